"""A family's computation as a graph: tensor ops in topological order, in blocks, many of them alike.

The last op is the answer. Blocks are the layers that a family repeats, and the ops before and after them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Any, Final

from hepti_mqtt.core.program import SlotDtype, WeightRef, state_name
from hepti_mqtt.core.storage import STORAGES, BlockStorage
from hepti_mqtt.lowering import ops, roles
from hepti_mqtt.lowering.attention import Attention, CachedAttention, Rotate
from hepti_mqtt.lowering.experts import ExpertsDown, ExpertsUp
from hepti_mqtt.lowering.ops import Norm, Op
from hepti_mqtt.lowering.roles import MOMENTS, TASK, TASK_MOMENTS

KEPT_BLOCKS: Final = 5  # of a run of equal blocks: two, the template, two
TEMPLATE_BLOCK: Final = 2  # place of the template among them


@dataclass(frozen=True, slots=True)
class Repeat:
    """A run of equal blocks first..stop of a graph: equal ops with inputs at equal places.

    A shortened graph has one of them, the template, for several.
    """

    first: int
    stop: int
    kept: int = KEPT_BLOCKS  #: blocks of the run in the shortened graph

    @property
    def template_count(self) -> int:
        """Return how many blocks the template stands for in the shortened graph."""
        return self.stop - self.first - self.kept + 1


@dataclass(frozen=True, eq=False)
class Graph:
    """Ops in topological order; blocks: the first op of each block.

    Graphs have no equality: equal ops may differ in their names, and tables and answers depend on names.
    """

    ops: tuple[Op, ...]
    blocks: tuple[int, ...]

    @property
    def output(self) -> Op:
        """Return the op that computes the answer."""
        return self.ops[-1]

    @cached_property
    def by_name(self) -> dict[str, Op]:
        """Return the ops by name."""
        return {op.name: op for op in self.ops}

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Return the names of all tensors."""
        return tuple([op.name for op in self.ops])

    @cached_property
    def layer_of(self) -> tuple[int, ...]:
        """Return the layers of all tensors."""
        return tuple([op.layer for op in self.ops])

    @cached_property
    def position(self) -> dict[str, int]:
        """Return the places of the ops, by name."""
        return {op.name: place for place, op in enumerate(self.ops)}

    @cached_property
    def roles(self) -> frozenset[str]:
        """Return the roles of all tensors."""
        return frozenset(op.role for op in self.ops)

    def first_with_role(self, role: str) -> Op:
        """Return the first op of a role; raises ValueError if there is none."""
        for op in self.ops:
            if op.role == role:
                return op
        raise ValueError(f"no tensor has the role {role!r}; there are {', '.join(sorted(self.roles))}")

    def layer_count(self) -> int:
        """Return the number of layers."""
        return max(op.layer for op in self.ops) + 1

    def block_range(self, block: int) -> tuple[int, int]:
        """Return the ops first..stop of a block."""
        after = block + 1
        return self.blocks[block], self.blocks[after] if after < len(self.blocks) else len(self.ops)

    @cached_property
    def repeat(self) -> Repeat | None:
        """Return the longest run of equal blocks, None if it is too short to shorten."""
        best = Repeat(0, 0)
        patterns = [self._pattern(block) for block in range(len(self.blocks))]
        for first, block in _runs(patterns):
            if block - first > best.stop - best.first:
                best = Repeat(first, block)
        return best if best.stop - best.first > KEPT_BLOCKS else None

    @cached_property
    def repeated_tensors(self) -> tuple[Mapping[str, str], ...]:
        """Return, for the template and each later block of the run, its stored tensors by those of the template."""
        run = self.repeat
        if run is None:
            return ()
        first, *others = (self.ops[slice(*self.block_range(b))] for b in range(run.first + TEMPLATE_BLOCK, run.stop))
        return tuple(
            {
                a: b
                for x, y in zip(first, block, strict=True)
                if x.tensors
                for a, b in zip(x.tensors, y.tensors, strict=True)
            }
            for block in (first, *others)
        )

    def _pattern(self, block: int) -> list[tuple[object, ...]]:
        """Return ops, roles and inputs of a block; equal blocks have equal patterns.

        Inputs in the block or the one before it are counted from the block's start, others from the graph's.
        """
        start, stop = self.block_range(block)
        neighbour, place = self.blocks[max(block - 1, 0)], self.position
        return [
            (op, op.role, *[(True, at - start) if (at := place[x]) >= neighbour else (False, at) for x in op.inputs])
            for op in self.ops[start:stop]
        ]

    def shortened(self) -> Graph:
        """Return the graph with its run of equal blocks cut to `KEPT_BLOCKS`; itself if there is no run.

        Ops keep their index in the whole graph.
        """
        run = self.repeat
        if run is None:
            return self
        template = run.first + TEMPLATE_BLOCK
        return self.without_blocks(template, run.stop - (KEPT_BLOCKS - TEMPLATE_BLOCK - 1))

    def without_blocks(self, template: int, following: int) -> Graph:
        """Return the graph without the blocks between two; `following` reads the template in their place."""
        before, start = slice(*self.block_range(following - 1)), self.blocks[template]
        names = {a.name: b.name for a, b in zip(self.ops[before], self.ops[start:], strict=False)}
        ops: list[Op] = []
        blocks = []
        for block in (*range(template + 1), *range(following, len(self.blocks))):
            blocks.append(len(ops))
            for op in self.ops[slice(*self.block_range(block))]:
                rewired = block == following and any(name in names for name in op.inputs)
                ops.append(replace(op, inputs=tuple(names.get(n, n) for n in op.inputs)) if rewired else op)
        return Graph(tuple(ops), tuple(blocks))


