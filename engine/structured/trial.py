"""Where a form is tried first: `python -m engine.structured.trial FD`, beside an engine process.

It loads the vocabulary once and forks for each form, so that several are tried at once. The fork
forks again, translates the form there, builds it and makes the first mask, with memory, processor
time and time on the clock limited and at a low priority; whatever becomes of that (killed, aborted,
out of stack), the fork lives on and says so.

A vocabulary's parts are its standard input. FD is one end of a socket pair, over which comes a
socket for each form; on that the form is sent with its limits, and its Verdict answered, as JSON.
The process ends when FD does.
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

TRIAL_LIMIT_BYTES = 512 << 20  # beyond what the process has with its vocabulary
MAX_SOURCE_BYTES = 1 << 20  # of the translated form


@dataclass(frozen=True, slots=True)
class TrialLimits:
    """Of one trial, and the priority it runs at."""

    cpu_s: float
    clock_s: float
    niceness: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a form: its translation, or what is wrong with it, or that time ran out."""

    source: str = ""
    error: str = ""
    num_bytes: int = 0  # memory that the grammar takes, at least
    out_of: str = ""  # "processor time" or "time": it was not done


def main(fd: int) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    vocabulary = load_vocabulary(**json.load(sys.stdin.buffer))
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
        form, limits = json.loads(pipe.recv_bytes())
        verdict = _verdict(vocabulary, StructuredOutputs(**form), TrialLimits(**limits))
        pipe.send_bytes(json.dumps(asdict(verdict)).encode())
    except (EOFError, OSError):
        pass  # who asked is gone
    finally:
        os._exit(0)


def _verdict(vocabulary: LLTokenizer, form: StructuredOutputs, limits: TrialLimits) -> Verdict:
    """Of a second fork, that tries the form."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ours)
        _try(vocabulary, form, limits, theirs)
    os.close(theirs)
    ends_at = time.monotonic() + limits.clock_s
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
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
        return Verdict(out_of="processor time")
    if timed_out:
        return Verdict(out_of="time")
    return Verdict(error=f"too large to compile in {TRIAL_LIMIT_BYTES >> 20} MiB, or too deep")


def _try(
    vocabulary: LLTokenizer, form: StructuredOutputs, limits: TrialLimits, fd: int
) -> NoReturn:
    """In the second fork: answers on `fd` and exits; without an answer if it is killed."""
    lower_priority(limits.niceness)
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 2)  # a panic's backtrace may quote the form
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)  # RLIMIT_CPU knows whole seconds only
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


def lower_priority(niceness: int) -> None:
    """Of the calling thread, where the system knows priorities of threads; else of the process."""
    current = os.getpriority(os.PRIO_PROCESS, 0)
    os.setpriority(os.PRIO_PROCESS, 0, max(current, niceness))


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
