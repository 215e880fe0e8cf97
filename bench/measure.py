"""How a system under test is timed on a workload; what is printed of it, and in which form.

A system is a callable (requests, n, temperature) -> a wall clock time and the generated pieces,
`n` a request, in the order of the requests. A workload is {"requests": [{"prompt": [ids],
"max_tokens": int}], "n": 1, "temperature": 0}; end of sequence is ignored, so that every piece has
`max_tokens` ids.

Round r > 0 replaces each prompt's first id: no round finds the one before it in a prefix cache,
while what prompts of one round share stays shared. W2's time to first token is a run with
max_tokens 1.
"""

import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Request = dict[str, Any]
FIRST_SALT = 1000  # token id; any that prompts rarely begin with
REFERENCE = Path(__file__).parents[1] / "tests" / "cases" / "reference_greedy.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """What a system gave back for one round of requests, and when."""

    wall_s: float
    token_ids: list[list[int]] | None  # None where a system tells text only
    num_tokens: list[int]
    texts: list[str]


System = Callable[[list[Request], int, float], Pieces]


@dataclass(slots=True, kw_only=True)
class Measured:
    """One system on one workload."""

    num_prompt_tokens: int
    num_output_tokens: int
    walls_s: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    num_wrong_lengths: int = 0
    agreement: float | None = None
    peak_rss_mb: int = 0
    texts: list[str] = field(default_factory=list)  # of round 0

    @property
    def wall_s(self) -> float:
        return statistics.median(self.walls_s)

    @property
    def output_tps(self) -> float:
        return self.num_output_tokens / self.wall_s

    def as_peer(self) -> dict[str, Any]:
        """The figures in the form every measured engine prints."""
        result: dict[str, Any] = {
            "wall_s": round(self.wall_s, 3),
            "walls": [round(wall, 2) for wall in self.walls_s],
            "out_tps": round(self.output_tps, 1),
            "total_tps": round((self.num_prompt_tokens + self.num_output_tokens) / self.wall_s, 1),
            "peak_rss_mb": self.peak_rss_mb,
        }
        if self.num_wrong_lengths:
            result["wrong_lengths"] = self.num_wrong_lengths
        if self.agreement is not None:
            result["agreement"] = self.agreement
        if self.first_token_s:
            ttft_s = statistics.median(self.first_token_s)
            result["ttft_ms"] = round(ttft_s * 1e3, 1)
            decode_s = max(self.wall_s - ttft_s, 1e-9)
            result["decode_tps"] = round((self.num_output_tokens - 1) / decode_s, 1)
        return result


def salted(requests: list[Request], round_no: int) -> list[Request]:
    """The requests of a round, whose prompts no other round has."""
    if round_no == 0:
        return requests
    return [{**r, "prompt": [FIRST_SALT + round_no, *r["prompt"][1:]]} for r in requests]


def measure(
    name: str,
    workload: dict[str, Any],
    systems: dict[str, System],
    processes: Callable[[str], list[int]],
    repeat: int,
) -> dict[str, Measured]:
    """Run the workload `repeat` times on each system in turn, so that slow minutes hit all alike.

    `processes(system)` are the ids of the processes whose memory is the system's.
    """
    requests: list[Request] = workload["requests"]
    n, temperature = workload.get("n", 1), workload.get("temperature", 0.0)
    wanted = [r["max_tokens"] for r in requests for _ in range(n)]
    measured = {
        system: Measured(
            num_prompt_tokens=sum(len(r["prompt"]) for r in requests),
            num_output_tokens=sum(wanted),
        )
        for system in systems
    }
    for system in systems:
        for process in processes(system):
            reset_peak_rss(process)
    for round_no in range(repeat):
        for system, run in systems.items():
            result = measured[system]
            pieces = run(salted(requests, round_no), n, temperature)
            result.walls_s.append(pieces.wall_s)
            result.num_wrong_lengths += sum(
                a != b for a, b in zip(pieces.num_tokens, wanted, strict=True)
            )
            if round_no == 0:
                result.texts = pieces.texts
                if name == "W1" and pieces.token_ids is not None:
                    result.agreement = agreement(requests, pieces.token_ids)
            if name == "W2":
                first = salted([{**requests[0], "max_tokens": 1}], 50 + round_no)
                result.first_token_s.append(run(first, 1, 0.0).wall_s)
    for system, result in measured.items():
        result.peak_rss_mb = sum(map(peak_rss_mb, processes(system)))
    return measured


def agreement(requests: list[Request], outputs: list[list[int]]) -> float | None:
    """Share of the reference's greedy ids that match before each output's first difference.

    None when the workload's prompts are not the reference's.
    """
    reference = json.loads(REFERENCE.read_text("utf-8"))
    prompts = reference["prompts"]
    if [r["prompt"] for r in requests[: len(prompts)]] != prompts:
        return None
    same = total = 0
    for got, known in zip(outputs, reference["outputs"], strict=False):
        want = known[: len(got)]
        pairs = enumerate(zip(got, want, strict=False))
        same += next((i for i, (a, b) in pairs if a != b), len(want))
        total += len(want)
    return round(same / total, 3)


def peak_rss_mb(process: int) -> int:
    """Peak resident MB of a process since `reset_peak_rss`; 0 when it is gone. Linux."""
    try:
        status = Path(f"/proc/{process}/status").read_text("utf-8")
    except OSError:
        return 0
    return round(int(status.split("VmHWM:")[1].split()[0]) / 1024)


def reset_peak_rss(process: int) -> None:
    Path(f"/proc/{process}/clear_refs").write_text("5", "utf-8")


def descendants(process: int) -> Iterator[int]:
    """A process, its children, theirs, and so on. Linux."""
    yield process
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        for child in task.read_text("utf-8").split():
            yield from descendants(int(child))
