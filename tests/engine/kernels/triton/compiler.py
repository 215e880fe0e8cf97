"""Kernels compiled for a GPU that is not there, as a launch on it would.

The very calls that launch kernels are made, on tensors in the CPU's memory. Triton derives from
them what it would on a device: types, alignments, constants; it compiles, and nothing is launched.
"""

import contextlib
import io
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from unittest import mock

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from engine.kernels.triton import devices
from engine.kernels.triton.devices import Device

DEVICES = {
    device.capability: device
    for device in (
        Device(capability=80, num_processors=108),  # A100
        Device(capability=90, num_processors=132),  # H100
        Device(capability=100, num_processors=148),  # B200
    )
}
# of shared memory for a program, from the CUDA programming guide's table of compute capabilities;
# an A100 has 163 KiB, others that are given its tiles (8.6, 8.9, 12.0) no more than this
SHARED_BYTES = {80: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What the compiler says of one kernel."""

    name: str
    ptx: str
    cubin: bytes
    shared_bytes: int
    spilled_bytes: int
    num_registers: int


# by Triton's hash of source, constants and device
_known: dict[str, Compiled] = {}


class _AbsentDevice:
    """As much of a driver as compiling asks for."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self._target.arch  # kernels are kept by device

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def absent_device(capability: int) -> Iterator[list[Compiled]]:
    """Inside it, what is launched is compiled instead; the list has each kernel, once."""
    found: list[Compiled] = []
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        assert all(0 < size < 2**31 for size in grid)
        log = io.StringIO()
        with contextlib.redirect_stdout(log):
            kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if log.getvalue():  # else Triton had it already
            _known[kernel.hash] = _compiled(kernel, log.getvalue())
        if _known[kernel.hash] not in found:
            found.append(_known[kernel.hash])
        return kernel

    before = driver._active
    driver.set_active(_AbsentDevice(capability))
    try:
        with (
            mock.patch.object(JITFunction, "run", compile_only),
            mock.patch.object(devices, "INTERPRETER", DEVICES[capability]),
            knobs.nvidia.scope(),
            knobs.compilation.scope(),
        ):
            knobs.nvidia.dump_ptxas_log = True
            # what is found on disk has no log
            knobs.compilation.always_compile = True
            devices.device_of.cache_clear()
            yield found
    finally:
        driver._active = before
        devices.device_of.cache_clear()


def compiled(capability: int, launch: Callable[[], object]) -> list[Compiled]:
    with absent_device(capability) as found:
        launch()
    return found


def _compiled(kernel, log: str) -> Compiled:
    [registers] = re.findall(r"Used (\d+) registers", log)
    spilled = re.findall(r"(\d+) bytes spill", log)
    return Compiled(
        name=kernel.name,
        ptx=kernel.asm["ptx"],
        cubin=kernel.asm["cubin"],
        shared_bytes=kernel.metadata.shared,
        spilled_bytes=sum(map(int, spilled)),
        num_registers=int(registers),
    )
