"""The kernel of some calls as the compiler sees it, one tab per call: `twinattn explain --source` for the site."""

import os
import textwrap
from collections.abc import Sequence
from importlib.util import find_spec

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton: no GPU is needed


def tabs(names: Sequence[str]) -> str:
    """Return the kernels of calls, folded; nothing where there is no Triton."""
    if find_spec("triton") is None:
        return ""
    from twinattn.course import explain

    parts = []
    for name in names:
        kernel = explain.folded(name)
        says = f"{explain.CALLS[name][0].upper()}{explain.CALLS[name][1:]}. "
        says += f"{len(kernel.read)} of {kernel.num_fields} fields of the arguments are read when it runs."
        text = f"{says}\n\n```python\n{kernel.functions[0].source()}\n```"
        parts.append(f'=== "{name}"\n\n{textwrap.indent(text, "    ")}')
    return "\n\n".join(parts)
