"""Arrays by address: what lets one compiled kernel read any number of arrays and weight segments."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import float32, types
from numba.extending import intrinsic
from numba.np.numpy_support import carray
from numpy.typing import NDArray

from hepti_mqtt.kernels.machine.jit import INT, INT_ARRAY, JIT, entry, helper, kernel, lowered, reads

GROUP: Final = 8
_PREFETCH: Final = "llvm.prefetch.p0"
_READ, _WRITE = 0, 1
_FIRST_LEVEL: Final = (3, 1)  # locality, data


def _pointer_to(item: Any) -> Any:
    """Return what compiled code calls to turn an address into a pointer to items of a type."""

    def emit(_context: Any, _address: Any) -> Any:
        result: Any = types.CPointer(item)  # type: ignore[no-untyped-call]

        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return result(types.intp), codegen

    return intrinsic(emit)


def _in_python(c_type: Any, dtype: Any) -> Callable[[Any], Any]:
    """Return a decorator for a helper that returns the array [count] at an address: without the JIT it is this one.

    Numba's own `carray` takes fifty microseconds for an array in plain Python, and kernels ask for thousands.
    """

    def at(address: int, count: int) -> Any:
        return np.ndarray((count,), dtype, (c_type * int(count)).from_address(int(address)))

    return lambda function: helper(function) if JIT else at


_floats_at: Final = _pointer_to(types.float32)
_octets_at: Final = _pointer_to(types.uint8)


@_in_python(ctypes.c_float, np.float32)
def floats(address: int, count: int) -> Any:
    """Return the f32 array [count] at an address."""
    return carray(_floats_at(address), (count,), np.float32)


@_in_python(ctypes.c_uint8, np.uint8)
def octets(address: int, count: int) -> Any:
    """Return the u8 array [count] at an address."""
    return carray(_octets_at(address), (count,), np.uint8)


def _fetch(purpose: int) -> Any:
    """Return the function that asks for the cache line at an address."""
    byte_pointer, word = ir.IntType(8).as_pointer(), ir.IntType(32)

    def emit(_context: Any, _address: Any) -> Any:
        def codegen(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            kind = ir.FunctionType(ir.VoidType(), [byte_pointer, word, word, word])
            ask = builder.module.globals.get(_PREFETCH) or ir.Function(builder.module, kind, _PREFETCH)
            address = builder.inttoptr(arguments[0], byte_pointer)
            builder.call(ask, [address, *(ir.Constant(word, v) for v in (purpose, *_FIRST_LEVEL))])
            return context.get_dummy_value()

        return types.void(types.int64), codegen

    return lowered(emit, lambda _address: None)


# Ask for the cache line at an address, which need not be valid, so that a later read or store does not wait for it.
fetch_to_read: Final = _fetch(_READ)
fetch_to_write: Final = _fetch(_WRITE)

_F32 = reads(float32, 2)


@kernel(INT_ARRAY, INT, *([_F32] * GROUP))
def _note_addresses(out: Any, at: int, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any) -> None:
    out[at] = a.ctypes.data
    out[at + 1] = b.ctypes.data
    out[at + 2] = c.ctypes.data
    out[at + 3] = d.ctypes.data
    out[at + 4] = e.ctypes.data
    out[at + 5] = f.ctypes.data
    out[at + 6] = g.ctypes.data
    out[at + 7] = h.ctypes.data


def address_table(count: int) -> tuple[NDArray[np.int64], Callable[[Sequence[NDArray[np.float32]]], None]]:
    """Return a table of `count` addresses, and the function that fills it from as many f32 arrays [.., ..].

    Reading the address of one array in Python costs as much as unboxing all eight of a group in one compiled call.
    """
    table = np.zeros(-(-max(count, 1) // GROUP) * GROUP, np.int64)
    padding = [np.empty((0, 0), np.float32)] * (len(table) - count)
    note = entry(_note_addresses)

    def fill(arrays: Sequence[NDArray[np.float32]]) -> None:
        padded = [*arrays, *padding]
        for at in range(0, len(table), GROUP):
            note(table, at, *padded[at : at + GROUP])

    return table, fill
