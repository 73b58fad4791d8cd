"""How the threads of a pool get their parts of a kernel: compiled code passes them through memory, without the GIL.

The calling thread enters compiled code once, with the kernel's arguments as a tuple. There it writes them into the
pool's memory, marks a lane for every other thread, takes parts until none is left, takes back the lanes that nobody
has begun, and waits for the others. Of n threads, thread t has the parts t, t + n, t + 2 n, and so on; when it has done
them it takes what the others have not begun. So nobody waits long for a thread that comes late, or whose core is slower
or busy with something else. A thread of the pool looks at its lane for a short time after its last task: the next op of
a layer comes within microseconds, and waking a thread that sleeps, or waiting for the GIL, takes tens of them.

The pool's memory is int64 [BLOCK + threads x LANE]: the block (whether a part has failed, the kernel's address, its
arguments as Numba passes them), then the lanes, of which the calling thread has the first; there it also says where the
parts are.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from threading import Lock
from typing import Any, Final, NamedTuple

from llvmlite import ir
from numba import types

from hepti_mqtt.kernels.machine.jit import (
    INT,
    INT_ARRAY,
    TABLE,
    compile_first,
    entry_of,
    helper,
    in_cache,
    kernel,
    lowered,
    template,
)
from hepti_mqtt.kernels.machine.jit import divided as divided_kernels

# Places in the block, and its size.
FAILED, _ADDRESS, BLOCK = 0, 1, 112
# Places in a lane, and its size: two cache lines, so that no two threads write to one, nor to a pair fetched together.
# _BEGUN, in the second line, counts the thread's parts that anybody has begun.
STATE, ASLEEP, _NUMBER, _BEGUN, LANE = 0, 1, 2, 8, 16
# Places in the first lane, where all parts are.
_ENTRY, _FIRST, _COUNT, _STRIDE, _THREADS = 3, 4, 5, 6, 7

# States of a lane. Its thread makes TAKEN of ISSUED, and IDLE when the parts are done. The calling thread takes a lane
# back that is still ISSUED, and makes AWAITED of TAKEN before it sleeps until that thread wakes it. CALLED sends the
# thread to its queue.
IDLE, _ISSUED, _TAKEN, AWAITED, CALLED = range(5)

# Looks between two offers of the core to other threads, so that two models on one core do not wait for each other.
_LOOKS: Final = 256
_CAN_YIELD: Final = hasattr(os, "sched_yield")

_I64: Final = ir.IntType(64)
_SUCCESS: Final = (0, -2)  # what compiled code returns that returns a value, or None


def _at(builder: Any, place: Any, *indices: int) -> Any:
    return builder.gep(place, [ir.IntType(32)(i) for i in indices])


def _emit_write(_context: Any, address: Any, arguments: Any, part: Any, block: Any) -> Any:
    """Write a kernel's address and arguments to the block; return the address of code that runs a part of it."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        fixed, varying = signature.args[1].types, signature.args[2].types
        taken = [_lent(context, builder, kind, builder.extract_value(values[1], i)) for i, kind in enumerate(fixed)]
        flat = context.get_arg_packer(fixed).as_arguments(builder, taken)
        if 2 + len(flat) > BLOCK:
            raise ValueError(f"arguments of {fixed} do not fit into a block of {BLOCK} values; make it larger")
        layout = ir.LiteralStructType([_I64, _I64, *(value.type for value in flat)])
        place = builder.inttoptr(values[3], layout.as_pointer())
        for i, value in enumerate((values[0], *flat)):
            builder.store(value, _at(builder, place, 0, _ADDRESS + i))
        called = context.call_conv.get_function_type(types.none, (*fixed, *varying))
        return builder.ptrtoint(_part_of(builder.module, layout, called, len(varying)), _I64)

    return types.int64(address, arguments, part, block), codegen


