"""What is asked for a row: the endpoint's body, the same each time it is made."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bulk.errors import InputError
from bulk.inputs import Row
from bulk.prompts import Prompt
from bulk.spec import Spec
from engine.sampling_params import ParameterError, params_of
from jobs import openai
from jobs.openai_fields import BodyError

CHAT = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Asked:
    url: str
    body: dict[str, Any]


class Requests:
    """Makes bodies of rows as a spec says. Raises SpecError for a template that is none."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._prompt = None if spec.prompt is None else Prompt(spec.prompt, "prompt")
        self._system = None if spec.system is None else Prompt(spec.system, "system")
        self._repair = Prompt(spec.repair.message, "repair.message")

    def check(self, row: Row) -> None:
        """Raises InputError with the row's place, where the endpoint would refuse it."""
        try:
            asked = self.of(row.values, seed=0)
            options = openai.parse(asked.url, asked.body).options
            params_of(options, max_tokens=1)
            if self._spec.repair.how == "show_error":
                self.objection(row.values, error="", output="")
        except (InputError, BodyError, ParameterError) as error:
            raise InputError(f"{row.place}: {error}") from None

    def of(self, values: Mapping[str, Any], *, seed: int) -> Asked:
        """Raises InputError, without a place."""
        spec = self._spec
        if self._prompt is None:
            body = {"model": spec.model, **spec.parameters, **values["body"]}
            if body.get("n", 1) != 1:
                raise InputError("body.n must be 1: samples of a row are the spec's samples")
            return Asked(values["url"], {**body, "model": spec.model, "seed": seed})
        body = {"model": spec.model, **spec.parameters, **self._of_row(values), "seed": seed}
        text = self._prompt.render(values)
        if spec.endpoint != CHAT:
            return Asked(spec.endpoint, {**body, "prompt": text})
        messages = [{"role": "user", "content": text}]
        if self._system is not None:
            messages.insert(0, {"role": "system", "content": self._system.render(values)})
        return Asked(spec.endpoint, {**body, "messages": messages})

    def seed(self, values: Mapping[str, Any], row: int, sample: int, round_: int) -> int:
        """Of a try. Where equal rows are to be generated once, what is asked stands for the row."""
        place: int | str = row
        if self._spec.dedupe:
            body = json.dumps(self.of(values, seed=0).body, sort_keys=True)
            place = hashlib.sha256(body.encode(errors="surrogatepass")).hexdigest()
        return seed_of(self._spec.seed, place, sample, round_)

    def objection(self, values: Mapping[str, Any], *, error: str, output: str) -> str:
        """What is said to the model of an answer that was refused. Raises InputError."""
        return self._repair.render({**values, "error": error, "output": output})

    def parameters(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Those a row was asked with, but for its seed."""
        own = self._of_row(values) if self._prompt is not None else values["body"]
        left_out = ("model", "messages", "prompt", "seed", "input")
        every = {**self._spec.parameters, **own}
        return {name: value for name, value in every.items() if name not in left_out}

    def _of_row(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Parameters that a row has; where its column is empty the spec's own stay."""
        found = {}
        for parameter, column in self._spec.row_parameters.items():
            if column not in values:
                raise InputError(f"row_parameters.{parameter}: the row has no column {column!r}")
            value = values[column]
            if isinstance(value, str) and self._spec.parameters.get(parameter) is not None:
                value = _read(value, type(self._spec.parameters[parameter]))
            elif isinstance(value, str):
                value = _read(value, None)
            if value is not None and value != "":
                found[parameter] = value
        return found


def text_of(choice: Mapping[str, Any]) -> str:
    """What a choice of either endpoint says."""
    message = choice.get("message")
    text = choice["text"] if message is None else message.get("content")
    # half a surrogate pair is no text that a file can hold
    return (text or "").encode(errors="surrogatepass").decode(errors="replace")


def seed_of(spec_seed: int, row: int | str, sample: int, round_: int) -> int:
    """In [0, 2**63): the same for the same place in a dataset of the same seed."""
    text = f"{spec_seed} {row} {sample} {round_}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 1


def _read(text: str, kind: type | None) -> Any:
    """A number, list or object that a CSV's text spells; a text otherwise."""
    if kind is str:
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text
