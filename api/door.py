"""The door check: everything about a generation that can be known to be wrong before it is stored.

A value that gets past here reaches an engine that other jobs share, so nothing odd may pass. The
worker checks again when it admits the job: its own limits may be smaller.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from api.errors import BadRequest
from engine.chat_template import ChatTemplateError
from engine.checkpoint_files import fingerprint
from engine.door import checked_params
from engine.sampling_params import MAX_N, ParameterError, SamplingParams, params_of
from engine.tokenizer import Tokenizer
from engine.tokenizer_files import TokenizerError
from jobs import openai
from jobs.openai_fields import BodyError
from jobs.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A generation that a model of ours can do."""

    model: str
    prompt_tokens: int
    max_tokens: int  # of each sample, the default filled in


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    name: str
    tokenizer: Tokenizer
    max_model_len: int  # tokens of prompt and output together
    created: int  # epoch seconds
    max_n: int = MAX_N  # samples of one generation
    fingerprint: str = ""  # of its files, see engine.checkpoint_files


class UnknownModel(BadRequest):
    """The body names a model that is not served here."""


class UnreadableModel(Exception):
    """A model's folder has no tokenizer or chat template that can be used."""


class Door:
    """The served models' tokenizers and limits. Safe to use from several threads."""

    def __init__(self, models: Mapping[str, ServedModel]) -> None:
        assert models
        self.models = models

    @classmethod
    def open(cls, settings: Settings) -> "Door":
        """Loads each model's tokenizer. Raises UnreadableModel."""
        models = {}
        for entry in settings.models:
            path = Path(entry.path)
            try:
                tokenizer = Tokenizer.load(path)
            except (TokenizerError, ChatTemplateError, OSError) as error:
                raise UnreadableModel(f"model {entry.name}: {error}") from error
            limit = min(settings.max_model_len or tokenizer.max_model_len, tokenizer.max_model_len)
            models[entry.name] = ServedModel(
                name=entry.name,
                tokenizer=tokenizer,
                max_model_len=limit,
                created=int(path.stat().st_mtime),
                max_n=settings.max_n,
                fingerprint=fingerprint(path),
            )
        return cls(models)

    def check(self, url: str, body: dict[str, Any], *, streams: bool = False) -> Checked:
        """Raises BadRequest; `param` is a path inside the body ("temperature")."""
        try:
            return self._check(url, body, streams)
        except BodyError as error:
            raise BadRequest(str(error), param=error.param, code=error.code) from None
        except ParameterError as error:
            param = openai.field_of(url, body, error.param)
            raise BadRequest(str(error), param=param, code=error.code) from None

    def _check(self, url: str, body: dict[str, Any], streams: bool) -> Checked:
        generation = openai.parse(url, body, streams=streams)
        model = self.models.get(generation.model)
        if model is None:
            served = ", ".join(sorted(self.models))
            raise UnknownModel(
                f"model {generation.model[:100]!r} is not served here; served: {served}",
                param="model",
                code="model_not_found",
            )
        prompt_ids = model.tokenizer.encode_input(
            prompt=generation.prompt,
            messages=generation.messages,
            tools=generation.tool_use.tools,
            variables=generation.template_variables,
        )
        params = checked_params(
            model.tokenizer,
            prompt_ids,
            generation.options,
            forced_tools=generation.tool_use.forced,
            parallel_calls=generation.tool_use.parallel,
            max_tokens=generation.max_tokens,
            room=model.max_model_len,
            max_model_len=model.max_model_len,
            max_n=model.max_n,
        )
        return Checked(
            model=model.name, prompt_tokens=len(prompt_ids), max_tokens=params.max_tokens
        )


def bound_of(option: str) -> str | None:
    """What a number must be, in the words of who checks it; None where an option is no number."""
    if get_type_hints(SamplingParams).get(option) not in (float, float | None):
        return None
    try:
        params_of({option: math.nan}, max_tokens=1)
    except ParameterError as error:
        return str(error).removesuffix(", got nan")
    raise AssertionError(f"{option} may be NaN")
