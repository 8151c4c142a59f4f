"""Start a server of SGLang that knows the backend `fastattn`.

    python -m twinattn.integrations.sglang_server --model-path MODEL --attention-backend fastattn

SGLang parses its arguments before it asks for plugins, so it would refuse the name. All arguments are those of
`sglang.launch_server`.
"""

import runpy
from importlib import import_module


def main() -> None:
    """Make the name known, and run SGLang's own launcher."""
    import_module("twinattn.integrations.sglang").register()
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
