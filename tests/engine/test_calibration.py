"""Which size a curve of times leads to, how little is measured, and what a broken file does."""

import json
import math

import pytest

from engine.calibration import (
    MEASURING_S,
    ROUNDS,
    SIZES,
    cache_folder,
    kept_or_measured,
    measured,
    suitable_num_tokens,
)

KEY = {"cpu": "one", "threads": 2}


def curve(fixed_s, tokens_per_s, sizes=SIZES):
    """A step reads the weights once, then computes its tokens."""
    return {size: fixed_s + size / tokens_per_s for size in sizes}


def choice(times, *, max_num_seqs=8, target_s=0.25):
    return suitable_num_tokens(times, max_num_seqs=max_num_seqs, target_s=target_s)


@pytest.mark.parametrize(
    ("fixed_s", "tokens_per_s", "chosen"),
    [
        (0.0, 2000, 64),  # nothing to share: 16 tokens would do, but that is out of bounds
        (0.0005, 2000, 64),  # 98.5 % of the rate, 98.6 % of the best
        (0.001, 2000, 128),  # 64 tokens: 97 % of the rate, 97.2 % of the best
        (0.005, 4000, 512),  # 256 tokens: 92.8 % of the rate, 94.6 % of the best
        (0.005, 2000, 256),  # 97.2 % of the best, but 512 tokens take 261 ms
        (0.020, 6000, 1024),  # 512 tokens: 90.5 % of the best, which takes 191 ms
        (0.100, 2000, 256),  # 228 ms
        (0.200, 2000, 64),  # 232 ms
        (0.300, 2000, 64),  # none is short enough
    ],
)
def test_the_smallest_size_near_the_best_rate_that_the_target_allows(fixed_s, tokens_per_s, chosen):
    assert choice(curve(fixed_s, tokens_per_s)) == chosen


def test_a_higher_target_allows_larger_steps():
    times = curve(0.1, 2000)
    targets = (0.1, 0.15, 0.2, 0.3, 0.4, 1.0)
    assert [choice(times, target_s=s) for s in targets] == [64, 64, 128, 256, 512, 1024]


def test_prompts_have_as_many_tokens_as_there_may_be_decodes():
    times = curve(0.0, 2000)
    numbers = (1, 32, 64, 300, 5000)
    assert [choice(times, max_num_seqs=n) for n in numbers] == [64, 64, 128, 600, 1024]


def test_a_size_that_was_disturbed_counts_as_the_next_larger():
    times = curve(0.0005, 2000) | {64: 3.0}
    assert choice(times) == 128
    assert choice(dict.fromkeys(SIZES, 0.1)) == 1024
    assert choice({16: 9.0}) == 64
    assert choice({}) == 64


class Machine:
    """Steps that take what a curve says, times what disturbs them."""

    def __init__(self, fixed_s, tokens_per_s, disturbance=()):
        self.times = curve(fixed_s, tokens_per_s)
        self.disturbance = list(disturbance)
        self.steps = []

    def step(self, num_tokens):
        self.steps.append(num_tokens)
        slower = self.disturbance.pop(0) if self.disturbance else 1.0
        return self.times[num_tokens] * slower

    def spent_s(self):
        return sum(self.times[size] for size in self.steps)


def test_each_size_is_measured_in_each_round_where_steps_are_short():
    machine = Machine(0.001, 50_000)
    assert measured(machine.step, SIZES, target_s=0.25) == machine.times
    assert machine.steps == list(SIZES) * ROUNDS


def test_no_size_is_measured_beyond_the_first_that_takes_too_long():
    machine = Machine(0.01, 1000)
    times = measured(machine.step, SIZES, target_s=0.25)
    assert times == {size: machine.times[size] for size in (16, 64, 128, 256)}
    assert machine.spent_s() <= MEASURING_S


def test_a_large_model_computes_one_small_step():
    machine = Machine(3.0, 10)
    assert measured(machine.step, SIZES, target_s=0.25) == {16: machine.times[16]}
    assert machine.steps == [16]


