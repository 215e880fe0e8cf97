"""The supervisor: what ended is started again, ever more patiently, and the end is in order."""

import signal
import time

import pytest

from cli import tether
from cli.supervisor import FIRST_PAUSE_S, HEALTHY_AFTER_S, LONGEST_PAUSE_S, Child, Loop, Supervisor
from tests.conftest import REPOSITORY


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class FakePart:
    """Keeps the contract of a Part; `end` is what a crash is."""

    def __init__(self, name, journal, *, failing_starts=()):
        self.name = name
        self.journal = journal
        self.failing_starts = set(failing_starts)
        self.num_starts = 0
        self.how = None

    def start(self):
        self.num_starts += 1
        if self.num_starts in self.failing_starts:
            raise OSError(f"{self.name} start {self.num_starts}")
        self.how = None
        self.journal.append(f"start {self.name}")

    def end(self):
        self.how = "ended with status 1"

    def ended(self):
        return self.how

    def ask_to_stop(self):
        self.journal.append(f"ask {self.name}")

    def stop(self):
        self.journal.append(f"stop {self.name}")


def test_parts_start_in_order_and_all_are_asked_before_any_is_waited_for():
    journal = []
    parts = [FakePart("valkey", journal), FakePart("worker", journal)]
    with Supervisor(parts):
        pass
    assert journal == [
        "start valkey", "start worker", "ask worker", "ask valkey", "stop worker", "stop valkey",
    ]  # fmt: skip


def test_a_start_that_fails_stops_what_was_started():
    journal = []
    good, bad = FakePart("good", journal), FakePart("bad", journal, failing_starts={1})
    with pytest.raises(OSError, match="bad start 1"):
        Supervisor([good, bad]).start()
    assert journal == ["start good", "ask good", "stop good"]


def test_a_part_that_ended_is_started_again_after_a_pause_and_the_others_are_left_alone():
    clock = Clock()
    worker, api = FakePart("worker", []), FakePart("api", [])
    supervisor = Supervisor([worker, api], clock=clock)
    supervisor.start()
    worker.end()
    assert supervisor.watch() == [
        f"worker ended with status 1; starting it again in {FIRST_PAUSE_S:g} s"
    ]
    assert supervisor.watch() == []
    assert worker.num_starts == 1
    clock.now += FIRST_PAUSE_S
    supervisor.watch()
    assert (worker.num_starts, api.num_starts) == (2, 1)


def test_pauses_double_up_to_a_bound_and_begin_anew_after_a_healthy_time():
    clock = Clock()
    worker = FakePart("worker", [])
    supervisor = Supervisor([worker], clock=clock)
    supervisor.start()

    def pause_after_crash():
        worker.end()
        supervisor.watch()
        began, starts = clock.now, worker.num_starts
        while worker.num_starts == starts:
            clock.now += 0.25
            supervisor.watch()
        return clock.now - began

    assert [pause_after_crash() for _ in range(4)] == [0.5, 1.0, 2.0, 4.0]
    assert max(pause_after_crash() for _ in range(5)) == LONGEST_PAUSE_S
    clock.now += HEALTHY_AFTER_S + 1
    assert pause_after_crash() == FIRST_PAUSE_S


def test_a_restart_that_fails_is_tried_again():
    clock = Clock()
    valkey = FakePart("valkey", [], failing_starts={2, 3})
    supervisor = Supervisor([valkey], clock=clock)
    supervisor.start()
    valkey.end()
    for _ in range(200):
        clock.now += 0.25
        supervisor.watch()
    assert valkey.num_starts == 4
    assert valkey.ended() is None


def test_hurry_asks_again():
    journal = []
    supervisor = Supervisor([FakePart("worker", journal)])
    supervisor.start()
    supervisor.hurry()
    assert journal == ["start worker", "ask worker"]


def test_a_loop_that_fails_counts_as_ended_and_one_that_is_told_to_stop_stops():
    def fail(stop):
        raise RuntimeError("broken")

    broken, good = Loop("broken", fail), Loop("good", lambda stop: stop.wait())
    with Supervisor([good]):
        broken.start()
        broken.stop()
        assert broken.ended() == "ended"
        assert good.ended() is None
    assert good.ended() == "ended"


def test_a_child_says_how_it_ended_and_where_its_log_is(tmp_path):
    child = Child(
        "doctor",
        ["doctor", "--only", "nothing"],
        {"PYTHONPATH": str(REPOSITORY)},
        grace_s=30.0,
        log_folder=tmp_path,
    )
    child.start()
    child.stop()
    assert child.ended() == f"ended with status 2, see {tmp_path / 'doctor.log'}"
    assert "--only must be one of" in (tmp_path / "doctor.log").read_text()


def test_stop_kills_what_does_not_end_in_time(tmp_path):
    stubborn = ["/bin/sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.05; done"]
    log = tmp_path / "out"
    with log.open("wb") as output:
        process = tether.spawn(stubborn, output=output)
    while not log.read_bytes():
        time.sleep(0.01)
    assert tether.stop(process, sig=signal.SIGTERM, grace_s=0.2) == -signal.SIGKILL
