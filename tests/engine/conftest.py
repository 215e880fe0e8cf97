import pytest
import torch


@pytest.fixture(scope="module")
def one_thread():
    """Waking threads for tensors this small costs more than it gains."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
