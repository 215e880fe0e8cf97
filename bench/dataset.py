"""A real dataset with SmolLM2: 500 customers' messages as JSON of a schema, judged and repaired.

    python -m bench.dataset FOLDER [--rows 500] [--model smollm2-135m-instruct=CHECKPOINT]

Writes input, spec and validator to FOLDER, runs `tokenmill dataset run` there (again: it goes on),
judges every delivered row once more by itself, and prints one line of JSON.
"""

import argparse
import itertools
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema

PRODUCTS = (
    "coffee grinder", "bicycle lamp", "desk chair", "rain jacket", "garden hose",
    "alarm clock", "electric kettle", "hiking boots", "wireless mouse", "reading glasses",
)  # fmt: skip
PROBLEMS = (
    "it arrived broken", "a part is missing", "it makes a loud noise", "it is the wrong colour",
    "it stopped working after a week", "the box was open", "it came two weeks late",
    "the manual is in another language", "it is too small", "it gets very hot",
)  # fmt: skip
TONES = ("angry", "polite", "confused", "hurried", "friendly")
URGENCY = ("low", "medium", "high")
COLUMNS = ("product", "problem", "tone")

# what the model is held to while it writes: the form
FORM: dict[str, Any] = {
    "type": "object", "additionalProperties": False,
    "required": ["subject", "message", "urgency"],
    "properties": {
        "subject": {"type": "string"}, "message": {"type": "string"},
        "urgency": {"enum": list(URGENCY)},
    },
}  # fmt: skip
# what is delivered: lengths, too
SCHEMA: dict[str, Any] = FORM | {
    "properties": {
        "subject": {"type": "string", "minLength": 4, "maxLength": 80},
        "message": {"type": "string", "minLength": 30, "maxLength": 400},
        "urgency": {"enum": list(URGENCY)},
    }
}
CHECKS = '''"""What a message must have that no schema says."""

import json


def about_it(text, row):
    said = json.loads(text)
    word = row["product"].split()[-1]
    if word not in (said["subject"] + said["message"]).lower():
        return f"it does not name the {word}"
    return True
'''


def spec_of(model: str) -> dict[str, Any]:
    return {
        "model": model,
        "input": {"path": "tickets.jsonl"},
        "output": {"path": "out", "rows_per_shard": 100},
        "system": "You write messages that customers send to a shop, as JSON.",
        "prompt": (
            "Write the message of a {{ tone }} customer who bought a {{ product }}: "
            "{{ problem }}. JSON with subject (a few words), message (one or two sentences that "
            "name the {{ product }}) and urgency (low, medium or high)."
        ),
        "parameters": {
            "max_tokens": 160,
            "temperature": 0.7,
            "response_format": {
                "type": "json_schema", "json_schema": {"name": "ticket", "schema": FORM},
            },
        },
        "seed": 8,
        "validate": [
            {"json_schema": SCHEMA},
            {"python": "checks.py:about_it"},
            {"no_flags": ["truncated", "repetition"]},
        ],
        "repair": {"rounds": 5, "how": "reseed"},
    }  # fmt: skip


def write(folder: Path, num_rows: int, model: str) -> Path:
    """The same rows for the same number."""
    every = list(itertools.product(PRODUCTS, PROBLEMS, TONES))
    random.Random(0).shuffle(every)
    rows = (dict(zip(COLUMNS, values, strict=True)) for values in every[:num_rows])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tickets.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "checks.py").write_text(CHECKS)
    (folder / "spec.yaml").write_text(json.dumps(spec_of(model), indent=1))
    return folder / "spec.yaml"


def faults(folder: Path) -> int:
    """Delivered rows that are not what was asked for."""
    num = 0
    for shard in sorted(folder.glob("out/data-*.jsonl")):
        for line in shard.read_bytes().splitlines():
            row = json.loads(line)
            try:
                said = json.loads(row["output"])
                jsonschema.validate(said, SCHEMA)
                good = row["product"].split()[-1] in (said["subject"] + said["message"]).lower()
            except (ValueError, jsonschema.ValidationError):
                good = False
            num += not (good and not row["generation"]["flags"])
    return num


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=500, choices=range(1, 501), metavar="1…500")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="NAME or NAME=FOLDER")
    options = parser.parse_args()
    spec = write(options.folder, options.rows, options.model.partition("=")[0])
    command = [sys.executable, "-m", "cli.main", "dataset", "run", str(spec)]
    command += ["--model", options.model, "--data-dir", str(options.folder / "service")]
    began = time.monotonic()
    status = subprocess.run(command, check=False).returncode
    seconds = time.monotonic() - began
    made = options.folder / "out" / "manifest.json"
    if not made.exists():
        sys.exit(status)
    manifest = json.loads(made.read_text())
    print(
        json.dumps(
            {
                "rows": manifest["rows"],
                "delivered": manifest["samples"]["delivered"],
                "delivered_but_bad": faults(options.folder),
                "not_delivered": manifest["not_delivered"],
                "tries_by_round": manifest["tries_by_round"],
                "tokens": manifest["tokens"],
                "last_run_s": round(seconds, 1),
            }
        )
    )


if __name__ == "__main__":
    main()
