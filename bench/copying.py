"""A workload whose answers stand in its prompts: chats that ask to copy or rewrite a text."""

from collections.abc import Iterator
from typing import Any

from engine.tokenizer import Tokenizer

MAX_TOKENS = 160  # of an answer

TASKS = (
    "Repeat the text below word for word, and write nothing else.",
    "Copy the text below, but write {new} wherever it says {old}. Write nothing else.",
    "Copy the text below with each sentence on a line of its own. Write nothing else.",
)

# (a text, a word of it, what to write instead)
TEXTS = (
    (
        "The mill stands at the bend of the river. Its wheel is twelve feet wide and turns from "
        "March to November. Grain comes by cart from the farms on the north bank, and flour leaves "
        "by boat on the river. In a dry summer the miller opens the upper sluice at night.",
        "river",
        "canal",
    ),
    (
        "Order 4417 has three parcels. Parcel A holds two copper kettles and weighs 3.2 kg. Parcel "
        "B holds one cast iron pan and weighs 4.1 kg. Parcel C holds six tea towels and weighs 0.5 "
        "kg. Parcel A and parcel B travel by road. Parcel C travels by post.",
        "parcel",
        "box",
    ),
    (
        "def total_price(items, rate):\n    total = 0\n    for item in items:\n        total += "
        "item.price * item.count\n    total += total * rate\n    return round(total, 2)\n\n\ndef "
        "total_weight(items):\n    total = 0\n    for item in items:\n        total += item.weight "
        "* item.count\n    return round(total, 3)\n",
        "total",
        "amount",
    ),
    (
        "Dear Ms Alder, thank you for your letter of 3 May. We have looked at the roof of the "
        "school and found two broken tiles above the gym. The builder will come on Tuesday and "
        "replace both tiles. Please keep the gym closed until then. The library stays open.",
        "gym",
        "hall",
    ),
    (
        '{"name": "north gate", "open": true, "hours": [7, 19], "staff": ["Ines", "Bo"]}\n'
        '{"name": "south gate", "open": true, "hours": [8, 18], "staff": ["Uma"]}\n'
        '{"name": "river gate", "open": false, "hours": [9, 17], "staff": ["Ines", "Kit"]}\n'
        '{"name": "field gate", "open": false, "hours": [9, 17], "staff": []}\n',
        "gate",
        "door",
    ),
    (
        "First wash the beans and leave them in cold water over night. Then pour the water off, "
        "cover the beans with fresh water and boil them for ten minutes. Turn the heat down and "
        "let the beans simmer for one hour. Add salt at the end, or the beans stay hard.",
        "beans",
        "lentils",
    ),
)


def copying(tokenizer: Tokenizer) -> dict[str, Any]:
    """The workload in a model's own tokens, in the form of bench/workload.json.

    Answers end where the model ends them: behind that it would only repeat itself.
    """
    return {
        "ignore_eos": False,
        "requests": [
            {
                "prompt": list(tokenizer.encode_input(prompt=None, messages=messages)),
                "max_tokens": MAX_TOKENS,
            }
            for messages in _chats()
        ],
    }


def _chats() -> Iterator[list[dict[str, str]]]:
    for task in TASKS:
        for text, old, new in TEXTS:
            content = f"{task.format(old=old, new=new)}\n\n{text}"
            yield [{"role": "user", "content": content}]
