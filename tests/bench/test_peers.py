"""The runners of other engines ask for exact lengths, keep the order, and print the shared form."""

import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest

import bench.measure
from bench.measure import Pieces
from bench.peers import run_llamacpp, run_vllm
from bench.peers.rewrite_gguf import rewrite
from bench.peers.runner import parser, report

REQUESTS = [{"prompt": [3 + i, 10, 11], "max_tokens": 2 + i} for i in range(5)]
FIGURES = {"wall_s", "walls", "out_tps", "total_tps", "peak_rss_mb"}
STAND_IN = Path(__file__).with_name("stand_in_llama_server.py")


@pytest.fixture
def workload(tmp_path):
    file = tmp_path / "workload.json"
    works = {
        "W1": {"requests": REQUESTS},
        "W2": {"requests": REQUESTS[:1]},
        "W5": {"requests": REQUESTS[:1], "n": 3, "temperature": 1.0},
    }
    file.write_text(json.dumps(works))
    return file


def options_of(workload, *more):
    return parser("").parse_args(["--model", "m", "--workload", str(workload), *more])


def run_as_program(monkeypatch, capfd, module, *arguments):
    monkeypatch.setattr(sys, "argv", [module.__file__, *map(str, arguments)])
    module.main()
    return json.loads(capfd.readouterr().out.strip().splitlines()[-1])


def test_a_runner_warms_up_measures_in_order_and_prints_the_shared_form(workload, capsys):
    asked = []

    def system(requests, n, temperature):
        asked.append((len(requests), n, temperature))
        pieces = [[7] * r["max_tokens"] for r in requests for _ in range(n)]
        return Pieces(
            wall_s=0.5, token_ids=pieces, num_tokens=[len(ids) for ids in pieces], texts=[]
        )

    options = options_of(workload, "--only", "W5,W2,W1", "--repeat", "2")
    report(options, system, peer="other", version="1", precision="float32")
    result = json.loads(capsys.readouterr().out)
    one = (1, 1, 0.0)
    assert asked == [one, *[(1, 3, 1.0)] * 2, *[one] * 4, *[(5, 1, 0.0)] * 2]
    assert list(result) == ["peer", "version", "precision", "threads", "W5", "W2", "W1"]
    assert set(result["W1"]) == set(result["W5"]) == FIGURES
    assert set(result["W2"]) == FIGURES | {"ttft_ms", "decode_tps"}
    assert result["W1"]["out_tps"] == 40.0


def test_memory_is_that_of_the_process_which_holds_the_engine(workload, capsys, monkeypatch):
    looked_at = []
    monkeypatch.setattr(bench.measure, "reset_peak_rss", looked_at.append)
    monkeypatch.setattr(
        bench.measure, "peak_rss_mb", lambda process: looked_at.append(process) or 1
    )

    def system(requests, n, temperature):
        return Pieces(wall_s=1.0, token_ids=None, num_tokens=[2], texts=[])

    report(options_of(workload, "--only", "W2"), system, peer="a", version="1", precision="")
    assert looked_at == [os.getpid()] * 2
    looked_at.clear()
    report(
        options_of(workload, "--only", "W2"), system, peer="a", version="1", precision="", process=7
    )
    assert looked_at == [7, 7]


