"""The soak sees what grows, and is content with what breathes."""

import math
import os
import types

from tests.chaos import soak
from tests.chaos.soak import Meter, Series


def series(value) -> Series:
    found = Series()
    for second in range(0, 1800, 5):
        found.add(float(second), value(second))
    return found


def test_a_slope_is_found_under_what_breathes():
    leak = series(lambda t: 100 + t / 36 + 5 * math.sin(t))  # 100 an hour
    assert abs(leak.slope_per_hour() - 100) < 5
    assert abs(series(lambda t: 100 + 5 * math.sin(t)).slope_per_hour()) < 2


def test_a_warm_up_is_no_slope():
    assert abs(series(lambda t: min(t, 300.0)).slope_per_hour()) < 1


def test_growth_is_named_and_a_flat_run_is_not():
    meter = Meter(types.SimpleNamespace())
    meter.series = {"api MB": series(lambda t: 50 + t / 36), "api threads": series(lambda t: 9)}
    assert meter.growing() == ["api MB grows by 100.0 an hour"]
    assert len(meter.lines()) == 2


def test_a_sample_looks_at_every_process():
    child = types.SimpleNamespace(name="worker-0", pid=os.getpid())
    record = types.SimpleNamespace(pid=1, stats={"num_blocks": 10, "num_free_blocks": 9})
    cluster = types.SimpleNamespace(
        children={"worker-0": child},
        workers=[child],
        engine_pid=lambda worker: os.getpid(),
        running=dict,
        live_workers=lambda: [record],
    )
    meter = Meter(cluster)
    meter.sample()
    assert set(meter.series) == {
        f"{name} {what}"
        for name in ("worker-0", "worker-0's engine")
        for what in ("MB", "descriptors", "threads")
    } | {"worker 1 blocks at rest"}
    assert meter.series["worker 1 blocks at rest"].values == [1]
    assert soak.MOST_FDS_H > 0
