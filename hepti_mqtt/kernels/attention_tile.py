"""The compiled part of attention: softmax and transposition as LLVM vector IR, tiles of queries over blocks of keys.

A tile is up to NR queries of one sequence and one head. In its scores, K @ Q.T [keys, NR], queries lie along the
vector
lanes: maximum, exponential and sum over keys need no horizontal reduction. The result, P @ V [queries, d], has d
along
the lanes, as it is stored. Both products use the register tile. A single query, as in decoding, would leave most
lanes
empty and runs with the lanes along d. Keys come in blocks with a running maximum and sum (Milakov and Gimelshein
2018,
"Online normalizer calculation for softmax"; FlashAttention, Dao et al. 2022, algorithm 1). Scores are in units of
log2(e), so that 2**(score - maximum) needs no reduction by ln 2. NaN gives NaN, -inf gives 0.

A head's keys and values are copied side by side once for all tiles that attend to them: rows of kv lie some KB apart,
where they fall into a few sets of a cache and evict each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
from llvmlite import ir
from numba import float32, types
from numpy.typing import NDArray

from hepti_mqtt.kernels.cpu import TILE, Tile
from hepti_mqtt.kernels.elementary import ONE, ZERO, exp_of_negative
from hepti_mqtt.kernels.jit import EXACT, FLOAT, INT, INT_ARRAY, TABLE, fills, floats, helper, kernel, lowered, reads
from hepti_mqtt.kernels.tile import MR, NR, panel_of_columns, panel_of_rows

LOG2E: Final = np.float32(1.4426950408889634)
LN2: Final = np.float32(0.6931471805599453)

_F32: Final = ir.FloatType()
_I32: Final = ir.IntType(32)
_I64: Final = ir.IntType(64)

# Numba gives the kernel's own flags to every operation that has none; with "reassoc", (x + shift) - shift would be x.
_EXACT: Final = tuple(sorted(EXACT))

# 2**r = 1 + r (c0 + r (c1 + ...)) for |r| <= 1/2: relative error 9.2e-8, least in the largest (fitted over Chebyshev
# nodes with weights moved to where the error is largest).
_EXP2: Final = (0.6931469775918806, 0.2402224208045559, 0.05550733753733339, 0.009671512865311795, 0.001326472404241906)

# 1.5 * 2**23 + 127: n added to it stands in the low bits of the sum as the exponent of 2**n. At n = -127 these bits
# are 0, the float 0: what is lower is raised to there, and needs no other care.
_SHIFT: Final = 12582912.0 + 127
_LOWEST: Final = -127.0


class Vectors:
    """What functions over vectors of f32 need: vectors of a tile's lanes at addresses, and arithmetic on them."""

    def __init__(self, module: ir.Module, name: str, tile: Tile, arguments: int) -> None:
        self.lanes, self.module, self.fma = tile.lanes, module, tile.fma
        self.vector = ir.VectorType(_F32, tile.lanes)
        self.integers = ir.VectorType(_I32, tile.lanes)
        self.function = ir.Function(module, ir.FunctionType(ir.VoidType(), [_I64] * arguments), name)
        self.function.linkage = "internal"
        self.function.attributes.add("noinline")
        self.builder = ir.IRBuilder(self.function.append_basic_block("entry"))

    def constant(self, value: float) -> Any:
        """Return a vector of one value."""
        # As the nearest f32: LLVM refuses a float constant that is not exact.
        return ir.Constant(self.vector, [float(np.float32(value))] * self.lanes)

    def splat(self, value: Any) -> Any:
        """Return a value in all lanes."""
        undefined = ir.Constant(self.vector, ir.Undefined)
        first = self.builder.insert_element(undefined, value, ir.Constant(_I32, 0))
        return self.builder.shuffle_vector(first, undefined, ir.Constant(self.integers, [0] * self.lanes))

    def load(self, address: Any, offset: int = 0) -> Any:
        """Return the vector `offset` floats after an address."""
        value = self.builder.load(self._at(address, offset))
        value.align = 4
        return value

    def store(self, value: Any, address: Any, offset: int = 0) -> None:
        """Write a vector `offset` floats after an address."""
        self.builder.store(value, self._at(address, offset)).align = 4

    def after(self, address: Any, bytes_: int) -> Any:
        """Return the address some bytes on."""
        return self.builder.add(address, ir.Constant(_I64, bytes_))

    def _at(self, address: Any, offset: int) -> Any:
        return self.builder.inttoptr(self.after(address, 4 * offset), self.vector.as_pointer())

    def select(self, relation: str, a: Any, b: Any) -> Any:
        """Return a where a `relation` b, else b; where either is NaN, b."""
        return self.builder.select(self.builder.fcmp_ordered(relation, a, b), a, b)

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        """Return a * b + c."""
        name = f"llvm.{'fma' if self.fma else 'fmuladd'}.v{self.lanes}f32"
        function = self.module.globals.get(name) or ir.Function(
            self.module, ir.FunctionType(self.vector, [self.vector] * 3), name
        )
        return self.builder.call(function, [a, b, c])

    def exp2(self, x: Any) -> Any:
        """Return 2**x for x <= 0 to 2 ulp; 0 below -126.5; NaN for NaN."""
        b, shift = self.builder, self.constant(_SHIFT)
        y = self.select(">", self.constant(_LOWEST), x)
        shifted = b.fadd(y, shift, flags=_EXACT)
        r = b.fsub(y, b.fsub(shifted, shift, flags=_EXACT), flags=_EXACT)
        p = self.constant(_EXP2[-1])
        for c in (*_EXP2[-2::-1], 1.0):
            p = self.multiply_add(p, r, self.constant(c))
        exponent = b.shl(b.bitcast(shifted, self.integers), ir.Constant(self.integers, [23] * self.lanes))
        return b.fmul(p, b.bitcast(exponent, self.vector), flags=_EXACT)

    def loop(
        self, count: Any, start: list[Any], step: Callable[[Any, list[Any]], list[Any]], first: Any, stride: int
    ) -> list[Any]:
        """Run step(address, values) -> values `count` (at least 1) times, the address from `first` on by `stride`."""
        b = self.builder
        before, body, done = b.block, b.append_basic_block("keys"), b.append_basic_block("done")
        b.branch(body)
        b.position_at_end(body)
        at, left = b.phi(_I64), b.phi(_I64)
        phis = [b.phi(self.vector) for _ in start]
        values = step(at, list(phis))
        rest = b.sub(left, ir.Constant(_I64, 1))
        for phi, begin, end in (
            (at, first, self.after(at, stride)),
            (left, count, rest),
            *zip(phis, start, values, strict=True),
        ):
            phi.add_incoming(begin, before)
            phi.add_incoming(end, body)
        b.cbranch(b.icmp_signed(">", rest, ir.Constant(_I64, 0)), body, done)
        b.position_at_end(done)
        return values


