"""From logits to token ids.

Greedy is the argmax in float32. A draw is Gumbel-max (Gumbel 1954; Maddison et al. 2014): the token
with the largest logit / temperature + noise, where the noise of token v is a function of (seed, v,
position) alone. So a draw does not depend on the other rows, on how the sequence came
to its position, or on any draw before it. The vocabulary is not sorted in the common case: filters
look at the 64 likeliest tokens, and at more only where those do not settle the matter.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine import logits_processors
from engine.beam_search import Candidates
from engine.kernels import draws
from engine.kernels.memory import sent
from engine.kernels.philox import philox_4x32_10
from engine.kernels.registry import Kernels
from engine.logits_processors import TokenTally
from engine.sampling_params import SamplingParams

FIRST_CANDIDATES = 64
CANDIDATE_GROWTH = 16  # 64, 1,024, then more than most vocabularies have
NOISE_TILE = 16384  # numbers made at once on a CPU: their temporaries stay in its cache


class CompiledDraws(NamedTuple):
    """For logits on a CPU, [R, vocab]; they return ids."""

    argmax: Callable[[Tensor], list[int]]  # as `_draw_greedy`
    # of temperatures [R] and `_words` [R, 3] too; as `_draw_plain`
    gumbel_argmax: Callable[[Tensor, NDArray[np.float32], NDArray[np.uint64]], list[int]]


class NumericalError(ArithmeticError):
    """Logits of one row from which no token can be chosen: a NaN, an infinity, or no finite one."""

    code = "numerical_error"


class NothingAllowedError(NumericalError):
    """A row whose own options leave no token: those allowed are banned."""

    code = "invalid_request"


def not_finite(position: int) -> NumericalError:
    return NumericalError(f"the logits for token {position} are not finite numbers")


def nothing_allowed(position: int) -> NothingAllowedError:
    return NothingAllowedError(
        f"the options allow no token at place {position}: all that is allowed is banned"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRow:
    """What decides one draw, next to the logits."""

    params: SamplingParams
    seed: int  # [0, 2⁶⁴)
    position: int  # index in the sequence of the token being drawn
    banned: tuple[int, ...] = ()  # ids that may not be drawn here, in [0, vocab)
    mask: bytes | None = None  # of the ids that a form allows, see token_masks; None: any
    tally: TokenTally | None = None  # of the tokens that the row's penalties touch
    forced: int | None = None  # the id that has to be drawn here
    num_candidates: int = 0  # of a beam: so many of the likeliest ids instead of a draw


def sample(
    logits: Tensor,  # [R, vocab] float32, changed where a row asks for it
    rows: Sequence[SampledRow],  # [R]
    compiled: CompiledDraws | None = None,  # where there are such
    on_device: Kernels | None = None,  # to draw with, rows of all kinds at once
) -> list[int | Candidates | NumericalError]:
    """One token id for each row, a beam's candidates, or the error of a row that is broken."""
    assert logits.shape[0] == len(rows)
    if not rows:
        return []
    results: list[int | Candidates | NumericalError] = [NumericalError("unset")] * len(rows)
    groups: dict[str, list[int]] = {
        "beams": [], "greedy": [], "filtered": [], "plain": [], "on_device": []
    }  # fmt: skip
    # options act on a beam's log-probabilities, as in transformers: none are made up for by others
    beams = [i for i, row in enumerate(rows) if row.num_candidates]
    if beams:
        logits[beams] = logits[beams].log_softmax(dim=-1)
    errors = _errors(logits, rows, draws.penalize if on_device is None else on_device.penalize)
    for i, row in enumerate(rows):
        if i in errors:
            nothing = row.num_candidates and isinstance(errors[i], NothingAllowedError)
            results[i] = () if nothing else errors[i]  # other beams may go on
        else:
            kind = _group(row, logits.shape[1])
            groups[kind if on_device is None or kind == "beams" else "on_device"].append(i)
    for name, indices in groups.items():
        if not indices:
            continue
        part = logits if len(indices) == len(rows) else logits[indices]
        chosen = [rows[i] for i in indices]
        tokens: Sequence[int | Candidates]
        if name == "on_device" and on_device is not None:
            tokens = draw_on_device(part, chosen, on_device).tolist()
        elif name == "greedy" and compiled is not None:
            tokens = compiled.argmax(part)
        elif name == "plain" and compiled is not None:
            tokens = compiled.gumbel_argmax(
                part,
                np.array([row.params.temperature for row in chosen], np.float32),
                _words(chosen),
            )
        else:
            tokens = _DRAWS[name](part, chosen)
        for i, token in zip(indices, tokens, strict=True):
            results[i] = token
    return results


