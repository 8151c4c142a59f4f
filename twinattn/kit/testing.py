"""Prove a kernel with pytest: a test per property.

    from twinattn.kit.testing import properties

    test_contract = properties("my_package:my_attention", path="chunked_prefill")

pytest runs `test_contract` once for each property of the path. A property that the kernel breaks fails with the report;
one that it does not claim is skipped, with the reason.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from twinattn.kit.adapters import kernel_of
from twinattn.kit.check import check
from twinattn.kit.kernel import Kernel
from twinattn.kit.properties import of_path
from twinattn.kit.report import of_failure


def properties(
    target: str | Callable[..., Any] | ModuleType, *, path: str | None = None, device: str = "cpu", **options: Any
) -> Callable[..., None]:
    """Make a test of a kernel, with a parameter per property.

    Args:
        target: the kernel, as `twinattn.kit.check.check` takes it.
        path: which path it computes.
        device: where the tensors are.
        options: of `check`: `dtypes`, `examples`.

    Raises:
        BadKernelError: if there is no such kernel, or it cannot be called.
    """
    kernel = kernel_of(target, path)

    @pytest.mark.parametrize("name", [x.name for x in of_path(kernel.path)])
    def test(name: str) -> None:
        _check(kernel, name, device=device, **options)

    return test


def _check(kernel: Kernel, name: str, **options: Any) -> None:
    report = check(kernel, only=[name], **options)
    (finding,) = report.findings
    if report.failures:
        pytest.fail("\n".join(text for _, text in of_failure(finding)), pytrace=False)
    if finding.outcome != "honoured":
        pytest.skip(f"{finding.outcome}: {finding.detail}")
