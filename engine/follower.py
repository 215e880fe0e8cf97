"""A rank of tensor parallel beside rank 0. `python -m engine.follower FD`.

FD is one end of a socket pair: first comes what to load, then a message for each step, until the
pipe ends. It leaves signals to rank 0, and dies with it.
"""

import contextlib
import json
import logging
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from engine.collectives import ProcessGroup
from engine.config import EngineConfig
from engine.crew import FAILED, HERE, LOADED
from engine.lifeline import heed_parent_alone
from engine.model_runner import ModelRunner, device_of
from engine.shards import Shard

logger = logging.getLogger(__name__)


def main(fd: int) -> int:
    heed_parent_alone()
    pipe = Connection(fd)
    with contextlib.suppress(EOFError, ConnectionResetError, BrokenPipeError):
        start = json.loads(pipe.recv_bytes())
        logging.basicConfig(
            level=start["log_level"],
            format=f"[%(asctime)s: %(levelname)s/rank-{start['rank']}] %(message)s",
        )
        return follow(pipe, EngineConfig(**start["config"]), start["rank"], start["meeting_place"])
    return 0


def follow(pipe: Connection, config: EngineConfig, rank: int, meeting_place: str) -> int:
    """Compute steps until the pipe ends."""
    shard = Shard(rank, config.tensor_parallel)
    pipe.send_bytes(HERE)
    group = ProcessGroup(shard, Path(meeting_place), device_of(config, rank))
    try:
        runner = ModelRunner(config, group=group, on_loaded=lambda: pipe.send_bytes(LOADED))
    except Exception as error:  # noqa: BLE001  # rank 0 raises it
        pipe.send_bytes(FAILED + f"{type(error).__name__}: {error}".encode())
        return 1
    while True:
        runner.follow(pipe.recv_bytes())


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
