"""llama.cpp's server on our workloads, in the form that `compare.py` reads.

    python bench/peers/run_llamacpp.py --server BUILD/bin/llama-server --model MODEL.F16.gguf

With `--server` a llama-server of one's own build, made for the machine's own instructions; without,
the one in xllamacpp's wheel, which stops at AVX2. README.md says how to come by either.

A slot keeps what it computed last, and only a request that comes to the same slot finds it: of W4's
shared prefix each slot computes its own. So fewer slots help W4, more help W1. `n` samples of a
prompt are one request, whose prompt llama.cpp computes once.
"""

import argparse
import http.client
import importlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))  # this environment has no Tokenmill

from bench.measure import Pieces, Request, System  # noqa: E402
from bench.peers.runner import parser, report  # noqa: E402

HTTP_THREADS = 70  # each of W1's 64 requests waits in one
START_S = 300.0  # for a server to load its model


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A llama.cpp server that answers."""

    port: int
    process: int
    version: str


def main() -> None:
    options = _options()
    start = _llama_server if options.server else _xllamacpp
    with start(options) as server:
        report(
            options,
            system_at(server.port),
            peer="llama.cpp",
            version=server.version,
            precision=f"weights as in {options.model.name}, {options.kv} KV cache, "
            f"{options.slots} slots{', one KV cache for all' if options.unified else ''}, "
            f"flash attention {options.flash_attention}",
            process=server.process,
        )


def system_at(port: int) -> System:
    """The server at a port of this machine. Raises RuntimeError when it refuses a request."""

    def run(requests: list[Request], n: int, temperature: float) -> Pieces:
        bodies = [_body(request, n, temperature) for request in requests]
        with ThreadPoolExecutor(len(bodies)) as threads:
            started = time.perf_counter()
            answers = list(threads.map(lambda body: _ask(port, body), bodies))
            wall_s = time.perf_counter() - started
        pieces = [one["tokens"] for answer in answers for one in answer]
        return Pieces(
            wall_s=wall_s, token_ids=pieces, num_tokens=[len(ids) for ids in pieces], texts=[]
        )

    return run


def _body(request: Request, n: int, temperature: float) -> bytes:
    """One request of `n` samples; the chain of samplers is the temperature alone, 0 is greedy."""
    body = {
        "prompt": request["prompt"],
        "n_predict": request["max_tokens"],
        "n_cmpl": n,
        "temperature": temperature,
        "samplers": ["temperature"],
        "ignore_eos": True,
        "cache_prompt": True,
        "return_tokens": True,
        "response_fields": ["tokens"],
    }
    return json.dumps(body).encode()


def _ask(port: int, body: bytes) -> list[dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=3600)
    try:
        connection.request("POST", "/completion", body, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        answer = reply.read().decode()
    finally:
        connection.close()
    if reply.status != http.client.OK:
        raise RuntimeError(f"llama.cpp answered {reply.status}: {answer[:500]}")
    found = json.loads(answer)
    return found if isinstance(found, list) else [found]


@contextmanager
def _xllamacpp(options: argparse.Namespace) -> Iterator[Server]:
    """The server of xllamacpp's wheel, within this process."""
    xllamacpp = importlib.import_module("xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path = str(options.model)
    params.n_parallel = options.slots
    params.n_ctx = options.slots * options.slot_context
    params.kv_unified = options.unified
    flash_attention = f"LLAMA_FLASH_ATTN_TYPE_{_FLASH_ATTENTION[options.flash_attention]}"
    params.flash_attn_type = xllamacpp.llama_flash_attn_type[flash_attention]
    kv = xllamacpp.ggml_type[f"GGML_TYPE_{options.kv.upper()}"]
    params.cache_type_k = params.cache_type_v = kv
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options.threads
    params.n_threads_http = HTTP_THREADS
    params.fit_params = False
    params.cache_ram_mib, params.cache_idle_slots = 0, False
    params.verbosity = -1
    server = xllamacpp.Server(params)
    yield Server(
        port=int(server.listening_address.rsplit(":", 1)[1]),
        process=os.getpid(),
        version=f"xllamacpp {xllamacpp.__version__}, {xllamacpp.get_system_info().strip(' |')}",
    )


@contextmanager
def _llama_server(options: argparse.Namespace) -> Iterator[Server]:
    """A llama-server of one's own build, as a child that ends with the run."""
    told = subprocess.run([options.server, "--version"], capture_output=True, text=True, check=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        llama_server_command(options, port), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        _wait_until_it_answers(process, port)
        lines = (told.stdout + told.stderr).splitlines()
        version = next((line for line in lines if line.startswith("version")), "of no version")
        yield Server(port=port, process=process.pid, version=f"llama-server {version}")
    finally:
        process.terminate()
        process.wait()


def llama_server_command(options: argparse.Namespace, port: int) -> list[str]:
    return [
        str(options.server),
        *("--model", str(options.model), "--host", "127.0.0.1", "--port", str(port)),
        *("--parallel", str(options.slots)),
        *("--ctx-size", str(options.slots * options.slot_context)),
        "--kv-unified" if options.unified else "--no-kv-unified",
        *("--flash-attn", options.flash_attention),
        *("--cache-type-k", options.kv, "--cache-type-v", options.kv),
        *("--threads", str(options.threads), "--threads-batch", str(options.threads)),
        *("--threads-http", str(HTTP_THREADS)),
        *("--fit", "off", "--cache-ram", "0", "--no-cache-idle-slots"),
    ]


def _wait_until_it_answers(process: subprocess.Popen[bytes], port: int) -> None:
    """Raises RuntimeError when the server ends, or has not loaded its model in time."""
    ends = time.monotonic() + START_S
    while time.monotonic() < ends:
        if process.poll() is not None:
            raise RuntimeError(f"llama-server ended with status {process.returncode}")
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == http.client.OK:
                return
        except OSError:
            pass  # it does not listen yet
        finally:
            connection.close()
        time.sleep(0.1)
    raise RuntimeError(f"llama-server did not answer within {START_S:.0f} s")


_FLASH_ATTENTION = {"auto": "AUTO", "on": "ENABLED", "off": "DISABLED"}


def _options() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--server", type=Path, help="a llama-server; xllamacpp's by default")
    options.add_argument("--slots", type=int, default=16, help="requests computed at once")
    options.add_argument("--slot-context", type=int, default=2304, help="tokens for each slot")
    options.add_argument("--unified", action="store_true", help="one KV cache for all slots")
    options.add_argument("--kv", default="f16", choices=("f32", "f16", "bf16", "q8_0"))
    options.add_argument("--flash-attention", default="auto", choices=tuple(_FLASH_ATTENTION))
    return options.parse_args()


if __name__ == "__main__":
    main()
