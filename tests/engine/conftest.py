import pytest
import torch

from engine.tokenizer import Tokenizer
from tests.engine.tokenizers_on_disk import byte_level, write


@pytest.fixture(scope="module")
def one_thread():
    """Waking threads for tensors this small costs more than it gains."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.load(write(tmp_path_factory.mktemp("byte-level"), byte_level()))