def draw_on_device(
    logits: Tensor,  # [R, vocab] float32
    rows: Sequence[SampledRow],  # [R], whose options have been applied
    kernels: Kernels,
) -> Tensor:  # [R] int64, `draws.BROKEN` where no token can be drawn
    """One token id for each row, without a wait for the device."""
    params = [row.params for row in rows]
    numbers = np.array(
        [
            (0.0, 1.0, -math.inf)
            if p.greedy
            else (p.temperature, p.top_p, math.log(p.min_p) if p.min_p > 0 else -math.inf)
            for p in params
        ],
        dtype=np.float64,
    ).reshape(-1, 3)
    words = np.array(
        [(max(row.params.top_k, 0), row.seed, row.position) for row in rows], dtype=np.uint64
    ).reshape(-1, 3)
    return kernels.draw(
        logits,
        sent(torch.from_numpy(numbers), logits.device),
        sent(torch.from_numpy(words.view(np.int64)), logits.device),
    )


def _errors(
    logits: Tensor, rows: Sequence[SampledRow], penalize: logits_processors.Penalize
) -> dict[int, NumericalError]:
    """Apply the rows' options; returns by row why no token can be drawn, where that is so."""
    errors: dict[int, NumericalError] = {}
    # NaN is the largest of all to amax
    for i, peak_is_finite in enumerate(logits.amax(dim=-1).isfinite().tolist()):
        if not peak_is_finite:
            errors[i] = not_finite(rows[i].position)
    changed = [i for i in logits_processors.process(logits, rows, penalize) if i not in errors]
    if changed:
        peaks = logits[changed].amax(dim=-1).isfinite().tolist()
        for i, peak_is_finite in zip(changed, peaks, strict=True):
            if not peak_is_finite:
                errors[i] = nothing_allowed(rows[i].position)
    return errors


def _group(row: SampledRow, vocab_size: int) -> str:
    params = row.params
    if row.num_candidates:
        return "beams"
    if params.greedy:
        return "greedy"
    filtered = 0 < params.top_k < vocab_size or params.top_p < 1.0 or params.min_p > 0.0
    return "filtered" if filtered else "plain"


def _draw_beams(logprobs: Tensor, rows: Sequence[SampledRow]) -> list[Candidates]:
    """The likeliest tokens of each row, likeliest first; fewer where no more are allowed."""
    width = min(max(row.num_candidates for row in rows), logprobs.shape[1])
    values, ids = logprobs.topk(width, dim=-1)
    return [
        tuple((v, p) for v, p in zip(found, scores, strict=True) if p > -math.inf)[
            : row.num_candidates
        ]
        for found, scores, row in zip(ids.tolist(), values.tolist(), rows, strict=True)
    ]


def _draw_greedy(logits: Tensor, rows: Sequence[SampledRow]) -> list[int]:
    tokens: list[int] = logits.argmax(dim=-1).tolist()
    return tokens


