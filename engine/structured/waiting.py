"""Requests whose form is being compiled: outside the scheduler until it is known.

Neither a step nor another request waits for them.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass

from engine.outputs import RequestUpdate
from engine.parameter_error import ParameterError
from engine.sequence import TokenFilter
from engine.structured.compiler import GrammarCompiler
from engine.structured.grammar import GrammarState
from engine.structured_outputs import StructuredOutputs

Admit = Callable[[Sequence[TokenFilter]], None]  # raises ParameterError


@dataclass(frozen=True, slots=True)
class _Waiting:
    compiling: "Future[list[GrammarState]]"
    admit: Admit
    generated: tuple[tuple[int, ...], ...]


class WaitingForForms:
    """Owns these requests from `put` until they are admitted, refused or dropped."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._waiting: dict[str, _Waiting] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def __len__(self) -> int:
        return len(self._waiting)

    def put(
        self,
        request_id: str,
        form: StructuredOutputs,
        n: int,
        generated: Sequence[Sequence[int]],
        admit: Admit,
    ) -> None:
        """Admit the request once its form is compiled: at once if it is.

        Raises ParameterError when the form is known to be unusable.
        """
        compiling = self._compiler.open(form, generated, n)
        if compiling.done():
            admit(compiling.result())
        else:
            given = tuple(tuple(token_ids) for token_ids in generated)
            self._waiting[request_id] = _Waiting(compiling, admit, given)

    def settle(self, *, wait_s: float = 0.0) -> list[RequestUpdate]:
        """Admit what is compiled by now, waiting so long for the first; returns the refused."""
        if wait_s and self._waiting:
            futures = [each.compiling for each in self._waiting.values()]
            wait(futures, timeout=wait_s, return_when=FIRST_COMPLETED)
        refused = []
        for request_id, each in list(self._waiting.items()):
            if not each.compiling.done():
                continue
            del self._waiting[request_id]
            try:
                each.admit(each.compiling.result())
            except ParameterError as error:
                refused.append(RequestUpdate(request_id=request_id, deltas=(), refusal=error))
        return refused

    def generated(self, request_id: str) -> tuple[tuple[int, ...], ...]:
        """The checkpoint that a waiting request came with."""
        return self._waiting[request_id].generated

    def drop(self, request_id: str) -> Admit | None:
        """Forget a request; returns how it would have been admitted. None: it is not here."""
        each = self._waiting.pop(request_id, None)
        if each is None:
            return None
        each.compiling.cancel()
        return each.admit
