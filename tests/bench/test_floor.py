"""The operations and bytes of a workload's floor, by hand and by the peers' own count."""

import json

import pytest

from bench.floor import REPOSITORY, Shape, floor_seconds, work_of

TINY = Shape(layers=1, hidden=2, heads=2, kv_heads=1, head_dim=1, intermediate=3, vocab=5)


def test_two_requests_with_a_common_prefix():
    requests = [
        {"prompt": [1, 2, 3], "max_tokens": 2},
        {"prompt": [1, 2, 4, 5], "max_tokens": 3},
    ]
    work = work_of({"requests": requests}, TINY)
    weights = 2 * 2 * 3 * 1 + 3 * 2 * 3
    assert TINY.weights_a_token == weights == 30
    prefill = 2 * (30 * 3 + 10) + 2 * (30 * 2 + 10)
    assert work.operations == prefill + 2 * (30 + 10) * (1 + 2)
    # keys seen: 1, 2, 3 and then 4; 3, 4 and then 5, 6
    assert work.attention == 4 * 2 * ((1 + 2 + 3 + 4) + (3 + 4 + 5 + 6))
    assert work.steps == 3
    assert work.kv_tokens == 2 * 3 + 2 + (3 + 4)  # the prefix each step, the rest each decode


def test_samples_share_their_prompt():
    work = work_of({"n": 3, "requests": [{"prompt": [1, 2], "max_tokens": 3}]}, TINY)
    assert work.operations == 2 * (30 * 2 + 10) + 3 * 2 * (30 + 10) * 2
    assert work.kv_tokens == 2 * 2 + 3 * (1 + 2)


@pytest.mark.parametrize(("name", "products", "attention"), [("W1", 3549, 142), ("W5", 380, 47)])
def test_the_benchmark_s_workloads(name, products, attention):
    workloads = json.loads((REPOSITORY / "bench" / "workload.json").read_text("utf-8"))
    work = work_of(workloads[name], Shape())
    assert round(work.operations / 1e9) == products
    assert round(work.attention / 1e9) == attention


def test_a_floor_adds_arithmetic_and_reading():
    work = work_of({"requests": [{"prompt": [1], "max_tokens": 2}]}, TINY)
    limits = {
        "product_gflops": 1e-9, "kernel_gflops": 2e-9, "kernel_int8_gops": 4e-9,
        "read_gb_per_s": 1e-9,
    }  # fmt: skip
    operations, attention = 80 + 80, 4 * 2 * (1 + 2)
    assert floor_seconds(work, TINY, "float16", limits) == pytest.approx(
        ((operations + attention) / 2, 2 * 40 * 2 + 2 * 2 * 2)
    )
    assert floor_seconds(work, TINY, "int8+float16", limits) == pytest.approx(
        (operations / 4 + attention / 2, 2 * 40 * 34 / 32 + 2 * 2 * 2)
    )
