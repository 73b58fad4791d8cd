"""Copies of copies become one, for every strategy alike: a pass from Program to Program.

A table that needs parts of what several devices sent makes a part of each and puts the parts together. Every op costs a
device a tenth of a millisecond beside its kernel, and every copy the memory's time, so one op does both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from hepti_mqtt.ids import PLANNER
from hepti_mqtt.plan import DevicePair, Range, Route, WeightDtype, WireDtype
from hepti_mqtt.program import (
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
from hepti_mqtt.storage import BLOCK_STORAGES

_KERNEL: Final = "assemble"
_Place = tuple[Range, ...]


class _Copy(NamedTuple):
    """A rectangle of a slot and where it goes."""

    slot: Slot
    source: _Place
    target: _Place


def merge_copies(program: Program) -> Program:
    """Return `program` without the slots that are only assembled to be assembled again."""
    between = _between(program)
    if not between:
        return program
    made: dict[Slot, list[_Copy]] = {}
    ops: list[Op] = []
    for op in program.ops:
        if not isinstance(op, Compute) or op.kernel != _KERNEL:
            ops.append(op)
            continue
        copies = [c for copy in _copies(op) for c in _through(copy, made)]
        if op.writes[0] in between:
            made[op.writes[0]] = copies
        else:
            ops.append(_assemble(op, copies) if any(slot in made for slot in op.reads) else op)
    return drop_buffers(program, between, ops)


def _between(program: Program) -> set[Slot]:
    """Return the slots that an assemble fills and that others of its kind read, and nobody else."""
    found = {op.writes[0] for op in program.ops if isinstance(op, Compute) and op.kernel == _KERNEL}
    found -= {spec.base for spec in program.slots if spec.base is not None}
    found -= {slot for slot in found if program.slots[slot].state}
    others: set[Slot] = set()
    read_at_all: set[Slot] = set()
    for op in program.ops:
        slots = slots_read(op)
        read_at_all.update(slots)
        if not isinstance(op, Compute) or op.kernel != _KERNEL:
            others.update(slots)
    return (found & read_at_all) - others


def _copies(op: Compute) -> Iterator[_Copy]:
    for n, source, target in op.attrs["copies"]:
        yield _Copy(op.reads[n], tuple(source), tuple(target))


def _through(copy: _Copy, made: Mapping[Slot, list[_Copy]]) -> Iterator[_Copy]:
    """Yield a copy, or what it copies of the parts that its slot is put together of."""
    if copy.slot not in made:
        yield copy
        return
    for part in made[copy.slot]:
        both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(copy.source, part.target, strict=True)]
        if all(a < b for a, b in both):
            source = _moved(both, part.target, part.source)
            yield _Copy(part.slot, source, _moved(both, copy.source, copy.target))


def _moved(ranges: list[Range], origin: _Place, to: _Place) -> _Place:
    """Return ranges that are counted from `origin` as they are counted from `to`."""
    return tuple((a - o[0] + t[0], b - o[0] + t[0]) for (a, b), o, t in zip(ranges, origin, to, strict=True))


def _assemble(op: Compute, copies: list[_Copy]) -> Compute:
    reads = tuple(dict.fromkeys(copy.slot for copy in copies))
    numbered = tuple((reads.index(c.slot), c.source, c.target) for c in copies)
    return op._replace(reads=reads, attrs={**op.attrs, "copies": numbered})


def drop_buffers(program: Program, gone: set[Slot], ops: list[Op]) -> Program:
    """Return a Program of these ops with its slots renumbered, without unused ones."""
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
# Narrower numbers on the wire, for every strategy alike: a pass from Program to Program.
#
# Each exchanged value is converted once before it leaves and once where it arrives; values from and to the planner
# stay
# as they are. Rows are converted one by one, so a range of rows can be sent of a converted value too. What only passes
# through is sent on as it came where narrowing it again gives the same bits: f16, but not i8, whose scale may differ.


SCALE_BYTES: Final = 4  # an i8 row ends with its scale as four raw bytes


def _f16(spec: SlotSpec) -> SlotSpec:
    return SlotSpec(spec.shape, "f16")


def _i8(spec: SlotSpec) -> SlotSpec:
    return SlotSpec((*spec.shape[:-1], spec.shape[-1] + SCALE_BYTES), "i8")


# wire dtype: (kernel that narrows, kernel that widens, the narrow slot)
_CODECS: Final[Mapping[str, tuple[str, str, Callable[[SlotSpec], SlotSpec]]]] = {
    "f16": ("to_f16", "from_f16", _f16),
    "i8": ("to_i8", "from_i8", _i8),
}

_SENT_ON: Final = frozenset({"f16"})


def narrow_spec(spec: SlotSpec, wire: SlotDtype) -> SlotSpec:
    """Return the slot that a slot is on the wire."""
    return _CODECS[wire][2](spec)


def narrow_wire(program: Program, wire: WireDtype) -> Program:
    """Return `program` with its exchanges between devices in `wire`; "f32" changes nothing."""
    if wire == "f32":
        return program
    to_narrow, to_wide, _ = _CODECS[wire]
    slots: list[SlotSpec] = list(program.slots)
    ops: list[Op] = []
    narrowed: dict[Slot, Slot] = {}

    def twin(slot: Slot) -> Slot:
        slots.append(narrow_spec(slots[slot], wire))
        return len(slots) - 1

    def sent(op: Send) -> Slot:
        """Return the narrow twin of what is sent: the same rows of the twin of all that it is a view of."""
        spec = program.slots[op.slot]
        base = program.base(op.slot)
        if program.slots[base].shape[1:] != spec.shape[1:]:
            base = op.slot  # a view of another shape is converted by itself
        if base not in narrowed:
            narrowed[base] = twin(base)
            ops.append(Compute(to_narrow, (base,), (narrowed[base],), layer=op.layer, node=op.node))
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
            if wire in _SENT_ON:
                narrowed[op.slot] = arriving
            ops.append(op._replace(slot=arriving))
            ops.append(Compute(to_wide, (arriving,), (op.slot,), layer=op.layer, node=op.node))
        else:
            ops.append(op)
    return replace(program, slots=tuple(slots), ops=tuple(ops))


# ----------------------------------------------------------------------------------------------------------------------
# What arrives narrow and is only put together with other parts is widened by the op that does so: a pass on Programs.
#
# Straight from the frame into its place, instead of an op and an array of its own for each part.


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
    """Return {wide slot: the narrow one} of those that nothing but assembling reads, in rows as they are."""
    found = {op.writes[0]: op.reads[0] for op in program.ops if isinstance(op, Compute) and op.kernel in WIDENING}
    for op in program.ops:
        for slot in slots_read(op):
            base = program.base(slot)
            same_rows = program.slots[slot].shape[1:] == program.slots[base].shape[1:]
            if not (isinstance(op, Compute) and op.kernel == _KERNEL and same_rows):
                found.pop(base, None)
    return found


# ----------------------------------------------------------------------------------------------------------------------
# Conversions become part of the ops that make or first read what they convert: a pass from Program to Program.
#
# An op costs a device a tenth of a millisecond beside its kernel. Kernels and slots stay as they are, and so do the
# bits;
# what only parts of the same op read is free when it has run.


NARROWING: Final = frozenset({"to_f16", "to_i8"})


def fuse_conversions(program: Program) -> Program:
    """Return `program` with its conversions as parts of other ops, where no op has to wait longer for that."""
    ops: list[Op | None] = list(program.ops)
    _into_makers(program, ops)
    _into_readers(program, ops)
    return replace(program, ops=tuple(op for op in ops if op is not None))


def _into_makers(program: Program, ops: list[Op | None]) -> None:
    """Fuse each narrowing op into the op that produces its value; received values keep an op of their own."""
    maker = {slot: place for place, op in enumerate(program.ops) for slot in slots_written(op)}
    for place, op in enumerate(program.ops):
        if not isinstance(op, Compute) or op.kernel not in NARROWING:
            continue
        at = maker.get(program.base(op.reads[0]))
        made = None if at is None else ops[at]
        if at is not None and isinstance(made, Compute):
            ops[at], ops[place] = fuse_ops(program, (made, op), made), None


def _into_readers(program: Program, ops: list[Op | None]) -> None:
    """Let the first op that reads a value widen it, unless another one could begin before that has run."""
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
    """Return whether ops that read what `first` reads cannot begin before it anyway."""
    waits, makes = set(program.reads(first)), set(slots_written(first))
    return all(waits <= (slots := set(program.reads(o))) or makes & slots for o in others)


# ----------------------------------------------------------------------------------------------------------------------
# Who carries the exchanges, for every strategy alike: a pass from Program to Program.
#
# Over the broker, or over mesh: from the sender straight to each receiver. What is for the planner stays on the
# broker.


def set_routes(program: Program, route: Route, relayed: Collection[DevicePair] = ()) -> Program:
    """Return `program` with its exchanges between devices on `route`; "broker" changes nothing.

    relayed: (source, target) whose exchanges go over the broker all the same. A Send to receivers of both kinds becomes
    two, with one key: each receiver has its exchange once, by one way or the other.
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
    return by_broker, mesh  # the longer way first