def _runs(patterns: Sequence[object]) -> Iterator[tuple[int, int]]:
    """Yield runs of equal patterns: first..stop."""
    first = 0
    for place in range(1, len(patterns) + 1):
        if place == len(patterns) or patterns[place] != patterns[first]:
            yield first, place
            first = place


# ----------------------------------------------------------------------------------------------------------------------
# Builds a graph: every method adds a tensor and returns its name.


@lru_cache(maxsize=256)
def _op(kind: Callable[..., Op], **fields: Any) -> Op:
    """Return an op without a name."""
    return kind(name="", **fields).warmed_up()


class GraphBuilder:
    """Builds a graph: every method adds the tensor of its docstring, with a role, and returns its name."""

    def __init__(self, storages: Mapping[str, BlockStorage] | None = None) -> None:
        """storages: of the matrices that stay in the blocks of their file."""
        self._storages = storages or {}
        self._unit = max((STORAGES[storage].block for storage in self._storages.values()), default=1)
        self._ops: dict[str, Op] = {}
        self._blocks: list[int] = []
        self._layer = 0
        self._branch = -1

    def layers(self, count: int) -> Iterator[int]:
        """Yield layer indices; ops added in the loop body belong to that layer."""
        for layer in range(count):
            self.set_layer(layer)
            yield layer

    def set_layer(self, layer: int, branch: int = -1) -> None:
        """Set the layer, and the branch of it, of the ops added from now on."""
        self._layer, self._branch = layer, branch

    def begin_block(self) -> None:
        """Begin a block; no kernel's ops may lie in two blocks."""
        if not self._blocks or self._blocks[-1] != len(self._ops):
            self._blocks.append(len(self._ops))

    def add_op(self, op: Op) -> str:
        """Add a tensor; return its name."""
        if not self._blocks:
            self.begin_block()
        if op.name in self._ops:
            raise ValueError(f"two tensors are called {op.name!r}")
        # The builder owns the op until `build`, and these fields are its place, not its identity.
        op.__dict__.update(layer=self._layer, branch=self._branch, index=len(self._ops))
        self._ops[op.name] = op
        return op.name

    def _add(
        self,
        name: str,
        inputs: tuple[str, ...],
        role: str,
        tensors: tuple[str, ...],
        kind: Callable[..., Op],
        **fields: Any,
    ) -> str:
        """Add a tensor and return its name; equal ops share their cached values."""
        return self.add_op(_op(kind, **fields).relabelled(name=name, inputs=inputs, role=role, tensors=tensors))

    def shape_of(self, x: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        op = self._ops[x]
        return op.space[: op.rank]

    def block_of(self, tensor: str) -> int:
        """Return how many values of a matrix's row are stored as one block."""
        return STORAGES[self._storages.get(tensor, "f32")].block

    def build(self) -> Graph:
        """Return the graph; the last tensor is the answer."""
        return Graph(tuple(self._ops.values()), tuple(self._blocks))

    def input(self, name: str, shape: Sequence[int], dtype: SlotDtype) -> str:
        """Return an input of the request."""
        return self.add_op(ops.Input(name=name, role="input", space=tuple(shape), rank=len(shape), dtype=dtype))

    def linear(
        self,
        name: str,
        x: str,
        role: str,
        matrices: Mapping[str, int],
        bias: bool = True,
        activation: str | None = None,
    ) -> str:
        """x [m, k] -> activation(x @ [W_1 | W_2 ...] + b) [m, n]; matrices: tensor names without .weight, columns."""
        m, k = self.shape_of(x)
        tensors = tuple(f"{t}.weight" for t in matrices) + (tuple(f"{t}.bias" for t in matrices) if bias else ())
        widths = tuple(matrices.values())
        space = (m, sum(widths), k)
        storages = tuple(self._storages.get(t) for t in tensors[: len(widths)]) if self._storages else ()
        return self._add(
            name, (x,), role, tensors, ops.Linear, space=space, widths=widths, bias=bias, activation=activation,
            storages=storages, unit=self._unit,
        )  # fmt: skip

    def experts_up(
        self, name: str, x: str, logits: str, role: str, matrices: Sequence[str], width: int, chosen: int,
        function: str, *, biases: Sequence[str] = (), limit: float = 0.0, offset: float = 0.0,
    ) -> str:  # fmt: skip
        """x [m, h], logits [m, E] -> hidden rows of chosen experts [m chosen, width].

        matrices: E gates, then E ups. biases: tables [E, width] of gates and ups, or none.
        """
        m, h = self.shape_of(x)
        return self._experts(
            ExpertsUp, name, (x, logits), role, matrices, biases, (m * chosen, width, h), chosen, function=function,
            limit=limit, offset=offset,
        )  # fmt: skip

    def experts_down(
        self, name: str, hidden: str, logits: str, role: str, matrices: Sequence[str], width: int, chosen: int,
        normed: bool, *, biases: Sequence[str] = (),
    ) -> str:  # fmt: skip
        """hidden [m chosen, f], logits [m, E] -> the weighted sum over chosen experts [m, width].

        matrices: E downs. biases: their table [E, width], or none.
        """
        m, f = self.shape_of(logits)[0], self.shape_of(hidden)[1]
        return self._experts(
            ExpertsDown, name, (hidden, logits), role, matrices, biases, (m, width, f), chosen, normed=normed
        )

    def _experts(
        self, kind: Callable[..., Op], name: str, inputs: tuple[str, str], role: str, matrices: Sequence[str],
        biases: Sequence[str], space: tuple[int, ...], chosen: int, **fields: Any,
    ) -> str:  # fmt: skip
        tensors = tuple(f"{matrix}.weight" for matrix in matrices)
        storages = tuple(self._storages.get(tensor) for tensor in tensors) if self._storages else ()
        return self._add(
            name, inputs, role, (*tensors, *biases), kind, space=space, experts=self.shape_of(inputs[1])[1],
            chosen=chosen, storages=storages, unit=self._unit, biases=len(biases), **fields,
        )  # fmt: skip

    def activation(self, name: str, x: str, role: str, function: str) -> str:
        """x -> function(x)."""
        dims = self.shape_of(x)
        return self._add(name, (x,), role, (), ops.Activation, space=dims, rank=len(dims), function=function)

    def sum(self, name: str, x: str, y: str, role: str) -> str:
        """x, y -> x + y."""
        dims = self.shape_of(x)
        return self._add(name, (x, y), role, (), ops.Add, space=dims, rank=len(dims))

    def add_table(self, name: str, x: str, role: str, tensor: str, rows: int) -> str:
        """x [m, h] -> x + the first m of the `rows` rows of a stored table."""
        return self._add(name, (x,), role, (tensor,), ops.AddTable, space=self.shape_of(x), rows=rows)

    def gate(self, name: str, x: str, y: str, role: str, function: str) -> str:
        """x, y -> function(x) * y."""
        return self._add(name, (x, y), role, (), ops.Gate, space=self.shape_of(x), function=function)

    def norm(self, name: str, x: str, role: str, tensor: str, norm: float | Norm, bias: bool = True) -> str:
        """x [m, h] -> its norm, a layer norm if `norm` is an eps; its moments are a tensor with a role of its own."""
        m, h = self.shape_of(x)
        moments_role = TASK_MOMENTS if role == TASK else MOMENTS
        moments = self._add(f"{name}.moments", (x,), moments_role, (), ops.Moments, space=(m, 2, h))
        tensors = (f"{tensor}.weight", f"{tensor}.bias") if bias else (f"{tensor}.weight",)
        how = norm if isinstance(norm, Norm) else Norm(norm)
        return self._add(name, (x, moments), role, tensors, ops.Normalise, space=(m, h), norm=how)

    def rotate(
        self,
        name: str,
        qkv: str,
        role: str,
        *,
        d: int,
        columns: tuple[int, int],
        theta: float,
        lengths: tuple[int, ...],
        norm: Norm | None = None,
        gammas: tuple[str, ...] = (),
        at: str = "",
        places: int = 0,
        divisors: tuple[float, ...] = (),
    ) -> str:
        """qkv [m, q + k + v] -> the same with rotary positions; columns: q and k; gammas: of the norms of heads.

        at: i32 [B], the position of each item's first row in its session of at most `places` positions.
        """
        inputs = (qkv, at) if at else (qkv,)
        return self._add(
            name, inputs, role, gammas, Rotate, space=self.shape_of(qkv), d=d, q_columns=columns[0],
            k_columns=columns[1], theta=theta, lengths=lengths, norm=norm, places=places, divisors=divisors,
        )  # fmt: skip

    def attention(
        self,
        name: str,
        q: str,
        kv: str,
        role: str,
        *,
        heads: int,
        width: int,
        columns: tuple[int, int, int],
        lengths: tuple[int, ...],
        causal: bool = False,
        window: int = -1,
        group: int = 1,
        scale: float = 0.0,
        bias: Sequence[WeightRef] = (),
        farthest: int = 0,
        side: int = 0,
        unit: int = 1,
    ) -> str:
        """q [m, ...], kv [s, ...] -> attention [m, width]; columns: first columns of q, k and v in their tensors.

        bias: a table [buckets, heads] of scores added by distance, up to `farthest`, or by steps on a grid; or keys
        and queries of distances, [buckets, width] each. Other arguments: see `Attention`.
        """
        space = (self.shape_of(q)[0], width, self.shape_of(kv)[0])
        tensors, buckets = tuple(ref.tensor for ref in bias), bias[0].rows[1] if bias else 0
        return self._add(
            name, (q, kv), role, tensors, Attention, space=space, d=width // heads, columns=columns, lengths=lengths,
            causal=causal, window=window, group=group, scale=scale, buckets=buckets, farthest=farthest,
            side=side, disentangled=len(bias) > 1, unit=unit,
        )  # fmt: skip

    def rows(self, name: str, x: str, role: str, rows: Sequence[int] | None = None) -> str:
        """x [m, h] -> some of its rows, ascending; None: all. Raises ValueError for rows in another order."""
        m, h = self.shape_of(x)
        chosen = None if rows is None else tuple(rows)
        if chosen is not None and any(row >= after for row, after in pairwise(chosen)):  # regions are sets of indices
            raise ValueError(f"{name}: rows must ascend, got {chosen[:8]}")
        space = (m if chosen is None else len(chosen), h)
        return self._add(name, (x,), role, (), ops.Rows, space=space, rows=chosen)

    def columns(self, name: str, x: str, role: str, start: int, stop: int) -> str:
        """x [m, h] -> columns start..stop."""
        return self._add(name, (x,), role, (), ops.Columns, space=(self.shape_of(x)[0], stop - start), start=start)

    def slice(self, name: str, x: str, role: str, start: int, stop: int) -> str:
        """x [n] -> x[start:stop]."""
        return self._add(
            name, (x,), role, (), ops.Columns, space=(stop - start,), rank=1, dtype=self._ops[x].dtype, start=start
        )

    def session_state(
        self, name: str, state: str, *, rows: int, width: int, role: str = roles.CACHE, kept: SlotDtype = "f32"
    ) -> str:
        """The session's `state` [rows, width]."""
        return self._add(name, (), role, (state,), ops.SessionState, space=(rows, width), dtype=kept)

    def append_to_cache(
        self,
        name: str,
        state: str,
        qkv: str,
        at: str,
        *,
        rows: int,
        start: int,
        role: str = roles.CACHE,
        lengths: tuple[int, ...] = (),
        kept: SlotDtype = "f32",
    ) -> tuple[str, ...]:
        """qkv [m, start + w], at [B] -> each item's session `state` [rows, w] with the new rows at `at`.

        lengths: of the items; empty for one item. kept: dtype of the state.
        """
        m, width = self.shape_of(qkv)
        caches, space = list[str](), (rows, width - start)
        for item, part in enumerate(pairwise(accumulate(lengths or (m,), initial=0))):
            own, state_of = state_name(name, item), state_name(state, item)
            past = self.session_state(f"{own}.past", state_of, rows=rows, width=width - start, role=role, kept=kept)
            where = {"start": start, "rows": part, "item": item}
            inputs = (past, qkv, at)
            caches.append(self._add(own, inputs, role, (state_of,), ops.AppendRows, space=space, dtype=kept, **where))
        return tuple(caches)

    def cached_attention(
        self,
        name: str,
        q: str,
        caches: tuple[str, ...],
        at: str,
        *,
        heads: int,
        columns: tuple[int, int, int],
        role: str = roles.ATTENTION,
        group: int = 1,
        scale: float = 0.0,
        lengths: tuple[int, ...] = (),
        window: int = -1,
        unit: int = 1,
        together: bool = False,
        sinks: str = "",
    ) -> str:
        """q [m, *], a cache [C, 2 width / group] for each item, at [B] -> attention [m, width].

        columns: first columns of q, k and v. lengths: of the items; empty for one item. together: rows of an item read
        its later rows too. sinks: a vector [heads]. Other arguments: see `CachedAttention`.
        """
        (rows, cached), m = self.shape_of(caches[0]), self.shape_of(q)[0]
        width = cached // 2 * group
        return self._add(
            name, (q, *caches, at), role, (sinks,) if sinks else (), CachedAttention, space=(m, width, rows),
            d=width // heads, columns=columns, group=group, scale=scale, lengths=lengths or (m,), window=window,
            unit=unit, together=together, sinks=bool(sinks),
        )  # fmt: skip

    def join(self, name: str, xs: Iterable[str], role: str) -> str:
        """Tensors [m, h_i] -> concatenated columns [m, sum of h_i]."""
        xs = tuple(xs)
        *starts, total = accumulate((self.shape_of(x)[1] for x in xs), initial=0)
        space = (self.shape_of(xs[0])[0], total)
        return self._add(name, xs, role, (), ops.Concat, space=space, starts=tuple(starts))

    def candidates(self, name: str, logits: str, temperatures: str, role: str, count: int) -> str:
        """logits [r, V], temperatures i32 [r] -> the likeliest tokens in the kernel's format [r, 2 count + 3]."""
        r, vocab = self.shape_of(logits)
        space = (r, 2 * count + 3, vocab)
        return self._add(name, (logits, temperatures), role, (), ops.Candidates, space=space)

    def embedding(
        self, name: str, xs: Iterable[str], kernel: str, refs: Iterable[WeightRef], width: int, **attrs: Any
    ) -> str:
        """ids i32 [m] and the kernel's other inputs -> [m, width]; refs: token embeddings, then the addends."""
        xs, refs = tuple(xs), tuple(refs)
        first, stop = refs[0].columns if refs[0].layout == "packed" else refs[0].rows
        return self.add_op(
            ops.Embedding(
                name=name, inputs=xs, role=roles.EMBEDDINGS, tensors=tuple(r.tensor for r in refs), kernel=kernel,
                space=(*self.shape_of(xs[0]), width, stop - first), attrs=tuple(attrs.items()), weights=refs,
                sources=tuple(self.shape_of(x) for x in xs),
            )
        )  # fmt: skip

    def opaque(
        self,
        name: str,
        xs: Iterable[str],
        role: str,
        kernel: str,
        shape: Sequence[int],
        refs: Iterable[WeightRef] = (),
        **attrs: Any,
    ) -> str:
        """A kernel that computes its whole result from its whole inputs."""
        xs, refs = tuple(xs), tuple(refs)
        return self.add_op(
            ops.OpaqueOp(
                name=name, inputs=xs, role=role, tensors=tuple(r.tensor for r in refs), space=tuple(shape),
                rank=len(shape), kernel=kernel, attrs=tuple(attrs.items()), weights=refs,
                sources=tuple(self.shape_of(x) for x in xs),
            )
        )  # fmt: skip
