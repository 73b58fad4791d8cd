"""The register tiles of every instruction set are valid LLVM IR, also of sets that this machine cannot run."""

from __future__ import annotations

import llvmlite.binding as llvm
import pytest
from llvmlite import ir

from hepti_mqtt.kernels import gemv
from hepti_mqtt.kernels.conv_tile import PlacesWriter
from hepti_mqtt.kernels.cpu import DOTS, TILES
from hepti_mqtt.kernels.quantised_tile import QuantisedGemvWriter, QuantisedTileWriter, form
from hepti_mqtt.kernels.tile import TileWriter

DOT_OF = {"avx512": "avx512vnni", "avx2": "avxvnni", "neon": "dotprod"}


def verify(write):
    """Have `write(module)` fill a module; LLVM raises RuntimeError if it is not valid."""
    module = ir.Module()
    write(module)
    llvm.parse_assembly(str(module)).verify()


def some(sizes):
    """Return the tiles of the fewest rows and of the most: further rows are written like these."""
    rows = {r for r, _ in sizes}
    return [size for size in sizes if size[0] in {min(rows), max(rows)}]


@pytest.mark.parametrize("name", TILES)
def test_tiles_of_f32(name):
    tile = TILES[name]

    def write(module):
        for rows, vectors in some(tile.sizes()):
            size = f"{rows}x{vectors}"
            for layout, prefetch in (("rows", False), ("rows", True), ("columns", False)):
                TileWriter(module, f"{layout}{prefetch}{size}", tile, rows, vectors, layout, prefetch).write()
            for kind in ("places", "depthwise"):
                PlacesWriter(module, f"{kind}{size}", tile, rows, vectors, kind).write()
        for rows, panels in some(gemv.tile_sizes(tile)):
            gemv.write_panels(module, f"gemv{rows}x{panels}", tile, rows, panels * tile.vectors)

    verify(write)


@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize("kind", ["f16", "w8a32", "w8a8"])
@pytest.mark.parametrize("writer", [QuantisedTileWriter, QuantisedGemvWriter])
def test_tiles_over_narrow_weights(name, kind, writer):
    def write(module):
        for dot in {"plain", DOT_OF.get(name, "plain")}:
            for by_hardware in (False, True):
                shape = form(kind, TILES[name], DOTS[dot], by_hardware)
                for rows, vectors in some(writer.sizes(shape)):
                    writer(module, f"{dot}{by_hardware}{rows}x{vectors}", shape, rows, vectors).write()

    verify(write)
