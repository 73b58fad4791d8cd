"""Reads the machine code of the register tiles: written for any CPU that LLVM knows, or as Numba compiled it here."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from itertools import product
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import llvmlite.binding as llvm
import numba
from llvmlite import ir
from numba.core.fastmathpass import rewrite_module

from hepti_mqtt.kernels.attention.softmax import _write_copy, _write_softmax
from hepti_mqtt.kernels.conv.places import PlacesWriter
from hepti_mqtt.kernels.gemm import few
from hepti_mqtt.kernels.gemm.forms import form
from hepti_mqtt.kernels.gemm.narrow_tile import StorageTileWriter
from hepti_mqtt.kernels.gemm.stream_tile import StreamTileWriter
from hepti_mqtt.kernels.gemm.tile import TileWriter
from hepti_mqtt.kernels.gemm.unit_tile import UnitTileWriter
from hepti_mqtt.kernels.machine import jit
from hepti_mqtt.kernels.machine.isa import Dot, Tile

TRIPLES: Final = {"neon": "aarch64-unknown-linux-gnu"}
X86: Final = "x86_64-unknown-linux-gnu"
# What adds products, in one instruction where the CPU has it, and what widens narrow weights.
MULTIPLY_ADD: Final = re.compile(r"^(vfmadd\d+ps|fmla|mulps|(?:\{vex\}\s*)?vpdpbusd|sdot)\s")
CONVERT: Final = re.compile(r"^(vcvtph2psx?|vcvtdq2ps|cvtdq2ps|fcvtl2?|scvtf)\s")
# The stack, by whatever name: (%rsp), (%rbp) as a frame pointer never occurs in code without one, [sp, #16].
STACK: Final = re.compile(r"\(%rsp|\[sp\b")
VECTOR: Final = re.compile(r"%[xyz]mm|\b[qv]\d+\b")
PREFETCH: Final = re.compile(r"^(prefetch|prfm)")
NAME: Final = re.compile(r"^hepti_(\w+?)_(\d+)(?:x(\d+))?:")


class Loop(NamedTuple):
    """One innermost loop of a tile's function: its instructions in order.

    kind: a key of `KINDS`, or "" for a loop of a kernel itself. size: the numbers in the function's name.
    """

    kind: str
    size: tuple[int, ...]
    body: tuple[str, ...]

    @property
    def multiply_adds(self) -> list[str]:
        return [line for line in self.body if MULTIPLY_ADD.match(line)]

    @property
    def conversions(self) -> list[str]:
        return [line for line in self.body if CONVERT.match(line)]

    @property
    def spills(self) -> list[str]:
        return [line for line in self.body if STACK.search(line)]

    @property
    def vector_spills(self) -> list[str]:
        return [line for line in self.spills if VECTOR.search(line)]

    @property
    def prefetches(self) -> list[str]:
        return [line for line in self.body if PREFETCH.match(line)]


def loops(assembly: str) -> list[Loop]:
    """Return the innermost loops, with products in them, of all functions in the assembly."""
    found: list[Loop] = []
    kind, size = "", ()
    label, body = "", []
    for raw in assembly.splitlines():
        line = raw.split("#")[0].strip() if "\t#" in raw else raw.strip()
        if match := NAME.match(line):
            kind, size = match[1], tuple(int(number) for number in match.groups()[1:] if number)
        elif line.startswith(".Lfunc_end"):
            kind, size = "", ()
        if match := re.match(r"^(\.LBB\w+):", line):
            label, body = match[1], []
        elif line and not line.startswith("."):
            body.append(line)
            # A jump back to the label that begins this block.
            if label and re.match(rf"^(j\w+|b\.?\w*|cbn?z|tbn?z)\s.*{re.escape(label)}$", line):
                loop = Loop(kind, size, tuple(body))
                if loop.multiply_adds:
                    found.append(loop)
    return found


class Target(NamedTuple):
    """A CPU by LLVM's name and what the kernels use on it: keys of `TILES` and `DOTS`, and the tiles themselves."""

    cpu: str
    isa: str
    tile: Tile
    dot: Dot

    @property
    def half_in_hardware(self) -> bool:
        return self.isa in ("avx512", "avx2", "neon")


Size = tuple[int, ...]


class Kind(NamedTuple):
    """A kind of function that is written as LLVM vector IR: the sizes that a target has, and what writes one of them.

    write: takes the module, the function's name, the target and the size.
    """

    sizes: Callable[[Target], Iterable[Size]]
    write: Callable[[ir.Module, str, Target, Size], ir.Function]


