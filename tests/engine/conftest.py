"""What all tests of the engine have in common."""

import inspect

import pytest


@pytest.fixture(autouse=True)
def no_pass_fails(request, caplog):
    """See that no pass fails unseen: its requests are computed again one by one, and their tokens are the right ones.

    A test that lets something fail says so by the mark `lets_a_pass_fail`, or asks for the log itself.
    """
    yield
    reads_the_log = "caplog" in inspect.signature(request.function).parameters
    if not reads_the_log and request.node.get_closest_marker("lets_a_pass_fail") is None:
        assert not [record.getMessage() for record in caplog.get_records("call") if record.exc_info]


@pytest.fixture(autouse=True, scope="module")
def in_one_thread(one_thread):
    """Models, too, which fixtures of a module make."""