def _draw_plain(logits: Tensor, rows: Sequence[SampledRow]) -> list[int]:
    """Draws from the whole vocabulary."""
    vocab_size = logits.shape[1]
    scores = _scaled(logits, rows).double()
    tile_size = NOISE_TILE if logits.device.type == "cpu" else max(1, scores.numel())
    height, width = max(1, tile_size // vocab_size), min(tile_size, vocab_size)
    for top in range(0, len(rows), height):
        for left in range(0, vocab_size, width):
            tile = scores[top : top + height, left : left + width]
            ids = torch.arange(left, left + tile.shape[1], device=logits.device)
            tile += _gumbel(ids.unsqueeze(0), rows[top : top + height])
    tokens: list[int] = scores.argmax(dim=-1).tolist()
    return tokens


def _draw_filtered(logits: Tensor, rows: Sequence[SampledRow]) -> list[int]:
    """Draws from the tokens that top_k, then top_p, then min_p leave."""
    # not logsumexp: it may split one long row over threads, and then rounds it otherwise than
    # among others
    logprobs = _scaled(logits, rows).log_softmax(dim=-1)
    tokens = [-1] * len(rows)
    pending = list(range(len(rows)))
    width = FIRST_CANDIDATES
    while pending:
        width = min(width, logprobs.shape[1])
        values, ids = logprobs[pending].topk(width, dim=-1)
        params = [rows[i].params for i in pending]
        kept, settled = _keep(values.double(), params)
        scores = values.double() + _gumbel(ids, [rows[i] for i in pending])
        best = scores.masked_fill_(~kept, -torch.inf).argmax(dim=-1, keepdim=True)
        chosen = ids.gather(1, best).squeeze(1).tolist()
        done = [True] * len(pending) if width == logprobs.shape[1] else settled.tolist()
        for i, token, is_done in zip(pending, chosen, done, strict=True):
            if is_done:
                tokens[i] = token
        pending = [i for i, is_done in zip(pending, done, strict=True) if not is_done]
        width *= CANDIDATE_GROWTH
    return tokens


def _keep(
    values: Tensor,  # [R, K] float64 log-probabilities of the K likeliest tokens, falling
    params: Sequence[SamplingParams],  # [R]
) -> tuple[Tensor, Tensor]:  # [R, K], [R] bool
    def column(numbers: list[float]) -> Tensor:
        return torch.tensor(numbers, dtype=values.dtype, device=values.device).unsqueeze(1)

    return draws.kept_candidates(
        values,
        column([p.top_k if p.top_k > 0 else torch.inf for p in params]),
        column([p.top_p if p.top_p < 1.0 else torch.inf for p in params]),
        column([p.min_p for p in params]).log(),
    )


def _scaled(logits: Tensor, rows: Sequence[SampledRow]) -> Tensor:
    """(logits - their maximum) / temperature: the largest is 0, so no temperature overflows."""
    temperatures = torch.tensor(
        [row.params.temperature for row in rows], dtype=logits.dtype, device=logits.device
    )
    return (logits - logits.amax(dim=-1, keepdim=True)) / temperatures.unsqueeze(1)


def _words(rows: Sequence[SampledRow]) -> NDArray[np.uint64]:  # [R, 3]
    """What noise depends on, beside the token: position, halves of the seed."""
    return np.array(
        [(r.position, r.seed & 0xFFFFFFFF, r.seed >> 32) for r in rows],
        dtype=np.uint64,
    )


def _gumbel(
    token_ids: Tensor,  # [R, K] or [1, K] int64
    rows: Sequence[SampledRow],  # [R]
) -> Tensor:  # [R, K] float64
    """-log(-log u) with u = (word + ½) / 2³², word the first of Philox(seed; v, position, …)."""
    words = _words(rows)
    if token_ids.device.type == "cpu":
        # numpy to the end: torch would start its threads for each of many small operations
        position, low, high = (column[:, None] for column in words.T)
        ids = token_ids.numpy().astype(np.uint64)
        nothing = np.zeros_like(position)
        word = philox_4x32_10((ids, position, nothing, nothing), (low, high))[0]
        return torch.from_numpy(-np.log(-np.log((word + 0.5) * 2.0**-32)))
    on_device = torch.tensor([[0, _signed(r.seed), r.position] for r in rows])
    return draws.gumbel(token_ids, on_device.to(token_ids.device))


def _signed(word: int) -> int:
    """64 bits as int64 has them."""
    return word - (word >> 63 << 64)


_DRAWS: dict[str, Callable[[Tensor, Sequence[SampledRow]], Sequence[int | Candidates]]] = {
    "beams": _draw_beams,
    "greedy": _draw_greedy,
    "filtered": _draw_filtered,
    "plain": _draw_plain,
}
