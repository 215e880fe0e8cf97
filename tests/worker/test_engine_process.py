"""The engine process and the worker's side of it, with a real engine on a tiny model."""

import contextlib
import fcntl
import os
import queue
import shutil
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator

import psutil
import pytest

from engine.config import EngineConfig
from engine.kernels import cpu
from engine.sampling_params import RepetitionDetection, SamplingParams
from engine.structured_outputs import StructuredOutputs
from worker.engine_client import EngineClient, EngineEvents, EngineStartError
from worker.messages import Abort, Add, Delta, Ready, Stepped

TIMEOUT_S = 60.0
NUM_BLOCKS = 1024


class Bench:
    """A client and what it was told."""

    def __init__(self, model: str, **values) -> None:
        config = {"model": model, "num_blocks": NUM_BLOCKS, "num_threads": 1, "max_num_seqs": 8}
        self.client = EngineClient(EngineConfig(**config | values), log_level="warning")
        self.told: queue.SimpleQueue = queue.SimpleQueue()
        self.deltas: list[Delta] = []
        self.phases: list[str] = []

    def start(self) -> Ready:
        events = EngineEvents(
            on_ready=self.told.put,
            on_stepped=self.told.put,
            on_died=self.told.put,
            on_loading=self.phases.append,
        )
        ready = self.client.start(events, lambda: None)
        assert self.next() == ready
        return ready

    def next(self):
        return self.told.get(timeout=TIMEOUT_S)

    def until(self, condition) -> Stepped:
        """The first step that meets it."""
        while True:
            stepped = self.next()
            assert isinstance(stepped, Stepped), stepped
            self.deltas += stepped.deltas
            if condition(stepped):
                return stepped

    @contextlib.contextmanager
    def stopped(self) -> Iterator[int]:
        """The engine process does not run; the steps that it had reported by then, all read."""
        os.kill(self.pid, signal.SIGSTOP)
        wait_for(lambda: psutil.Process(self.pid).status() == psutil.STATUS_STOPPED)
        assert self.unread_by_engine() == 0
        for _ in range(2):  # the first leaves time for what has been read and not yet been told
            wait_for(lambda: self._queued(termios.FIONREAD) == 0)
            time.sleep(0.1)
        with contextlib.suppress(queue.Empty):
            while True:
                stepped = self.told.get_nowait()
                assert not stepped.ended
                self.deltas += stepped.deltas
        try:
            yield self.client.num_steps
        finally:
            os.kill(self.pid, signal.SIGCONT)

    def unread_by_engine(self) -> int:
        """Bytes of commands that it has not taken in."""
        return self._queued(termios.TIOCOUTQ)

    def _queued(self, request: int) -> int:
        assert self.client._pipe is not None
        answer = fcntl.ioctl(self.client._pipe.fileno(), request, bytes(4))
        return int.from_bytes(answer, sys.byteorder)

    def tokens(self, key: str) -> list[int]:
        return [token for delta in self.deltas if delta.key == key for token in delta.token_ids]

    @property
    def pid(self) -> int:
        pid = self.client.pid
        assert pid is not None
        return pid


def add(
    key: str, max_tokens: int = 10, prompt=(5, 6, 7), generated=(), cache_salt="", **options
) -> Add:
    usual = {"temperature": 0.0, "ignore_eos": True}
    params = SamplingParams(max_tokens=max_tokens, **usual | options)
    kept = [list(ids) for ids in generated]
    return Add(key, list(prompt), params, 0, None, kept, cache_salt=cache_salt)


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_for(condition) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def bench(long_llama_dir):
    bench = Bench(str(long_llama_dir))
    yield bench
    bench.client.stop()


@pytest.fixture(scope="module")
def running(long_llama_dir):
    """One that is started for several tests, each of which leaves it idle."""
    bench = Bench(str(long_llama_dir))
    bench.start()
    yield bench
    bench.client.stop()


