"""When a worker may say that it is alive."""

from worker.lease import Progress


def look(progress: Progress, now: float, *, steps: int, busy: bool = True, restarts: int = 0):
    progress.look(restarts=restarts, steps=steps, busy=busy, now=now)


def test_an_engine_that_steps_is_moving():
    progress = Progress(stall_s=60)
    for now in range(10):
        look(progress, now, steps=now)
        assert progress.moving(now=now, within_s=5)


def test_an_engine_with_work_that_does_not_step_is_first_silent_then_stalled():
    progress = Progress(stall_s=60)
    for now in range(100):
        look(progress, now, steps=7)
        assert progress.moving(now=now, within_s=5) == (now < 5)
        assert progress.stalled(now=now) == (now >= 60)


def test_an_idle_engine_is_never_stalled():
    progress = Progress(stall_s=60)
    for now in range(0, 1000, 10):
        look(progress, now, steps=7, busy=False)
        assert progress.moving(now=now, within_s=5)
        assert not progress.stalled(now=now)


def test_work_after_a_long_rest_has_the_whole_time():
    progress = Progress(stall_s=60)
    look(progress, 0, steps=7, busy=False)
    look(progress, 500, steps=7, busy=False)
    look(progress, 559, steps=7)
    assert not progress.stalled(now=559)
    assert progress.stalled(now=560)


def test_a_new_process_that_counts_from_nothing_is_progress():
    progress = Progress(stall_s=60)
    look(progress, 0, steps=1)
    look(progress, 50, steps=1, restarts=1)
    assert not progress.stalled(now=100)
