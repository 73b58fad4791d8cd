from __future__ import annotations

import numba
import numpy as np
import pytest
from kernels_support import array, held_here

from hepti_mqtt.errors import ConfigError
from hepti_mqtt.kernels import cpu
from hepti_mqtt.kernels.cpu import OVERRIDE, TILE, TILES, isa, require_known
from hepti_mqtt.kernels.jit import JIT, lowered
from hepti_mqtt.kernels.tile import emit_tile, panel_of_columns, panel_of_rows


def compiled(tile):
    @numba.njit
    def call(rows, vectors, a, stride, k, b, start, start_stride, c):
        place, apart = c.ctypes.data, c.shape[1]
        tile(rows, vectors, a.ctypes.data, stride, k, b.ctypes.data, start.ctypes.data, start_stride, place, apart)

    return call


def check(call, layout, tile, rows, vectors, k):
    width = vectors * tile.lanes
    a, b = array(rows, k), array(k, tile.width)
    stored = np.zeros((rows, k + 3) if layout == "rows" else (k, rows + 3), np.float32)
    stored[:, :-3] = a if layout == "rows" else a.T
    for start, stride in ((array(tile.width), 0), (array(rows, tile.width), tile.width)):
        # Guards around the tile: it must not write beyond its rows and vectors.
        c = np.full((rows + 2, width + 3), 7, np.float32)
        call(rows, vectors, stored, stored.shape[1], k, b, start, stride, c[1:])
        want = np.atleast_2d(start)[:, :width] + a.astype(np.float64) @ b[:, :width]
        np.testing.assert_allclose(c[1:-1, :width], want, rtol=1e-4, atol=1e-4)
        assert (c[[0, -1]] == 7).all()
        assert (c[:, width:] == 7).all()


@pytest.mark.wide
@pytest.mark.skipif(not JIT, reason="only compiled code has tiles of an instruction set")
@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize("name", TILES)
def test_the_tile_of_every_instruction_set(name, layout):
    tile = held_here(TILES[name])
    call = compiled(lowered(emit_tile(layout, tile), compiled))
    for rows in range(1, tile.rows + 1):
        for k in (0, 1, 7, 32):
            check(call, layout, tile, rows, tile.vectors - rows % tile.vectors, k)


@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_the_tile_of_this_machine(layout):
    call = compiled(panel_of_rows if layout == "rows" else panel_of_columns)
    check(call, layout, TILE, 3, TILE.vectors, 5)
    check(call, layout, TILE, 1, 1, 0)


def test_the_accumulators_of_every_tile_fit_the_registers():
    registers = {"avx512": 32, "neon": 32, "avx2": 16, "sse": 16, "generic": 16}
    for name, tile in TILES.items():
        needed = tile.rows * tile.vectors + tile.vectors + (tile.rows if tile.lane_broadcast else 1)
        assert needed <= registers[name], name


def test_the_instruction_set_can_be_forced_to_one_that_exists(monkeypatch):
    monkeypatch.delenv(OVERRIDE, raising=False)
    assert isa() in TILES
    monkeypatch.setenv(OVERRIDE, "neon")
    assert isa() == "neon"
    monkeypatch.setenv(OVERRIDE, "mmx")
    assert isa() in TILES, "modules can be imported; nothing is compiled with it"
    with pytest.raises(ConfigError, match="'mmx' is not an instruction set"):
        require_known()
    monkeypatch.setattr(cpu, "_own", lambda: "avx2")
    monkeypatch.setenv(OVERRIDE, "neon")
    require_known()
    monkeypatch.setenv(OVERRIDE, "avx512")
    with pytest.raises(ConfigError, match="'avx512' has wider vectors than this CPU, which has avx2"):
        require_known()


@pytest.mark.parametrize(
    ("machine", "features", "expected"),
    [
        ("aarch64", {}, "neon"),
        ("arm64", {}, "neon"),
        ("armv7l", {}, "generic"),
        ("x86_64", {"avx512f": True, "avx2": True, "fma": True}, "avx512"),
        ("AMD64", {"avx2": True, "fma": True}, "avx2"),
        ("x86_64", {"avx2": True}, "sse"),
    ],
)
def test_the_instruction_set_follows_from_the_machine(monkeypatch, machine, features, expected):
    monkeypatch.delenv(OVERRIDE, raising=False)
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_features", lambda: features)
    assert isa() == expected
