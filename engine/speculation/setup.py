"""The speculator that an engine's settings ask for, and the draft model where it has one."""

import dataclasses
from collections.abc import Callable

from engine.config import EngineConfig
from engine.model_runner import ModelRunner, Runner
from engine.speculation.draft_model import DraftModelProposer
from engine.speculation.ngram import NgramProposer
from engine.speculation.speculator import Proposer, Speculator
from engine.tokenizer import Tokenizer
from engine.weights import resolve_folder

DRAFT_STEP_TOKENS = 512  # of a draft model's step, where the engine's setting leaves it open


def draft_runner(
    config: EngineConfig, tokenizer: Tokenizer, on_compile: Callable[[], None]
) -> ModelRunner | None:
    """The draft model, loaded, but for its KV blocks: there are as many as the model has.

    On the first of several ranks. Raises CheckpointError, TokenizerError or ValueError when it
    cannot be set up, or has another vocabulary.
    """
    if config.speculation != "draft":
        return None
    theirs = Tokenizer.load(resolve_folder(config.draft_model))
    for token_id in range(max(tokenizer.vocab_size, theirs.vocab_size)):
        token, other = tokenizer.token(token_id), theirs.token(token_id)
        if token != other:
            raise ValueError(
                f"draft_model {config.draft_model} has another vocabulary: "
                f"token {token_id} is {other!r:.40}, the model's is {token!r:.40}"
            )
    own = dataclasses.replace(
        config,
        model=config.draft_model,
        speculation="off",
        tensor_parallel=1,
        max_model_len=None,
        max_num_batched_tokens=config.max_num_batched_tokens or DRAFT_STEP_TOKENS,
    )
    return ModelRunner(
        own,
        eos_token_ids=tokenizer.eos_token_ids,
        on_compile=on_compile,
        without_blocks=True,
        drafts=True,
    )


def speculator_of(
    config: EngineConfig,
    clock: Callable[[], float],
    runner: Runner,  # of the model
    draft: ModelRunner | None,
) -> Speculator | None:
    """Gives the draft model its blocks. Raises ValueError where it has another vocabulary."""
    if config.speculation == "off":
        return None
    proposer: Proposer = NgramProposer()
    if draft is not None:
        if draft.vocab_size != runner.vocab_size:
            raise ValueError(
                f"draft_model {config.draft_model} has another vocabulary: "
                f"{draft.vocab_size} logits, the model has {runner.vocab_size}"
            )
        draft.make_blocks(runner.num_blocks)
        proposer = DraftModelProposer(
            draft,
            config.block_size,
            max_num_tokens=draft.max_num_batched_tokens,
            enable_prefix_caching=config.enable_prefix_caching,
        )
    return Speculator(proposer, config.num_draft_tokens, clock)
