"""Log-probabilities of a job's tokens, and the prompt before its text, for the response."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from engine.detokenizer import Detokenizer, text_offsets, token_bytes
from engine.outputs import TokenLogprobs
from engine.sampling_params import SamplingParams
from engine.tokenizer import Tokenizer
from jobs import openai_logprobs
from jobs.openai import Generation
from worker.messages import Ended, Sample
from worker.prompt import Prompt


def echo_of(
    generation: Generation, token_ids: list[int], params: SamplingParams, tokenizer: Tokenizer
) -> str | None:
    """What stands before the text: a prompt in text as it came, one in ids as the text of them."""
    if not generation.echo:
        return None
    if isinstance(generation.prompt, str):
        return generation.prompt
    return tokenizer.decode(token_ids, skip_special_tokens=params.skip_special_tokens)


def text_of(
    sample: Sample,
    prompt: Prompt,
    content: str,
    generated: Sequence[Sequence[int]],  # ids of each sample, where they are known
    tokenizer: Tokenizer,
) -> str:
    """A choice's text: `content`, behind the prompt if that is echoed."""
    token_ids = generated[sample.index] if generated else ()
    return _echo_before(sample, prompt, token_ids, tokenizer) + content


def _echo_before(
    sample: Sample, prompt: Prompt, token_ids: Sequence[int], tokenizer: Tokenizer
) -> str:
    """The prompt, with the space in front of the text that some decoders take off it."""
    if not prompt.echo:
        return ""
    has_all = tokenizer.is_byte_level or prompt.params.structured_outputs is not None
    if has_all or not sample.text:
        return prompt.echo
    alone, behind = (
        Detokenizer(tokenizer, skip_special_tokens=prompt.params.skip_special_tokens, in_form=each)
        for each in (False, True)
    )
    lost = len(behind.add(token_ids) + behind.flush()) - len(alone.add(token_ids) + alone.flush())
    return prompt.echo + " " * lost


def logprobs_of(
    sample: Sample, ended: Ended, prompt: Prompt, tokenizer: Tokenizer, *, chat: bool
) -> dict[str, Any] | None:
    """In the endpoint's shape: all tokens generated, also those that a stop cut from the text."""
    num_top = prompt.params.logprobs
    if sample.logprobs is None or num_top is None:
        return None
    spell = partial(token_bytes, tokenizer)
    if chat:
        return openai_logprobs.chat_logprobs(sample.logprobs, spell)
    skip_special_tokens = prompt.params.skip_special_tokens

    def offsets_in(text: str, token_ids: list[int], *, in_form: bool = False) -> list[int]:
        offsets = text_offsets(
            tokenizer, token_ids, skip_special_tokens=skip_special_tokens, in_form=in_form
        )
        return [min(offset, len(text)) for offset in offsets]

    places: list[tuple[int, TokenLogprobs | None]] = []
    offsets: list[int] = []
    if prompt.echo is not None and ended.prompt_logprobs is not None:
        # fewer scores than tokens where it was cut short
        places += zip(prompt.token_ids, ended.prompt_logprobs, strict=False)
        offsets += offsets_in(prompt.echo, [token_id for token_id, _ in places])
    generated = [score.token_id for score in sample.logprobs]
    places += zip(generated, sample.logprobs, strict=True)
    start = len(_echo_before(sample, prompt, generated, tokenizer))
    in_form = prompt.params.structured_outputs is not None
    offsets += [start + offset for offset in offsets_in(sample.text, generated, in_form=in_form)]
    return openai_logprobs.completion_logprobs(places, offsets, num_top, spell)


def prompt_logprobs_of(
    ended: Ended, prompt: Prompt, tokenizer: Tokenizer
) -> list[dict[str, Any] | None] | None:
    if ended.prompt_logprobs is None or prompt.prompt_logprobs is None:
        return None
    spell = partial(token_bytes, tokenizer)
    return openai_logprobs.prompt_logprobs(ended.prompt_logprobs, prompt.prompt_logprobs, spell)
