"""The tile of int8 products on a matrix unit (Intel's AMX): 16 rows of codes times up to four vectors of a panel.

One instruction multiplies 16 rows of 64 bytes by 64 rows of 16 columns, eight times as many products in a cycle as the
dot products of vectors. A panel lies in memory as the unit takes it. Sums of a block are exact in i32 and scaled as
those of `narrow_tile` are, so that a row has the same bits in either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final

from llvmlite import ir
from numba import types

from hepti_mqtt.kernels.gemm.forms import FORMS, GROUP, Form
from hepti_mqtt.kernels.gemm.loops import loop
from hepti_mqtt.kernels.gemm.narrow_tile import LINE, StorageTileWriter, emit_storage_tile, plain_tile
from hepti_mqtt.kernels.machine.isa import DOT
from hepti_mqtt.kernels.machine.jit import lowered

# Rows of a tile, and bytes of each: of codes 64 values, of a panel 16 columns of GROUP values, of sums 16 columns.
ROWS: Final = 16
_ROW: Final = 64
_STEPS: Final = _ROW // GROUP

# Tile registers: sums of each vector, whole tiles of codes and of the panel, and what is left of k.
_CODES, _CODES_LEFT, _PANEL, _PANEL_LEFT = 4, 5, 6, 7

_I8, _I32, _I64 = (ir.IntType(bits) for bits in (8, 32, 64))
_POINTER: Final = _I8.as_pointer()
_NONE: Final = ir.VoidType()


class _Unit:
    """Writes the unit's instructions; a register is a number that is part of the instruction."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.builder = builder

    def configure(self, steps_left: Any) -> None:
        """Say how high and wide the registers are; steps_left: 1 to 16, of the tiles that end k."""
        b = self.builder
        at = b.alloca(_I64, 8)
        at.align = _ROW
        widths, heights = 0x0040_0040_0000_0040, 0x0010_1010_1010_1010
        of_left = b.or_(b.shl(steps_left, _int(16 + 2)), _int(widths))
        rows = b.or_(b.shl(steps_left, _int(56)), _int(heights))
        sums, nothing = _int(0x0040_0040_0040_0040), _int(0)
        for place, value in enumerate((_int(1), nothing, sums, of_left, nothing, nothing, rows, nothing)):
            b.store(value, b.gep(at, [_int(place)]))
        self._do("ldtilecfg", b.bitcast(at, _POINTER))

    def release(self) -> None:
        self._do("tilerelease")

    def clear(self, register: int) -> None:
        self._do("tilezero", _register(register))

    def load(self, register: int, address: Any, between: Any) -> None:
        self._do("tileloadd64", _register(register), self.builder.inttoptr(address, _POINTER), between)

    def store(self, register: int, address: Any) -> None:
        self._do("tilestored64", _register(register), address, _int(_ROW))

    def multiply_add(self, sums: int, codes: int, panel: int) -> None:
        self._do("tdpbusd", *map(_register, (sums, codes, panel)))

    def _do(self, name: str, *arguments: Any) -> None:
        module, name = self.builder.module, f"llvm.x86.{name}"
        kind = ir.FunctionType(_NONE, [a.type for a in arguments])
        self.builder.call(module.globals.get(name) or ir.Function(module, kind, name), list(arguments))


