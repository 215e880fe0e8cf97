"""The folder of a dataset: who works in it, of which spec and input it is, its files at the end.

OUTPUT/data-00000-of-00003.jsonl   shards, each there as soon as all its rows have ended
OUTPUT/rejects.jsonl               what was not delivered, and why
OUTPUT/manifest.json               what the dataset was made from and how
OUTPUT/.tokenmill/                 how far it is; kept, for regenerate and retry-failed
"""

import fcntl
import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from bulk.atomic import written
from bulk.errors import OutputError
from bulk.inputs import Source, find_source
from bulk.outputs import REJECTS, Outputs, measured
from bulk.spec import Spec, digest
from bulk.state import State, failures

HIDDEN = ".tokenmill"
MANIFEST = "manifest.json"
SEEDS = "sha256 of '{seed} {row} {sample} {round}', its first 63 bits"
SEEDS_OF_SAME = (
    "sha256 of '{seed} {request} {sample} {round}', its first 63 bits; request: sha256 of what is "
    "asked for the row with seed 0, as JSON with sorted keys"
)


class Workplace:
    """Where a spec's dataset is made. Raises OutputError."""

    def __init__(self, spec: Spec, folder: Path) -> None:
        """`folder` is the spec's."""
        self.spec = spec
        self.spec_folder = folder
        self.folder = folder / spec.output.path
        self.hidden = self.folder / HIDDEN

    def state(self, *, new: bool = False) -> State:
        """Raises OutputError where there is none, and none is to be made."""
        path = self.hidden / "state.sqlite"
        if not new and not path.exists():
            raise OutputError(f"{self.folder} has no dataset yet: `tokenmill dataset run` makes it")
        self.hidden.mkdir(parents=True, exist_ok=True)
        return State(path)

    @contextmanager
    def held(self) -> Iterator[None]:
        """By one process at a time."""
        self.hidden.mkdir(parents=True, exist_ok=True)
        fd = os.open(self.hidden / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise OutputError(f"{self.folder} is being worked on by another run") from None
            yield
        finally:
            os.close(fd)

    def is_held(self) -> bool:
        try:
            with self.held():
                return False
        except OutputError:
            return True

    def begin(self, state: State) -> Source:
        """The input; it and the spec must be those that the folder's dataset was begun with."""
        source = find_source(self.spec.input, self.spec_folder)
        inputs = [
            {"path": str(path), "bytes": size, "sha256": sha256}
            for path in source.paths
            for size, sha256 in [measured(path)]
        ]
        hashes = [each["sha256"] for each in inputs]
        earlier = state.fact("spec_sha256")
        if earlier is not None and earlier != digest(self.spec):
            raise OutputError(
                f"{self.folder} holds a dataset of another spec: give another output.path, or "
                "remove the folder"
            )
        if earlier is not None and [each["sha256"] for each in state.fact("inputs")] != hashes:
            raise OutputError(f"the input has changed since {self.folder} was begun")
        state.note(spec_sha256=digest(self.spec), inputs=inputs)
        return source

    def finish(self, state: State) -> dict[str, Any]:
        """Shards, rejects and manifest. The manifest says whether it is all."""
        outputs = Outputs(self.spec, state, self.folder)
        outputs.write_settled()
        num_rejects = outputs.write_rejects()
        counts = state.counts()
        rounds: dict[int, int] = {}
        for (_, round_, _), (num, _, _) in counts.items():
            rounds[round_] = rounds.get(round_, 0) + num
        by_state = dict.fromkeys(("delivered", "invalid", "failed", "planned", "asked"), 0)
        for (name, _, _), (num, _, _) in counts.items():
            by_state[name] = by_state.get(name, 0) + num
        manifest = {
            "spec": msgspec.to_builtins(self.spec),
            "spec_sha256": digest(self.spec),
            "inputs": state.fact("inputs"),
            "model": state.fact("model"),
            "seeds": SEEDS_OF_SAME if self.spec.dedupe else SEEDS,
            "versions": {
                "tokenmill": version("tokenmill"), "python": platform.python_version(),
                "pyarrow": pa.__version__,
            },
            "rows": state.fact("num_rows"),
            "samples": by_state,
            "complete": not by_state["planned"] and not by_state["asked"],
            "not_delivered": dict(failures(counts)),
            "tries_by_round": {str(name): rounds[name] for name in sorted(rounds)},
            "tokens": {
                "prompt": sum(each[1] for each in counts.values()),
                "completion": sum(each[2] for each in counts.values()),
                "saved": state.saved_tokens() if self.spec.dedupe else 0,
            },
            "shards": list(state.shards().values()),
            "rejects": {"name": REJECTS, "rows": num_rejects},
        }  # fmt: skip
        with written(self.folder / MANIFEST) as draft:
            draft.write_text(json.dumps(manifest, indent=2, ensure_ascii=False) + "\n")
        return manifest
