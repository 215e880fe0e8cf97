"""Threads that go through a step side by side, and wait for each other between its phases.

They are entered once a step, not once a phase: waking a sleeping thread takes as long as a small
product, and a step has hundreds of phases. Between phases a worker spins, and lets others have its
core when the wait is long: on a busy machine the one it waits for may need it.
"""

import platform
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, prange
from numba.core import types
from numba.extending import intrinsic

from engine.kernels.cpu.emit import I32, I64, declare
from engine.kernels.cpu.functions import call_function

FAILED = 1 << 40  # added to a meeting's count by a worker that fails: more than any phase is due
SPINS = 4000  # before a core is yielded: some tens of microseconds
PATIENCE = 3_000_000  # yields, some seconds, when it is tried whether threads run side by side


class Crew(NamedTuple):
    """One worker among its like."""

    worker: int  # [0, num_workers)
    num_workers: int
    meeting: np.ndarray  # [8] int64, shared, 0 at first: how often a worker has ended a phase


@njit(nogil=True, cache=True)
def share(count, crew):
    """[low, high): one worker's part of so many."""
    low = count * crew.worker // crew.num_workers
    return low, count * (crew.worker + 1) // crew.num_workers


@njit(nogil=True, cache=True)
def wait_for_all(crew, phase):
    """Return when all workers have ended `phase`, counted from 0."""
    if crew.num_workers == 1:
        return
    address = crew.meeting.ctypes.data
    due = (phase + 1) * crew.num_workers
    fetch_add(address, 1)
    spins = 0
    while load_shared(address) < due:
        spins += 1
        if spins < SPINS:
            pause()
        else:
            yield_core()


@njit(nogil=True, cache=True, parallel=True)
def run_by_all(function, table, num_workers):
    """Have each worker call `function(table, worker)`, a C function by its address."""
    for worker in prange(num_workers):
        call_function(function, (table, np.int64(worker)))


@njit(nogil=True, cache=True, parallel=True)
def run_side_by_side(num_workers):
    """Whether so many workers do run at once: they would else wait for each other for ever."""
    counter, met = np.zeros(8, np.int64), np.zeros(num_workers, np.int64)
    for worker in prange(num_workers):
        address = counter.ctypes.data
        fetch_add(address, 1)
        tries = 0
        while load_shared(address) < num_workers and tries < PATIENCE:
            tries += 1
            yield_core()
        met[worker] = load_shared(address) >= num_workers
    return met.all()


@intrinsic
def fetch_add(context: Any, address: Any, amount: Any) -> Any:
    """Add to an int64 that threads share; returns what it was."""
    signature = types.int64(types.int64, types.int64)

    def emit(_context: Any, build: Any, _signature: Any, args: Any) -> Any:
        pointer = build.inttoptr(args[0], I64.as_pointer())
        return build.atomic_rmw("add", pointer, args[1], "acq_rel")

    return signature, emit


@intrinsic
def load_shared(context: Any, address: Any) -> Any:
    """An int64 that threads share, as the last of them left it."""
    signature = types.int64(types.int64)

    def emit(_context: Any, build: Any, _signature: Any, args: Any) -> Any:
        return build.load_atomic(build.inttoptr(args[0], I64.as_pointer()), "acquire", 8)

    return signature, emit


@intrinsic
def pause(context: Any) -> Any:
    """Tell the core that it spins."""
    signature = types.void()

    def emit(_context: Any, build: Any, _signature: Any, args: Any) -> Any:
        if platform.machine() in ("x86_64", "AMD64"):
            build.call(declare(build, "llvm.x86.sse2.pause", ir.VoidType()), [])
        return _context.get_dummy_value()

    return signature, emit


@intrinsic
def yield_core(context: Any) -> Any:
    """Let another thread run on this core, if one waits for it."""
    signature = types.void()

    def emit(_context: Any, build: Any, _signature: Any, args: Any) -> Any:
        build.call(declare(build, "sched_yield", I32), [])
        return _context.get_dummy_value()

    return signature, emit
