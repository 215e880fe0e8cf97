"""Memory and processor time of a running service, part by part, and what Redis itself counts."""

import contextlib
import threading
from collections import defaultdict

import psutil
import redis

SAMPLE_S = 1.0
PARTS = {
    "engine": "worker.engine_process", "worker": "main worker", "api": "main api",
    "valkey": "valkey-server", "up": "main up",
}  # fmt: skip
SESSION = "postgres"  # as a victim
SHOWN = 8  # stretches of time that memory is told of


class Watch:
    """Memory and processor time of each part of the service, dead ones' too."""

    def __init__(self, pid: int, redis_url: str, server_pid: int | None) -> None:
        self._root = psutil.Process(pid)
        self._server = None if server_pid is None else psutil.Process(server_pid)
        self._redis = redis.Redis.from_url(redis_url, socket_timeout=2.0)
        self._cpu_s: dict[tuple[str, int], float] = {}
        self.rss_mb: dict[str, list[float]] = defaultdict(list)
        self.redis_kb: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def part(self, name: str) -> psutil.Process | None:
        if name == SESSION:
            return self._session()
        for process in [self._root, *self._root.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                if PARTS[name] in " ".join(process.cmdline()):
                    return process
        return None

    def _session(self) -> psutil.Process | None:
        for process in [] if self._server is None else self._server.children():
            with contextlib.suppress(psutil.Error):
                if "127.0.0.1" in " ".join(process.cmdline()):
                    return process
        return None

    def cpu_s(self) -> dict[str, float]:
        total: dict[str, float] = defaultdict(float)
        for (name, _), seconds in self._cpu_s.items():
            total[name] += seconds
        return dict(total)

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            for name in PARTS:
                if (process := self.part(name)) is None:
                    continue
                with contextlib.suppress(psutil.Error):
                    used = process.cpu_times()
                    self._cpu_s[name, process.pid] = used.user + used.system
                    self.rss_mb[name].append(process.memory_info().rss / 2**20)
            with contextlib.suppress(psutil.Error):
                self._look_at_sessions()
            with contextlib.suppress(redis.RedisError):
                self.redis_kb.append(self._redis.info("memory")["used_memory"] / 1024)

    def _look_at_sessions(self) -> None:
        """All of PostgreSQL's processes together; shared memory counts in each that touched it."""
        if self._server is None:
            return
        rss = 0.0
        for process in [self._server, *self._server.children()]:
            used = process.cpu_times()
            self._cpu_s[SESSION, process.pid] = used.user + used.system
            rss += process.memory_info().rss / 2**20
        self.rss_mb[SESSION].append(rss)


def stretches(values: list[float]) -> list[int]:
    """The most in each stretch of the run: flat, if the last is no more than those before."""
    size = max(1, -(-len(values) // SHOWN))
    return [round(max(values[start : start + size])) for start in range(0, len(values), size)]
