"""What tests of compiled kernels share."""

import numba
import numpy as np
import pytest
import torch

from tests.engine.kernels.attention_case import WORKERS


@pytest.fixture(autouse=True)
def as_many_threads_as_workers():
    """Workers that wait for each other need a thread each, whatever ran before in this one."""
    before = numba.get_num_threads()
    numba.set_num_threads(WORKERS)
    yield
    numba.set_num_threads(before)


@pytest.fixture
def draw(request):
    """Fresh numbers on every run; the seed stands in the failure."""
    seed = int(torch.seed() % 2**31)
    print("seed", seed)  # noqa: T201
    torch.manual_seed(seed)
    return np.random.default_rng(seed)
