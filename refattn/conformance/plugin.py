"""A plugin of pytest: a fixture with which any repository proves its kernel in two lines.

    def test_my_kernel(prove):
        prove(my_kernel, "chunked_prefill")

pytest finds it by the entry point `pytest11` where this package is installed with the extra `conformance`.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def prove() -> Callable[..., None]:
    """Return a function that checks a kernel, and fails the test with the report if a property does not hold.

    It takes the kernel, its path, and the options of `refattn.conformance.check.check`: `device`, `dtypes`, `examples`,
    `only`.
    """

    def prove(target: str | Callable[..., Any] | ModuleType, path: str | None = None, **options: Any) -> None:
        from refattn.conformance.check import check  # torch is imported for those who use it
        from refattn.conformance.report import as_text

        report = check(target, path, **options)
        if report.failures:
            pytest.fail(as_text(report), pytrace=False)
        if not any(finding.outcome == "honoured" for finding in report.findings):
            pytest.fail("nothing was checked:\n" + as_text(report), pytrace=False)

    return prove
