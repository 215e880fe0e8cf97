"""How many more jobs a worker may take from Redis, and which of those it holds may run together.

Both are pure functions of numbers the worker knows. A job is taken when the engine is expected to
hold it: its future length is unknown, so it is guessed from how long recent generations became;
a guess that was too low costs a preemption in the engine, never a job.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

FIRST_GUESS_TOKENS = 128  # of a generation's length, before any has ended
LOOKAHEAD = 8  # one job waits in the engine for every so many that run: a place is filled at once
LOOKAHEAD_OF_CHUNKS = 2  # the same, of jobs whose ids are here already


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What one job in the worker's hands asks of the engine."""

    num_seqs: int
    prompt_tokens: int  # 0: nothing is known yet
    max_tokens: int  # for each sequence
    generated_tokens: int  # of all sequences together
    started: bool  # its prompt lies in KV blocks


UNKNOWN_LOAD = Load(
    num_seqs=1, prompt_tokens=0, max_tokens=0, generated_tokens=0, started=False
)  # of a message whose row has not been read


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRoom:
    """What the engine last said of itself."""

    max_num_seqs: int
    free_tokens: int  # tokens that fit in the blocks no sequence holds
    num_waiting: int  # sequences without blocks: new, or preempted


class LengthGuess:
    """A guess of how many tokens the next generation will have: quick to rise, slow to fall."""

    def __init__(self) -> None:
        self.prompt_tokens = float(FIRST_GUESS_TOKENS)
        self.completion_tokens = float(FIRST_GUESS_TOKENS)

    def learn(self, prompt_tokens: int, completion_tokens: int) -> None:
        self.prompt_tokens = _lean(self.prompt_tokens, prompt_tokens)
        self.completion_tokens = _lean(self.completion_tokens, completion_tokens)

    def growth(self, load: Load) -> float:
        """KV tokens the job is still expected to take up."""
        if not load.prompt_tokens:
            return self.prompt_tokens + load.num_seqs * self.completion_tokens
        remaining = load.num_seqs * load.max_tokens - load.generated_tokens
        grown = min(remaining, load.num_seqs * self.completion_tokens)
        return grown + (0 if load.started else load.prompt_tokens + load.generated_tokens)


def _lean(guess: float, value: int) -> float:
    return guess + (value - guess) * (0.3 if value > guess else 0.05)


def room_of_foreground(room: EngineRoom, background: Sequence[Load]) -> EngineRoom:
    """The room for jobs that somebody waits for: the engine preempts the others for them."""
    held = sum(load.prompt_tokens + load.generated_tokens for load in background if load.started)
    num_seqs = sum(load.num_seqs for load in background)
    return replace(
        room,
        free_tokens=room.free_tokens + held,
        num_waiting=max(0, room.num_waiting - num_seqs),
    )


def free_places(
    room: EngineRoom,
    loads: Sequence[Load],
    guess: LengthGuess,
    *,
    max_jobs: int,
    lookahead: int = LOOKAHEAD,
) -> int:
    """How many more jobs the engine is expected to hold beside those in the worker's hands."""
    if not loads:
        return 1  # an idle engine refuses a job that is too large; it never keeps one waiting
    num_ahead = max(1, room.max_num_seqs // lookahead)
    if room.num_waiting > num_ahead:
        return 0  # sequences wait for blocks, whatever the guess says
    num_seqs = sum(load.num_seqs for load in loads)
    free = room.free_tokens - sum(guess.growth(load) for load in loads)
    each = guess.prompt_tokens + guess.completion_tokens
    return max(
        0, min(max_jobs - len(loads), room.max_num_seqs + num_ahead - num_seqs, int(free // each))
    )


def may_join(
    crash_count: int, running: Sequence[int], *, max_crashes: int, max_num_seqs: int
) -> bool:
    """Whether a job that was in `crash_count` engine deaths may run beside those `running`.

    Suspects run in halves, then alone, so that the one that kills the engine is found before its
    neighbours have died with it `max_crashes` times. `running` has their crash counts.
    """
    if not running:
        return True
    last_chance = max_crashes - 1
    if max(crash_count, *running) >= last_chance > 0:
        return False
    if crash_count or any(running):
        return len(running) < max(1, max_num_seqs // 2)
    return True
