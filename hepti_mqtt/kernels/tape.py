"""Tapes: the calls of one or more ops as rows that a compiled loop runs one after the other, without the GIL.

A row is (wrapper, block, part, share). The block has the address of the kernel and its arguments as Numba passes them;
the wrapper, one for each signature, reads them there and calls the kernel. An array is a word of the block, too: its
address is written when a run enters the tape, so several runs may use one tape.

Arrays that only this tape uses lie in scratch memory: two of them share bytes if no call needs both. Numba, not this
module, decides how an argument is passed; `_emit_wrapper` asks it, and `_words` follows the layout of its arrays.

A row may also be a frame to or from a peer (`transfers`). Before `learn` the tape stops there, and leaves it to Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import zip_longest
from math import prod
from time import perf_counter_ns
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import types
from numpy.typing import NDArray

from hepti_mqtt.core.program import LINE_BYTES, Slot, lay_out
from hepti_mqtt.kernels import threads as pools
from hepti_mqtt.kernels import transfers
from hepti_mqtt.kernels.calls import Addresses, Call, Calls, Operand, Scratch, SizedChoice, received, sent
from hepti_mqtt.kernels.choice import Choice
from hepti_mqtt.kernels.jit import (
    INT,
    INT_ARRAY,
    JIT,
    TABLE,
    divided,
    entry,
    entry_of,
    helper,
    in_cache,
    kernel,
    lowered,
    registered,
    signature_of,
    template,
)
from hepti_mqtt.kernels.threads import Parts, Workers
from hepti_mqtt.kernels.transfers import NO_PEERS, Peers

Array = NDArray[Any]

_I64: Final = ir.IntType(64)
_SUCCESS: Final = (0, -2)  # results of compiled code that returns a value, or None
_WORD: Final = 8
# Runs without a measurement after a measured one.
_SKIPS: Final = 3
_NOTHING: Final[Mapping[Any, Any]] = MappingProxyType({})

# Columns of the rows. _SHARE: 0 for a call on one thread; for a divided call the address of (threads, parts, number of
# parts, bytes of a part); for a transfer, whose block is its descriptor, one of the numbers below.
_WRAPPER, _BLOCK, _PART, _SHARE, _COLUMNS = range(5)
_SENDS, _RECEIVES = -1, -2
# Places in a pool's `control` after its flag: limit in nanoseconds, 0 for none; number of polls of other threads; then
# the results: next row, code, lanes to wait for. `transfers` has more.
_LIMIT, _POLLS, _NEXT, _CODE, _LANES = range(1, 6)
# Why the loop returned. _ASLEEP: wake threads and try again. _LATE: wait for other threads; the row is done then.
# UNSENT, AWAITED: a row that Python has to send, or to wait for.
_DONE, _STOPPED, _ASLEEP, _LATE, _FAILED, UNSENT, AWAITED = range(7)
_RESULTS: Final = [transfers.WAITED, transfers.SPENT, transfers.SENT]
_EXCHANGES: Final = [transfers.RUN, transfers.WAKE, transfers.PATIENCE, *_RESULTS]


def _at(builder: Any, place: Any, *indices: int) -> Any:
    return builder.gep(place, [ir.IntType(32)(i) for i in indices])


def _emit_wrapper(_context: Any, fixed: Any, varying: Any) -> Any:
    """Write code of (block, part) that calls the block's kernel; return its address."""

    def codegen(context: Any, builder: Any, signature: Any, _values: Any) -> Any:
        first, last = (kind.instance_type.types for kind in signature.args)
        layout = ir.LiteralStructType([_I64, *context.get_arg_packer(first).argument_types])
        called = context.call_conv.get_function_type(types.none, (*first, *last))
        return builder.ptrtoint(_part_of(builder.module, layout, called, len(last)), _I64)

    return types.int64(fixed, varying), codegen