def _write_softmax(module: ir.Module, name: str, tile: Tile, vectors: int) -> ir.Function:
    w = Vectors(module, name, tile, 5)
    b, offsets = w.builder, [j * tile.lanes for j in range(vectors)]
    scores, keys, high, norm, rescale = w.function.args
    stride = 4 * tile.width
    before = [w.load(high, o) for o in offsets]
    tops = w.loop(
        keys,
        before,
        lambda at, t: [w.select(">", w.load(at, o), v) for o, v in zip(offsets, t, strict=True)],
        scores,
        stride,
    )
    # A maximum of -inf would make -inf - -inf = NaN of scores that are all -inf.
    lowest, zero = w.constant(-np.inf), w.constant(0.0)
    above = [b.select(b.fcmp_ordered(">", t, lowest), t, zero) for t in tops]
    sums = []
    for o, was, top, a in zip(offsets, before, tops, above, strict=True):
        by = w.exp2(b.fsub(was, a, flags=_EXACT))
        w.store(by, rescale, o)
        w.store(top, high, o)
        sums.append(b.fmul(w.load(norm, o), by, flags=_EXACT))

    def exponentials(at: Any, totals: list[Any]) -> list[Any]:
        found = []
        for o, a, total in zip(offsets, above, totals, strict=True):
            e = w.exp2(b.fsub(w.load(at, o), a, flags=_EXACT))
            w.store(e, at, o)
            found.append(b.fadd(total, e, flags=_EXACT))
        return found

    for o, total in zip(offsets, w.loop(keys, sums, exponentials, scores, stride), strict=True):
        w.store(total, norm, o)
    b.ret_void()
    return w.function


