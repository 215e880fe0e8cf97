"""Panels of 16-bit numbers made float32 once, for as many tiles as they meet.

A tile that reads 16 bits turns each vector into float32 itself, in the units that multiply: up to a
seventh of their time with AVX-512, a quarter with AVX2.
"""

from typing import Any

from numba.core import types
from numba.extending import intrinsic

from engine.kernels.cpu.emit import F32, FLOAT32, I64, ITEM_BYTES, WIDTH, load, loop, store

MANY_TILES = 3  # from so many on it pays
MOST_NUMBERS = 1 << 16  # of all panels that meet a tile: 256 KiB on the stack, half a core's cache


@intrinsic
def room_for_panels(context: Any) -> Any:
    """Address of float32 [MOST_NUMBERS] that last as long as the function that asks."""
    signature = types.int64()

    def emit(_context: Any, build: Any, _signature: Any, args: Any) -> Any:
        with build.goto_entry_block():
            numbers = build.alloca(F32, size=MOST_NUMBERS)
        numbers.align = 64
        return build.ptrtoint(numbers, I64)

    return signature, emit


@intrinsic(prefer_literal=True)
def widen(
    context: Any,
    source: Any,  # address of [count] stored as `kind` says
    target: Any,  # address of float32 [count], changed
    count: Any,  # a multiple of 16
    kind: Any,  # literal: FLOAT16 or BFLOAT16
) -> Any:
    signature = types.void(types.int64, types.int64, types.int64, kind)
    stored = kind.literal_value

    def emit(_context: Any, build: Any, _signature: Any, args: Any) -> Any:
        source, target, count, _ = args

        def move(index: Any, _state: list[Any]) -> list[Any]:
            first = build.mul(index, I64(WIDTH))
            numbers = load(
                build, build.add(source, build.mul(first, I64(ITEM_BYTES[stored]))), stored
            )
            store(build, numbers, build.add(target, build.mul(first, I64(ITEM_BYTES[FLOAT32]))))
            return []

        loop(build, build.sdiv(count, I64(WIDTH)), [], move)
        return _context.get_dummy_value()

    return signature, emit
