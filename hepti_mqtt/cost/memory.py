"""The memory that a device needs for a plan, derived from its Programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Final

from hepti_mqtt.core.plan import Plan
from hepti_mqtt.core.program import LINE_BYTES, Compute, Program, Slot, SlotSpec, WeightRef, lay_out, slots_written
from hepti_mqtt.core.schedule import make_template, stretches_of
from hepti_mqtt.core.spec import Spec
from hepti_mqtt.lowering.lower import Lowered
from hepti_mqtt.lowering.roles import CACHE
from hepti_mqtt.models import full_ref, largest_shape, tensor_sources
from hepti_mqtt.protocol.manifest import TILE, TILES_AHEAD, grid
from hepti_mqtt.strategies.plan_programs import lowered_for_longest, resident_counts, run_passes

# Rows that every run in flight has on a device, besides one session of the model's full context length. Sessions of
# ended requests stay in the unused part of both.
ROWS_IN_FLIGHT: Final = 4096
KEPT_PROGRAMS: Final = 12  # request shapes with kept Programs per plan and device: the expected ones and some more
# Measured upper bounds for a Program bound to its weights: Python objects and kernel scratch per op, and the kernels'
# tables per column of a matrix (panel address, columns, and bias padded to the panel).
OP_BYTES: Final = 3 << 10
COLUMN_BYTES: Final = 8
# Measured bytes of Python objects per tile: of a model in its manifest and map of tiles, of a load in the loader.
MAP_BYTES: Final = 180
LOADED_TILE_BYTES: Final = 480
# Table entry of a kernel that stores only each matrix's place, and the Program's reference to it.
MATRIX_BYTES: Final = 256


def matrices(refs: Iterable[WeightRef], held: Iterable[WeightRef] = ()) -> dict[WeightRef, WeightRef]:
    """Return for each weight range the resident range that contains it.

    That is a held range if it contains the weight range; other adjacent ranges are loaded as one matrix. So a device
    that holds a whole matrix loads nothing if another part of it becomes its own.
    """
    from hepti_mqtt.kernels.weights import is_part, joined, kin  # Numba takes long to import

    held_by_kin: dict[tuple[object, ...], dict[WeightRef, None]] = {}
    for matrix in held:
        held_by_kin.setdefault(kin(matrix), {})[matrix] = None
    if not held_by_kin:
        distinct = dict.fromkeys(refs)
        single = len({ref.tensor for ref in distinct}) == len(distinct)
        return dict(zip(distinct, distinct, strict=True)) if single else joined(distinct)
    resident: dict[WeightRef, WeightRef | None] = {}
    for ref in refs:
        wider = held_by_kin.get(kin(ref), {})
        resident[ref] = ref if ref in wider else next((m for m in wider if is_part(ref, m)), None)
    new = joined(ref for ref, matrix in resident.items() if matrix is None)
    return {ref: new[ref] if matrix is None else matrix for ref, matrix in resident.items()}


def weights_bytes(refs: Iterable[WeightRef], held: Iterable[WeightRef] = ()) -> int:
    """Return the bytes of the `matrices` of weight ranges, as the kernels pack them, without the held ones."""
    from hepti_mqtt.kernels import weight_bytes

    resident = set(held)
    return sum(weight_bytes(matrix) for matrix in set(matrices(refs, resident).values()) - resident)


def resident_bytes(spec: Spec, plan: Plan, device: str) -> int:
    """Return the bytes of all weights of a device under a plan, as the kernels pack them."""
    from hepti_mqtt.kernels import weight_bytes

    counts = resident_counts(spec, plan, device)
    times = {matrix: counts[ref] for ref, matrix in matrices(counts).items()}
    return sum(weight_bytes(matrix) * count for matrix, count in times.items())


@lru_cache(maxsize=KEPT_PROGRAMS)
def tile_map_bytes(spec: Spec) -> int:
    """Return the bytes of a model's manifest and map of tiles on each of its devices."""
    grids = (grid(s.shape, s.transposed, full_ref(spec, s.name).weight_dtype) for s in tensor_sources(spec))
    return MAP_BYTES * sum(rows * columns for rows, columns in grids)


