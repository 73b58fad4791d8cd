"""Reads the machine code of the register tiles: run as a program, it prints the assembly for one CPU.

    python assembly.py ISA CPU [ROWS]

A forced instruction set is compiled for any CPU by LLVM's cross compiler, so that ARM is read on x86 too. ROWS makes
the tile higher than the table says, for the test that tests the tests.
"""

from __future__ import annotations

import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import NamedTuple

TRIPLES = {"neon": "aarch64-unknown-linux-gnu"}
X86 = "x86_64-unknown-linux-gnu"
MULTIPLY_ADD = re.compile(r"^(vfmadd\d+ps|fmla|mulps)\s")
# The stack, by whatever name: (%rsp), (%rbp) as a frame pointer never occurs in code without one, [sp, #16].
STACK = re.compile(r"\(%rsp|\[sp\b")
TILE_NAME = re.compile(r"^(hepti_(?:tile|panel)(?:_ahead)?_(?:rows|columns)_(\d+)x(\d+)):")


class Loop(NamedTuple):
    """One innermost loop of a tile's function: its instructions in order."""

    tile: str
    rows: int
    vectors: int
    body: tuple[str, ...]

    @property
    def multiply_adds(self) -> list[str]:
        return [line for line in self.body if MULTIPLY_ADD.match(line)]

    @property
    def spills(self) -> list[str]:
        return [line for line in self.body if STACK.search(line)]


def loops(assembly: str) -> list[Loop]:
    """Return the innermost loops, with vector arithmetic in them, of all tiles in the assembly."""
    found: list[Loop] = []
    name, rows, vectors = "", 0, 0
    label, body = "", []
    for raw in assembly.splitlines():
        line = raw.split("#")[0].strip() if "\t#" in raw else raw.strip()
        if match := TILE_NAME.match(line):
            name, rows, vectors = match[1], int(match[2]), int(match[3])
        elif line.startswith(".Lfunc_end"):
            name = ""
        if match := re.match(r"^(\.LBB\w+):", line):
            label, body = match[1], []
        elif line and not line.startswith("."):
            body.append(line)
            # A jump back to the label that begins this block.
            if label and re.match(rf"^(j\w+|b\.?\w*|cbn?z|tbn?z)\s.*{re.escape(label)}$", line):
                loop = Loop(name, rows, vectors, tuple(body))
                if name and loop.multiply_adds:
                    found.append(loop)
    return found


def _functions(code: str, triple: str, layout: str) -> str:
    """Return a module of only the tiles, for another target; the rest of what Numba compiled is of this machine."""
    tiles = re.findall(r"^define [^\n]*@hepti_(?:tile|panel)_.*?^}", code, re.MULTILINE | re.DOTALL)
    others = [
        line for line in code.splitlines() if re.match(r"declare .*@llvm\.(fma|fmuladd|prefetch)|attributes #", line)
    ]
    head = [f'target triple = "{triple}"', f'target datalayout = "{layout}"']
    tiles = [tile.replace("define internal", "define", 1) for tile in tiles]
    return re.sub(r", ![\w.]+ !\d+", "", "\n".join([*head, *tiles, *others]))


def _heighten(rows: int) -> None:
    """Make the tile `rows` high, before the package is imported and makes its tiles from the table."""
    path = Path(__file__).parents[2] / "hepti_mqtt" / "kernels" / "isa.py"
    spec = spec_from_file_location("hepti_mqtt.kernels.isa", path)
    table = module_from_spec(spec)
    sys.modules[spec.name] = table
    spec.loader.exec_module(table)
    table.TILE = table.TILE._replace(rows=rows)


def _main(isa: str, cpu: str, rows: str = "") -> None:
    import llvmlite.binding as llvm

    if rows:
        _heighten(int(rows))
    from hepti_mqtt.kernels import jit, linear

    kernel = linear._linear
    (arguments,) = [signature for dispatcher, signature in jit.registered if dispatcher is kernel]
    kernel.compile(arguments)
    code = kernel.inspect_llvm(kernel.signatures[0])
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    triple = TRIPLES.get(isa, X86)
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, opt=3, reloc="pic")
    module = llvm.parse_assembly(_functions(code, triple, str(machine.target_data)))
    module.verify()
    sys.stdout.write(machine.emit_assembly(module))


if __name__ == "__main__":
    _main(*sys.argv[1:])
