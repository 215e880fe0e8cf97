"""Seeds of the simulated deployment: what happens: service.py; what must hold: audit.py."""

import pytest

from tests.simulation.service import run_seed

NUM_SEEDS = 2000  # `make simulate` runs as many as it is told
CHUNK = 50


@pytest.mark.timeout(900)  # seconds, on a machine of its own
@pytest.mark.parametrize("first", range(0, NUM_SEEDS, CHUNK))
def test_nothing_is_lost_or_done_twice_whatever_fails(first):
    for seed in range(first, first + CHUNK):
        run_seed(seed)
