"""Passes over Programs, the same for every method: joined copies, narrow dtypes on the wire and in memory, routes.

First: joined copies. A table that needs parts of several devices' messages copies a part of each, then assembles the
parts. One op does both: each op costs 0.1 ms besides its kernel, and each copy memory bandwidth.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from hepti_mqtt.core.ids import PLANNER
from hepti_mqtt.core.plan import DevicePair, Range, Route, WeightDtype, WireDtype
from hepti_mqtt.core.program import (
    Compute,
    Op,
    Program,
    Recv,
    Send,
    Slot,
    SlotDtype,
    SlotSpec,
    WeightRef,
    fuse_ops,
    slots_read,
    slots_written,
)
from hepti_mqtt.core.storage import BLOCK_STORAGES

_KERNEL: Final = "assemble"
_Place = tuple[Range, ...]


class _Copy(NamedTuple):
    """A copy of a rectangle of a slot."""

    slot: Slot
    source: _Place
    target: _Place


def merge_copies(program: Program) -> Program:
    """Return `program` without slots that are assembled only to be assembled again."""
    between = _between(program)
    if not between:
        return program
    copies_into: dict[Slot, list[_Copy]] = {}
    ops: list[Op] = []
    for op in program.ops:
        if not isinstance(op, Compute) or op.kernel != _KERNEL:
            ops.append(op)
            continue
        copies = [c for copy in _copies(op) for c in _resolve(copy, copies_into)]
        if op.writes[0] in between:
            copies_into[op.writes[0]] = copies
        else:
            ops.append(_assemble(op, copies) if any(slot in copies_into for slot in op.reads) else op)
    return drop_buffers(program, between, ops)


def _between(program: Program) -> set[Slot]:
    """Return the slots that an assemble fills and that only other assembles read."""
    filled = {op.writes[0] for op in program.ops if isinstance(op, Compute) and op.kernel == _KERNEL}
    filled -= {spec.base for spec in program.slots if spec.base is not None}
    filled -= {slot for slot in filled if program.slots[slot].state}
    read_by_others: set[Slot] = set()
    read: set[Slot] = set()
    for op in program.ops:
        slots = slots_read(op)
        read.update(slots)
        if not isinstance(op, Compute) or op.kernel != _KERNEL:
            read_by_others.update(slots)
    return (filled & read) - read_by_others


def _copies(op: Compute) -> Iterator[_Copy]:
    for n, source, target in op.attrs["copies"]:
        yield _Copy(op.reads[n], tuple(source), tuple(target))


def _resolve(copy: _Copy, copies_into: Mapping[Slot, list[_Copy]]) -> Iterator[_Copy]:
    """Yield a copy; if its slot is itself assembled, the equivalent copies of that slot's parts."""
    if copy.slot not in copies_into:
        yield copy
        return
    for part in copies_into[copy.slot]:
        both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(copy.source, part.target, strict=True)]
        if all(a < b for a, b in both):
            source = _moved(both, part.target, part.source)
            yield _Copy(part.slot, source, _moved(both, copy.source, copy.target))


def _moved(ranges: list[Range], origin: _Place, to: _Place) -> _Place:
    """Return ranges relative to `origin` as ranges relative to `to`."""
    return tuple((a - o[0] + t[0], b - o[0] + t[0]) for (a, b), o, t in zip(ranges, origin, to, strict=True))


def _assemble(op: Compute, copies: list[_Copy]) -> Compute:
    reads = tuple(dict.fromkeys(copy.slot for copy in copies))
    numbered = tuple((reads.index(c.slot), c.source, c.target) for c in copies)
    return op._replace(reads=reads, attrs={**op.attrs, "copies": numbered})


def drop_buffers(program: Program, gone: set[Slot], ops: list[Op]) -> Program:
    """Return a Program of these ops with its slots renumbered, without the slots in `gone`."""
    kept = [slot for slot in range(len(program.slots)) if slot not in gone]
    new = {slot: n for n, slot in enumerate(kept)}
    slots = tuple(
        spec if spec.base is None else spec._replace(base=new[spec.base])
        for spec in (program.slots[slot] for slot in kept)
    )

    def numbered(op: Op) -> Op:
        if isinstance(op, Compute):
            return op._replace(reads=tuple(new[s] for s in op.reads), writes=tuple(new[s] for s in op.writes))
        return op._replace(slot=new[op.slot])

    return replace(program, slots=slots, ops=tuple(map(numbered, ops)))


# ----------------------------------------------------------------------------------------------------------------------
# Narrow dtypes on the wire: a pass from Program to Program.
#
# Each exchanged value is converted once before sending and once after receiving; exchanges with the planner keep
# their dtype. Rows are converted one by one, so a range of rows of a converted value can be sent too. A relayed value
# is not narrowed again in f16, since the bits would be equal; in i8 it is, since its scale may differ.


