"""What hostile forms cost their neighbours: `python -m bench.neighbours MODEL_FOLDER`.

Free rows generate without an end: in turns alone, while requests keep arriving, and while such
requests arrive with hostile forms, each another one than any before. Prints how much of its speed a
free row keeps beside the forms, of that alone and of that beside the same requests without a form
(a row takes its share of a step whatever it generates): by the clock, and by the processor time of
the engine's thread, which other programs on the machine disturb less. Last, `--at-once` hostile
forms arrive together, and it prints how long each took to have its first token or its refusal.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count, cycle, islice, repeat

# as a worker starts its engine, and before torch is loaded
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from engine.config import EngineConfig
from engine.llm_engine import LLMEngine
from engine.outputs import RequestUpdate
from engine.parameter_error import ParameterError
from engine.sampling_params import SamplingParams
from engine.structured_outputs import StructuredOutputs

NUM_FREE_ROWS = 16
ARRIVE_EVERY_S = 0.25
MAX_ARRIVED = 4  # in the engine at a time
PROMPT = "once upon a time"


def _nested(depth: int, number: int) -> dict[str, object]:
    if not depth:
        return {"type": "integer", "minimum": number}
    return {"oneOf": [_nested(depth - 1, number), {"type": "string", "maxLength": depth}]}


def _exploding(number: int) -> str:
    """Each rule is twice the next."""
    rules = [f"r{i} ::= r{i + 1} r{i + 1}" for i in range(3000)]
    return "\n".join([*rules, f'r3000 ::= "{number}"', "root ::= r0"])


def _recursive(number: int) -> dict[str, object]:
    """Never done: each object needs another."""
    inner = {"$ref": "#"}
    return {"type": "object", "properties": {f"p{number}": inner}, "required": [f"p{number}"]}


def _wide(number: int) -> dict[str, object]:
    properties = {f"p{number}_{i}": {"type": "string"} for i in range(800)}
    return {"type": "object", "properties": properties}


# a kind of form, and the text of the n-th of its sort
HOSTILE: dict[str, tuple[str, Callable[[int], str]]] = {
    "oneOf nested 12 deep": ("json", lambda n: json.dumps(_nested(12, n))),
    "(a|aa)+": ("regex", lambda n: f"(a|aa)+{n}"),
    "recursive $ref": ("json", lambda n: json.dumps(_recursive(n))),
    "rules that explode": ("grammar", _exploding),
    ".*a.{30}": ("regex", lambda n: f".*a.{{30}}{n}"),
    "nested counts": ("regex", lambda n: f"(((a{{1,50}}){{1,50}}){{1,50}}){{1,50}}{n}"),
    "800 optional": ("json", lambda n: json.dumps(_wide(n))),
    "enum of 3000": ("json", lambda n: json.dumps({"enum": [f"v{n}_{i}" for i in range(3000)]})),
}


def hostile_forms(names: list[str] | None = None, *, first: int = 0) -> Iterator[StructuredOutputs]:
    """Without end, one of each kind after another, none twice; numbered from `first`."""
    for number, name in zip(count(first), cycle(names or HOSTILE)):
        kind, text = HOSTILE[name]
        yield StructuredOutputs(kind=kind, text=text(number), param=name)


@dataclass(slots=True)
class Turn:
    """Tokens of the free rows in one turn, and what they took."""

    num_tokens: int = 0
    num_steps: int = 0
    wall_s: float = 0.0
    thread_s: float = 0.0
    num_refused: int = 0
    num_hostile_tokens: int = 0

    @property
    def by_clock(self) -> float:
        return self.num_tokens / self.wall_s

    @property
    def by_thread(self) -> float:
        return self.num_tokens / self.thread_s


class Neighbourhood:
    """Free rows of an engine, kept at their number, and others beside them when asked."""

    def __init__(
        self,
        engine: LLMEngine,
        forms: Iterator[StructuredOutputs],
        *,
        num_free: int = NUM_FREE_ROWS,
        max_arrived: int = MAX_ARRIVED,
        arrive_every_s: float = ARRIVE_EVERY_S,
        max_tokens: int = 200,  # of each that arrives
        other: StructuredOutputs | None = None,  # the form of other rows
    ) -> None:
        self._engine = engine
        self._forms = forms
        self._num_free = num_free
        self._max_arrived = max_arrived
        self._arrive_every_s = arrive_every_s
        self._max_tokens = max_tokens
        self._other = other
        self._ids = count()
        self.free: set[str] = set()
        self._arrived: set[str] = set()

    def alone(self, length_s: float) -> Turn:
        """Step for so many seconds of the engine thread's processor time."""
        return self._turn(length_s, repeat(None, 0))

    def beside_others(self, length_s: float) -> Turn:
        return self._turn(length_s, repeat(self._other))

    def beside_forms(self, length_s: float) -> Turn:
        return self._turn(length_s, self._forms)

    def answer_times(self, forms: Iterable[StructuredOutputs]) -> tuple[dict[str, float], Turn]:
        """Seconds, for each form, until its first token or its refusal; all arrive at once.

        And what the free rows did until the last of them.
        """
        asked_at = time.monotonic()
        took: dict[str, float] = {}
        waiting: dict[str, str] = {}
        for index, form in enumerate(forms):
            request_id, name = f"at once {next(self._ids)}", f"{index} {form.param}"
            params = SamplingParams(max_tokens=2, temperature=0.0, structured_outputs=form)
            try:
                self._engine.add_request(request_id, PROMPT, params)
                waiting[request_id] = name
            except ParameterError:  # known from before to be unusable
                took[name] = time.monotonic() - asked_at
        self._keep_free()
        turn, thread_began = Turn(), time.thread_time()
        while waiting:
            for update in self._step(turn):
                told = update.refusal or update.output or any(d.token_ids for d in update.deltas)
                if told and update.request_id in waiting:
                    took[waiting.pop(update.request_id)] = time.monotonic() - asked_at
        turn.wall_s, turn.thread_s = time.monotonic() - asked_at, time.thread_time() - thread_began
        return took, turn

    def _turn(self, length_s: float, arriving: Iterator[StructuredOutputs | None]) -> Turn:
        turn = Turn()
        self._keep_free()
        next_at = time.monotonic()
        began, thread_began = time.monotonic(), time.thread_time()
        while time.thread_time() - thread_began < length_s:
            if time.monotonic() >= next_at and len(self._arrived) < self._max_arrived:
                next_at = time.monotonic() + self._arrive_every_s
                for form in islice(arriving, 1):
                    self._arrive(form, turn)
            self._step(turn)
        turn.wall_s, turn.thread_s = time.monotonic() - began, time.thread_time() - thread_began
        for request_id in self._arrived:
            self._engine.abort(request_id)
        self._arrived.clear()
        return turn

    def _keep_free(self) -> None:
        room = self._engine.max_model_len - 32
        while len(self.free) < self._num_free:
            request_id = f"free {next(self._ids)}"
            params = SamplingParams(max_tokens=room, ignore_eos=True, temperature=0.0)
            self._engine.add_request(request_id, PROMPT, params)
            self.free.add(request_id)

    def _arrive(self, form: StructuredOutputs | None, turn: Turn) -> None:
        request_id = f"arrived {next(self._ids)}"
        params = SamplingParams(
            max_tokens=self._max_tokens, temperature=0.0, structured_outputs=form
        )
        try:
            self._engine.add_request(request_id, PROMPT, params)
        except ParameterError:  # known from before to be unusable
            turn.num_refused += 1
        else:
            self._arrived.add(request_id)

    def _step(self, turn: Turn) -> list[RequestUpdate]:
        turn.num_steps += 1
        updates = self._engine.step()
        for update in updates:
            num_tokens = sum(len(delta.token_ids) for delta in update.deltas)
            if update.request_id in self.free:
                turn.num_tokens += num_tokens
            else:
                turn.num_hostile_tokens += num_tokens
            if update.refusal is not None:
                turn.num_refused += 1
            if update.output is not None or update.refusal is not None:
                self._arrived.discard(update.request_id)
                self.free.discard(update.request_id)
        self._keep_free()
        return updates