# ----------------------------------------------------------------------------------------------------------------------
# Narrower weights in memory, for every strategy alike: a pass from Program to Program.
#
# The matrices of the layers are stored narrow; what the stem and the task head use, biases and norms stay f32. Plans
# of
# models whose layers read them by other kernels than `linear` have f32 alone (`models.storages`).


_PREFIX = "layers."


_PRODUCTS = ("linear", "experts_up", "experts_down")  # kernels that multiply by blocks


def narrow_weight(ref: WeightRef, storage: WeightDtype) -> WeightRef:
    """Return a weight as it is kept in `storage`: matrices of the layers alone are narrow, unless a file has blocks."""
    if ref.weight_dtype not in BLOCK_STORAGES and ref.layout == "packed" and ref.tensor.startswith(_PREFIX):
        return ref._replace(weight_dtype=storage)
    return ref


def narrow_weights(program: Program, storage: WeightDtype) -> Program:
    """Return `program` with every packed matrix of its layers kept in `storage`.

    Those in blocks stay; under w8a8 they are multiplied by activations in int8.
    """
    return replace(program, ops=tuple(_narrowed(op, storage) if isinstance(op, Compute) else op for op in program.ops))


def _narrowed(op: Compute, storage: WeightDtype) -> Compute:
    in_blocks = op.kernel in _PRODUCTS and any(ref.weight_dtype in BLOCK_STORAGES for ref in op.weights)
    attrs = {**op.attrs, "x": "i8"} if in_blocks and storage == "w8a8" else op.attrs
    fused = tuple(_narrowed(part, storage) for part in op.fused)
    return op._replace(weights=tuple(narrow_weight(ref, storage) for ref in op.weights), attrs=attrs, fused=fused)
