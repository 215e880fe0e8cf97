"""What a job asks of the engine: token ids and options, and how its text is to be read."""

from dataclasses import dataclass

from engine.reply import PLAIN, ReplyForm
from engine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A generation, ready for the engine."""

    token_ids: list[int]
    params: SamplingParams
    reply_form: ReplyForm = PLAIN  # how the text it brings is to be read
    echo: str | None = None  # what stands before the text
    prompt_logprobs: int | None = None  # shown in the response, so many at each place