def kept(pairs: Iterable[tuple[Turn, Turn]], measure: Callable[[Turn], float]) -> float:
    """How much of the first turn's speed is left in the second: the median over the pairs."""
    return statistics.median(measure(after) / measure(before) for before, after in pairs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a checkpoint folder")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--turn-s", type=float, default=2.0, help="of the engine's thread")
    parser.add_argument("--num-threads", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=12)
    parser.add_argument("--only", choices=sorted(HOSTILE), action="append")
    args = parser.parse_args()
    config = EngineConfig(model=args.model, num_threads=args.num_threads, max_model_len=1024)
    rows = Neighbourhood(LLMEngine(config), hostile_forms(args.only))
    rows.alone(1.0)
    rounds = []
    for _ in range(args.rounds):
        turns = [rows.alone, rows.beside_others, rows.beside_forms]
        alone, others, forms = (turn(args.turn_s) for turn in turns)
        rounds.append((alone, others, forms))
        print(_line(rounds[-1:]), f"({forms.num_refused} refused)", flush=True)
    print("median:", _line(rounds))
    alone = rows.alone(args.turn_s)
    took, meanwhile = rows.answer_times(islice(hostile_forms(args.only, first=10**6), args.at_once))
    for name, seconds in sorted(took.items(), key=lambda each: each[1]):
        print(f"{seconds:5.2f} s until {name} had a token or a refusal")
    left = kept([(alone, meanwhile)], lambda turn: turn.by_clock)
    print(f"meanwhile the free rows kept {left:.2f} of their speed alone, by the clock")
    return 0


def _line(rounds: list[tuple[Turn, Turn, Turn]]) -> str:
    of_alone = [(alone, forms) for alone, _, forms in rounds]
    of_others = [(others, forms) for _, others, forms in rounds]
    by_clock, by_thread = (lambda turn: turn.by_clock), (lambda turn: turn.by_thread)
    return (
        f"kept of the speed alone: {kept(of_alone, by_clock):.2f} by the clock, "
        f"{kept(of_alone, by_thread):.2f} by the thread; of that beside other rows: "
        f"{kept(of_others, by_clock):.2f}, {kept(of_others, by_thread):.2f}"
    )


if __name__ == "__main__":
    sys.exit(main())
