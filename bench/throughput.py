"""Tokens per second on a workload, through the engine alone or through the whole service.

    python bench/throughput.py --workload bench/workload.json --only W1,W2 --repeat 3
    python bench/throughput.py --only W1 --through service

With `--json` one JSON object goes to standard output; what a person reads goes to standard error.
Through the service, engine and service take turns, round by round, and the service's cost is what
it takes of the engine's output tokens per second. From one round, or where the rounds of both lie
among each other, the difference is the machine's.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))  # run as a script, from a checkout that need not be installed
# as a worker starts its engine, and before torch is loaded: both are to be measured alike
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from bench.kept import kept_as  # noqa: E402
from bench.measure import (  # noqa: E402
    Measured,
    Pieces,
    Request,
    System,
    descendants,
    measure,
    salted,
)
from bench.service import running_service  # noqa: E402
from engine import EngineConfig, LLMEngine, SamplingParams  # noqa: E402
from engine.outputs import EngineStats  # noqa: E402

DEFAULT_MODEL = REPOSITORY / ".tokenmill" / "models" / "smollm2-135m-instruct"


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    workloads = json.loads(options.workload.read_text("utf-8"))
    names = options.only.split(",") if options.only else list(workloads)
    unknown = [name for name in names if name not in workloads]
    if unknown:
        known = ", ".join(workloads)
        sys.exit(f"{options.workload} has no workload {unknown[0]!r}; it has {known}")
    if not options.model.is_dir():
        sys.exit(f"no model in {options.model}: tokenmill models fetch {options.model.name}")
    kept = kept_as(options.dtype)
    engine = LLMEngine(EngineConfig(model=str(options.model), num_threads=options.threads, **kept))
    result: dict[str, Any] = {
        "peer": "tokenmill",
        "version": _version(),
        "precision": options.dtype,
        "label": options.label,
        "threads": options.threads,
        "through": options.through,
    }
    with ExitStack() as stack:
        systems: dict[str, System] = {"engine": _system(engine)}
        processes: dict[str, Callable[[], list[int]]] = {"engine": lambda: [os.getpid()]}
        if options.through == "service":
            settings = {f"TOKENMILL_{name.upper()}": value for name, value in kept.items()}
            settings["TOKENMILL_THREADS"] = str(options.threads)
            service, process = stack.enter_context(running_service(options.model, settings))
            systems["service"] = service
            processes["service"] = lambda: list(descendants(process))
        warm_up = salted(workloads[names[0]]["requests"][:1], 90)
        for system in systems.values():
            system([{**warm_up[0], "max_tokens": 8}], 1, 0.0)
        for name in names:
            _measure(name, workloads[name], options.repeat, engine, systems, processes, result)
    if options.json:
        print(json.dumps(result))


def _measure(
    name: str,
    workload: dict[str, Any],
    repeat: int,
    engine: LLMEngine,
    systems: dict[str, System],
    processes: dict[str, Callable[[], list[int]]],
    result: dict[str, Any],
) -> None:
    """Measure one workload, say so, and put its figures into `result`."""
    before = engine.stats()
    measured = measure(name, workload, systems, lambda system: processes[system](), repeat)
    _say_engine(name, measured["engine"], before, engine.stats(), engine.config.block_size)
    result[name] = measured[result["through"]].as_peer()
    if "service" in measured:
        _say_service(name, measured)
        result.setdefault("engine", {})[name] = measured["engine"].as_peer()
        result.setdefault("service_cost", {})[name] = _cost(measured)


def _system(engine: LLMEngine) -> System:
    def run(requests: list[Request], n: int, temperature: float) -> Pieces:
        params = [
            SamplingParams(
                max_tokens=request["max_tokens"], n=n, temperature=temperature, ignore_eos=True
            )
            for request in requests
        ]
        started = time.perf_counter()
        outputs = engine.generate([request["prompt"] for request in requests], params)
        wall_s = time.perf_counter() - started
        pieces = [completion for output in outputs for completion in output.completions]
        return Pieces(
            wall_s=wall_s,
            token_ids=[list(piece.token_ids) for piece in pieces],
            num_tokens=[len(piece.token_ids) for piece in pieces],
            texts=[piece.text for piece in pieces],
        )

    return run


def _cost(measured: dict[str, Measured]) -> float:
    """The share of the engine's throughput that is lost on the way through the service."""
    return round(1 - measured["service"].output_tps / measured["engine"].output_tps, 4)


