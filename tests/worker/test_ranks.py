"""An engine of two ranks in a worker: it serves, and ends as one process when either ends."""

import os
import signal

import psutil
import pytest

from engine.crew import EXIT_STATUS
from tests.worker.test_engine_process import Bench, add, gone, wait_for
from worker.messages import Stepped


@pytest.mark.timeout(300)
def test_a_rank_that_dies_ends_the_engine_which_the_worker_replaces(long_llama_dir):
    bench = Bench(str(long_llama_dir), kernels="reference", tensor_parallel=2)
    bench.start()
    try:
        engine = psutil.Process(bench.pid)
        [rank] = [p for p in engine.children() if "engine.follower" in p.cmdline()]
        bench.client.send(add("first", max_tokens=3))
        assert bench.until(lambda step: step.ended).ended[0].key == "first"
        os.kill(rank.pid, signal.SIGKILL)  # while the engine waits for work
        while isinstance(told := bench.next(), Stepped):
            pass
        assert told == f"exit status {EXIT_STATUS}"
        assert gone(engine.pid)
    finally:
        bench.client.stop()


@pytest.mark.timeout(300)
def test_ranks_end_with_an_engine_that_is_killed(long_llama_dir):
    bench = Bench(str(long_llama_dir), kernels="reference", tensor_parallel=2)
    bench.start()
    try:
        engine = psutil.Process(bench.pid)
        [rank] = [p for p in engine.children() if "engine.follower" in p.cmdline()]
        bench.client._stopping.set()  # it is not to be replaced
        os.kill(engine.pid, signal.SIGKILL)
        wait_for(lambda: gone(rank.pid))
    finally:
        bench.client.stop()
