"""The other ranks of a model's tensor parallel, as rank 0 sees them: processes of its own.

Rank 0 is the engine's process: it plans, draws and answers. The others (`engine.follower`) get each
step's input through a pipe, one message, and compute their part. They end with the pipe, and with
rank 0's process. If one of them ends first, no step can be finished any more: the next raises
RankError, and where none comes to it, because it is idle or waits for the dead, the process ends.
"""

import contextlib
import dataclasses
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from engine.collectives import ProcessGroup
from engine.config import EngineConfig
from engine.shards import Shard

START_TIMEOUT_S = 300.0  # for a rank to import what it needs, and again to load its part
STOP_GRACE_S = 5.0
DEATH_GRACE_S = 5.0  # from a rank's death until the process ends, if no step has raised
NOTICE_S = 2.0  # from a broken connection until its rank's end is known
EXIT_STATUS = 70
HERE, LOADED, FAILED = b"here", b"loaded", b"failed "

logger = logging.getLogger(__name__)


class RankError(RuntimeError):
    """A rank has ended, or cannot go on: the engine's process has to end, too."""


class Follower:
    """One process, and the pipe to it."""

    def __init__(self, rank: int, config: EngineConfig, meeting_place: Path) -> None:
        self.rank = rank
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "engine.follower", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            )
        self.pipe = Connection(ours.detach())
        start = {
            "config": dataclasses.asdict(config),
            "rank": rank,
            "meeting_place": str(meeting_place),
            "log_level": logging.getLogger().getEffectiveLevel(),
        }
        self.pipe.send_bytes(json.dumps(start).encode())

    def wait_for(self, word: bytes) -> None:
        """Raises RankError, or ValueError with what the rank says that it failed at."""
        if not self.pipe.poll(START_TIMEOUT_S):
            raise RankError(f"rank {self.rank} was not {word.decode()} in {START_TIMEOUT_S:g} s")
        try:
            said = self.pipe.recv_bytes()
        except (EOFError, OSError):
            raise RankError(f"rank {self.rank} ended before it was {word.decode()}") from None
        if said != word:
            raise ValueError(f"rank {self.rank}: {said.removeprefix(FAILED).decode()}")


class Crew:
    """Starts the followers, sends them steps, and watches over them."""

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        """Raises RankError when a rank does not come."""
        self.failure: str | None = None  # how the first rank ended that did
        self._closing = threading.Event()
        self._failed = threading.Event()
        folder = Path(tempfile.mkdtemp(prefix="tokenmill-ranks-"))
        self._followers = [
            Follower(rank, config, folder / "ranks") for rank in range(1, config.tensor_parallel)
        ]
        self._group: ProcessGroup | None = None
        try:
            for follower in self._followers:
                follower.wait_for(HERE)
                threading.Thread(
                    target=self._watch, args=(follower,), name=f"rank-{follower.rank}", daemon=True
                ).start()
            shard = Shard(0, config.tensor_parallel)
            self.group = self._group = ProcessGroup(shard, folder / "ranks", device)
        except BaseException:
            self.close()
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    @property
    def pids(self) -> list[int]:
        return [follower.process.pid for follower in self._followers]

    def wait_until_loaded(self) -> None:
        """Raises RankError, or ValueError when a rank cannot load its part."""
        for follower in self._followers:
            follower.wait_for(LOADED)

    def send(self, message: bytes) -> None:
        for follower in self._followers:
            follower.pipe.send_bytes(message)

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """What goes wrong in a step of several ranks as RankError: none of them can go on."""
        if self.failure is not None:
            raise RankError(self.failure)
        try:
            yield
        except torch.OutOfMemoryError as error:
            # the others are in the middle of the step, and cannot be called back
            raise RankError(f"no memory for a step on rank 0: {error}") from error
        except (RuntimeError, OSError) as error:
            if self._failed.wait(NOTICE_S):
                raise RankError(self.failure) from error
            raise

    def close(self) -> None:
        """End the followers and wait for it."""
        self._closing.set()
        for follower in self._followers:
            follower.pipe.close()
        for follower in self._followers:
            try:
                follower.process.wait(STOP_GRACE_S)
            except subprocess.TimeoutExpired:
                follower.process.kill()
                follower.process.wait()
        if self._group is not None:
            self._group.leave()
            self._group = None

    def _watch(self, follower: Follower) -> None:
        status = follower.process.wait()
        if self._closing.is_set():
            return
        self.failure = f"rank {follower.rank} ended with status {status}"
        self._failed.set()
        logger.error("%s: the engine cannot go on", self.failure)
        if not self._closing.wait(DEATH_GRACE_S):
            os._exit(EXIT_STATUS)
