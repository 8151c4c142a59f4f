"""What all tests of the engine have in common."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Threads cost more than they bring at these sizes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
