"""A completion of several prompts: one job for each, one reply of them all.

A job has one prompt, so that each is queued, batched, retried and accounted for by itself.
"""

from collections.abc import Mapping, Sequence
from typing import Any


def several(body: Mapping[str, Any]) -> list[Any] | None:
    """The prompts of a body that has a list of them; None where it has one, or nothing sensible."""
    prompt = body.get("prompt")
    if not isinstance(prompt, list) or len(prompt) < 2:
        return None
    return prompt if all(isinstance(each, str | list) for each in prompt) else None


def joined(outputs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One response body of those of all prompts, in order. The first one names it."""
    if len(outputs) == 1:
        return dict(outputs[0])
    choices = [
        choice | {"index": place * len(output["choices"]) + choice["index"]}
        for place, output in enumerate(outputs)
        for choice in output["choices"]
    ]
    return {
        **outputs[0], "choices": choices, "usage": _sum([output["usage"] for output in outputs]),
    }  # fmt: skip


def _sum(usages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        name: _sum([usage[name] for usage in usages])
        if isinstance(value, Mapping)
        else sum(usage[name] for usage in usages)
        for name, value in usages[0].items()
    }
