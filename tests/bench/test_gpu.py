"""bench/gpu.py from end to end on a CPU: nothing of it is run for the first time on a GPU."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench.gpu import ENGINE_S, PLAN, aims, elsewhere, engine_s, proofs_elsewhere
from bench.gpu_engine import RandomCheckpoint
from bench.gpu_kernels import DRY
from bench.gpu_proofs import proofs
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
        "machine", "limits", "proofs", "same texts", "Llama-3.1-8B bf16",
        "generate_batch", "kernels", "aims", "seconds",
    ]  # fmt: skip
    assert found["generate_batch"][0]["tokens_s"] > 0
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
    on_device = [rows[0][part] for part in ("gpu_model_ms", "gpu_sample_ms", "gpu_copy_ms")]
    assert all(on_device)
    assert rows[0]["gpu_ms"] == pytest.approx(sum(on_device))
    assert rows[0]["gpu_ms"] < rows[0]["step_ms"]
    assert len(found["aims"]) == 5
    measured = [aim["aim"] for aim in found["aims"] if aim["found"] != "unmeasured"]
    assert len(measured) == 4, "all but what needs a GPU's clock and a batch of 256"
    assert "decode attention" in done.stdout


def test_a_kernel_that_cannot_run_is_told_of_beside_the_others():
    def broken(gate_up):
        raise RuntimeError("no such unit")

    cpu, kernels = torch.device("cpu"), replace(REFERENCE, silu_mul=broken)
    with torch.inference_mode():
        rows = list(proofs(kernels, cpu, DRY, ["copies", "sums", "draws"]))
    assert [row["begins"] for row in rows if "begins" in row] == ["copies", "sums", "draws"]
    failed = [row for row in rows if not row.get("ok", True)]
    assert [row["failed"] for row in failed] == ["RuntimeError: no such unit"]
    assert {"copy_blocks torch.int8", "rms_norm float32", "draw"} <= {
        row.get("kernel") for row in rows
    }


@pytest.mark.parametrize(
    ("kernel", "wrong"),
    [
        ("rms_norm", lambda x, weight, eps: REFERENCE.rms_norm(x, weight, eps) * 1.001),
        ("silu_mul", lambda x: REFERENCE.silu_mul(x) + 0.001),
        ("penalize", lambda logits, at, terms: REFERENCE.penalize(logits, at, terms * 1.001)),
    ],
)
def test_a_kernel_that_is_a_little_wrong_proves_so(kernel, wrong):
    kernels = replace(REFERENCE, **{kernel: wrong})
    with torch.inference_mode():
        rows = list(proofs(kernels, torch.device("cpu"), DRY, ["sums", "draws"]))
    bad = {row["kernel"].split()[0] for row in rows if not row.get("ok", True)}
    assert bad == {kernel}


BROKEN = "tests.bench.breaking_section"


def test_a_group_that_ends_its_process_leaves_the_others_their_proofs(tmp_path, monkeypatch):
    groups = dict.fromkeys(("sums", "copies", "draws"))  # the second one's kernels break there
    monkeypatch.setattr("bench.gpu.GROUPS", groups)
    rows = list(proofs_elsewhere("cpu", Report(100.0, tmp_path / "found.json"), program=BROKEN))
    assert [row for row in rows if not row["ok"]] == [
        {"kernel": "copies", "ok": False, "failed": "its process ended with status -9"}
    ]
    assert {"rms_norm float32", "draw"} <= {row["kernel"] for row in rows}


@pytest.mark.parametrize(
    ("section", "most_s", "told"),
    [
        ("stuck", 3.0, {"cut_off": "it had not come back in 3 s"}),
        ("no such section", 60.0, {"failed": "AssertionError: no such section"}),
    ],
)
def test_what_becomes_of_a_section_elsewhere_is_told(section, most_s, told):
    assert list(elsewhere(section, "cpu", {}, most_s, BROKEN)) == [told]


def test_an_aim_without_a_figure_says_why():
    assert {row["why"] for row in aims({})} == {
        "limits: not begun", "Llama-3.1-8B bf16: not begun",
    }  # fmt: skip
    found = {
        "limits": [{"copy_gb_s": 4000.0, "bf16_tflop_s": 700.0}, {"cut_off": "after 9 s"}],
        "Llama-3.1-8B bf16": [
            {"batch": 1, "weights_at_copy_rate_ms": 3.75, "step_ms": 5.0, "gpu_ms": 4.9},
            {"measured": "offline", "tokens_s": 9000.0},
        ],
        "generate_batch": {"left_out": "9 s left, 65 needed"},
    }
    decode, prefill, step, ratio, busy = aims(found)
    assert decode["why"] == prefill["why"] == "limits: cut off: after 9 s"
    assert (step["found"], step["met"]) == (0.75, True)
    assert ratio["why"] == "generate_batch: left out: 9 s left, 65 needed"
    assert busy["why"] == "Llama-3.1-8B bf16: not measured on this machine"


def test_the_floor_of_a_step_has_no_embedding_but_one_that_is_the_head():
    def taken(tied):
        checkpoint = RandomCheckpoint(
            {"tie_word_embeddings": tied}, torch.device("cpu"), torch.bfloat16
        )
        for name in ("embed_tokens", "q_proj", "lm_head")[: 2 if tied else 3]:
            checkpoint.take(f"model.{name}.weight", (100, 10))
        return checkpoint

    for tied in (False, True):
        assert taken(tied).bytes_read("none") == 4000
        assert taken(tied).bytes_read("fp8") == 3000, "heads stay whole"


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
