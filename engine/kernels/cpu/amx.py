"""AMX's registers, 8 tiles of 16 rows of 64 bytes, and products of them, by name.

LLVM's own instructions for them choose the registers, and spill them, as it likes; here each is
named, so that sums stay where they are.
"""

from typing import Any

from llvmlite import ir

from engine.kernels.cpu.emit import I64

TILE_ROWS = 16
TILE_BYTES = 64  # of a row

_I8 = ir.IntType(8)


def configure(
    build: Any,
    place: Any,  # address of 64 bytes, changed
    shapes: dict[int, tuple[Any, int]],  # of each tile in use its rows, int64, and bytes of a row
) -> None:
    """Give tiles their shapes; all are zero then (Intel's manual, LDTILECFG)."""
    for at in range(0, 64, 8):
        _store(build, I64(1 if at == 0 else 0), build.add(place, I64(at)))
    for tile, (rows, num_bytes) in shapes.items():
        _store(build, ir.IntType(16)(num_bytes), build.add(place, I64(16 + 2 * tile)))
        _store(build, build.trunc(rows, _I8), build.add(place, I64(48 + tile)))
    _emit(build, "ldtilecfg ($0)", place)


def release(build: Any) -> None:
    """Give the tiles back: threads that have none are switched faster."""
    _emit(build, "tilerelease")


def zero_tile(build: Any, tile: int) -> None:
    _emit(build, f"tilezero %tmm{tile}")


def load_tile(build: Any, tile: int, address: Any, stride: Any) -> None:
    """Its rows, so many bytes apart."""
    _emit(build, f"tileloadd ($0,$1,1), %tmm{tile}", address, stride)


def store_tile(build: Any, tile: int, address: Any, stride: Any) -> None:
    _emit(build, f"tilestored %tmm{tile}, ($0,$1,1)", address, stride)


def add_bfloat16_products(build: Any, total: int, a: int, b: int) -> None:
    """total [M, N] float32 += a [M, K] × b [K / 2, N, 2], K ≤ 32."""
    _emit(build, f"tdpbf16ps %tmm{b}, %tmm{a}, %tmm{total}")


def add_int8_products(build: Any, total: int, a: int, b: int) -> None:
    """total [M, N] int32 += a [M, K] × b [K / 4, N, 4], K ≤ 64, numbers with a sign."""
    _emit(build, f"tdpbssd %tmm{b}, %tmm{a}, %tmm{total}")


def _store(build: Any, x: Any, address: Any) -> None:
    build.store(x, build.inttoptr(address, x.type.as_pointer())).align = 1


def _emit(build: Any, instruction: str, *operands: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [each.type for each in operands])
    constraints = ",".join(["r"] * len(operands) + ["~{memory}"])
    build.asm(kind, instruction, constraints, operands, side_effect=True)