def test_it_generates_reports_each_step_and_ends_with_the_whole_text(running):
    bench = running
    assert bench.client.ready.kv_tokens == NUM_BLOCKS * 16
    bench.client.send(add("a", n=2))
    last = bench.until(lambda step: step.ended)
    [ended] = last.ended
    assert (ended.key, ended.prompt_tokens, ended.completion_tokens) == ("a", 3, 20)
    assert [sample.finish_reason for sample in ended.samples] == ["length", "length"]
    assert {delta.sample_index for delta in bench.deltas if delta.key == "a"} == {0, 1}
    assert len(bench.tokens("a")) == 20
    assert last.free_tokens == NUM_BLOCKS * 16
    assert last.stats["num_steps"] == last.num_steps > 0


def test_every_option_and_every_score_comes_through_the_pipe(running):
    options = {
        "presence_penalty": 0.5, "frequency_penalty": 1, "repetition_penalty": 1.2,
        "logit_bias": ((5, -3), (6, 2.5)), "allowed_token_ids": (5, 6, 7, 8), "bad_words": ("zz",),
        "stop": ("qq",), "include_stop_str_in_output": True, "skip_special_tokens": False,
        "repetition_detection": RepetitionDetection(max_pattern_size=2, min_count=50),
        "timeout_s": 60, "logprobs": 2, "prompt_logprobs": 3,
    }  # fmt: skip
    running.client.send(add("scored", **options))
    [ended] = running.until(lambda step: step.ended).ended
    [sample] = ended.samples
    tokens = running.tokens("scored")
    assert [score.token_id for score in sample.logprobs] == tokens
    assert set(tokens) <= {5, 6, 7, 8}
    assert [len(score.top) for score in sample.logprobs] == [2] * 10
    assert ended.prompt_logprobs[0] is None
    assert [score.token_id for score in ended.prompt_logprobs[1:]] == [6, 7]


def test_an_abort_frees_every_block_within_one_step_and_nothing_more_is_heard(running):
    bench = running
    bench.client.send(add("gone", max_tokens=5000, prompt=[5] * 600))
    bench.client.send(add("stays", max_tokens=5000, prompt=[6] * 3))
    before = bench.until(lambda step: len(step.deltas) == 2)
    assert before.free_tokens <= NUM_BLOCKS * 16 - 600
    with bench.stopped() as num_steps:
        bench.client.send(Abort("gone"))
        wait_for(lambda: bench.unread_by_engine() > 0)
    aborted = bench.until(lambda step: step.ended)
    # it may have been in the midst of a step, whose report comes first
    assert aborted.num_steps <= num_steps + 2
    [ended] = aborted.ended
    assert (ended.key, ended.samples[0].finish_reason) == ("gone", "abort")
    # the report of the abort is that of the step behind it: the blocks are free in it already
    assert {delta.key for delta in aborted.deltas} == {"stays"}
    held = -(-(3 + len(bench.tokens("stays"))) // 16) * 16
    assert aborted.free_tokens >= NUM_BLOCKS * 16 - held
    after = [bench.until(lambda step: True) for _ in range(5)]
    assert all(delta.key == "stays" for step in after for delta in step.deltas)
    bench.client.send(Abort("stays"))
    assert bench.until(lambda step: step.ended).free_tokens == NUM_BLOCKS * 16


def test_a_generation_goes_on_from_its_tokens_as_if_never_interrupted(running):
    bench = running
    options = {"max_tokens": 40, "temperature": 1.0, "seed": 7}
    bench.client.send(add("whole", **options))
    whole = bench.until(lambda step: step.ended).ended[0]
    bench.client.send(add("resumed", generated=[bench.tokens("whole")[:15]], **options))
    resumed = bench.until(lambda step: step.ended).ended[0]
    assert resumed.samples[0].text == whole.samples[0].text
    assert resumed.completion_tokens == 40
    assert bench.tokens("resumed") == bench.tokens("whole")[15:]


def test_what_can_never_fit_is_refused_with_its_parameter(running):
    running.client.send(add("large", max_tokens=16_384))
    [refused] = running.until(lambda step: step.refused).refused
    assert (refused.key, refused.param) == ("large", "max_tokens")


def test_signals_are_left_to_the_parent(running):
    pid = running.pid
    for sig in (signal.SIGINT, signal.SIGTERM):
        os.kill(pid, sig)
    running.client.send(add("after"))
    assert running.until(lambda step: step.ended).ended[0].key == "after"
    assert running.client.pid == pid


def test_a_killed_engine_is_replaced_and_hears_nothing_that_was_meant_for_the_dead_one(bench):
    first = bench.start()
    bench.client.send(add("a", max_tokens=5000))
    bench.until(lambda step: step.deltas)
    os.kill(first.pid, signal.SIGSTOP)
    bench.client.send(add("ghost"))
    os.kill(first.pid, signal.SIGKILL)
    while isinstance(told := bench.next(), Stepped):
        pass
    assert told == "SIGKILL"
    second = bench.next()
    assert isinstance(second, Ready)
    assert second.pid != first.pid
    assert bench.client.num_restarts == 1
    assert not bench.client._has_ended_some
    bench.client.send(add("real"))
    [ended] = bench.until(lambda step: step.ended).ended
    assert bench.client._has_ended_some
    assert ended.key == "real"
    bench.client.stop()
    assert gone(second.pid)


def test_a_model_that_cannot_be_loaded_is_named(tmp_path):
    bench = Bench(str(tmp_path / "missing"))
    with pytest.raises(EngineStartError, match="missing"):
        bench.start()
    bench.client.stop()


def test_it_says_what_it_waits_for_and_of_compiling_only_where_it_compiles(
    long_llama_dir, tmp_path, monkeypatch
):
    warm = Bench(str(long_llama_dir))
    warm.start()
    warm.client.stop()
    assert warm.phases == ["loading weights"]
    # all kernels but one are in this folder
    shutil.copytree(cpu.config.CACHE_DIR, tmp_path / "kernels")
    missing = list((tmp_path / "kernels").rglob("workers.run_by_all*"))
    assert missing
    for file in missing:
        file.unlink()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "kernels"))
    cold = Bench(str(long_llama_dir))
    cold.start()
    cold.client.stop()
    assert cold.phases == [
        "loading weights", "compiling kernels for this CPU, once: about a minute"
    ]  # fmt: skip