def _write_transpose(module: ir.Module, name: str, tile: Tile) -> ir.Function:
    """Rows interleaved with those half a block on, log2(lanes) times over, are the columns."""
    n = tile.lanes
    w = Vectors(module, name, tile, 5)
    b = w.builder
    x, stride, count, scale, out = w.function.args
    by = w.splat(b.bitcast(b.trunc(scale, _I32), _F32))
    last = b.sub(count, ir.Constant(_I64, 1))
    rows = []
    for i in range(n):
        at = ir.Constant(_I64, i)
        at = b.select(b.icmp_signed("<", at, last), at, last)
        rows.append(b.fmul(w.load(b.add(x, b.mul(b.mul(at, stride), ir.Constant(_I64, 4)))), by, flags=_EXACT))
    low, high = ([k // 2 + (k % 2) * n + half for k in range(n)] for half in (0, n // 2))
    for _ in range(n.bit_length() - 1):
        pairs = list(zip(rows[: n // 2], rows[n // 2 :], strict=True))
        rows = [b.shuffle_vector(p, q, ir.Constant(w.integers, m)) for p, q in pairs for m in (low, high)]
    for i, row in enumerate(rows):
        w.store(row, out, i * tile.width)
    b.ret_void()
    return w.function


def _write_copy(module: ir.Module, name: str, tile: Tile, vectors: int) -> ir.Function:
    w = Vectors(module, name, tile, 6)
    b = w.builder
    rows, x, stride, scale, out, out_stride = w.function.args
    by = w.splat(b.bitcast(b.trunc(scale, _I32), _F32))

    def copy(at: Any, _: list[Any]) -> list[Any]:
        # `at` is the row's number times the bytes of an f32.
        source, target = b.add(x, b.mul(at, stride)), b.add(out, b.mul(at, out_stride))
        for o in range(0, vectors * tile.lanes, tile.lanes):
            w.store(b.fmul(w.load(source, o), by, flags=_EXACT), target, o)
        return []

    w.loop(rows, [], copy, ir.Constant(_I64, 0), 4)
    b.ret_void()
    return w.function


def emit_copy(tile: Tile) -> Callable[..., Any]:
    """Return the Numba intrinsic of `scaled_rows`."""

    def codegen(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        vectors, rows, x, stride, scale, out, out_stride = arguments
        bits = builder.zext(builder.bitcast(scale, _I32), _I64)
        rest = [rows, x, stride, bits, out, out_stride]
        _call_by_number(builder, "hepti_copy", tile, vectors, rest, _write_copy)
        return context.get_dummy_value()

    def emit(_context: Any, _vectors: Any, _rows: Any, _x: Any, _stride: Any, _scale: Any, _out: Any, _os: Any) -> Any:
        integer = types.int64
        return types.void(*[integer] * 4, types.float32, *[integer] * 2), codegen

    return emit


def _call_by_number(
    builder: Any, name: str, tile: Tile, vectors: Any, arguments: Any, write: Callable[..., ir.Function]
) -> None:
    """Call the function for this number of vectors, 1 to `tile.vectors`; nothing for any other."""
    end = builder.append_basic_block("vectors.end")
    choice = builder.switch(vectors, end)
    for count in range(1, tile.vectors + 1):
        full = f"{name}_{count}"
        function = builder.module.globals.get(full) or write(builder.module, full, tile, count)
        with builder.goto_block(builder.append_basic_block(full)):
            choice.add_case(ir.Constant(_I64, count), builder.block)
            builder.call(function, arguments)
            builder.branch(end)
    builder.position_at_end(end)


def emit_softmax(tile: Tile) -> Callable[..., Any]:
    """Return the Numba intrinsic of `softmax_tile`."""

    def codegen(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        vectors, *rest = arguments
        _call_by_number(builder, "hepti_softmax", tile, vectors, rest, _write_softmax)
        return context.get_dummy_value()

    def emit(_context: Any, _vectors: Any, _scores: Any, _keys: Any, _high: Any, _norm: Any, _rescale: Any) -> Any:
        return types.void(*[types.int64] * 6), codegen

    return emit


def emit_transpose(tile: Tile) -> Callable[..., Any]:
    """Return the Numba intrinsic of `transpose_tile`."""

    def codegen(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        x, stride, count, scale, out = arguments
        name = "hepti_transpose"
        function = builder.module.globals.get(name) or _write_transpose(builder.module, name, tile)
        builder.call(function, [x, stride, count, builder.zext(builder.bitcast(scale, _I32), _I64), out])
        return context.get_dummy_value()

    def emit(_context: Any, _x: Any, _stride: Any, _count: Any, _scale: Any, _out: Any) -> Any:
        return types.void(types.int64, types.int64, types.int64, types.float32, types.int64), codegen

    return emit


def _plain_softmax(vectors: int, scores: int, keys: int, high: int, norm: int, rescale: int) -> None:
    width = vectors * TILE.lanes
    s = floats(scores, keys * NR).reshape(keys, NR)[:, :width]
    tops, sums = floats(high, width), floats(norm, width)
    top = np.fmax(tops, np.fmax.reduce(s, axis=0))
    above = np.where(top > -np.inf, top, np.float32(0))
    by = np.exp2(tops - above)
    s[:] = np.exp2(s - above)
    floats(rescale, width)[:] = by
    sums[:] = sums * by + s.sum(axis=0, dtype=np.float32)
    tops[:] = top


def _plain_copy(vectors: int, rows: int, x: int, stride: int, scale: Any, out: int, out_stride: int) -> None:
    n = vectors * TILE.lanes
    for i in range(rows if n else 0):
        floats(out + 4 * i * out_stride, n)[:] = floats(x + 4 * i * stride, n) * scale


def _plain_transpose(x: int, stride: int, count: int, scale: Any, out: int) -> None:
    n = TILE.lanes
    for i in range(n):
        row = floats(x + 4 * min(i, count - 1) * stride, n) * scale
        for c in range(n):
            floats(out + 4 * (c * NR + i), 1)[:] = row[c : c + 1]


# Turn the first `vectors` vectors of scores [keys, NR] (keys at least 1) into 2**(score - high), where high [NR] is
# raised to their maximum; write to rescale [NR] what sums of before must be multiplied by, and add to norm [NR],
# rescaled, the sum over the keys in ascending order. Arguments: vectors (1 to TILE.vectors), scores, keys, high, norm,
# rescale; all but the numbers are addresses.
softmax_tile: Final = lowered(emit_softmax(TILE), _plain_softmax)

# Fill out [lanes, NR], its first vector, with scale * the transpose of x [count, lanes]; the last row stands for those
# that there are not. Arguments: x, floats between its rows, count (at least 1), scale, out.
transpose_tile: Final = lowered(emit_transpose(TILE), _plain_transpose)

# Fill out [rows, vectors] with scale * x [rows, vectors]. Arguments: vectors (0 to TILE.vectors), rows (at least 1), x,
# floats between its rows, scale, out, floats between its rows.
scaled_rows: Final = lowered(emit_copy(TILE), _plain_copy)


# Scores and values [KEYS, NR] stay in the second-level cache; 64 and 128 were slower (more rescaling), 512 no faster.
KEYS: Final = 256

# Queries of a tile up to which one after the other, with lanes along d, is faster than all in the lanes of one vector.
FEW: Final = 1

LANES: Final = TILE.lanes

_MINUS_INF: Final = np.float32(-np.inf)

# Columns of the tables of tiles and of limits.
_FIRST, _STOP, _LOW, _HIGH, _ANCHOR = range(5)
_BEGIN, _END = 0, 1


@helper
def scores_of(k: int, stride: int, keys: int, vectors: int, queries: Any, d: int, zeros: Any, scores: Any) -> None:
    """Fill scores [keys, NR] with keys [keys, d], whose address is k, times queries [d, NR]."""
    for i in range(0, keys, MR):
        at, out = k + 4 * i * stride, scores.ctypes.data + 4 * i * NR
        rows = min(MR, keys - i)
        panel_of_rows(rows, vectors, at, stride, d, queries.ctypes.data, zeros.ctypes.data, 0, out, NR)


@helper
def _copy_rows(
    kv: Any, column: int, first: int, rows: int, d: int, copies: Any, at: int, stride: int, apart: int
) -> None:
    """Copy kv[first : first + rows, column : column + d] to copies[at:], in panels of NR columns.

    Rows of a panel lie `stride` floats apart, panels `apart`. What is beyond column d of the last one is left alone.
    """
    for c in range(0, d if rows > 0 else 0, NR):
        vectors, place = min(NR, d - c) // LANES, at + c // NR * apart
        source = kv.ctypes.data + 4 * (first * kv.shape[1] + column + c)
        scaled_rows(vectors, rows, source, kv.shape[1], ONE, copies.ctypes.data + 4 * place, stride)
        for i in range(rows):
            for j in range(vectors * LANES, min(NR, d - c)):
                copies[place + i * stride + j] = kv[first + i, column + c + j]


@helper
def _weighted_values(
    keys: int, count: int, d: int, scores: Any, values: int, zeros: Any, started: Any, total: Any
) -> None:
    """Add scores.T @ values to total [count, d up to whole panels], or start it.

    values: the address of panels [KEYS, NR], of which the first `keys` rows count.
    """
    stride = len(total) // NR
    for c in range(0, d, NR):
        vectors = -(-min(NR, d - c) // LANES)
        panel = values + 4 * c * KEYS
        for i in range(0, count, MR):
            out = total.ctypes.data + 4 * (i * stride + c)
            start, start_stride = (out, stride) if started else (zeros.ctypes.data, 0)
            at = scores.ctypes.data + 4 * i
            panel_of_columns(min(MR, count - i), vectors, at, NR, keys, panel, start, start_stride, out, stride)


@helper
def transpose(q: Any, row: int, count: int, column: int, d: int, scale: Any, queries: Any) -> None:
    """Fill the vectors of queries [d, NR] that have a query with scale * q.T; lanes beyond it repeat the last."""
    whole = d // LANES * LANES
    for j in range(0, count, LANES):
        rows = min(LANES, count - j)
        for c in range(0, whole, LANES):
            at = q.ctypes.data + 4 * ((row + j) * q.shape[1] + column + c)
            transpose_tile(at, q.shape[1], rows, scale, queries.ctypes.data + 4 * (c * NR + j))
        for c in range(whole, d):
            for i in range(LANES):
                queries[c * NR + j + i] = q[row + j + min(i, rows - 1), column + c] * scale


@helper
def _most_keys(tiles: Any) -> tuple[Any, Any]:
    """Return how many keys are copied at once, and in how many blocks.

    A query alone, as in every step of a decoder, needs no copies.
    """
    keys, blocks = 0, 0
    for tile in range(len(tiles)):
        if tiles[tile, _STOP] - tiles[tile, _FIRST] > FEW:
            low, high, anchor = tiles[tile, _LOW], tiles[tile, _HIGH], tiles[tile, _ANCHOR]
            keys = max(keys, high - low)
            blocks = max(blocks, -(-(high - anchor) // KEYS) - (low - anchor) // KEYS)
    return keys, blocks


@helper
def _all_see(limits: Any, row: int, count: int, low: int, high: int) -> bool:
    """Return whether all of some queries see all of the keys low..high."""
    found = True
    for j in range(row, row + count):
        found &= limits[j, _BEGIN] <= low and high <= limits[j, _END]
    return found


@helper
def _has_nan(total: Any, count: int, d: int) -> bool:
    stride = len(total) // NR
    found = False
    for i in range(count):
        for c in range(d):
            found |= np.isnan(total[i * stride + c])
    return found


@helper
def _mask(scores: Any, low: int, keys: int, limits: Any, row: int, count: int) -> None:
    """Set the scores of keys beyond a query's limits to -inf."""
    for j in range(count):
        for i in range(min(keys, limits[row + j, _BEGIN] - low)):
            scores[i * NR + j] = _MINUS_INF
        for i in range(max(0, limits[row + j, _END] - low), keys):
            scores[i * NR + j] = _MINUS_INF


@helper
def _add_bias(
    scores: Any, first: int, keys: int, row: int, count: int, q_at: Any, k_at: Any, bias: Any, by: Any
) -> None:
    """Add the bias [2 L - 1] of each query and key to their scores, times `by`; the queries are consecutive rows."""
    middle = len(bias) // 2
    for i in range(keys):
        line = bias[middle + q_at[row] - k_at[first + i] :]
        for j in range(count):
            scores[i * NR + j] += line[j] * by


@helper
def _add_positions(
    scores: Any, kv: Any, k_column: int, first: int, keys: int, row: int, count: int, queries: Any, scale: Any,
    q_at: Any, k_at: Any, buckets: Any, to_queries: Any, to_keys: Any, column: int, scratch: Any, zeros: Any,
) -> None:  # fmt: skip
    """Add to scores what the distances' keys give with the queries [d, NR], and their queries with the keys of kv.

    to_queries, to_keys: those keys and queries, [rows, *], in columns from `column` on. Of the products with up to NR
    keys few rows matter: buckets ascend with the distance.
    """
    d, middle, stride = len(queries) // NR, len(buckets) // 2 + q_at[row], to_queries.shape[1]
    most = len(to_queries) * NR
    by_query, by_key, turned = scratch[:most], scratch[most : 2 * most], scratch[2 * most :]
    low = buckets[middle - k_at[first + keys - 1]]
    rows = buckets[middle + count - 1 - k_at[first]] + 1 - low
    met = to_queries.ctypes.data + 4 * (low * stride + column)
    scores_of(met, stride, rows, -(-count // LANES), queries, d, zeros, by_query)
    for at in range(0, keys, NR):
        some, begin = min(NR, keys - at), first + at
        near = buckets[middle - k_at[begin + some - 1]]
        rows = buckets[middle + count - 1 - k_at[begin]] + 1 - near
        transpose(kv, begin, some, k_column, d, scale, turned)
        met = to_keys.ctypes.data + 4 * (near * stride + column)
        scores_of(met, stride, rows, -(-some // LANES), turned, d, zeros, by_key)
        for i in range(some):
            line = buckets[middle - k_at[begin + i] :]
            for j in range(count):
                bucket = line[j]
                scores[(at + i) * NR + j] += by_query[(bucket - low) * NR + j] + by_key[(bucket - near) * NR + i]


@helper
def _scale_rows(total: Any, count: int, stride: int, d: int, by: Any) -> None:
    for i in range(count):
        for c in range(d):
            total[i * stride + c] *= by[i]


@helper
def _query_alone(
    query: Any, kv: Any, k_column: int, v_column: int, low: int, high: int, place: int, k_at: Any, bias: Any,
    scale: Any, buckets: Any, to_queries: Any, to_keys: Any, column: int, scores: Any, total: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """Fill total [d] with the sum of exp(score - maximum) v over keys low..high; return (maximum, sum of exp).

    place: the query's row, of which with the keys' rows k_at follows where its bias [2 L - 1] stands, or its bucket.
    """
    d, middle, centre = len(query), len(bias) // 2, len(buckets) // 2
    top, norm = _MINUS_INF, ZERO
    total[:] = ZERO
    for block in range(low, high, KEYS):
        keys = min(KEYS, high - block)
        before = top
        for i in range(keys):
            key = kv[block + i, k_column : k_column + d]
            s = ZERO
            for c in range(d):
                s += query[c] * key[c]
            if len(bias) > 0:
                s += bias[middle + place - k_at[block + i]]
            if len(buckets) > 0:
                bucket = buckets[centre + place - k_at[block + i]]
                other = ZERO
                for c in range(d):
                    s += query[c] * to_queries[bucket, column + c]
                    other += key[c] * to_keys[bucket, column + c]
                s += other * scale
            scores[i] = s
            top = s if s > top else top
        above = top if top > _MINUS_INF else ZERO
        rescale = exp_of_negative(before - above)
        block_norm = ZERO
        for i in range(keys):
            scores[i] = exp_of_negative(scores[i] - above)
            block_norm += scores[i]
        norm = norm * rescale + block_norm
        for c in range(d):
            total[c] *= rescale
        for i in range(keys):
            weight = scores[i]
            value = kv[block + i, v_column : v_column + d]
            for c in range(d):
                total[c] += weight * value[c]
    return top, norm


@helper
def _store(total: Any, d: int, high: Any, norm: Any, with_state: int, out: Any, at: int) -> None:
    """Write one query's result to out[at:]: its state, or the sum total [d] divided by the norm."""
    by = ONE if with_state or norm == ZERO else ONE / norm
    whole = d // LANES * LANES
    for c in range(0, whole, NR):
        vectors = min(NR, whole - c) // LANES
        scaled_rows(vectors, 1, total.ctypes.data + 4 * c, NR, by, out.ctypes.data + 4 * (at + c), NR)
    for c in range(whole, d):
        out[at + c] = total[c] * by
    if with_state:
        out[at + d] = high
        out[at + d + 1] = norm


@helper
def _store_rows(
    total: Any, row: int, count: int, d: int, high: Any, norm: Any, with_state: int, out: Any, heads: int, head: int
) -> None:
    """Write the results of `count` queries from `row` on, whose maxima are in units of log2(e)."""
    for j in range(count):
        to = ((row + j) * heads + head) * (d + 2 if with_state else d)
        _store(total[j * (len(total) // NR) :], d, high[j] * LN2, norm[j], with_state, out, to)


@helper
def _each_alone(
    q: Any, kv: Any, out: Any, limits: Any, layout: Any, q_at: Any, k_at: Any, bias: Any, buckets: Any,
    to_queries: Any, to_keys: Any, scale: Any, row: int, count: int, head: int, scores: Any, total: Any, query: Any,
) -> None:  # fmt: skip
    """Write the results of `count` queries from `row` on, one after the other."""
    heads, d, with_state, of_keys = layout[3], layout[4], layout[5], head // layout[6]
    column, k_column, v_column = layout[0] + head * d, layout[1] + of_keys * d, layout[2] + of_keys * d
    for j in range(row, row + count):
        for c in range(d):
            query[c] = q[j, column + c] * scale
        place = q_at[j] if len(bias) > 0 or len(buckets) > 0 else 0
        top, weight = _query_alone(
            query[:d], kv, k_column, v_column, limits[j, _BEGIN], limits[j, _END], place, k_at, bias, scale, buckets,
            to_queries, to_keys, head * d, scores, total[:d],
        )  # fmt: skip
        _store(total, d, top, weight, with_state, out, (j * heads + head) * (d + 2 if with_state else d))


class HeadLayout(NamedTuple):
    """Where the heads of an op lie in q and kv; compiled code reads it as a table in this order.

    d: columns of a head. with_state: 1 if states are written, else 0. group: queries' heads that share one of kv.
    """

    q_column: int
    k_column: int
    v_column: int
    heads: int
    d: int
    with_state: int
    group: int = 1

    def table(self) -> NDArray[np.int64]:
        """Return the layout as compiled code reads it."""
        return np.asarray(self, np.int64)


@kernel(
    reads(float32, 2), reads(float32, 2), fills(float32, 1), TABLE, TABLE, INT_ARRAY, INT_ARRAY, INT_ARRAY,
    reads(float32, 2), INT_ARRAY, reads(float32, 2), reads(float32, 2), FLOAT, INT, INT, part=2,
)  # fmt: skip
def attention_units(
    q: Any, kv: Any, out: Any, tiles: Any, limits: Any, layout: Any, q_at: Any, k_at: Any, biases: Any, buckets: Any,
    to_queries: Any, to_keys: Any, scale: Any, first: int, stop: int,
) -> None:  # fmt: skip
    """Fill out [r, heads, d] (or d + 2 with state, flat) for the units first..stop; a unit is head * tiles + tile.

    tiles [tiles, 5]: rows first..stop, of which each sees some of the keys low..high, and from where on keys are parted
    into blocks, whatever the tile. limits [r, 2] are begin and end of each query's keys, layout the table of
    `HeadLayout`. biases [heads, 2 L - 1] are added to scores by the distance between q_at [r] and k_at [s], the rows
    that queries and keys are; of no columns without. buckets [2 L - 1]: by the same distance the row of to_queries and
    to_keys [rows, heads * d] that queries and keys meet; empty without.
    """
    heads, d, with_state, group = layout[3], layout[4], layout[5], layout[6]
    queries, scores = np.empty(d * NR, np.float32), np.empty(KEYS * NR, np.float32)
    stride = -(-d // NR) * NR
    most, blocks = _most_keys(tiles)
    copied_keys, values = np.empty(most * d, np.float32), np.empty(blocks * KEYS * stride, np.float32)
    copied_head, copied_low, copied_to, near = -1, 0, 0, False
    total, zeros = np.empty(NR * stride, np.float32), np.zeros(NR, np.float32)
    high, norm, rescale = np.empty(NR, np.float32), np.empty(NR, np.float32), np.empty(NR, np.float32)
    scratch = np.empty((2 * len(to_queries) + d) * NR, np.float32)
    for unit in range(first, stop):
        head, tile = unit // len(tiles), unit % len(tiles)
        row, low, end, anchor = tiles[tile, _FIRST], tiles[tile, _LOW], tiles[tile, _HIGH], tiles[tile, _ANCHOR]
        count, column, of_keys, bias = tiles[tile, _STOP] - row, layout[0] + head * d, head // group, biases[head]
        k_column, v_column = layout[1] + of_keys * d, layout[2] + of_keys * d
        alone = count <= FEW or end <= low
        if not alone:
            vectors = -(-count // LANES)
            transpose(q, row, count, column, d, scale * LOG2E, queries)
            high[:] = _MINUS_INF
            norm[:] = ZERO
            if of_keys != copied_head or low != copied_low:
                copied_head, copied_low, copied_to = of_keys, low, low
                near = unit + 1 < stop and tile + 1 < len(tiles) and tiles[tile + 1, _LOW] == low  # else read in place
            masked, block, at = False, low, 0
            while block < end:
                keys = min(KEYS - (block - anchor) % KEYS, end - block)
                k, k_stride = kv.ctypes.data + 4 * (block * kv.shape[1] + k_column), kv.shape[1]
                new, copied_to = max(block, copied_to), max(block + keys, copied_to)
                if near:
                    _copy_rows(kv, k_column, new, copied_to - new, d, copied_keys, (new - low) * d, d, NR)
                    k, k_stride = copied_keys.ctypes.data + 4 * (block - low) * d, d
                _copy_rows(kv, v_column, new, copied_to - new, d, values, at + (new - block) * NR, NR, KEYS * NR)
                scores_of(k, k_stride, keys, vectors, queries, d, zeros, scores)
                if len(bias) > 0:
                    _add_bias(scores, block, keys, row, count, q_at, k_at, bias, LOG2E)
                if len(buckets) > 0:
                    _add_positions(
                        scores, kv, k_column, block, keys, row, count, queries, scale * LOG2E, q_at, k_at, buckets,
                        to_queries, to_keys, head * d, scratch, zeros,
                    )  # fmt: skip
                if not _all_see(limits, row, count, block, block + keys):
                    _mask(scores, block, keys, limits, row, count)
                    masked = True
                softmax_tile(vectors, scores.ctypes.data, keys, high.ctypes.data, norm.ctypes.data, rescale.ctypes.data)
                if block > low:
                    _scale_rows(total, count, stride, d, rescale)
                _weighted_values(keys, count, d, scores, values.ctypes.data + 4 * at, zeros, block > low, total)
                block, at = block + keys, at + KEYS * stride
            # A masked key weighs 0, but 0 times a value that is not finite is NaN, which its query must not see.
            alone = masked and _has_nan(total, count, d)
        if alone:
            _each_alone(
                q, kv, out, limits, layout, q_at, k_at, bias, buckets, to_queries, to_keys, scale, row, count, head,
                scores, total, queries,
            )  # fmt: skip
        else:
            _store_rows(total, row, count, d, high, norm, with_state, out, heads, head)
