"""The loop of a register tile, as LLVM IR: its sums stay in registers, and its steps are as many as are written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from llvmlite import ir

_I64: Final = ir.IntType(64)


def loop(
    builder: Any,
    bounds: tuple[Any, Any, int],
    start: Sequence[Any],
    body: Callable[[Any, list[Any]], list[Any]],
    *,
    as_written: bool,
) -> list[Any]:
    """Write `sums = body(p, sums)` for p in range(*bounds) (i64, i64, a number); return the last sums.

    as_written: the compiler does no several turns at once.
    """
    first, stop, step = bounds
    before, inner, after = builder.block, builder.append_basic_block("k"), builder.append_basic_block("done")
    builder.cbranch(builder.icmp_signed("<", first, stop), inner, after)
    builder.position_at_end(inner)
    p, sums = builder.phi(_I64), [builder.phi(value.type) for value in start]
    new = body(p, list(sums))
    last = builder.block
    following = builder.add(p, ir.Constant(_I64, step))
    back = builder.cbranch(builder.icmp_signed("<", following, stop), inner, after)
    if as_written:
        back.set_metadata("llvm.loop", _not_unrolled(builder.module))
    p.add_incoming(first, before)
    p.add_incoming(following, last)
    builder.position_at_end(after)
    results = [builder.phi(value.type) for value in start]
    for phi, result, begin, end in zip(sums, results, start, new, strict=True):
        for place in (phi, result):
            place.add_incoming(begin, before)
            place.add_incoming(end, last)
    return results


def in_order(builder: Any, sums: Sequence[Any]) -> list[Any]:
    """Return vectors of an x86 register unchanged, and keep the compiler from moving products or loads across.

    It would load what several steps need before their products (Zen), and run out of registers. No instruction comes
    of it.
    """
    vector, count = sums[0].type, len(sums)
    constraints = ",".join(["=v"] * count + [str(i) for i in range(count)] + ["~{memory}"])
    result = ir.LiteralStructType([vector] * count) if count > 1 else vector
    same = builder.asm(ir.FunctionType(result, [vector] * count), "", constraints, sums, True)
    return [builder.extract_value(same, i) for i in range(count)] if count > 1 else [same]


def _not_unrolled(module: ir.Module) -> Any:
    """Return what a loop's last branch bears so that the compiler does one turn at a time."""
    mark = module.add_metadata([ir.MetaDataString(module, f"hepti.loop.{len(module.metadata)}")])
    mark.operands = (mark, module.add_metadata([ir.MetaDataString(module, "llvm.loop.unroll.disable")]))
    return mark
