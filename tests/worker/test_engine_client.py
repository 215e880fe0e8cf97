"""When the engine process is started again."""

from worker.engine_client import RESTART_WAITS_S, restart_wait_s


def test_a_steady_engine_that_dies_once_is_replaced_at_once():
    assert restart_wait_s(0) == 0.0


def test_each_death_in_a_row_waits_longer_up_to_a_bound():
    waits = [restart_wait_s(failures) for failures in range(1, 20)]
    assert waits == sorted(waits)
    assert waits[0] == 0.0
    assert waits[-1] == RESTART_WAITS_S[-1] == 30.0