def _lent(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    """Return an argument without its owner: nothing counts references to what the caller's Python keeps alive.

    A thread that is AWAITED runs on when compiled code of the caller has returned and its counters are gone.
    """
    if not isinstance(kind, types.Array):
        return value
    array = context.make_array(kind)(context, builder, value)
    array.meminfo, array.parent = (ir.Constant(member.type, None) for member in (array.meminfo, array.parent))
    return array._getvalue()


def _part_of(module: Any, layout: Any, called: Any, width: int) -> Any:
    """Return the function of (block, part) that calls the block's kernel with its arguments and `width` of the part."""
    function = ir.Function(module, ir.FunctionType(_I64, [_I64, _I64]), name="hepti_part")
    function.linkage = "internal"
    builder = ir.IRBuilder(function.append_basic_block())
    block = builder.inttoptr(function.args[0], layout.as_pointer())
    part = builder.inttoptr(function.args[1], _I64.as_pointer())
    address, *fixed = (builder.load(_at(builder, block, 0, i)) for i in range(_ADDRESS, len(layout.elements)))
    varying = [builder.load(_at(builder, part, i)) for i in range(width)]
    result, error = (builder.alloca(argument.pointee) for argument in called.args[:2])
    code = builder.call(builder.inttoptr(address, called.as_pointer()), [result, error, *fixed, *varying])
    good = builder.or_(*(builder.icmp_signed("==", code, code.type(value)) for value in _SUCCESS))
    builder.ret(builder.zext(builder.not_(good), _I64))
    return function


def _emit_call(_context: Any, entry: Any, block: Any, part: Any) -> Any:
    def codegen(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        function = builder.inttoptr(values[0], ir.FunctionType(_I64, [_I64, _I64]).as_pointer())
        return builder.call(function, values[1:])

    return types.int64(entry, block, part), codegen


def _emit_get(_context: Any, address: Any) -> Any:
    def codegen(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(values[0], _I64.as_pointer()), "acquire", 8)

    return types.int64(address), codegen


def _emit_put(_context: Any, address: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        builder.store_atomic(values[1], builder.inttoptr(values[0], _I64.as_pointer()), "release", 8)
        return context.get_dummy_value()

    return types.void(address, value), codegen


def _emit_swap(_context: Any, address: Any, old: Any, new: Any) -> Any:
    def codegen(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        place = builder.inttoptr(values[0], _I64.as_pointer())
        return builder.extract_value(builder.cmpxchg(place, values[1], values[2], "acq_rel", "acquire"), 1)

    return types.boolean(address, old, new), codegen


def _emit_take(_context: Any, counter: Any) -> Any:
    def codegen(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return builder.atomic_rmw("add", builder.inttoptr(values[0], _I64.as_pointer()), _I64(1), "monotonic")

    return types.int64(counter), codegen


def _emit_pass_on(_context: Any) -> Any:
    def codegen(context: Any, builder: Any, _signature: Any, _values: Any) -> Any:
        if _CAN_YIELD:
            module = builder.module
            name = "sched_yield"
            call = module.globals.get(name) or ir.Function(module, ir.FunctionType(ir.IntType(32), []), name)
            builder.call(call, [])
        return context.get_dummy_value()

    return types.void(), codegen


def _compiled_alone(*_arguments: Any) -> Any:
    raise NotImplementedError("parts are handed over by compiled code alone; without it the pool's queues carry them")


_write: Final = lowered(_emit_write, _compiled_alone)
_call: Final = lowered(_emit_call, _compiled_alone)
_get: Final = lowered(_emit_get, _compiled_alone)
_put: Final = lowered(_emit_put, _compiled_alone)
_swap: Final = lowered(_emit_swap, _compiled_alone)  # whether the value was the old one and is the new one now
_take: Final = lowered(_emit_take, _compiled_alone)  # the value, which is one more from then on
_pass_on: Final = lowered(_emit_pass_on, _compiled_alone)  # lets another thread that waits for this core run


@helper
def _run(lanes: int, number: int) -> None:
    """Run the parts of this thread, then those that the others have not begun; lanes: the address of the first."""
    block = lanes - 8 * BLOCK
    entry, first, stride = _get(lanes + 8 * _ENTRY), _get(lanes + 8 * _FIRST), _get(lanes + 8 * _STRIDE)
    count, threads = _get(lanes + 8 * _COUNT), _get(lanes + 8 * _THREADS)
    failed = 0
    for turn in range(threads):
        whose = (number + turn) % threads
        begun = lanes + 8 * (LANE * whose + _BEGUN)
        part = whose + threads * _take(begun)
        while part < count:
            failed |= _call(entry, block, first + part * stride)
            part = whose + threads * _take(begun)
    if failed:
        _put(block + 8 * FAILED, 1)


@kernel(INT, INT)
def serve(lane: int, polls: int) -> None:
    """Run what is issued in the lane at this address, until nothing was in `polls` looks, or the caller wants more."""
    _put(lane + 8 * ASLEEP, 0)
    look = 0
    while look < polls or look == 0:
        look += 1
        state = _get(lane + 8 * STATE)
        if state == CALLED:
            _put(lane + 8 * STATE, IDLE)
            break
        if state == _ISSUED and _swap(lane + 8 * STATE, _ISSUED, _TAKEN):
            number = _get(lane + 8 * _NUMBER)
            _run(lane - 8 * LANE * number, number)
            if not _swap(lane + 8 * STATE, _TAKEN, IDLE):
                return
            look = 0
        elif look % _LOOKS == 0:
            _pass_on()
    _put(lane + 8 * ASLEEP, 1)


def _share(address: int, arguments: Any, part: Any, parts: Any, memory: Any, threads: int, polls: int) -> int:
    """Run the kernel at `address` for every row of `parts` on so many threads; return how many lanes are AWAITED."""
    block = memory.ctypes.data
    lanes = block + 8 * BLOCK
    _put(lanes + 8 * _ENTRY, _write(address, arguments, part, block))
    _put(lanes + 8 * _FIRST, parts.ctypes.data)
    _put(lanes + 8 * _COUNT, len(parts))
    _put(lanes + 8 * _STRIDE, 8 * parts.shape[1])
    _put(lanes + 8 * _THREADS, threads)
    for i in range(threads):
        _put(lanes + 8 * (LANE * i + _BEGUN), 0)
    for i in range(1, threads):
        _put(lanes + 8 * (LANE * i + _NUMBER), i)
        _put(lanes + 8 * (LANE * i + STATE), _ISSUED)
    _run(lanes, 0)
    for i in range(1, threads):
        _swap(lanes + 8 * (LANE * i + STATE), _ISSUED, IDLE)
    awaited = 0
    for i in range(1, threads):
        state = lanes + 8 * (LANE * i + STATE)
        for look in range(1, polls + 1):
            if _get(state) == IDLE:
                break
            if look % _LOOKS == 0:
                _pass_on()
        if _swap(state, _TAKEN, AWAITED):
            awaited += 1
    return awaited


class Shared(NamedTuple):
    """A kernel as `_share` takes it: `call(address, arguments, part, parts, memory, threads, polls)`."""

    call: Callable[..., int]
    address: int


_sharing: Final = template(_share)
_preparing: Final = Lock()

# The kernels that are divided into parts and were compiled when `prepare` was called.
shared: Final[dict[Any, Shared]] = {}


def prepare() -> None:
    """Compile, or load from the cache, the kernels of f32 weights and how parts of all that are there are handed over.

    Parts of the others go by the pool's queues.
    """
    compile_first()
    with _preparing:
        for dispatcher, (arguments, width) in divided_kernels.items():
            if dispatcher not in shared and dispatcher.signatures:
                shared[dispatcher] = shared_of(dispatcher, arguments, width)


def shared_of(dispatcher: Any, arguments: tuple[Any, ...], width: int) -> Shared:
    """Return the compiled kernel of these argument types, of which the last `width` say the part, to be shared."""
    return Shared(entry_of(_sharing, _taken(arguments, width))[0], entry_of(dispatcher, arguments)[1])


def shared_in_cache(dispatcher: Any) -> bool:
    """Return whether the cache has what hands over the parts of a kernel, or it has none."""
    return dispatcher not in divided_kernels or in_cache(_sharing, _taken(*divided_kernels[dispatcher]))


def _taken(arguments: tuple[Any, ...], width: int) -> tuple[Any, ...]:
    of: Any = types.Tuple  # without types in Numba
    return (INT, of(arguments[:-width]), of((types.int64,) * width), TABLE, INT_ARRAY, INT, INT)