def loading_overhead_bytes(counts: Mapping[WeightRef, int]) -> int:
    """Return a bound of the bytes of incomplete int8 blocks and of the loader's tables during a load.

    counts: as `resident_counts` returns them.

    Tiles arrive nearly in order (`TILES_AHEAD`). A tile leaves at most the blocks that it touches, two of k by the
    panels of its width plus one. All tiles before the oldest missing one leave one panel of a matrix, or one row of
    blocks. The bound ignores equal tiles of several matrices, which arrive at the same time.
    """
    from hepti_mqtt.kernels import loading_bytes
    from hepti_mqtt.kernels.weights import BLOCK, PANELS

    tables = LOADED_TILE_BYTES * sum(
        times * (-(-ref.rows[1] // TILE) - ref.rows[0] // TILE) * (-(-ref.columns[1] // TILE) - ref.columns[0] // TILE)
        for ref, times in counts.items()
    )
    if not any(map(loading_bytes, counts)):  # joining ranges takes several times as long
        return tables
    staged, ahead, begun = 0, 0, 0
    times = {matrix: counts[ref] for ref, matrix in matrices(counts).items()}
    for ref, count in times.items():
        if not (nbytes := loading_bytes(ref)):
            continue
        width = PANELS[ref.weight_dtype].width
        staged += nbytes * count
        ahead = max(ahead, TILES_AHEAD * 2 * BLOCK * (TILE + 2 * width) * 4)
        rows, columns = (stop - start for start, stop in (ref.rows, ref.columns))
        begun = max(begun, rows * width * 4, BLOCK * (columns + width) * 4)
    return min(staged, ahead + begun) + tables


def live_bytes(program: Program) -> int:
    """Return the bytes of buffers that one run of a Program needs, ops in list order, without session arrays.

    Slots used by one stretch alone share scratch memory, as large as the largest stretch needs. The executor reuses
    other buffers for later slots of the same shape, so they need the sum over shapes of the most slots alive at the
    same time.
    """
    stretches = sorted(stretches_of(program))
    template = make_template(program, stretches)
    alive: Counter[SlotSpec] = Counter()
    most: Counter[SlotSpec] = Counter()
    scratch = 0
    for places in stretches:
        ops = [program.ops[place] for place in places]
        written = [s for op in ops for s in slots_written(op) if not program.slots[s].state]
        inner = {s for s in written if not template.readers[s]} if isinstance(ops[0], Compute) else set()
        for slot in set(written) - inner:
            spec = program.slots[slot]
            alive[spec] += 1
            most[spec] = max(most[spec], alive[spec])
        uses: dict[Slot, tuple[int, int, int]] = {}
        for number, op in enumerate(ops):
            for slot in inner.intersection((*slots_written(op), *program.reads(op))):
                uses[slot] = uses.get(slot, (number,))[0], number, program.slots[slot].nbytes
        scratch = max(scratch, lay_out(uses)[1])
        for slot in {*written, *(s for op in ops for s in program.reads(op))} - inner:
            readers = template.readers[slot]
            if not program.slots[slot].state and (not readers or readers[-1] == places[0]):
                alive[program.slots[slot]] -= 1
    return sum(spec.nbytes * count for spec, count in most.items()) + scratch + (LINE_BYTES if scratch else 0)


def scratch_bytes(program: Program) -> int:
    """Return the most bytes that an op of a Program needs besides its slots; a device runs one op at a time."""
    from hepti_mqtt.kernels import KERNELS  # Numba takes long to import

    kernels = (step for op in program.ops if isinstance(op, Compute) for step in op.kernels)
    return max((KERNELS[step.kernel].scratch_bytes(step, program.slots) for step in kernels), default=0)


def max_live_bytes(spec: Spec, plan: Plan, device: str, in_flight: int = 1) -> int:
    """Return the most bytes that runs of any requests need besides the weights on a device under a plan.

    They are the buffers of `in_flight` runs, the scratch memory of one op, and the arrays of `session_rows` rows.
    """
    runs = max(in_flight, 1)
    lowered = tuple(lowered_for_longest(spec, plan, device))
    programs = [run_passes(low.compact_program(device), plan) for low in lowered]
    buffers, scratch = max(map(live_bytes, programs)), max(map(scratch_bytes, programs))
    longest = max(largest_shape(spec).session_rows, 1)
    sessions = max(session_bytes(low, device) for low in lowered) * session_rows(spec, runs) // longest
    return runs * buffers + scratch + sessions


@lru_cache(maxsize=KEPT_PROGRAMS)
def session_rows(spec: Spec, in_flight: int) -> int:
    """Return the number of rows that all sessions of a plan may have together on each of its devices."""
    longest = largest_shape(spec).session_rows
    return longest + max(in_flight, 1) * min(longest, ROWS_IN_FLIGHT)


def programs_bytes(spec: Spec, plan: Plan, device: str) -> int:
    """Return a bound of the bytes of all bound Programs that a device keeps for a plan."""
    return KEPT_PROGRAMS * max(_bound_bytes(lowered, device) for lowered in lowered_for_longest(spec, plan, device))


def _bound_bytes(lowered: Lowered, device: str) -> int:
    from hepti_mqtt.kernels import KERNELS, weight_bytes  # Numba takes long to import

    layer, times = lowered.repeated_layer or (-1, 1)
    whole, program = 0, lowered.compact_program(device)
    for op in program.ops:
        # Embeddings have no tables: they read rows in place.
        is_product = isinstance(op, Compute) and KERNELS[op.kernel].work(op, program.slots).kind != "rowwise"
        refs = op.weights if isinstance(op, Compute) and is_product else ()
        if refs and isinstance(op, Compute) and KERNELS[op.kernel].by_matrix:
            tables = MATRIX_BYTES * len(refs) + sum(weight_bytes(ref) for ref in refs if ref.layout == "plain")
        else:
            tables = COLUMN_BYTES * sum(ref.columns[1] - ref.columns[0] for ref in refs if ref.layout == "packed")
        whole += (OP_BYTES + tables) * (times if op.layer == layer else 1)
    return whole


def session_bytes(lowered: Lowered, device: str) -> int:
    """Return the bytes that a session keeps on a device between runs."""
    return lowered.session_bytes(device) if lowered.computes_role(device, CACHE) else 0
