"""A pytest plugin with fixtures to check a kernel, or a test of your own.

    def test_my_kernel(prove):
        prove(my_kernel, "chunked_prefill")

    def test_my_own_check_can_fail(vacuous):         # fails with the known mistakes that your test lets pass
        vacuous(check, "chunked_prefill", like=my_kernel)

pytest finds it by the entry point `pytest11` where this package is installed with the extra `kit`.
"""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def prove() -> Callable[..., None]:
    """Return a function that checks a kernel, and fails the test with the report if a property does not hold.

    It takes the kernel, its path, and the options of `twinattn.kit.check.check`: `device`, `dtypes`, `examples`,
    `only`.
    """

    def prove(target: str | Callable[..., Any] | ModuleType, path: str | None = None, **options: Any) -> None:
        from twinattn.kit.check import check  # here, so that other test suites do not import torch
        from twinattn.kit.report import as_text

        report = check(target, path, **options)
        if report.failures:
            pytest.fail(as_text(report), pytrace=False)
        if not any(finding.outcome == "honoured" for finding in report.findings):
            pytest.fail("nothing was checked:\n" + as_text(report), pytrace=False)

    return prove


@pytest.fixture
def vacuous() -> Callable[..., None]:
    """Return a function that runs a check against known mistakes, and fails the test with those that pass.

    It takes the arguments of `twinattn.kit.vacuous`, and `allowed`: names of mistakes that may pass.
    """

    def vacuous(check: Callable[..., object], path: str, *, allowed: Sequence[str] = (), **options: Any) -> None:
        from twinattn.kit import vacuous  # here, so that other test suites do not import torch

        found = vacuous(check, path, **options)
        if any(x.name not in allowed for x in found.missed):
            pytest.fail(str(found), pytrace=False)

    return vacuous