def _all_sizes(target: Target) -> Iterable[Size]:
    return product(range(1, target.tile.rows + 1), range(1, target.tile.vectors + 1))


def _matmul(kind: str) -> Kind:
    layout: Any = "columns" if kind.endswith("columns") else "rows"

    def write(module: ir.Module, name: str, target: Target, size: Size) -> ir.Function:
        return TileWriter(module, name, target.tile, *size, layout, "ahead" in kind).write()

    return Kind(_all_sizes, write)


def _panels() -> Kind:
    def write(module: ir.Module, name: str, target: Target, size: Size) -> ir.Function:
        return few.write_panels(module, name, target.tile, *size)

    return Kind(lambda target: dict.fromkeys(few.sizes(target.tile)), write)


def _places(kind: Any) -> Kind:
    def write(module: ir.Module, name: str, target: Target, size: Size) -> ir.Function:
        return PlacesWriter(module, name, target.tile, *size, kind).write()

    return Kind(_all_sizes, write)


def _storage(kind: Any, writer: type[StorageTileWriter]) -> Kind:
    def shape(target: Target) -> Any:
        return form(kind, target.tile, target.dot, target.half_in_hardware)

    def write(module: ir.Module, name: str, target: Target, size: Size) -> ir.Function:
        return writer(module, name, shape(target), *size).write()

    return Kind(lambda target: writer.sizes(shape(target)), write)


def _vectors(write_one: Callable[[ir.Module, str, Tile, int], ir.Function]) -> Kind:
    def write(module: ir.Module, name: str, target: Target, size: Size) -> ir.Function:
        return write_one(module, name, target.tile, *size)

    return Kind(lambda target: [(vectors,) for vectors in range(1, target.tile.vectors + 1)], write)


# Every function that is written as LLVM vector IR and has a loop, by the kernel that it is part of.
_OF_PANELS: Final = ("panel_ahead_rows", "panel_rows", "panel_columns")
MATMUL: Final = (*_OF_PANELS, "places")
KINDS: Final[dict[str, Kind]] = {
    **{kind: _matmul(kind) for kind in _OF_PANELS},
    "panels_rows": _panels(),
    **{kind: _places(kind) for kind in ("places", "depthwise")},
    **{kind: _storage(kind, StorageTileWriter) for kind in ("f16", "w8a32", "w8a8")},
    **{f"stream_{kind}": _storage(kind, StreamTileWriter) for kind in ("f16", "w8a32")},
    "unit_w8a8": _storage("w8a8", UnitTileWriter),
    "softmax": _vectors(_write_softmax),
    "copy": _vectors(_write_copy),
}


def written(kind: str, target: Target, sizes: Iterable[Size] | None = None) -> str:
    """Return the assembly of tiles of a kind for any CPU, with the passes and flags that Numba uses.

    sizes: those that are wanted, all that the target has if None.
    """
    triple = TRIPLES.get(target.isa, X86)
    source = ir.Module()
    source.triple, source.data_layout = triple, str(_machine(triple, target.cpu).target_data)
    for size in KINDS[kind].sizes(target) if sizes is None else sizes:
        name = f"hepti_{kind}_{'x'.join(map(str, size))}"
        KINDS[kind].write(source, name, target, size).linkage = "external"  # nobody calls them here
    rewrite_module(source, SimpleNamespace(flags=jit.FASTMATH))
    return _assembled(str(source), triple, target.cpu)


def _machine(triple: str, cpu: str) -> Any:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    return llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, opt=3, reloc="pic")


@functools.cache  # several tilings have the same tile
def _assembled(source: str, triple: str, cpu: str) -> str:
    machine = _machine(triple, cpu)
    module = llvm.parse_assembly(source)
    module.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization, options.slp_vectorization = True, False
    passes = llvm.create_pass_builder(machine, options)
    passes.getModulePassManager().run(module, passes)
    return machine.emit_assembly(module)


def compiled(kernel: Any) -> str:
    """Return the assembly of a kernel as Numba makes it for this machine; not from the cache, which has none."""
    (arguments,) = [signature for dispatcher, signature in jit.registered if dispatcher is kernel]
    fresh = numba.njit(**jit._options(jit.FASTMATH))(kernel.py_func)
    fresh.compile(arguments)
    return fresh.inspect_asm(fresh.signatures[0])
