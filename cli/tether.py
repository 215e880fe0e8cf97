"""Child processes that end when this process ends, however it ends.

A server or worker that outlives its `kill -9`ed parent holds ports, locks and memory that nobody
knows of. Linux ends such a child by itself if it asked to be told (prctl PR_SET_PDEATHSIG).

The asking is done by this very file, run as a script between fork and exec: Python code in
`preexec_fn` may deadlock in a parent with threads, and a user id set in there clears the request.
Other systems have no such request; there the child ends only by `stop` and by its own signals.
"""

import argparse
import ctypes
import os
import pwd
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

PR_SET_PDEATHSIG = 1

_forker_lock = threading.Lock()
_forker: ThreadPoolExecutor | None = None


def spawn(
    command: Sequence[str | Path],
    *,
    death_signal: signal.Signals = signal.SIGTERM,
    user: str | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    output: IO[bytes] | int | None = None,
    keep_open: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start `command` in its own session, without input; it gets `death_signal` when we end.

    `user` is taken on by setuid, for which this process must be root; `output` gets stdout and
    stderr; the descriptors of `keep_open` stay open in the child.
    """
    wrapped = [
        sys.executable,
        *("-I", "-S", str(Path(__file__).resolve())),
        *("--parent", str(os.getpid())),
        *("--signal", str(int(death_signal))),
        *(("--user", user) if user else ()),
        "--",
        *(str(word) for word in command),
    ]

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            wrapped,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if output is not None else None,
            env=env,
            cwd=cwd,
            pass_fds=keep_open,
            # a terminal's Ctrl-C goes to the foreground group: we decide who stops and when
            start_new_session=True,
        )

    if threading.current_thread() is threading.main_thread():
        return start()
    # The kernel's "parent" is the thread that forked: a child of a short-lived thread would be
    # ended with it. One thread that lives as long as the process forks for all the others.
    return _lasting_thread().submit(start).result()


def stop(child: subprocess.Popen[bytes], *, sig: signal.Signals, grace_s: float) -> int:
    """Send `sig`, wait up to `grace_s`, then kill. Returns the exit status."""
    if child.poll() is None:
        child.send_signal(sig)
        try:
            return child.wait(grace_s)
        except subprocess.TimeoutExpired:
            child.kill()
    return child.wait()


def _lasting_thread() -> ThreadPoolExecutor:
    global _forker
    with _forker_lock:
        if _forker is None:
            _forker = ThreadPoolExecutor(1, thread_name_prefix="tether")
        return _forker


def _become(arguments: Sequence[str]) -> None:
    """In the child: drop to the user, ask for the signal, become the command."""
    parser = argparse.ArgumentParser(prog="tether")
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--signal", type=int, required=True)
    parser.add_argument("--user")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)

    libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
    if options.user:
        entry = pwd.getpwnam(options.user)
        os.setgroups([])
        os.setgid(entry.pw_gid)
        os.setuid(entry.pw_uid)
    # after setuid: a change of user clears the request
    if libc is not None and libc.prctl(PR_SET_PDEATHSIG, options.signal, 0, 0, 0) != 0:
        sys.exit(f"prctl(PR_SET_PDEATHSIG) failed: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != options.parent:  # it ended before we asked
        sys.exit(f"the parent {options.parent} has ended")
    os.execvp(options.command[0], options.command)


if __name__ == "__main__":
    _become(sys.argv[1:])
