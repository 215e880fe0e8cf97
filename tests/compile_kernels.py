"""Compile the CPU kernels, once on a machine, before tests measure how soon an engine answers.

python -m tests.compile_kernels
"""

import tempfile
from pathlib import Path

from engine import EngineConfig, LLMEngine, SamplingParams
from tests.tiny_llama import write_tiny_llama

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_llama(Path(folder))
        engine = LLMEngine(EngineConfig(model=folder, num_blocks=8))
        engine.generate(["warm"], SamplingParams(max_tokens=2))
