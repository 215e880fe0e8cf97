"""How many tokens a step should have on this machine: chosen from how long steps take.

The more tokens a step has, the more of them share one read of the weights, until arithmetic alone
takes the time. From there on a larger step only keeps those waiting who decode beside a prompt, and
those who arrive. Source: Agrawal et al. 2024 (Sarathi-Serve), the token budget.

Knows neither model nor clock. The times are kept in a file for each thing they depend on.
"""

import hashlib
import json
import logging
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

logger = logging.getLogger(__name__)

DEFAULT_NUM_TOKENS = 512  # where nothing is measured
SIZES = (16, 64, 128, 256, 512, 1024)  # tokens of the steps that are timed
LEAST_NUM_TOKENS = 64  # of what is chosen; the most is the largest of SIZES
NEAR_BEST = 0.98  # of the best tokens per second; the rest is the price of shorter steps
ROUNDS = 3
MEASURING_S = 1.2  # for all rounds: none begins a step that will not end in time

StepTimes = Mapping[int, float]  # seconds of a step, by its tokens
Key = Mapping[str, str | int]  # what the times depend on


def measured(
    step: Callable[[int], float], sizes: Sequence[int], *, target_s: float
) -> dict[int, float]:
    """The least time of each size's steps. `step` computes so many tokens and says how long.

    Sizes ascend. One whose step takes longer than `target_s` is the last: no larger one can be
    chosen.
    """
    times: dict[int, float] = {}
    spent_s = 0.0
    for _ in range(ROUNDS):
        token_s = 0.0  # of the size before: a larger one's tokens take no longer
        for size in sizes:
            if times and spent_s + times.get(size, size * token_s) > MEASURING_S:
                return times
            seconds = step(size)
            spent_s += seconds
            times[size] = min(times.get(size, math.inf), seconds)
            token_s = times[size] / size
            if times[size] > target_s:
                break
    return times


def suitable_num_tokens(times: StepTimes, *, max_num_seqs: int, target_s: float) -> int:
    """The fewest tokens with near the best tokens per second, in steps no longer than `target_s`.

    But at least twice as many as sequences, so that prompts go on beside as many decodes as run,
    and within LEAST_NUM_TOKENS and the largest of SIZES.
    """
    least = min(max(LEAST_NUM_TOKENS, 2 * max_num_seqs), SIZES[-1])
    steady: dict[int, float] = {}
    bound_s = math.inf
    for size in sorted(times, reverse=True):
        # what took longer than a larger step was disturbed
        steady[size] = bound_s = min(bound_s, times[size])
    best = max((size / seconds for size, seconds in steady.items()), default=0.0)
    allowed = [size for size in sorted(steady) if steady[size] <= target_s]
    near_best = [size for size in allowed if size / steady[size] >= NEAR_BEST * best]
    return max(least, near_best[0] if near_best else max(allowed, default=0))


def kept_or_measured(
    key: Key, measure: Callable[[], dict[int, float]], folder: Path | None
) -> tuple[dict[int, float], bool]:
    """Times from the folder, else measured and written there; and whether they were measured.

    A file that cannot be read or written is passed over, with a line in the log.
    """
    if folder is None:
        return measure(), True
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    file = folder / f"{digest[:16]}.json"
    times = _read(file, key)
    if times is not None:
        return times, False
    times = measure()
    try:
        _write(file, key, times)
    except OSError as error:
        logger.warning("times of steps not kept: %s", error)
    return times, True


def cache_folder() -> Path | None:
    """Where times are kept; None where nobody has a home."""
    try:
        return Path.home() / ".cache" / "tokenmill" / "calibration"
    except RuntimeError:
        return None


def _read(file: Path, key: Key) -> dict[int, float] | None:
    try:
        kept = json.loads(file.read_text("utf-8"))
        if kept["key"] != key:
            raise ValueError("it is of another model or machine")
        times = {int(size): seconds for size, seconds in kept["seconds"].items()}
        if not times or not times.keys() <= set(SIZES):
            raise ValueError(f"it has the sizes {sorted(times)}")
        if not all(type(s) is float and 0 < s < math.inf for s in times.values()):
            raise ValueError("it has times that are none")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        logger.warning("times of steps in %s ignored: %r", file, error)
        return None
    return times


def _write(file: Path, key: Key, times: StepTimes) -> None:
    """Whole or not at all: engines start side by side."""
    file.parent.mkdir(parents=True, exist_ok=True)
    number, name = tempfile.mkstemp(dir=file.parent)
    try:
        with os.fdopen(number, "w", encoding="utf-8") as new:
            json.dump({"key": key, "seconds": times}, new, indent=1)
        os.replace(name, file)
    except OSError:
        Path(name).unlink()
        raise
