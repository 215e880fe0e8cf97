"""OpenVINO GenAI's continuous batching on our workloads, in the form that `compare.py` reads.

    pip install openvino-genai==2026.4.1.0          (in an environment of its own: README.md)
    python bench/peers/run_openvino.py --model MODEL.gguf --only W1,W2

The model is a GGUF file with float16 or 8-bit weights, or a folder that optimum-intel exported.
With `--lead` the first request of a workload goes one step ahead: OpenVINO finds a prefix that
requests share only after one of them has been computed.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))  # this environment has no Tokenmill

import openvino  # type: ignore[import-not-found]  # noqa: E402
import openvino_genai  # type: ignore[import-not-found]  # noqa: E402

from bench.measure import Pieces, Request  # noqa: E402
from bench.peers.runner import parser, report  # noqa: E402


def main() -> None:
    options = _options()
    pipeline = _pipeline(options)

    def run(requests: list[Request], n: int, temperature: float) -> Pieces:
        started = time.perf_counter()
        handles = []
        for index, request in enumerate(requests):
            prompt = openvino.Tensor([request["prompt"]])
            config = _generation(request["max_tokens"], n, temperature)
            handles.append(pipeline.add_request(index, prompt, config))
            if options.lead and index == 0:
                pipeline.step()
        while pipeline.has_non_finished_requests():
            pipeline.step()
        outputs = [list(out.generated_ids) for handle in handles for out in handle.read_all()]
        return Pieces(
            wall_s=time.perf_counter() - started,
            token_ids=outputs,
            num_tokens=[len(ids) for ids in outputs],
            texts=[],
        )

    report(
        options,
        run,
        peer="openvino-genai",
        version=openvino_genai.__version__,
        precision=f"weights as in {options.model.name}, {options.precision} in the rest",
    )


def _pipeline(options: argparse.Namespace) -> Any:
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = 4  # GB
    scheduler.max_num_batched_tokens = 512  # as Tokenmill where nothing is measured
    scheduler.max_num_seqs = 64
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = True
    return openvino_genai.ContinuousBatchingPipeline(
        str(options.model),
        scheduler,
        "CPU",
        {
            "INFERENCE_NUM_THREADS": options.threads,
            "INFERENCE_PRECISION_HINT": options.precision,
            "KV_CACHE_PRECISION": options.precision,
        },
    )


def _generation(max_tokens: int, n: int, temperature: float) -> Any:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.num_return_sequences = max_tokens, True, n
    config.do_sample = temperature > 0
    if config.do_sample:
        config.temperature, config.top_p, config.top_k = temperature, 1.0, 0
    return config


def _options() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--precision", default="f32", help="of arithmetic and KV cache: f32, bf16")
    options.add_argument("--lead", action="store_true", help="the first request a step ahead")
    return options.parse_args()


if __name__ == "__main__":
    main()
