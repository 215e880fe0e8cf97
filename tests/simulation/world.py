"""What the scheduler is simulated against: a runner without a model, and the naive truth.

The runner keeps ModelRunner.run's contract, but where the real one stores K and V it stores which
context they belong to. K and V of a token depend on every token before it and on the tenant, so a
slot's content is a hash of exactly that; attention reads all of a sequence's slots, so every step
reads them all and compares them with the sequence's own tokens.
"""

from zlib import crc32

from engine.beam_search import BeamSearch, Candidates
from engine.sampling_params import SamplingParams
from engine.sequence import FinishReason, Sequence
from engine.step_plan import StepPlan

VOCAB_SIZE = 4  # small, so that prompts and what is generated collide often
EOS = 0


def contexts(cache_salt: bytes, token_ids: list[int]) -> list[int]:
    """What each token's slot should hold."""
    found, context = [], crc32(cache_salt)
    for token_id in token_ids:
        context = hash((context, token_id))
        found.append(context)
    return found


def next_token(context: int, seed: int) -> int:
    """EOS one time in sixteen."""
    draw = hash((context, seed)) % 16
    return 1 + draw % (VOCAB_SIZE - 1) if draw else EOS


def expected_generation(
    prompt_ids: list[int], params: SamplingParams, seed: int, salt: bytes
) -> tuple[list[int], FinishReason]:
    """The tokens and the end of a sample, had it been alone: no blocks, no steps, no neighbours."""
    token_ids = list(prompt_ids)
    for num_before in range(params.max_tokens):
        context = contexts(salt, token_ids)[-1]
        token_ids.append(next_token(context, seed))
        eos = token_ids[-1] == EOS and not params.ignore_eos
        if num_before >= params.min_tokens and (eos or token_ids[-1] in params.stop_token_ids):
            return token_ids[len(prompt_ids) :], FinishReason.STOP
    return token_ids[len(prompt_ids) :], FinishReason.LENGTH


def candidates(context: int, seed: int) -> Candidates:
    """Of a beam: every id, likeliest first, with log-probabilities that hardly ever are equal."""
    scores = [(v, -(hash((context, seed, v)) % 1000) / 100) for v in range(VOCAB_SIZE)]
    return tuple(sorted(scores, key=lambda pair: -pair[1]))


def expected_texts(
    prompt_ids: list[int], params: SamplingParams, seed: int, salt: bytes
) -> list[tuple[list[int], FinishReason]]:
    """The outcome of each place of a search, had it been alone: texts first, then empty places."""
    search = BeamSearch(params, params.stop_ids(frozenset({EOS})))
    while search.live:
        search.advance({
            beam: candidates(contexts(salt, [*prompt_ids, *beam.generated_ids])[-1], seed)
            for beam in search.live
        })  # fmt: skip
    outcomes = [
        (each.beam.generated_ids, FinishReason.STOP if each.stopped else FinishReason.LENGTH)
        for each in search.best()[: params.n]
    ]
    outcomes += [([], FinishReason.ERROR)] * (params.n - len(outcomes))
    return outcomes + [([], FinishReason.STOP)] * (params.num_beams - params.n)


def expected_outcomes(
    prompt_ids: list[int], params: SamplingParams, seed: int, salt: bytes
) -> list[tuple[list[int], FinishReason]]:
    """Tokens and end of each sample, or of each place of a search."""
    if params.num_beams > 1:
        return expected_texts(prompt_ids, params, seed, salt)
    return [expected_generation(prompt_ids, params, seed + i, salt) for i in range(params.n)]


class FakeRunner:
    """Runs a step plan against slots that remember their context."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.blocks: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.scored: dict[Sequence, list[int]] = {}  # places whose log-probability was told

    def run(self, plan: StepPlan) -> list[int | Candidates | None]:
        """Copies, then every row's writes, then every row's reads: the order of a real step."""
        for source, destination in plan.block_copies:
            self.blocks[destination] = list(self.blocks[source])
        rows = []
        for row in plan.scheduled:
            sequence = row.sequence
            end = sequence.num_computed_tokens + row.num_scheduled_tokens
            wanted = contexts(sequence.cache_salt, sequence.token_ids[:end])
            rows.append((row, wanted))
            for position in range(sequence.num_computed_tokens, end):
                block, offset = self._slot(sequence, position)
                self.blocks[block][offset] = wanted[position]
        sampled: list[int | Candidates | None] = []
        for row, wanted in rows:
            sequence = row.sequence
            for position, context in enumerate(wanted):
                block, offset = self._slot(sequence, position)
                assert self.blocks[block][offset] == context, (
                    f"position {position} of {sequence} reads what is not its own"
                )
            token: int | Candidates
            if sequence.params.num_beams > 1:
                # a beam's likelihoods do not hang on its place
                token = candidates(wanted[-1], sequence.seed - sequence.sample_index)
            else:
                token = next_token(wanted[-1], sequence.seed)
            sampled.append(token if row.samples else None)
            told = self.scored.setdefault(sequence, [])
            told += row.scored
            if row.samples and sequence.params.logprobs is not None:
                told.append(sequence.num_tokens)
        return sampled

    def _slot(self, sequence: Sequence, position: int) -> tuple[int, int]:
        return sequence.block_table[position // self.block_size], position % self.block_size
