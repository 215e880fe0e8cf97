"""What a start shows of itself, and what a worker tells the process that started it."""

import os

from rich.console import Console

from cli.start import StartLog, WorkerChild, reporter
from tests.conftest import REPOSITORY
from tests.e2e.conftest import environment, wait_until
from worker.progress import Progress


def test_a_phase_is_shown_when_it_begins_and_with_its_seconds_while_it_lasts():
    now, lines = [1000.0], []
    log = StartLog(lines.append, clock=lambda: now[0])
    for phases in [{"w": "loading"}] * 3 + [{"w": "compiling"}] * 25 + [{}] * 20:
        log.show(phases)
        now[0] += 1.0
    assert lines == [
        "w: loading",
        "w: compiling",
        "w: compiling (10 s so far)",
        "w: compiling (20 s so far)",
    ]


def test_each_part_has_its_own_seconds():
    now, lines = [0.0], []
    log = StartLog(lines.append, clock=lambda: now[0])
    log.show({"a": "loading"})
    now[0] = 6.0
    log.show({"a": "loading", "b": "loading"})
    now[0] = 11.0
    log.show({"a": "loading", "b": "loading"})
    assert lines == ["a: loading", "b: loading", "a: loading (11 s so far)"]


def worker(tmp_path, model, **settings):
    """A worker's process on a folder that is no model."""
    url = f"sqlite:///{tmp_path / 'tokenmill.db'}"
    environ = environment(tmp_path, models=f"tiny={model}", **settings)
    environ |= {"DATABASE_URL": url, "REDIS_URL": "redis://127.0.0.1:9/0"}
    return WorkerChild("worker-tiny", ["worker"], environ, grace_s=30.0, log_folder=tmp_path)


def test_a_worker_that_cannot_start_ends_with_its_reason(tmp_path):
    child = worker(tmp_path, REPOSITORY / "nowhere")
    child.start()
    assert child.phase == "starting the engine"
    how = wait_until(child.ended, timeout_s=60)
    child.stop()
    assert how.startswith(f"could not start: model tiny: {REPOSITORY / 'nowhere'} does not exist")
    assert how.endswith(f", see {tmp_path / 'worker-tiny.log'}")


def test_a_worker_started_again_tells_anew(tmp_path):
    child = worker(tmp_path, REPOSITORY / "nowhere")
    for _ in range(2):
        child.start()
        assert child.phase == "starting the engine"
        assert "does not exist" in wait_until(child.ended, timeout_s=60)
    child.stop()


def test_telling_never_waits_for_a_reader_nor_fails_without_one():
    ear, mouth = os.pipe()
    progress = Progress(mouth)
    for _ in range(10_000):  # more than a pipe holds
        progress.phase("loading weights")
    os.close(ear)
    progress.failed("nobody hears")
    os.close(mouth)
    Progress().phase("to nobody")


def test_a_line_is_shown_whole_on_whatever_console():
    console = Console(width=20)
    line = "worker-[tiny]: starting the engine (10 s so far)"
    with console.capture() as capture:
        reporter(console)(line)
    assert capture.get() == f"{line}\n"