def _say_engine(
    name: str, measured: Measured, before: EngineStats, after: EngineStats, block_size: int
) -> None:
    steps = after.num_steps - before.num_steps
    seqs, tokens = (
        (getattr(after, total) - getattr(before, total)) / steps
        for total in ("scheduled_seqs", "scheduled_tokens")
    )
    run_s, step_s = after.run_s - before.run_s, after.step_s - before.step_s
    _say(
        f"{name} engine: {measured.output_tps:.1f} output tokens/s, "
        f"wall {measured.wall_s:.2f} s (median of {len(measured.walls_s)})\n"
        f"    steps {steps}, mean batch {seqs:.1f} sequences and {tokens:.1f} tokens, "
        f"largest {after.peak_step_seqs} sequences\n"
        f"    KV use: at most {after.peak_used_blocks} of {after.num_blocks} blocks "
        f"({after.peak_used_blocks * block_size} tokens, "
        f"{after.peak_used_blocks / after.num_blocks:.0%}), "
        f"{after.cached_tokens - before.cached_tokens} prompt tokens found in the prefix cache, "
        f"{after.num_preemptions - before.num_preemptions} preemptions\n"
        f"    {1 - run_s / step_s:.1%} of a step outside the model"
    )
    if measured.num_wrong_lengths:
        _say(f"    {measured.num_wrong_lengths} outputs of a wrong length")
    if measured.agreement is not None:
        _say(f"    agreement with the reference's greedy ids: {measured.agreement:.3f}")


def _say_service(name: str, measured: dict[str, Measured]) -> None:
    engine, service = measured["engine"], measured["service"]
    pairs = zip(engine.texts, service.texts, strict=True)
    same = sum(a == b for a, b in pairs)
    _say(
        f"{name} service: {service.output_tps:.1f} output tokens/s, wall {service.wall_s:.2f} s; "
        f"{_compared(measured)}\n"
        f"    {same} of {len(service.texts)} texts equal the engine's"
    )


def _compared(measured: dict[str, Measured]) -> str:
    """What the service's throughput is to the engine's. A cost only where the rounds are clear."""
    cost, engine_s, service_s = (
        _cost(measured), measured["engine"].walls_s, measured["service"].walls_s
    )  # fmt: skip
    share = f"{abs(cost):.1%} {'below' if cost > 0 else 'above'} the engine's"
    if len(engine_s) == 1:
        return f"{share}; one round each does not tell what it costs (see --repeat)"
    if max(engine_s) >= min(service_s) and max(service_s) >= min(engine_s):
        return f"{share}, within the spread of {len(engine_s)} rounds"
    if cost < 0:
        return f"{share}, as it cannot be: the machine's speed has changed"
    return f"it costs {cost:.1%} of the engine's throughput"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--workload", type=Path, default=REPOSITORY / "bench" / "workload.json")
    parser.add_argument("--only", help="workloads by name, separated by commas; all by default")
    parser.add_argument("--repeat", type=int, default=3, help="rounds; the median counts")
    parser.add_argument("--through", choices=("engine", "service"), default="engine")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL, help="checkpoint folder")
    parser.add_argument(
        "--dtype",
        default="float32",
        help="of weights and KV cache, int8 of weights alone; int8+int8, float32+int8, …: of each",
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--label", default="", help="free text copied to the result")
    options = parser.parse_args(arguments)
    if options.repeat < 1:
        parser.error(f"--repeat must be at least 1, got {options.repeat}")
    return options


def _version() -> str:
    try:
        return version("tokenmill")
    except PackageNotFoundError:
        return "unknown"


if __name__ == "__main__":
    main()