SCALE_BYTES: Final = 4  # an i8 row ends with its scale as four raw bytes


def narrow_spec(spec: SlotSpec, wire: SlotDtype) -> SlotSpec:
    """Return the spec of a slot on the wire."""
    *others, columns = spec.shape
    return SlotSpec((*others, columns + SCALE_BYTES if wire == "i8" else columns), wire)


def narrow_wire(program: Program, wire: WireDtype) -> Program:
    """Return `program` with its exchanges between devices in `wire`; "f32" changes nothing."""
    if wire == "f32":
        return program
    slots: list[SlotSpec] = list(program.slots)
    ops: list[Op] = []
    narrowed: dict[Slot, Slot] = {}

    def twin(slot: Slot) -> Slot:
        slots.append(narrow_spec(slots[slot], wire))
        return len(slots) - 1

    def sent(op: Send) -> Slot:
        """Return the narrow twin of a sent slot: the same rows of its base's twin."""
        spec = program.slots[op.slot]
        base = program.base(op.slot)
        if program.slots[base].shape[1:] != spec.shape[1:]:
            base = op.slot  # rows of another shape cannot be rows of the base's twin
        if base not in narrowed:
            narrowed[base] = twin(base)
            ops.append(Compute(f"to_{wire}", (base,), (narrowed[base],), layer=op.layer, node=op.node))
        if base == op.slot:
            return narrowed[base]
        slots.append(narrow_spec(spec, wire)._replace(base=narrowed[base], start=spec.start))
        return len(slots) - 1

    for op in program.ops:
        if isinstance(op, Send) and op.to != (PLANNER,) and not op.exact:
            slot = sent(op)
            ops.append(op._replace(slot=slot))
        elif isinstance(op, Recv) and op.source != PLANNER and not op.exact:
            arriving = twin(op.slot)
            if wire == "f16":
                narrowed[op.slot] = arriving
            ops.append(op._replace(slot=arriving))
            ops.append(Compute(f"from_{wire}", (arriving,), (op.slot,), layer=op.layer, node=op.node))
        else:
            ops.append(op)
    return replace(program, slots=tuple(slots), ops=tuple(ops))


# ----------------------------------------------------------------------------------------------------------------------
# Values that are received narrow and only assembled are widened by the assemble: a pass from Program to Program.
#
# The kernel reads the frame directly, without an op and an array for each part.


WIDENING: Final = frozenset({"from_f16", "from_i8"})


def widen_in_assemble(program: Program) -> Program:
    """Return `program` without the slots that are widened only to be assembled; the values have the same bits."""
    wide = _only_assembled(program)
    if not wide:
        return program
    slots: list[SlotSpec] = list(program.slots)
    views = {slot: spec for slot, spec in enumerate(slots) if spec.base in wide}
    twins = dict(wide)
    for slot, spec in views.items():
        twins[slot] = len(slots)
        narrow = narrow_spec(spec, slots[wide[program.base(slot)]].dtype)
        slots.append(narrow._replace(base=wide[program.base(slot)], start=spec.start))
    ops: list[Op] = []
    for op in program.ops:
        if isinstance(op, Compute) and op.kernel in WIDENING and op.writes[0] in wide:
            continue
        if isinstance(op, Compute) and op.kernel == _KERNEL:
            op = op._replace(reads=tuple(twins.get(slot, slot) for slot in op.reads))
        ops.append(op)
    return drop_buffers(replace(program, slots=tuple(slots)), {*wide, *views}, ops)


def _only_assembled(program: Program) -> Mapping[Slot, Slot]:
    """Return {wide slot: narrow slot} of widened slots that only assembles read, in rows of equal shape."""
    assembled = {op.writes[0]: op.reads[0] for op in program.ops if isinstance(op, Compute) and op.kernel in WIDENING}
    for op in program.ops:
        for slot in slots_read(op):
            base = program.base(slot)
            same_rows = program.slots[slot].shape[1:] == program.slots[base].shape[1:]
            if not (isinstance(op, Compute) and op.kernel == _KERNEL and same_rows):
                assembled.pop(base, None)
    return assembled


# ----------------------------------------------------------------------------------------------------------------------
# Conversions are fused with the op that writes or first reads the value: a pass from Program to Program.
#
# An op costs 0.1 ms besides its kernel. Kernels, slots and bits stay the same; a slot that only parts of one op read
# is free after that op.


NARROWING: Final = frozenset({"to_f16", "to_i8"})


def fuse_conversions(program: Program) -> Program:
    """Return `program` with conversions fused with other ops, unless an op would wait longer."""
    ops: list[Op | None] = list(program.ops)
    _into_producers(program, ops)
    _into_readers(program, ops)
    return replace(program, ops=tuple(op for op in ops if op is not None))


