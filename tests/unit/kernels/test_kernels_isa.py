from __future__ import annotations

import pytest

from hepti_mqtt.errors import ConfigError
from hepti_mqtt.kernels import cpu
from hepti_mqtt.kernels.cpu import OVERRIDE, TILES, isa, require_known


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
    monkeypatch.setattr("llvmlite.binding.get_process_triple", lambda: f"{machine}-unknown-linux-gnu")
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_features", lambda: features)
    assert isa() == expected