def test_what_disturbs_one_round_is_forgotten_in_the_next():
    quiet, busy = Machine(0.002, 6000), Machine(0.002, 6000, [4.0, 1.0, 9.0])
    times = measured(busy.step, SIZES, target_s=0.25)
    assert times == {size: busy.times[size] for size in times}
    assert choice(times) == choice(measured(quiet.step, SIZES, target_s=0.25)) == 512


@pytest.mark.parametrize("target_s", [0.05, 0.25, 60.0])
@pytest.mark.parametrize("fixed_s", [0.0, 0.01, 0.3])
@pytest.mark.parametrize("tokens_per_s", [300, 2000, 90_000])
def test_measuring_ends_in_time(target_s, fixed_s, tokens_per_s):
    machine = Machine(fixed_s, tokens_per_s)
    measured(machine.step, SIZES, target_s=target_s)
    assert machine.spent_s() <= max(MEASURING_S, machine.times[16])


def remembered(folder, key=KEY, times=None):
    """What is found for a key, or measured as `times`; and whether it was measured."""
    return kept_or_measured(key, lambda: times or {16: 0.5, 64: 1.25}, folder)


def test_times_are_measured_once_for_each_key(tmp_path):
    folder = tmp_path / "not" / "there yet"
    assert remembered(folder) == ({16: 0.5, 64: 1.25}, True)
    assert remembered(folder, times={16: 9.0}) == ({16: 0.5, 64: 1.25}, False)
    assert remembered(folder, KEY | {"cpu": "other"}, {16: 9.0}) == ({16: 9.0}, True)
    assert remembered(folder, KEY | {"threads": 1}, {16: 8.0}) == ({16: 8.0}, True)
    assert remembered(folder, KEY) == ({16: 0.5, 64: 1.25}, False)
    assert len(list(folder.iterdir())) == 3


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[" * 100_000,
        b"[]",
        b"{}",
        json.dumps({"key": KEY}).encode(),
        json.dumps({"key": KEY, "seconds": {}}).encode(),
        json.dumps({"key": KEY, "seconds": [1.0]}).encode(),
        json.dumps({"key": KEY, "seconds": {"17": 1.0}}).encode(),
        json.dumps({"key": KEY, "seconds": {"many": 1.0}}).encode(),
        json.dumps({"key": KEY, "seconds": {"16": -1.0}}).encode(),
        json.dumps({"key": KEY, "seconds": {"16": "1"}}).encode(),
        json.dumps({"key": KEY, "seconds": {"16": math.nan}}).encode(),
        json.dumps({"key": KEY, "seconds": {"16": math.inf}}).encode(),
        json.dumps({"key": KEY | {"cpu": "other"}, "seconds": {"16": 1.0}}).encode(),
    ],
)
def test_a_broken_file_is_passed_over_and_written_anew(tmp_path, caplog, content):
    remembered(tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_bytes(content)
    assert remembered(tmp_path, times={16: 2.0}) == ({16: 2.0}, True)
    assert f"times of steps in {file} ignored" in caplog.text
    assert remembered(tmp_path) == ({16: 2.0}, False)


def test_a_folder_that_cannot_be_written_costs_a_line_in_the_log(tmp_path, caplog):
    (tmp_path / "file").touch()
    assert remembered(tmp_path / "file" / "folder") == ({16: 0.5, 64: 1.25}, True)
    assert "times of steps not kept" in caplog.text
    file = next(iter(tmp_path.iterdir()))
    remembered(tmp_path)
    kept = next(each for each in tmp_path.iterdir() if each != file)
    kept.unlink()
    kept.mkdir()
    assert remembered(tmp_path) == ({16: 0.5, 64: 1.25}, True)
    assert sorted(tmp_path.iterdir()) == sorted([file, kept])  # and nothing half-written


def test_without_a_home_times_are_measured_each_time(monkeypatch):
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert cache_folder() is None
    assert remembered(None, times={16: 2.0}) == ({16: 2.0}, True)
