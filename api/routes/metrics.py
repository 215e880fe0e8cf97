"""GET /metrics: the deployment's counts in Prometheus' text form.

Jobs are counted in SQL; what the engines do is what each live worker said at its last beat, so its
values are up to one beat old, and end with the worker.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry
from sqlalchemy import Connection
from starlette.responses import Response

from api.routing import Router
from api.services import Services
from jobs import attempts, batches, store
from jobs.attempts import Count, Outcome
from jobs.batch_record import BatchState
from jobs.forecast import Backlog, backlogs
from jobs.lately import WINDOW_S, Lately, lately
from jobs.lifecycle import JobState
from jobs.records import WorkerRecord

OTHER = "other"  # the label of every model that is not served here
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# what a worker says : our name without the prefix, and what it means
GAUGES = {
    "num_running": ("engine_running_sequences", "Sequences that hold KV blocks."),
    "num_waiting": ("engine_waiting_sequences", "Sequences in the engine without KV blocks."),
    "last_step_seqs": ("engine_batch_sequences", "Sequences in the last step."),
    "last_step_tokens": ("engine_batch_tokens", "Tokens computed in the last step."),
    "max_num_batched_tokens": ("engine_batch_tokens_limit", "Most tokens computed in one step."),
    "peak_step_seqs": ("engine_batch_sequences_peak", "Most sequences in one step."),
    "num_blocks": ("engine_kv_blocks", "Blocks of the KV cache."),
    "num_free_blocks": ("engine_kv_blocks_free", "Blocks of the KV cache in no sequence's hold."),
}
COUNTERS = {
    "num_steps": ("engine_steps", "Steps of the engine."),
    "scheduled_seqs": ("engine_scheduled_sequences", "Sequences, counted in every step."),
    "scheduled_tokens": ("engine_scheduled_tokens", "Tokens computed, some of them again."),
    "drawing_seqs": ("engine_drawing_sequences", "Sequences that drew tokens, in every step."),
    "draft_tokens": ("engine_draft_tokens", "Tokens guessed beforehand, to be confirmed."),
    "confirmed_tokens": ("engine_confirmed_tokens", "Guessed tokens that the model drew, too."),
    "engine_restarts": ("engine_restarts", "Engine processes that had to be replaced."),
    "num_preemptions": ("engine_preemptions", "Sequences that lost their blocks to another."),
    "prompt_tokens": ("prompt_tokens", "Prompt tokens of admitted sequences."),
    "cached_tokens": ("prefix_hit_tokens", "Prompt tokens found in the prefix cache."),
    "generated_tokens": ("generated_tokens", "Tokens generated."),
}
# what is counted in SQL: name, label, what always stands there, and what it means
COUNTED = {
    Count.ATTEMPTS: ("attempts", "outcome", tuple(Outcome), "Attempts that have ended."),
    Count.WASTED_TOKENS: ("wasted_tokens", None, ("",), "Tokens generated, and in no output."),
    Count.STALE_WRITES: (
        "stale_writes_refused", "write", ("result", "hand_back"),
        "Writes of workers whose fence was not the job's any more.",
    ),
    Count.ENGINE_DEATHS: (
        "engine_deaths", "ending", (), "Engine processes that ended while their worker went on."
    ),
}  # fmt: skip

router = Router()


@router.get("/metrics")
async def metrics(services: Services) -> Response:
    served = frozenset(services.door.models)
    snapshot = await services.sql.read(partial(Snapshot, served))
    registry = CollectorRegistry(auto_describe=False)
    registry.register(snapshot)
    return Response(generate_latest(registry), media_type=CONTENT_TYPE)


class Snapshot(Collector):
    """What one scrape shows. Jobs of models not `served` are counted together, as OTHER: a job
    that came as a Celery message may name any model, and a series is for ever."""

    def __init__(self, served: frozenset[str], connection: Connection, now: float) -> None:
        self.now = now
        self.models = sorted(served | {OTHER})
        self.counts: Counter[tuple[str, JobState]] = Counter()
        for (model, state), number in store.counts(connection).items():
            self.counts[model if model in served else OTHER, state] += number
        self.backlogs: dict[tuple[str, int], Backlog] = {}
        for (model, priority), backlog in backlogs(connection).items():
            key = (model if model in served else OTHER, priority)
            self.backlogs[key] = self.backlogs.get(key, Backlog(now, 0, 0)) + backlog
        self.lately = {model: lately(connection, model, now) for model in sorted(served)}
        self.batches = batches.num_by_state(connection)
        self.workers = store.live_workers(connection, now)
        self.totals = attempts.totals(connection)

    def collect(self) -> Iterator[Metric]:
        yield from _jobs(self.models, self.counts)
        yield _batches(self.batches)
        yield from _queue(self.models, self.backlogs, self.now)
        yield from _lately(self.lately)
        yield from _engines(self.workers)
        yield from _counted(self.totals)


def _jobs(models: Sequence[str], counts: Counter[tuple[str, JobState]]) -> Iterator[Metric]:
    jobs = GaugeMetricFamily("tokenmill_jobs", "Jobs by state.", labels=["model", "state"])
    for model in models:
        for state in JobState:  # a state that nobody is in is 0, not a gap in the graph
            jobs.add_metric([model, state], counts[model, state])
    yield jobs


def _batches(counts: dict[BatchState, int]) -> Metric:
    family = GaugeMetricFamily("tokenmill_batches", "Batches by state.", labels=["state"])
    for state in BatchState:
        family.add_metric([state], counts.get(state, 0))
    return family


def _queue(
    models: Sequence[str], backlogs: dict[tuple[str, int], Backlog], now: float
) -> Iterator[Metric]:
    labels = ["model", "priority"]
    age = GaugeMetricFamily(
        "tokenmill_queue_age_seconds", "Age of the oldest queued job.", labels=["model"]
    )
    prompt = GaugeMetricFamily(
        "tokenmill_waiting_prompt_tokens", "Prompt tokens of queued jobs.", labels=labels
    )
    output = GaugeMetricFamily(
        "tokenmill_waiting_max_tokens", "Most tokens queued jobs may generate.", labels=labels
    )
    for model in models:
        waiting = {key[1]: backlog for key, backlog in backlogs.items() if key[0] == model}
        oldest = min((each.oldest_created_at for each in waiting.values()), default=now)
        age.add_metric([model], max(0.0, now - oldest))
        for priority, backlog in sorted((waiting or {0: Backlog(now, 0, 0)}).items()):
            prompt.add_metric([model, str(priority)], backlog.prompt_tokens)
            output.add_metric([model, str(priority)], backlog.max_tokens)
    yield from (age, prompt, output)


def _lately(models: dict[str, Lately]) -> Iterator[Metric]:
    """Of jobs that ended in the last minutes: gauges, for SQL may be emptied of its jobs."""
    ago = f"jobs that ended in the last {WINDOW_S:g} s"
    for name, meaning in (
        ("num_jobs", f"Number of {ago}, at most 500 of each state."),
        ("num_attempts", f"Attempts of {ago}."),
        ("wasted_tokens", f"Tokens generated for {ago}, and in no output."),
    ):
        short = name.removeprefix("num_")
        gauge = GaugeMetricFamily(f"tokenmill_recent_{short}", meaning, labels=["model"])
        for model, seen in models.items():
            gauge.add_metric([model], getattr(seen, name))
        yield gauge
    for name, short, meaning in (
        ("queue_s", "queue", f"Seconds from acceptance to the start, of {ago}."),
        ("ttft_s", "ttft", f"Seconds from acceptance to the first token, of {ago}."),
        ("tpot_s", "tpot", f"Seconds for each token after the first, of {ago}."),
    ):
        gauge = GaugeMetricFamily(
            f"tokenmill_recent_{short}_seconds", meaning, labels=["model", "quantile"]
        )
        for model, seen in models.items():
            for quantile, value in getattr(seen, name).items():
                gauge.add_metric([model, f"{quantile:g}"], value)
        yield gauge


def _counted(totals: Mapping[tuple[str, str], int]) -> Iterator[Metric]:
    """Since the first job: these outlive jobs and workers, and never go down."""
    for count, (name, label, always, meaning) in COUNTED.items():
        labels = [] if label is None else [label]
        family = CounterMetricFamily(f"tokenmill_{name}", meaning, labels=labels)
        seen = {value: amount for (counted, value), amount in totals.items() if counted == count}
        for value in sorted({*always, *seen}):
            family.add_metric([value] if labels else [], seen.get(value, 0))
        yield family


def _engines(workers: Sequence[WorkerRecord]) -> Iterator[Metric]:
    labels = ["model", "worker"]
    live = GaugeMetricFamily("tokenmill_workers", "Workers whose lease stands.", labels=["model"])
    for model in sorted({worker.model for worker in workers}):
        live.add_metric([model], sum(worker.model == model for worker in workers))
    yield live
    for families, kind in ((GAUGES, GaugeMetricFamily), (COUNTERS, CounterMetricFamily)):
        for stat, (name, meaning) in families.items():
            family = kind(f"tokenmill_{name}", meaning, labels=labels)
            for worker in workers:
                if stat in worker.stats:
                    family.add_metric([worker.model, worker.id], worker.stats[stat])
            yield family
    yield _step_times(workers, labels)


def _step_times(workers: Sequence[WorkerRecord], labels: Sequence[str]) -> Metric:
    family = HistogramMetricFamily(
        "tokenmill_engine_step_seconds", "How long steps took.", labels=labels
    )
    for worker in workers:
        if "steps_by_time" in worker.stats:
            bounds = [*map(str, worker.stats["step_bounds_s"]), "+Inf"]
            up_to = accumulate(worker.stats["steps_by_time"])
            buckets = list(zip(bounds, up_to, strict=True))
            family.add_metric([worker.model, worker.id], buckets, worker.stats["step_s"])
    return family