def _part_of(module: Any, layout: Any, called: Any, width: int) -> Any:
    """Return the function of (block, part) that calls the block's kernel with its arguments and `width` of the part."""
    function = ir.Function(module, ir.FunctionType(_I64, [_I64, _I64]), name="hepti_part")
    function.linkage = "internal"
    builder = ir.IRBuilder(function.append_basic_block())
    block = builder.inttoptr(function.args[0], layout.as_pointer())
    part = builder.inttoptr(function.args[1], _I64.as_pointer())
    address, *fixed = (builder.load(_at(builder, block, 0, i)) for i in range(len(layout.elements)))
    varying = [builder.load(_at(builder, part, i)) for i in range(width)]
    result, error = (builder.alloca(argument.pointee) for argument in called.args[:2])
    code = builder.call(builder.inttoptr(address, called.as_pointer()), [result, error, *fixed, *varying])
    good = builder.or_(*(builder.icmp_signed("==", code, code.type(value)) for value in _SUCCESS))
    builder.ret(builder.zext(builder.not_(good), _I64))
    return function


_wrapper: Final = lowered(_emit_wrapper, pools._compiled_alone)


@template
def _wrapping(fixed: Any, varying: Any) -> Any:
    return _wrapper(fixed, varying)


def _kinds(function: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the types of a kernel's arguments without the part, and of the part."""
    kinds = signature_of(function)
    assert kinds is not None
    width = divided.get(function, (kinds, 0))[1]
    return kinds[: len(kinds) - width], kinds[len(kinds) - width :]


def _wrapper_types(function: Any) -> tuple[Any, Any]:
    of: Any = types.Tuple  # without types in Numba
    return tuple(types.TypeRef(of(kinds)) for kinds in _kinds(function))  # type: ignore[return-value]


@cache
def wrapper_of(function: Any) -> int:
    """Return the address of the wrapper of a kernel, compiled or loaded if need be."""
    address: int = entry_of(_wrapping, _wrapper_types(function))[0](None, None)
    return address


@cache
def _code_of(function: Any) -> int:
    """Return the address of a kernel's code."""
    return entry_of(function, signature_of(function) or ())[1]


def wrapper_in_cache(function: Any) -> bool:
    """Return whether the cache has the wrapper of a kernel."""
    return in_cache(_wrapping, _wrapper_types(function))


def prepare() -> None:
    """Compile or load the wrappers of all kernels that are compiled."""
    for function, _ in registered:
        if function.signatures:
            wrapper_of(function)


@helper
def _share(row: Any, lanes: int, control: int) -> Any:
    """Run a kernel's parts on the threads that its row names, or all of it on this one; return why to stop."""
    share = row[_SHARE]
    threads = pools._get(share)
    if threads == 0:
        return _DONE
    if threads == 1:
        return _FAILED if pools._call(row[_WRAPPER], row[_BLOCK], row[_PART]) else _DONE
    for i in range(1, threads):
        if pools._get(lanes + 8 * (pools.LANE * i + pools.ASLEEP)):
            return _ASLEEP
    pools._put(lanes + 8 * pools.BLOCK, row[_BLOCK])
    pools._put(lanes + 8 * pools.ENTRY, row[_WRAPPER])
    pools._put(lanes + 8 * pools.FIRST, pools._get(share + 8))
    pools._put(lanes + 8 * pools.COUNT, pools._get(share + 16))
    pools._put(lanes + 8 * pools.STRIDE, pools._get(share + 24))
    pools._put(lanes + 8 * pools.THREADS, threads)
    for i in range(threads):
        pools._put(lanes + 8 * (pools.LANE * i + pools.BEGUN), 0)
    pools._put(lanes + 8 * pools.CORE, pools._core())
    for i in range(1, threads):
        pools._put(lanes + 8 * (pools.LANE * i + pools.STATE), pools.ISSUED)
    pools._run(lanes, 0)
    awaited = 0
    for i in range(1, threads):
        pools._swap(lanes + 8 * (pools.LANE * i + pools.STATE), pools.ISSUED, pools.IDLE)
    for i in range(1, threads):
        state = lanes + 8 * (pools.LANE * i + pools.STATE)
        for look in range(1, pools._get(control + 8 * _POLLS) + 1):
            if pools._get(state) == pools.IDLE:
                break
            if look % pools.LOOKS:
                pools._rest()
            else:
                pools._pass_on()
        if pools._swap(state, pools.TAKEN, pools.AWAITED):
            awaited += 1
    pools._put(control + 8 * _LANES, awaited)
    if awaited:
        return _LATE
    return _FAILED if pools._get(lanes + 8 * pools.FAILED) else _DONE


@kernel(TABLE, INT, INT, INT, INT_ARRAY, INT_ARRAY)
def _run_rows(rows: Any, first: int, stop: int, lanes: int, control: Any, times: Any) -> None:
    """Run rows first..stop. times [rows]: to which the nanoseconds of each row are added; empty for none."""
    at = control.ctypes.data
    limit, timed = control[_LIMIT], len(times) > 0
    now = begun = pools._now(at + 8 * pools.CLOCK) if limit > 0 or timed else 0
    place, code = first, _DONE
    while place < stop:
        if rows[place, _SHARE] == 0:
            if pools._call(rows[place, _WRAPPER], rows[place, _BLOCK], rows[place, _PART]):
                code = _FAILED
        elif rows[place, _SHARE] in (_SENDS, _RECEIVES):
            sends = rows[place, _SHARE] == _SENDS
            if not transfers.exchange(rows[place, _BLOCK], sends, at):
                code = UNSENT if sends else AWAITED
        else:
            code = _share(rows[place], lanes, at)
        if limit > 0 or timed:
            before, now = now, pools._now(at + 8 * pools.CLOCK)
            if timed:
                times[place] += now - before
        if code != _DONE:
            break
        place += 1
        if place < stop and (pools._get(at + 8 * pools.FLAG) or (limit > 0 and now - begun > limit)):
            code = _STOPPED
            break
    control[_NEXT], control[_CODE] = place, code


def _words(kinds: Sequence[Any], arguments: Sequence[Any]) -> tuple[bytes, list[tuple[int, Operand | Addresses]]]:
    """Return a block with these arguments, and the words, by number, for addresses of a run's memory."""
    block, places = bytearray(), list[tuple[int, Operand | Addresses]]()
    for kind, argument in zip(kinds, arguments, strict=True):
        if kind == types.float32:
            block += np.float32(argument).tobytes()
            continue
        block += bytes(-len(block) % _WORD)
        if not isinstance(kind, types.Array):
            block += int(argument).to_bytes(_WORD, "little", signed=True)
            continue
        is_table = isinstance(argument, Addresses)
        shape, itemsize = ((len(argument),), _WORD) if is_table else (argument.shape, argument.dtype.itemsize)
        address = 0
        if isinstance(argument, Operand | Addresses):
            places.append((len(block) // _WORD + 4, argument))
        else:
            assert argument.flags.c_contiguous
            address = argument.__array_interface__["data"][0]
        strides = [itemsize * prod(shape[d + 1 :]) for d in range(len(shape))]
        block += np.array([0, 0, prod(shape), itemsize, address, *shape, *strides], np.int64).tobytes()
    return bytes(block + bytes(-len(block) % _WORD)), places


class Tape:
    """Calls of ops as rows. It owns the memory that its rows point to, except the arrays that `run` takes.

    slots: the slots of these arrays, in their order. nbytes: of scratch memory.
    """

    def __init__(
        self,
        ops: Sequence[Calls],
        pool: Workers,
        externals: Sequence[Slot],
        growing: Iterable[Slot] = (),
    ) -> None:
        """Make the rows. growing: externals with as many rows as their arrays have."""
        self._externals: dict[Slot | Scratch, int] = {slot: i for i, slot in enumerate(externals)}
        self.slots = tuple(externals)
        self.calls = [call for calls in ops for call in calls]
        #: first row of each op, then the number of rows
        self.starts = np.cumsum([0, *map(len, ops)]).tolist()
        self._pool, self._growing = pool, tuple(growing)
        #: index of each received array among the received arrays
        arrays = [call.arguments[0] for call in self.calls if call.function is received]
        self._received = {array.memory: number for number, array in enumerate(arrays)}
        #: received arrays that are too large for scratch memory: they stay in the memory of their frames
        self._foreign = {array.memory for array in arrays if array.nbytes > transfers.LARGEST}
        self._offsets, nbytes = lay_out(self._uses())
        self.nbytes = nbytes + LINE_BYTES if nbytes else 0  # a line more, for its alignment
        #: rows of each choice, by op
        self._choices: dict[Choice | SizedChoice, dict[int, list[int]]] = {}
        for row, call in enumerate(self.calls):
            if call.choice is not None:
                self._choices.setdefault(call.choice, {}).setdefault(self.op_at(row), []).append(row)
        #: the choice in use for each of them; of a `SizedChoice`, the one for the size of the work
        self._in_force = {each: each if isinstance(each, Choice) else pool.alone for each in self._choices}
        self._skips, self._bases = 0, list[int]()
        #: index in `_addresses` of the extent of each growing external
        self._extents = {self._externals[slot]: at for at, slot in enumerate(self._growing, len(self.slots))}
        #: addresses of the last run's externals, then the extents of the growing ones; address of its scratch memory
        self._addresses, self._base = [0] * (len(self.slots) + len(self._growing)), 0
        #: nanoseconds of each row, and whether the current run adds to them
        self._times, self._timed = np.zeros(len(self.calls), np.int64), False
        #: whether all rows of the last run were measured, and the row that ran last, or failed
        self.measured, self.row = False, 0
        #: why the last run stopped; bytes that it sent to peers, seconds that it waited for them and exchanged
        self.code, self.sent_bytes, self.waited_s, self.exchanged_s = _DONE, 0, 0.0, 0.0
        self._arrays: Sequence[Array] = ()
        self._delivered: Mapping[Slot, Array] = _NOTHING
        self._heads = dict[int, Array]()
        self._scratch = np.empty(0, np.uint8)
        #: of each row with a choice: threads; address, number and bytes of its parts
        self._shares = np.zeros((len(self.calls), 4), np.int64)
        self._rows = np.zeros((len(self.calls), _COLUMNS), np.int64)
        self._choose()
        if JIT:
            self._write()

    def _uses(self) -> dict[Any, tuple[int, int, int]]:
        """Return the first and last call of each array in scratch memory, and its bytes."""
        uses: dict[Any, tuple[int, int, int]] = {}
        for place, call in enumerate(self.calls):
            for each in call.operands():
                if each.memory not in self._externals and each.memory not in self._foreign:
                    first, _, nbytes = uses.get(each.memory, (place, 0, 0))
                    uses[each.memory] = first, place, max(nbytes, each.start + each.nbytes)
        return uses

    def _write(self) -> None:
        """Write blocks and rows, and record the words for addresses of a run's memory."""
        blocks, tables = bytearray(), list[tuple[int, int]]()
        patches: list[tuple[int, int, int]] = []  # word, index in the bases of a run, bytes to add
        growing: dict[Slot | Scratch, int] = {
            slot: 1 + len(self._externals) + i for i, slot in enumerate(self._growing)
        }

        for row, call in enumerate(self.calls):
            if call.function in (sent, received):
                begin, array = len(blocks) // _WORD, call.arguments[0]
                if call.function is sent:
                    self._rows[row, [_BLOCK, _SHARE]] = len(blocks), _SENDS
                    patches.append((begin + transfers.SENT_PLACE, *self._base_of(array)))
                else:
                    self._rows[row, [_BLOCK, _SHARE]] = len(blocks), _RECEIVES
                    patches.append((begin + transfers.PLACE, *self._base_of(array)))
                    patches.append((begin + transfers.FILLED, self._filled + self._received[array.memory], 0))
                blocks += bytes(_WORD * transfers.WORDS)
                continue
            block, places = _words(_kinds(call.function)[0], call.arguments)
            self._rows[row, _WRAPPER], self._rows[row, _BLOCK] = wrapper_of(call.function), len(blocks)
            code = _code_of(call.function)
            begin = len(blocks) // _WORD + 1
            blocks += int(code).to_bytes(_WORD, "little") + block
            for word, argument in places:
                if isinstance(argument, Operand):
                    patches.append((begin + word, *self._base_of(argument)))
                    if argument.memory in growing and argument.start == 0:  # the word after the address: the extent
                        patches.append((begin + word + 1, growing[argument.memory], 0))
                else:
                    at = len(blocks) // _WORD
                    tables.append((begin + word, at))
                    patches += [(at + i, *self._base_of(each)) for i, each in enumerate(argument)]
                    blocks += bytes(_WORD * len(argument))
            self._rows[row, _PART] = len(blocks)
            if call.parts is not None:
                blocks += np.array(call.parts.whole(), np.int64).tobytes()
            if call.choice is not None:
                if call.parts is not None:
                    table = call.parts.table
                    at = table.__array_interface__["data"][0]
                    self._shares[row, 1:] = at, len(table), _WORD * table.shape[1]
                self._rows[row, _SHARE] = self._shares[row].__array_interface__["data"][0]
        self._blocks = np.frombuffer(blocks, np.int64)
        base = self._blocks.__array_interface__["data"][0]
        self._rows[:, [_BLOCK, _PART]] += base
        for word, begin in tables:
            self._blocks[word] = base + _WORD * begin
        self._patched, self._sources, self._added = np.array(patches, np.int64).reshape(-1, 3).T.copy()

    @property
    def _arrived(self) -> int:
        """Return the index in a run's bases of the first received array; `_filled`: of the first flag of arrival."""
        return 1 + len(self._externals) + len(self._growing)

    @property
    def _filled(self) -> int:
        return self._arrived + len(self._received)

    def _base_of(self, each: Operand) -> tuple[int, int]:
        """Return (index in the bases of a run, offset in bytes) of an operand."""
        place = self._externals.get(each.memory)
        if place is not None:
            return 1 + place, each.start
        number = self._received.get(each.memory)
        if number is not None:
            return self._arrived + number, each.start
        return 0, self._offsets[each.memory] + each.start

    def _choose(self) -> None:
        """Decide on the threads of each row with a choice."""
        is_open = self._pool.is_open
        for choice, ops in self._choices.items():
            threads = self._in_force[choice].threads if is_open else 1
            for row in (row for rows in ops.values() for row in rows):
                call = self.calls[row]
                self._shares[row, 0] = threads if call.least <= threads <= call.most else 0

    def _resize(self) -> bool:
        """Select the choices for the work of a run; return whether one has changed."""
        changed = False
        for each in self._choices:
            if isinstance(each, SizedChoice):
                choice = self._pool.choice_of(each, self._array(each.work.held))
                changed |= choice is not self._in_force[each]
                self._in_force[each] = choice
        return changed

    def _place(self, arrays: Sequence[Array], scratch: Array | None, delivered: Mapping[Slot, Array]) -> None:
        """Write the addresses of a run's arrays."""
        if scratch is None or len(scratch) < self.nbytes:
            scratch = np.empty(self.nbytes, np.uint8)
        before, self._arrays, self._delivered = self._arrays, arrays, delivered
        if not JIT:
            self._scratch = scratch
            return
        # Reading an address takes long, and most arrays are those of the last run, which `_arrays` keeps alive.
        if scratch is not self._scratch:
            self._scratch, self._base = scratch, scratch.__array_interface__["data"][0]
            self._base += -self._base % LINE_BYTES
        for place, (array, same) in enumerate(zip_longest(arrays, before)):
            if array is not same:
                self._addresses[place] = array.__array_interface__["data"][0]
                if (at := self._extents.get(place)) is not None:
                    self._addresses[at] = len(array)
        bases = [self._base, *self._addresses]
        bases += [self._base + self._offsets.get(slot, 0) for slot in self._received]
        bases += [0] * len(self._received)
        for slot, array in delivered.items():
            number = self._received[slot]
            bases[self._arrived + number] = array.__array_interface__["data"][0]
            bases[self._filled + number] = 1
        if bases != self._bases:
            self._bases = bases
            self._blocks[self._patched] = np.array(bases, np.int64)[self._sources] + self._added

    def learn(self, row: int, channel: int, head: bytes, counted: int) -> NDArray[np.int64]:
        """Let compiled code send or receive a row's frame by a channel, which must live as long as the tape.

        head: the bytes before the array; they end with the run id. counted: bytes that the channel counts. Returns the
        head's last words, which may be changed between runs.
        """
        nbytes = self.calls[row].operands()[0].nbytes
        own = self._heads[row] = transfers.describe(self._descriptor(row), channel, head, nbytes, counted)
        self._bases = []  # so that the next run writes the body's address
        return own[: own.size // 2]

    def forget(self, row: int) -> None:
        """Leave a row's frame to Python."""
        if self._heads.pop(row, None) is not None:
            self._descriptor(row)[0] = 0

    def knows(self, row: int) -> bool:
        """Return whether compiled code sends or receives a row's frame."""
        return row in self._heads

    def unsent(self, row: int) -> tuple[tuple[bytes, Array], int] | None:
        """Return the parts of an UNSENT frame, and the number of its sent bytes; None if nothing was sent."""
        if row not in self._heads or not (sent := int(self._descriptor(row)[transfers.DONE_BYTES])):
            return None
        return (transfers.sent_head(self._descriptor(row), self._heads[row]), self.array_of(row)), sent

    def came(self, row: int) -> bytes:
        """Return the bytes that were read for an AWAITED row, of an incomplete or another frame; empty if none were."""
        if row not in self._heads:
            return b""
        return transfers.came(self._descriptor(row), self._heads[row], self.array_of(row).data.cast("B"))

    def array_of(self, row: int) -> Array:
        """Return the array of a transfer in the current run."""
        return self._array(self.calls[row].operands()[0])

    def _descriptor(self, row: int) -> NDArray[np.int64]:
        at = int(self._rows[row, _BLOCK] - self._blocks.__array_interface__["data"][0]) // _WORD
        return self._blocks[at : at + transfers.WORDS]

    def run(
        self,
        arrays: Sequence[Array],
        scratch: Array | None = None,
        first: int = 0,
        stop: int | None = None,
        limit_s: float = 0.0,
        delivered: Mapping[Slot, Array] = _NOTHING,
        peers: Peers = NO_PEERS,
    ) -> int:
        """Run rows from `first` on; return the next row: `stop`, or an earlier one (see `code`).

        arrays: of `externals`, contiguous, of the dtypes of their slots, which is not checked. scratch: u8 [nbytes] or
        more, the same for all rows of a run; None if the run is not interrupted. limit_s: 0 for none. delivered: arrays
        that Python received for rows. Raises the error of a row. `code` says why the tape stopped.
        """
        stop = len(self.calls) if stop is None else stop
        self._place(arrays, scratch, delivered)
        changed = False
        if first == 0:
            changed = self._resize()
            self._timed = self._skips == 0 or changed
            self._skips = max(self._skips - 1, 0)
            self._times[:] = 0
        if self._choices and (self._timed or not self._pool.is_open):
            self._choose()
        times = self._times if self._timed else self._times[:0]
        self.code, control = _DONE, self._pool.control
        control[_EXCHANGES] = *peers, 0, 0, 0
        place, woke = (self._run_compiled if JIT else self._run_plain)(first, stop, int(1e9 * limit_s), times)
        waited, spent, self.sent_bytes = control[_RESULTS].tolist()
        self.waited_s, self.exchanged_s = 1e-9 * waited, 1e-9 * (spent - waited)
        self.measured = self._timed and place == len(self.calls)
        if self.measured:
            self._note(woke)
        return place

    def _run_compiled(self, first: int, stop: int, limit_ns: int, times: NDArray[np.int64]) -> tuple[int, bool]:
        pool, place, woke, run = self._pool, first, False, entry(_run_rows)
        control, lanes = pool.control, pool.memory.__array_interface__["data"][0]
        control[_LIMIT], control[_POLLS] = limit_ns, pool.polls
        while place < stop:
            run(self._rows, place, stop, lanes, control, times)
            place, code = int(control[_NEXT]), int(control[_CODE])
            self.code = code
            if code in (_STOPPED, UNSENT, AWAITED):
                break
            if code == _ASLEEP:
                woke |= pool.wake(int(self._shares[place, 0]))
                continue
            if code == _LATE:
                pool.wait(int(control[_LANES]))
            if code == _FAILED or pool.memory[pools.FAILED]:
                self._fail(place)
            place += code != _DONE
        return place, woke

    def _run_plain(self, first: int, stop: int, limit_ns: int, times: NDArray[np.int64]) -> tuple[int, bool]:
        control, begun = self._pool.control, perf_counter_ns()
        for place in range(first, stop):
            call, self.code = self.calls[place], _DONE
            if call.function is sent or (call.function is received and call.arguments[0].memory not in self._delivered):
                self.code = UNSENT if call.function is sent else AWAITED
                return place, False
            if call.function is not received:
                self._run_plainly(place, times)
            if control[pools.FLAG] or (limit_ns and perf_counter_ns() - begun > limit_ns):
                return place + 1, False
        return stop, False

    def _run_plainly(self, place: int, times: NDArray[np.int64]) -> None:
        """Run a row in Python."""
        self.row, call, begun = place, self.calls[place], perf_counter_ns()
        if call.choice is not None and not self._shares[place, 0]:
            return
        try:
            call.function(*call.resolved(self._array), *(() if call.parts is None else call.parts.whole()))
        except ValueError:
            if call.refuse is not None:
                call.refuse(*call.resolved(self._array))
            raise
        if len(times):
            times[place] += perf_counter_ns() - begun

    def _array(self, each: Operand) -> Array:
        """Return an operand's array in the current run."""
        at, memory = each.start, self._delivered.get(each.memory)  # type: ignore[arg-type]
        if memory is None and each.memory in self._externals:
            memory = self._arrays[self._externals[each.memory]]
        elif memory is None:
            at += self._offsets[each.memory]
            memory = self._scratch
            at += -memory.__array_interface__["data"][0] % LINE_BYTES
        values = memory.reshape(-1).view(np.uint8)[at : at + each.nbytes].view(each.dtype)
        is_whole = values.size == prod(each.shape)
        return values.reshape(each.shape if is_whole else (-1, *each.shape[1:]))

    def _fail(self, place: int) -> None:
        """Raise the error of a row that failed in compiled code."""
        self._pool.memory[pools.FAILED], self.row = 0, place
        call = self.calls[place]
        if call.refuse is not None:
            call.refuse(*call.resolved(self._array))
        raise MemoryError("a kernel could not get the memory that it computes in; give it more, or smaller requests")

    def _note(self, woke: bool) -> None:
        """Record the durations of ops in their choices, and decide when to measure again."""
        for each, ops in self._choices.items():
            choice = self._in_force[each]
            place = choice.next
            for rows in ops.values():
                choice.note(place, 1e-9 * float(self._times[rows].sum()), woke)
        self._skips = _SKIPS if all(choice.skips for choice in self._in_force.values()) else 0

    def op_at(self, row: int) -> int:
        """Return the number of a row's op."""
        return int(np.searchsorted(self.starts, row, side="right")) - 1

    def seconds(self) -> list[float]:
        """Return how long each op took in the last run, if that was `measured`."""
        until = np.concatenate([[0], np.cumsum(self._times)])[self.starts]
        seconds: list[float] = (1e-9 * np.diff(until)).tolist()
        return seconds


def share(pool: Workers, function: Callable[..., None], arguments: Sequence[Any], parts: Parts, threads: int) -> None:
    """Run a compiled kernel's parts on so many threads of a pool."""
    choice = Choice((threads,))
    Tape([[Call(function, tuple(arguments), parts, choice)]], pool, ()).run(())