PARENT = """
import os, sys, time
from engine.config import EngineConfig
from worker.engine_client import EngineClient, EngineEvents
ignore = lambda *_: None
client = EngineClient(EngineConfig(model=sys.argv[1], num_blocks=64), log_level="warning")
client.start(EngineEvents(on_ready=ignore, on_stepped=ignore, on_died=ignore), ignore)
print(client.pid, "torch" in sys.modules, flush=True)
time.sleep(600)
"""


def test_an_engine_dies_with_its_parent_which_never_loads_torch(long_llama_dir):
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(long_llama_dir)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid, torch_loaded = parent.stdout.readline().split()
        parent.kill()
    assert torch_loaded == "False"
    wait_for(lambda: gone(int(pid)))


def test_a_form_is_kept_one_that_is_none_is_refused_and_the_trial_ends_with_its_engine(bench):
    bench.start()
    forms = {
        "good": StructuredOutputs(kind="regex", text="[0-9]{3}"),
        "bad": StructuredOutputs(kind="regex", text="(a", param="structured_outputs.regex"),
    }
    for key, form in forms.items():
        bench.client.send(add(key, structured_outputs=form, ignore_eos=False))
    bench.client.send(add("free"))
    ended, refused = {}, {}
    while len(ended) + len(refused) < 3:
        stepped = bench.until(lambda stepped: stepped.ended or stepped.refused)
        ended |= {each.key: each for each in stepped.ended}
        refused |= {each.key: each for each in stepped.refused}
    assert set(ended) == {"good", "free"}
    assert ended["good"].samples[0].text.isdecimal()
    assert ended["good"].samples[0].finish_reason == "stop"
    assert refused["bad"].param == "structured_outputs.regex"
    assert refused["bad"].code is None
    (trial,) = psutil.Process(bench.pid).children()
    os.kill(bench.pid, signal.SIGKILL)
    deadline = time.monotonic() + TIMEOUT_S
    while not gone(trial.pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_tenants_share_no_prefix(running):
    cached = []
    for number, tenant in enumerate(("acme", "acme", "globex", "globex")):
        prompt = [7] * 100
        running.client.send(add(f"salt{number}", prompt=prompt, cache_salt=tenant))
        [ended] = running.until(lambda step: step.ended).ended
        cached.append(ended.cached_tokens)
    assert cached[0] == cached[2] == 0
    assert cached[1] == cached[3] > 0
