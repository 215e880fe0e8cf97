"""bench/gpu.py from end to end on a CPU: nothing of it is run for the first time on a GPU."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench.gpu import ENGINE_S, PLAN, engine_s
from bench.gpu_kernels import DRY, proofs
from bench.gpu_report import CUT_OFF, Report
from engine.kernels.registry import REFERENCE

# not there on a machine that has a GPU and nothing of the service
ABSENT = ("celery", "kombu", "redis", "sqlalchemy", "starlette", "pydantic", "llguidance", "numba")
START = (
    "import sys\n"
    f"for name in {ABSENT!r}: sys.modules[name] = None\n"
    "from bench.gpu import main\n"
    "main()\n"
)


def dry_run(tmp_path, *arguments):
    return subprocess.run(
        [sys.executable, "-c", START, "--dry", "--out", str(tmp_path), *arguments],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )


def found_in(tmp_path):
    [file] = tmp_path.iterdir()
    assert file.name.endswith("-gpu-dry.json")
    return json.loads(file.read_text("utf-8"))


def test_a_dry_run_proves_measures_and_keeps_what_it_found(tmp_path):
    done = dry_run(tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = found_in(tmp_path)
    assert list(found) == [
        "machine", "limits", "proofs", "aimed at", "same texts", "Llama-3.1-8B bf16",
        "generate_batch", "kernels", "aims", "seconds",
    ]  # fmt: skip
    assert found["generate_batch"]["tokens_s"] > 0
    assert not any(word in json.dumps(found) for word in ("failed", "left_out", "cut_off")), found
    proven = " ".join(proof["kernel"] for proof in found["proofs"])
    for kernel in (
        "paged_attention", "rotary_store_kv", "add_rms_norm", "silu_mul", "gelu_mul", "moe",
        "moe of 4 bits", "moe of fp8", "packed_linear 8", "packed_linear 4", "fp8_linear", "draw",
        "int8", "float8_e4m3fn",
    ):  # fmt: skip
        assert kernel in proven
    assert all(proof["ok"] for proof in found["proofs"])
    assert all(row["ok"] for row in found["same texts"])
    assert found["same texts"][1]["confirmed"] > 0
    rows = found["Llama-3.1-8B bf16"]
    assert {row["measured"] for row in rows} == {"steady decode", "offline", "under load"}
    assert all(row["tokens_s"] > 0 for row in rows if row["measured"] == "offline")
    for part in ("schedule_ms", "launch_ms", "wait_ms", "update_ms"):
        assert rows[0][part] > 0
    assert len(found["aims"]) == 5
    measured = [aim["aim"] for aim in found["aims"] if aim["found"] != "unmeasured"]
    assert len(measured) == 4, "all but what needs a GPU's clock and a batch of 256"
    assert "decode attention" in done.stdout


def test_a_kernel_that_cannot_run_is_told_of_beside_the_others():
    def broken(gate_up):
        raise RuntimeError("no such unit")

    with torch.inference_mode():
        rows = list(proofs(replace(REFERENCE, silu_mul=broken), torch.device("cpu"), DRY))
    assert [row["failed"] for row in rows if not row["ok"]] == ["RuntimeError: no such unit"]
    assert {"draw", "moe", "fp8_linear"} <= {row["kernel"] for row in rows}


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(time=0.0)
    monkeypatch.setattr("time.perf_counter", lambda: now.time)
    return now


def test_what_there_is_no_time_for_is_left_out_by_name_and_each_row_is_kept(tmp_path, clock):
    report = Report(100.0, tmp_path / "found.json")

    def kept():
        return json.loads(report.path.read_text())

    def rows():
        for i in range(9):
            clock.time += 30.0
            yield {"row": i}
            assert kept()["slow"][-1] == {"row": i}

    report.section("quick", lambda: {"it": 1}, needs_s=99.0)
    report.section("slow", rows, needs_s=50.0)
    report.section("next", lambda: 1 / 0, needs_s=1.0)
    found = kept()
    assert found["quick"] == {"it": 1}
    assert found["slow"][:4] == [{"row": i} for i in range(4)]
    assert found["slow"][4:] == [{"left_out": "the rest: no time is left"}]
    assert found["next"] == {"left_out": "-20 s left, 1 needed"}
    assert found["seconds"] == {"quick": 0.0, "slow": 120.0}
    assert "## next" in report.table()


def test_a_section_that_fails_says_so_and_keeps_the_rows_before(tmp_path):
    report = Report(100.0, tmp_path / "found.json")

    def rows():
        yield {"row": 1}
        raise ValueError("no such kernel")

    report.section("broken", rows, needs_s=0.0)
    report.section("whole", lambda: {"it": 1}, needs_s=0.0)
    found = json.loads(report.path.read_text())
    assert found["broken"] == [{"row": 1}, {"failed": "ValueError: no such kernel"}]
    assert found["whole"] == {"it": 1}


def test_a_section_that_never_comes_back_is_cut_off_and_the_rest_is_kept(tmp_path):
    path = tmp_path / "found.json"
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, time; from pathlib import Path; from bench import gpu_report\n"
            "gpu_report.LATE_S = 0.2\n"
            "report = gpu_report.Report(0.5, Path(sys.argv[1]))\n"
            "report.keep_time()\n"
            "report.section('quick', lambda: {'it': 1}, needs_s=0)\n"
            "report.section('stuck', lambda: time.sleep(60), needs_s=0)\n",
            str(path),
        ],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == CUT_OFF, done.stderr
    found = json.loads(path.read_text())
    assert found["quick"] == {"it": 1}
    assert found["stuck"]["cut_off"].startswith("it had not come back")
    assert "## stuck" in done.stdout


def test_an_engine_is_expected_to_take_what_the_first_one_took(tmp_path):
    report = Report(100.0, tmp_path / "found.json")
    assert engine_s(report, "Llama-3.1-8B", "none") == ENGINE_S
    report.seconds["Llama-3.1-8B bf16"] = 40.0
    assert engine_s(report, "Qwen3-8B", "int4") == 40.0 * 1.1 * 1.3
    assert sum(engine_s(report, *each) for each in PLAN[:4]) < 450 - 160


def test_the_budget_is_bounded(tmp_path):
    for budget in ("0", "461"):
        done = dry_run(tmp_path, "--budget", budget)
        assert f"--budget must be in (0, 460], got {budget}" in done.stderr
