"""C functions that kernels call by their address.

Numba compiles what a kernel calls again into each of its callers. The tiles, which are most of the
code, are compiled once instead, and only for the kinds of numbers that a model has.
"""

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.ccallback import CFunc
from numba.extending import intrinsic


def address_of(function: CFunc) -> int:
    """A compiled function is kept as long as its object is."""
    address: int | None = function.address
    assert address is not None
    return address


@intrinsic
def call_function(context: Any, address: Any, arguments: Any) -> Any:
    """Call a C function that returns an int64; the arguments are a tuple of int64 and float32."""
    signature = types.int64(types.int64, arguments)

    def emit(_context: Any, build: Any, _signature: Any, args: Any) -> Any:
        given = cgutils.unpack_tuple(build, args[1])
        kind = ir.FunctionType(ir.IntType(64), [each.type for each in given])
        return build.call(build.inttoptr(args[0], kind.as_pointer()), given)

    return signature, emit