@pytest.fixture
def llamacpp():
    """A server that answers a prompt with its own first id, the first requests last."""
    bodies, ended = [], threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            bodies.append(body)
            if body["prompt"][0] == 3:
                ended.wait(5)  # until another has been answered
            status, answer = 200, {"tokens": body["prompt"][:1] * body["n_predict"]}
            if body["prompt"] == [0]:
                status, answer = 400, {"error": {"message": "no such token"}}
            if body["n_cmpl"] > 1:
                answer = [answer] * body["n_cmpl"]
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())
            ended.set()

        def log_message(self, *_args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield SimpleNamespace(port=server.server_port, bodies=bodies)
        server.shutdown()
        thread.join()


def test_llamacpps_answers_stand_in_the_order_of_the_requests(llamacpp):
    pieces = run_llamacpp.system_at(llamacpp.port)(REQUESTS, 1, 0.0)
    assert pieces.token_ids == [[3 + i] * (2 + i) for i in range(5)]
    assert pieces.num_tokens == [2, 3, 4, 5, 6]
    for body in llamacpp.bodies:
        assert body["ignore_eos"] is True
        assert (body["temperature"], body["samplers"]) == (0.0, ["temperature"])


def test_llamacpp_computes_the_samples_of_a_prompt_as_one_request(llamacpp):
    pieces = run_llamacpp.system_at(llamacpp.port)(REQUESTS[1:2], 3, 1.0)
    assert pieces.token_ids == [[4, 4, 4]] * 3
    assert [body["n_cmpl"] for body in llamacpp.bodies] == [3]


def test_what_llamacpp_refuses_ends_the_run_with_its_words(llamacpp):
    with pytest.raises(RuntimeError, match=r"answered 400: .*no such token"):
        run_llamacpp.system_at(llamacpp.port)([{"prompt": [0], "max_tokens": 1}], 1, 0.0)


def test_a_llama_server_of_ones_own_is_started_measured_and_ended(
    workload, tmp_path, monkeypatch, capfd
):
    noted = tmp_path / "noted.json"
    monkeypatch.setenv("STAND_IN_NOTES", str(noted))
    result = run_as_program(
        monkeypatch, capfd, run_llamacpp,
        "--server", STAND_IN, "--model", "m.F16.gguf", "--workload", workload,
        "--only", "W1,W2,W5", "--slots", 8, "--unified", "--flash-attention", "on",
    )  # fmt: skip
    assert result["version"] == "llama-server version: 1 (stand-in)"
    assert "m.F16.gguf, f16 KV cache, 8 slots, one KV cache for all" in result["precision"]
    assert set(result["W1"]) == set(result["W5"]) == FIGURES  # no wrong lengths
    notes = json.loads(noted.read_text())
    arguments = notes["arguments"]
    for name, value in (
        ("--parallel", "8"), ("--ctx-size", "18432"), ("--threads", "2"), ("--flash-attn", "on"),
        ("--cache-type-v", "f16"), ("--cache-ram", "0"),
    ):  # fmt: skip
        assert arguments[arguments.index(name) + 1] == value
    assert "--kv-unified" in arguments
    assert not Path(f"/proc/{notes['process']}").exists()


def test_a_llama_server_that_ends_at_once_is_said(workload, monkeypatch, capfd):
    monkeypatch.setenv("STAND_IN_STATUS", "3")
    with pytest.raises(RuntimeError, match="ended with status 3"):
        run_as_program(
            monkeypatch, capfd, run_llamacpp,
            "--server", STAND_IN, "--model", "m", "--workload", workload,
        )  # fmt: skip


class FakeLLM:
    made: list[dict] = []  # noqa: RUF012

    def __init__(self, model, **settings):
        self.made.append({"model": model, **settings})

    def generate(self, prompts, params, use_tqdm):
        return [
            SimpleNamespace(
                outputs=[
                    SimpleNamespace(token_ids=tuple(prompt["prompt_token_ids"][:1] * p.max_tokens))
                    for _ in range(p.n)
                ]
            )
            for prompt, p in zip(prompts, params, strict=True)
        ]


def test_vllm_runs_in_its_environment_and_is_measured(workload, monkeypatch, capfd):
    FakeLLM.made.clear()
    fake = SimpleNamespace(
        LLM=FakeLLM, SamplingParams=lambda **given: SimpleNamespace(**given), __version__="9"
    )
    monkeypatch.setitem(sys.modules, "vllm", fake)
    started = []

    def execve(program, arguments, environment):
        started.append(arguments)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)

    monkeypatch.setattr(os, "execve", execve)
    arguments = ("--model", "folder", "--workload", workload, "--only", "W1,W5", "--threads", 2)
    for _ in range(2):  # the second is the process that the first has become
        result = run_as_program(
            monkeypatch, capfd, run_vllm, *arguments, "--dtype", "bfloat16", "--compile"
        )
    assert len(started) == 1
    assert started[0][0] == sys.executable
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"
    assert result["precision"] == "bfloat16 weights, arithmetic and KV cache, compiled"
    assert set(result["W1"]) == set(result["W5"]) == FIGURES  # no wrong lengths
    assert FakeLLM.made[0]["enforce_eager"] is False
    assert FakeLLM.made[0]["enable_prefix_caching"] is True


def test_a_library_the_user_preloads_for_vllm_stays_before_its_own(tmp_path, monkeypatch):
    (tmp_path / "lib").mkdir()
    openmp = tmp_path / "lib" / "libiomp5.so"
    openmp.touch()
    monkeypatch.setattr("ctypes.util.find_library", lambda _name: None)
    monkeypatch.setenv("LD_PRELOAD", "mine.so")
    for _ in range(2):
        environment = run_vllm.environment_of(2, 2, tmp_path)
        assert environment["LD_PRELOAD"] == f"mine.so:{openmp}"
        monkeypatch.setenv("LD_PRELOAD", environment["LD_PRELOAD"])


@pytest.mark.parametrize(("type_name", "off"), [("F32", 0), ("F16", 1e-3), ("Q8_0", 0.02)])
def test_a_gguf_is_written_again_with_the_same_weights(tmp_path, type_name, off):
    rng = np.random.default_rng(5)
    matrix = rng.uniform(-1, 1, (4, 64)).astype(np.float32)
    vector = rng.uniform(-1, 1, 64).astype(np.float32)
    source = tmp_path / "source.gguf"
    writer = gguf.GGUFWriter(source, "llama")
    writer.add_block_count(1)
    writer.add_token_list(["a", "b"])
    kind = gguf.GGMLQuantizationType.Q4_1
    packed = gguf.quants.quantize(matrix, kind)
    writer.add_tensor("blk.0.attn_q.weight", packed, raw_dtype=kind)
    writer.add_tensor("blk.0.attn_norm.weight", vector)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    rewrite(source, tmp_path / "target.gguf", type_name)

    reader = gguf.GGUFReader(tmp_path / "target.gguf")
    assert reader.fields["llama.block_count"].contents() == 1
    assert reader.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
    found = {tensor.name: tensor for tensor in reader.tensors}
    assert found["blk.0.attn_q.weight"].tensor_type.name == type_name
    assert found["blk.0.attn_norm.weight"].tensor_type.name == "F32"
    for name, wanted, allowed in (
        ("blk.0.attn_q.weight", gguf.quants.dequantize(packed, kind), off),
        ("blk.0.attn_norm.weight", vector, 0),
    ):
        tensor = found[name]
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert np.abs(values - wanted).max() <= allowed
