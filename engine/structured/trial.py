"""Where a form is tried first: `python -m engine.structured.trial FD`, beside an engine process.

It loads the vocabulary once and forks for each form, so that several are tried at once. The fork
forks again, translates the form there, builds it and makes the first mask, with memory, processor
time and time on the clock limited and at a low priority; whatever becomes of that (killed, aborted,
out of stack), the fork lives on and says so.

FD is one end of a socket pair: first come a vocabulary's parts, then a socket for each form, on
which the form is sent and its Verdict answered, both as JSON. The process ends when FD does.
"""

import json
import os
import resource
import select
import signal
import socket
import sys
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import NoReturn

from llguidance import LLTokenizer

from engine.structured.grammar import Grammar, GrammarError, load_vocabulary, translate
from engine.structured_outputs import StructuredOutputs

TRIAL_LIMIT_S = 4.0  # by the clock
TRIAL_LIMIT_CPU_S = 2
TRIAL_LIMIT_BYTES = 512 << 20  # beyond what the process has with its vocabulary
MAX_SOURCE_BYTES = 1 << 20  # of the translated form
NICENESS = 10


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a form: its translation, or what is wrong with it."""

    source: str = ""
    error: str = ""
    num_bytes: int = 0  # memory that the grammar takes, at least


def main(fd: int) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    parts = json.loads(Connection(os.dup(fd)).recv_bytes())
    vocabulary = load_vocabulary(**parts)
    control = socket.socket(fileno=fd)
    while True:
        _, given, _, _ = socket.recv_fds(control, 1, 1)
        if not given:
            return 0
        if os.fork() == 0:
            control.close()
            _answer(vocabulary, Connection(given[0]))
        os.close(given[0])


def _answer(vocabulary: LLTokenizer, pipe: Connection) -> NoReturn:
    """In the first fork."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        form = StructuredOutputs(**json.loads(pipe.recv_bytes()))
        pipe.send_bytes(json.dumps(asdict(_verdict(vocabulary, form))).encode())
    except (EOFError, OSError):
        pass  # who asked is gone
    finally:
        os._exit(0)


def _verdict(vocabulary: LLTokenizer, form: StructuredOutputs) -> Verdict:
    """Of a second fork, that tries the form."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ours)
        _try(vocabulary, form, theirs)
    os.close(theirs)
    ends_at = time.monotonic() + TRIAL_LIMIT_S
    answer = b""
    while (left_s := ends_at - time.monotonic()) > 0 and select.select([ours], [], [], left_s)[0]:
        piece = os.read(ours, 1 << 16)
        if not piece:
            break
        answer += piece
    os.close(ours)
    timed_out = time.monotonic() >= ends_at
    os.kill(pid, signal.SIGKILL)  # of no use any more, if it still lives
    _, status = os.waitpid(pid, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0:
        return Verdict(**json.loads(answer))
    if timed_out or os.WTERMSIG(status) == signal.SIGXCPU:
        return Verdict(error=f"takes more than {TRIAL_LIMIT_CPU_S} seconds to compile")
    return Verdict(error=f"too large to compile in {TRIAL_LIMIT_BYTES >> 20} MiB, or too deep")


def _try(vocabulary: LLTokenizer, form: StructuredOutputs, fd: int) -> NoReturn:
    """In the second fork: answers on `fd` and exits; without an answer if it is killed."""
    os.nice(NICENESS)
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 2)  # a panic's backtrace may quote the form
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (TRIAL_LIMIT_CPU_S, TRIAL_LIMIT_CPU_S + 1))
    anonymous = _memory("RssAnon")
    if sys.platform == "linux":
        limit = _memory("VmSize") + TRIAL_LIMIT_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    status = 1
    try:
        source = translate(form)
        if len(source.encode()) > MAX_SOURCE_BYTES:
            raise GrammarError(f"translated, it has more than {MAX_SOURCE_BYTES} bytes")
        Grammar(vocabulary, source).state().mask(())
        grown = max(0, _memory("RssAnon") - anonymous)
        verdict = Verdict(source=source, num_bytes=grown + len(source))
        status = 0
    except GrammarError as error:
        verdict = Verdict(error=str(error))
        status = 0
    finally:
        if status == 0:
            answer = json.dumps(asdict(verdict)).encode()
            while answer:
                answer = answer[os.write(fd, answer) :]
        os._exit(status)


def _memory(name: str) -> int:
    """Bytes of this process, by a line of its status; 0 where there is none."""
    try:
        with open("/proc/self/status") as file:
            found = [line for line in file if line.startswith(name + ":")]
    except OSError:
        return 0
    return int(found[0].split()[1]) * 1024 if found else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
