"""bench/gpu.py from end to end on a CPU: nothing of it is run for the first time on a GPU."""

import json
import subprocess
import sys
from pathlib import Path

# not there on a machine that has a GPU and nothing of the service
ABSENT = ("celery", "kombu", "redis", "sqlalchemy", "starlette", "pydantic", "llguidance", "numba")
START = (
    "import sys\n"
    f"for name in {ABSENT!r}: sys.modules[name] = None\n"
    "from bench.gpu import main\n"
    "main()\n"
)


def test_a_dry_run_proves_measures_and_keeps_what_it_found(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", START, "--dry", "--out", str(tmp_path)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    [file] = tmp_path.glob("*-gpu-dry.json")
    found = json.loads(file.read_text("utf-8"))
    assert found.keys() == {
        "machine", "proofs", "limits", "kernels", "same texts", "Llama-3.1-8B bf16",
        "generate_batch",
    }  # fmt: skip
    assert found["generate_batch"]["tokens_s"] > 0
    assert not any("failed" in str(section)[:20] for section in found.values()), found
    proven = " ".join(proof["kernel"] for proof in found["proofs"])
    for kernel in (
        "paged_attention", "rotary_store_kv", "add_rms_norm", "silu_mul", "gelu_mul", "moe",
        "moe of 4 bits", "packed_linear 8", "packed_linear 4", "fp8_linear", "draw",
        "int8", "float8_e4m3fn",
    ):  # fmt: skip
        assert kernel in proven
    assert all(proof["ok"] for proof in found["proofs"])
    assert found["same texts"]["ok"]
    rows = found["Llama-3.1-8B bf16"]
    assert {row["measured"] for row in rows} == {"steady decode", "offline", "under load"}
    assert all(row["tokens_s"] > 0 for row in rows if row["measured"] == "offline")
    for part in ("schedule_ms", "launch_ms", "wait_ms", "update_ms"):
        assert rows[0][part] > 0
    assert "decode attention" in done.stdout