class UnitTileWriter(StorageTileWriter):
    """Writes the tile of `StorageTileWriter` on the matrix unit, for any number of rows up to 16.

    Arguments: those, then the rows. All 16 rows of codes are read: what lies behind the last one must be memory, and
    nothing comes of it. The registers must have been configured for k.
    """

    prefix = "unit_"
    signature: ClassVar[ir.FunctionType] = ir.FunctionType(_NONE, [_I64] * (len(StorageTileWriter.signature.args) + 1))

    @classmethod
    def sizes(cls, shape: Form) -> Sequence[tuple[int, int]]:
        """Return (1, vectors) of all tiles: the scaling goes row by row."""
        return [(1, vectors) for vectors in range(1, shape.vectors + 1)]

    @staticmethod
    def call(rows: Any, vectors: Any, *rest: Any) -> tuple[tuple[Any, Any], list[Any]]:
        """Return the size by which a function is chosen, and what it is called with."""
        return (_int(1), vectors), [*rest, rows]

    def write(self) -> ir.Function:
        """Return the finished function."""
        b, unit = self.builder, _Unit(self.builder)
        a, stride, steps, panel, *rest = self.function.args
        row_scales, zeros, scale_stride, column_scales, column_sums, start, start_stride, c, c_stride, *rest = rest
        ahead, fetch, rows = rest
        scratch = b.alloca(ir.ArrayType(_I8, ROWS * _ROW), self.vectors)
        scratch.align = _ROW
        for j in range(self.vectors):
            unit.clear(j)
        tiles = b.udiv(steps, _int(_STEPS))
        loop(
            b,
            (_int(0), tiles, 1),
            [],
            lambda q, _: self._tile(unit, q, (a, stride, panel, ahead, fetch)),
            as_written=True,
        )
        with b.if_then(b.icmp_signed("!=", b.and_(steps, _int(_STEPS - 1)), _int(0))):
            self._multiply(unit, tiles, (a, stride, panel), _CODES_LEFT, _PANEL_LEFT)
        for j in range(self.vectors):
            unit.store(j, b.bitcast(b.gep(scratch, [_int(j)]), _POINTER))
        sums, wide = b.ptrtoint(scratch, _I64), ir.VectorType(ir.FloatType(), self.form.lanes)
        columns = [_int(4 * j * self.form.lanes) for j in range(self.vectors)]
        scales, of_codes = ([self._load(b.add(of, at), wide) for at in columns] for of in (column_scales, column_sums))

        def scaled(i: Any, _: Any) -> list[Any]:
            of_row = b.mul(i, scale_stride)
            zero, scale = (
                self._splat(self._load(b.add(of, of_row), ir.FloatType()), wide) for of in (zeros, row_scales)
            )
            at_sums, at_start, at_c = (
                b.add(at, b.mul(i, by)) for at, by in ((sums, _int(_ROW)), (start, start_stride), (c, c_stride))
            )
            for j, at in enumerate(columns):
                value = self._load(b.add(at_sums, _int(j * ROWS * _ROW)), self.vector)
                value = self._of_codes(value, zero, of_codes[j], scales[j])
                value = self._multiply_add(value, scale, self._load(b.add(at_start, at), wide))
                b.store(value, self._pointer(b.add(at_c, at), wide)).align = 4
            return []

        loop(b, (_int(0), rows, 1), [], scaled, as_written=True)
        b.ret_void()
        return self.function

    def _tile(self, unit: _Unit, q: Any, of: tuple[Any, ...]) -> list[Any]:
        b = self.builder
        *operands, ahead, fetch = of
        self._multiply(unit, q, operands, _CODES, _PANEL)
        # Asking for a line that is not in the first-level cache costs as much as reading it.
        with b.if_then(b.icmp_signed("!=", fetch, _int(0))):
            first = b.add(ahead, b.mul(b.mul(q, _int(_STEPS)), fetch))
            for line in range(_STEPS):
                self._prefetch(b.add(first, b.mul(fetch, _int(line))), 2 * LINE, 3)
        return []

    def _multiply(self, unit: _Unit, q: Any, of: Sequence[Any], codes: int, weights: int) -> None:
        """Add the products of the tile q of codes with those of the panel."""
        b, (a, stride, panel) = self.builder, of
        step = GROUP * self.form.width
        unit.load(codes, b.add(a, b.mul(q, _int(_ROW))), stride)
        at = b.add(panel, b.mul(q, _int(step * _STEPS)))
        for j in range(self.vectors):
            unit.load(weights, b.add(at, _int(j * _ROW)), _int(step))
            unit.multiply_add(j, codes, weights)


def _int(value: int) -> Any:
    return ir.Constant(_I64, value)


def _register(number: int) -> Any:
    return ir.Constant(_I8, number)


def _emit_configure(_context: Any, _k: Any) -> Any:
    def codegen(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        if DOT.unit:
            # Steps of the tiles that end k, 1 to 16: where whole tiles end it, any number does.
            last = builder.sub(arguments[0], _int(1))
            steps = builder.udiv(builder.and_(last, _int(_ROW - 1)), _int(GROUP))
            _Unit(builder).configure(builder.add(steps, _int(1)))
        return context.get_dummy_value()

    return types.void(types.int64), codegen


def _emit_release(_context: Any) -> Any:
    def codegen(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        if DOT.unit:
            _Unit(builder).release()
        return context.get_dummy_value()

    return types.void(), codegen


def _plain_configure(_k: int) -> None:
    return None


def _plain_release() -> None:
    return None


# Before the first tile and after the last one, in the thread that calls it; nothing where there is no matrix unit.
configure_unit: Final[Callable[[int], None]] = lowered(_emit_configure, _plain_configure)
release_unit: Final[Callable[[], None]] = lowered(_emit_release, _plain_release)
# Arguments: rows (1 to 16), vectors (1 to the form's), then those of `StorageTileWriter`.
unit_tile: Final = lowered(emit_storage_tile(FORMS["w8a8"], UnitTileWriter), plain_tile(FORMS["w8a8"]))
