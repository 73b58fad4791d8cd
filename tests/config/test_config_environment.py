"""A wrong variable of the environment is an error in words, whatever is started with it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hepti_mqtt.cli.main import main
from hepti_mqtt.config.settings import check_environment, data_link
from hepti_mqtt.errors import ConfigError

WRONG = {
    "HEPTI_KERNELS_ISA": "'mmx' is not an instruction set of the kernels; use one of",
    "HEPTI_KERNELS_DOT": "'mmx' is no int8 tile of the kernels; use one of",
    "HEPTI_KERNELS_TILE": "'mmx' is no register tile of",
    "HEPTI_DATA_LINK": "'mmx' is no link for tensors; use one of",
}
# None of them gets as far as a broker or a model.
NOWHERE = ["--broker", "mqtt://127.0.0.1:1"]
MODULES = [
    ["device_agent", *NOWHERE, "--id", "d1"],
    ["hepti_mqtt.cli", "agent", *NOWHERE, "--id", "d1"],
    ["hepti_mqtt.service", *NOWHERE, "--model", "m=nowhere"],
    ["hepti_mqtt.bench.encoder_layer", "--rows", "8"],
    ["hepti_mqtt.bench.chain_host", *NOWHERE, "--device", "primary", "--run", "r"],
    ["hepti_mqtt.lab.probe", "warm"],
]


@pytest.fixture(autouse=True)
def _unset(monkeypatch):
    for name in WRONG:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize(
    "command",
    [
        ["agent", *NOWHERE, "--id", "d1"],
        ["planner", *NOWHERE, "--model", "m=nowhere"],
        ["demo"],
        ["bench", "kernels"],
        ["doctor"],
    ],
    ids=lambda command: command[0],
)
def test_a_command_says_what_is_wrong_before_it_begins(name, command, monkeypatch, capsys):
    monkeypatch.setenv(name, "mmx")
    assert main(command) == ConfigError.exit_code
    assert f"hepti: {name}={WRONG[name]}" in " ".join(capsys.readouterr().err.split())


@pytest.mark.wide
@pytest.mark.parametrize("name", ["HEPTI_KERNELS_ISA", "HEPTI_KERNELS_TILE"])
@pytest.mark.parametrize("arguments", MODULES, ids=lambda arguments: arguments[0])
def test_so_does_a_module_that_is_run(name, arguments, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        env={**os.environ, name: "mmx", "HOME": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode in {1, ConfigError.exit_code}
    assert f"{name}={WRONG[name]}" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_is_unset_or_empty_is_no_error(monkeypatch):
    for name in WRONG:
        monkeypatch.setenv(name, "")
    check_environment()
    assert data_link() == "own"
    assert data_link({"HEPTI_DATA_LINK": "paho"}) == "paho"
