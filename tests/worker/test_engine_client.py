"""When the engine process is started again."""

from engine.config import EngineConfig
from worker.engine_client import RESTART_WAITS_S, EngineClient, restart_wait_s


def test_a_steady_engine_that_dies_once_is_replaced_at_once():
    assert restart_wait_s(0) == 0.0


def test_each_death_in_a_row_waits_longer_up_to_a_bound():
    waits = [restart_wait_s(failures) for failures in range(1, 20)]
    assert waits == sorted(waits)
    assert waits[0] == 0.0
    assert waits[-1] == RESTART_WAITS_S[-1] == 30.0


def test_one_that_has_ended_a_request_was_no_failed_start(monkeypatch):
    client = EngineClient(EngineConfig(model="/x"), log_level="INFO")
    client._settled.set()
    lives, waits = iter([False, False, False, True, False]), []

    def run_process() -> str:
        client._has_ended_some = next(lives)
        return "SIGKILL"

    monkeypatch.setattr(client, "_run_process", run_process)
    monkeypatch.setattr(client._stopping, "wait", waits.append)
    monkeypatch.setattr(client._stopping, "is_set", lambda: len(waits) == 5)
    client._keep()
    assert waits == [0.0, 0.5, 1.0, 0.0, 0.0]
