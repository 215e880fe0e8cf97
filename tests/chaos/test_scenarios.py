"""Short forms of the chaos scenarios: what must hold on every commit.

Real processes and servers, one cluster on PostgreSQL and one on SQLite for all of them. Those that
take minutes together run with `pytest -m "long or not long" tests/chaos`. The long forms, with
their figures, are `make chaos` and `make chaos-report`.
"""

from collections.abc import Iterator

import pytest

from tests.chaos import more_scenarios as more
from tests.chaos import scenarios
from tests.chaos.cluster import Cluster
from tests.chaos.long import small_disk
from tests.chaos.oracle import Oracle
from tests.chaos.run import Size, run

BUSY_S = 60.0  # more than every bound of time: tests share their machine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def oracle(tiny_llama_dir) -> Oracle:
    return Oracle(tiny_llama_dir, most_tokens=60)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, tiny_llama_dir) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("chaos"), tiny_llama_dir) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def sqlite_cluster(tmp_path_factory, tiny_llama_dir) -> Iterator[Cluster]:
    """On a disk that can be filled, where one can be mounted."""
    folder = tmp_path_factory.mktemp("chaos")
    with (
        small_disk(folder / "disk") as disk,
        Cluster(folder / "c", tiny_llama_dir, postgres=False, database_folder=disk) as cluster,
    ):
        yield cluster


SHORT = [
    (scenarios.kill_workers, Size(num_jobs=120, num_faults=2)),
    (scenarios.kill_engines, Size(num_jobs=120, num_faults=3)),
    (scenarios.kill_api, Size(num_jobs=60, num_faults=3)),
    (scenarios.kill_redis, Size(num_jobs=120, num_faults=3)),
    (scenarios.redis_away, Size(num_jobs=120, num_faults=1, pause_s=10.0)),
    (scenarios.kill_postgres, Size(num_jobs=120, num_faults=3)),
    (scenarios.freeze_workers, Size(num_jobs=80, num_faults=1)),
    (scenarios.break_the_network, Size(num_jobs=120, num_faults=4)),
    (scenarios.wrong_clocks, Size(num_jobs=80, num_faults=1)),
    (more.starve_of_memory, Size(num_jobs=80, num_faults=1)),
    (more.drain, Size(num_jobs=80, num_faults=1)),
    (more.poison, Size(num_jobs=40, num_faults=1)),
    (more.odd_messages, Size(num_jobs=60, num_faults=1)),
    (scenarios.swizzle, Size(num_jobs=100, num_faults=1)),
]


ON_EVERY_COMMIT = (
    scenarios.kill_workers,
    scenarios.kill_engines,
    scenarios.kill_api,
    scenarios.kill_redis,
    scenarios.kill_postgres,
    scenarios.freeze_workers,
    more.drain,
    more.poison,
)


@pytest.mark.parametrize(
    ("faults", "size"),
    [
        pytest.param(
            faults,
            size,
            id=faults.__name__,
            marks=() if faults in ON_EVERY_COMMIT else pytest.mark.long,
        )
        for faults, size in SHORT
    ],
)
def test_no_promise_is_broken(cluster, oracle, faults, size):
    result, violations = run(cluster, oracle, faults, size, slack_s=BUSY_S)
    assert violations == [], result


@pytest.mark.parametrize(
    "faults", [scenarios.kill_workers, pytest.param(more.fill_the_disk, marks=pytest.mark.long)]
)
def test_no_promise_is_broken_on_sqlite(sqlite_cluster, oracle, faults):
    if faults is more.fill_the_disk and sqlite_cluster.database_folder == sqlite_cluster.folder:
        pytest.skip("no tmpfs can be mounted here: root alone may")
    size = Size(num_jobs=80, num_faults=1)
    result, violations = run(sqlite_cluster, oracle, faults, size, slack_s=BUSY_S)
    assert violations == [], result


def test_the_checker_is_not_content_with_a_run_without_a_fence(cluster, oracle):
    size = Size(num_jobs=160, num_faults=6, pause_s=0.4)
    result, violations = run(cluster, oracle, more.without_a_fence, size, slack_s=BUSY_S)
    assert result.stops >= 1
    assert "I2" in {violation.invariant for violation in violations}
