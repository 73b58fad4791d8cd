"""The instruction set and the int8 tile: what the machine has, or what is forced."""

from __future__ import annotations

import pytest

from hepti_mqtt.core.errors import ConfigError
from hepti_mqtt.kernels import cpu
from hepti_mqtt.kernels.cpu import DOT_OVERRIDE, OVERRIDE, TILES, dot, isa, require_known


@pytest.fixture
def machine(monkeypatch):
    """Return what sets this machine: its architecture, LLVM's features, and Linux's bits."""

    def become(name, features, hwcap=0):
        for variable in (OVERRIDE, DOT_OVERRIDE):
            monkeypatch.delenv(variable, raising=False)
        monkeypatch.setattr("llvmlite.binding.get_process_triple", lambda: f"{name}-unknown-linux-gnu")
        monkeypatch.setattr("llvmlite.binding.get_host_cpu_features", lambda: dict.fromkeys(features, True))
        monkeypatch.setattr(cpu, "_hwcap", lambda: hwcap)

    return become


A72, A76 = 0x8FB, 0x119FFB  # what Linux says of these CPUs


@pytest.mark.parametrize(
    ("name", "features", "hwcap", "tile", "int8_tile"),
    [
        ("aarch64", {"neon", "lse"}, A76, "neon", "dotprod"),
        ("aarch64", {"dotprod"}, 0, "neon", "dotprod"),
        ("arm64", {"neon"}, A72, "neon", "plain"),
        ("armv7l", {}, 0, "generic", "plain"),
        ("riscv64", {}, A76, "generic", "plain"),
        ("x86_64", {"avx512f", "avx512vnni", "avx2", "fma"}, 0, "avx512", "avx512vnni"),
        ("x86_64", {"avx512f", "avx2", "fma"}, 0, "avx512", "plain"),
        ("x86_64", {"avx2", "fma", "avxvnni"}, 0, "avx2", "avxvnni"),
        ("AMD64", {"avx2", "fma"}, A76, "avx2", "plain"),
        ("x86_64", {"avx2"}, 0, "sse", "plain"),
    ],
)
def test_tiles_follow_from_the_machine(machine, name, features, hwcap, tile, int8_tile):
    machine(name, features, hwcap)
    assert (isa(), dot()) == (tile, int8_tile)


@pytest.mark.parametrize(("features", "tile"), [("", "sse"), ("+avx2,+fma", "avx2"), ("+avx2,-fma", "sse")])
def test_the_instruction_set_is_one_that_numba_compiles_for(machine, monkeypatch, features, tile):
    machine("x86_64", {"avx2", "fma"})
    monkeypatch.setattr("numba.config.CPU_FEATURES", features)
    assert isa() == tile


def test_narrower_tiles_can_be_forced(machine, monkeypatch):
    machine("x86_64", {"avx2", "fma", "avxvnni"})
    monkeypatch.setenv(OVERRIDE, "neon")
    monkeypatch.setenv(DOT_OVERRIDE, "plain")
    assert (isa(), dot()) == ("neon", "plain")
    require_known()


@pytest.mark.parametrize(
    ("name", "features", "variable", "forced"),
    [
        ("x86_64", {"avx2", "fma"}, OVERRIDE, "mmx"),
        ("x86_64", {"avx2", "fma"}, OVERRIDE, "avx512"),
        ("x86_64", {"avx2", "fma"}, DOT_OVERRIDE, "mmx"),
        ("x86_64", {"avx2", "fma"}, DOT_OVERRIDE, "dotprod"),
        ("x86_64", {"avx2", "fma"}, DOT_OVERRIDE, "avxvnni"),
        ("aarch64", {"neon"}, DOT_OVERRIDE, "avx512vnni"),
    ],
)
def test_a_forced_tile_that_is_unknown_or_beyond_the_cpu_is_an_error(
    machine, monkeypatch, name, features, variable, forced
):
    machine(name, features)
    monkeypatch.setenv(variable, forced)
    assert isa() in TILES, "modules can be imported; nothing is compiled with it"
    with pytest.raises(ConfigError):
        require_known()
