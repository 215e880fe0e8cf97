"""What is asked in a later round: the row again, with a new seed, or with the error before it."""

from bulk.requests import Asked, Requests
from bulk.spec import Spec
from bulk.state import State, Try


def asked(spec: Spec, requests: Requests, state: State, each: Try) -> Asked:
    """The same each time it is made: the answer that was refused stands in the state."""
    seed = requests.seed(each.values, each.row, each.sample, each.round)
    first = requests.of(each.values, seed=seed)
    if not each.round or spec.repair.how != "show_error":
        return first
    before = state.one(each.row, each.sample, each.round - 1)
    assert before is not None
    refused = before[1]
    if refused.output is None:  # it was not the answer that failed
        return first
    message = requests.objection(each.values, error=refused.reason or "", output=refused.output)
    return Asked(
        first.url,
        first.body | {
            "messages": [
                *first.body["messages"],
                {"role": "assistant", "content": refused.output},
                {"role": "user", "content": message},
            ],
        },
    )  # fmt: skip