def _into_producers(program: Program, ops: list[Op | None]) -> None:
    """Fuse each narrowing op into the op that produces its value; received values keep an op of their own."""
    producers = {slot: place for place, op in enumerate(program.ops) for slot in slots_written(op)}
    for place, op in enumerate(program.ops):
        if not isinstance(op, Compute) or op.kernel not in NARROWING:
            continue
        at = producers.get(program.base(op.reads[0]))
        producer = None if at is None else ops[at]
        if at is not None and isinstance(producer, Compute):
            ops[at], ops[place] = fuse_ops(program, (producer, op), producer), None


def _into_readers(program: Program, ops: list[Op | None]) -> None:
    """Fuse each widening op with the first op that reads its value, unless another reader could begin earlier."""
    readers: dict[Slot, list[int]] = defaultdict(list)
    for place, op in enumerate(ops):
        for slot in () if op is None else program.reads(op):
            readers[slot].append(place)
    for place, op in enumerate(ops):
        if not isinstance(op, Compute) or op.kernel not in WIDENING or op.fused:
            continue
        if not readers[op.writes[0]]:
            continue
        first, *others = readers[op.writes[0]]
        reader = ops[first]
        if isinstance(reader, Compute) and _may_wait(program, program.ops[first], [program.ops[o] for o in others]):
            ops[first], ops[place] = fuse_ops(program, (op, reader), reader), None


def _may_wait(program: Program, first: Op, others: Sequence[Op]) -> bool:
    """Return whether the other readers cannot begin before `first` in any case."""
    waits, makes = set(program.reads(first)), set(slots_written(first))
    return all(waits <= (slots := set(program.reads(o))) or makes & slots for o in others)


# ----------------------------------------------------------------------------------------------------------------------
# Routes of exchanges: a pass from Program to Program.
#
# Exchanges go over the broker, or over the mesh from the sender to each receiver. Those for the planner stay on the
# broker.


def set_routes(program: Program, route: Route, relayed: Collection[DevicePair] = ()) -> Program:
    """Return `program` with its exchanges between devices on `route`; "broker" changes nothing.

    relayed: (source, target) pairs that use the broker all the same. A Send to receivers of both kinds becomes two
    with one key, so that each receiver gets its exchange once.
    """
    if route == "broker":
        return program
    past = frozenset(relayed)
    ops: list[Op] = []
    for op in program.ops:
        ops += _ways(op, program.device, past) if isinstance(op, Send) else (op,)
    return replace(program, ops=tuple(ops))


def _ways(op: Send, source: str, relayed: frozenset[DevicePair]) -> tuple[Send, ...]:
    direct = tuple(to for to in op.to if to != PLANNER and (source, to) not in relayed)
    if not direct:
        return (op,)
    mesh = op._replace(to=direct, route="mesh")
    if len(direct) == len(op.to):
        return (mesh,)
    by_broker = op._replace(to=tuple(to for to in op.to if to not in direct))
    return by_broker, mesh  # the slower route first


# ----------------------------------------------------------------------------------------------------------------------
# Narrow weights in memory: a pass from Program to Program.
#
# The matrices of layers are stored narrow; stem, task head, biases and norms stay f32. If a model's layers read their
# matrices by other kernels than `linear`, it supports f32 only (`models.storages`).


_PREFIX = "layers."


_PRODUCTS = ("linear", "experts_up", "experts_down")  # kernels that multiply by matrices in blocks


def narrow_weight(ref: WeightRef, storage: WeightDtype) -> WeightRef:
    """Return a weight as stored in `storage`: only matrices of layers are narrow, except those in blocks."""
    if ref.weight_dtype not in BLOCK_STORAGES and ref.layout == "packed" and ref.tensor.startswith(_PREFIX):
        return ref._replace(weight_dtype=storage)
    return ref


def narrow_weights(program: Program, storage: WeightDtype) -> Program:
    """Return `program` with every packed matrix of its layers stored in `storage`.

    Matrices in blocks keep their storage; under w8a8 their kernels quantise activations to int8.
    """
    return replace(program, ops=tuple(_narrowed(op, storage) if isinstance(op, Compute) else op for op in program.ops))


def _narrowed(op: Compute, storage: WeightDtype) -> Compute:
    in_blocks = op.kernel in _PRODUCTS and any(ref.weight_dtype in BLOCK_STORAGES for ref in op.weights)
    attrs = {**op.attrs, "x": "i8"} if in_blocks and storage == "w8a8" else op.attrs
    fused = tuple(_narrowed(part, storage) for part in op.fused)
    return op._replace(weights=tuple(narrow_weight(ref, storage) for ref in op.weights), attrs=attrs, fused=fused)
