"""The engine processes of a simulated deployment: tokens by the numbers, and all ways to die."""

from collections import deque
from dataclasses import dataclass
from typing import Any

from worker.messages import Abort, Add, Command, Delta, Ended, Ready, Sample, Stepped

MAX_NUM_SEQS = 4
# with few a worker takes one job after the other: it guesses that each will be long
KV_TOKENS = (64, 4096)
POISON = 10_000  # prompts from this token on end the engine


def token(prompt: int, sample: int, position: int) -> int:
    """What the engine generates there, in any attempt."""
    return hash((prompt, sample, position)) % 1000


def text(prompt: int, sample: int, num_tokens: int) -> str:
    return " ".join(str(token(prompt, sample, i)) for i in range(num_tokens))


@dataclass
class Request:
    prompt: int
    max_tokens: int
    generated: list[list[int]]


class FakeEngine:
    """An engine process and the pipe to it, as worker.engine_client shows them to a worker."""

    def __init__(self, world: Any) -> None:
        self._world = world
        self.commands: list[Command] = []
        self.requests: dict[str, Request] = {}
        self.pipe: deque[Stepped | None] = deque()  # None: its end
        self.running = False
        self.stuck = False
        self.restart_at = 0.0
        self.num_restarts = -1
        self.num_steps = 0  # as the worker knows it
        self._steps = 0
        self.failing = False

    @property
    def pid(self) -> int | None:
        return 1 if self.running else None

    def send(self, command: Command) -> None:
        if self.running:
            self.commands.append(command)

    def kill(self) -> None:
        if self.running:
            self.running = self.stuck = False
            self._world.unaccountable |= {key.rpartition(":")[0] for key in self.requests}
            self.commands, self.requests = [], {}
            self.pipe.append(None)

    def start(self) -> Ready:
        self.running = True
        self.num_restarts += 1
        self._steps = self.num_steps = 0
        return Ready(
            pid=1,
            max_num_seqs=MAX_NUM_SEQS,
            kv_tokens=self._world.kv_tokens,
            max_model_len=64,
            load_s=0.0,
        )

    def step(self) -> None:
        if not self.running or self.stuck:
            return  # since it was its turn
        ended = [end for command in self.commands if (end := self._take(command))]
        self.commands = []
        if any(request.prompt >= POISON for request in self.requests.values()):
            self._world.num_poisoned += 1
            self.kill()
            return
        deltas = []
        for key, request in list(self.requests.items()):
            for index, ids in enumerate(request.generated):
                if len(ids) < request.max_tokens:
                    ids.append(token(request.prompt, index, len(ids)))
                    deltas.append(Delta(key, index, ids[-1:]))
                    self._world.generated(key)
            if all(len(ids) == request.max_tokens for ids in request.generated):
                ended.append(self._end(key, "length"))
            elif self._world.chance(self._world.faults.engine / 2):
                self._world.num_failures += 1
                ended.append(self._end(key, "error", "numerical_error: no numbers"))
        self._steps += 1
        used = sum(1 + sum(map(len, request.generated)) for request in self.requests.values())
        self.pipe.append(
            Stepped(
                num_steps=self._steps,
                num_waiting=0,
                free_tokens=self._world.kv_tokens - used,
                deltas=deltas,
                ended=ended,
                refused=[],
                stats={},
            )
        )

    def _take(self, command: Command) -> Ended | None:
        match command:
            case Add():
                generated = [list(ids) for ids in command.generated]
                self.requests[command.key] = Request(
                    prompt=command.prompt_ids[0],
                    max_tokens=command.params.max_tokens,
                    generated=generated or [[] for _ in range(command.params.n)],
                )
            case Abort() if command.key in self.requests:
                return self._end(command.key, "abort")
        return None

    def _end(self, key: str, reason: str, error: str | None = None) -> Ended:
        request = self.requests.pop(key)
        return Ended(
            key=key,
            samples=[
                Sample(
                    index=index,
                    text=" ".join(map(str, ids)),
                    finish_reason=reason,
                    error=error,
                )
                for index, ids in enumerate(request.generated)
            ],
            prompt_tokens=1,
            cached_tokens=0,
            completion_tokens=sum(map(len, request.generated)),
            first_token_at=None,
        )
