"""The example units start commands that exist, and docs/install.md names files that exist."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from hepti_mqtt.cli.main import build
from hepti_mqtt.errors import ConfigError, RefusedError

ROOT = Path(__file__).parents[2]
UNITS = sorted((ROOT / "configs" / "systemd").glob("*.service"))
GUIDE = (ROOT / "docs" / "install.md").read_text()


def unit(path):
    parser = configparser.ConfigParser(interpolation=None, strict=False)  # some keys stand there twice
    parser.optionxform = str
    parser.read_string(path.read_text())
    return parser


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_a_unit_runs_a_command_that_exists(path):
    program, *arguments = shlex.split(unit(path)["Service"]["ExecStart"])
    name = Path(program).name
    words = {"%l": "pi-1", "${HEPTI_MODEL}": "m=/d"}
    command = [words.get(word, word) for word in arguments]
    build().parse_args([*(["agent"] if name == "hepti-agent" else []), *command, "--broker", "mqtt://broker"])
    assert name in {"hepti", "hepti-agent"}


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_a_unit_keeps_what_it_writes_and_nothing_else(path):
    service = unit(path)["Service"]
    assert f"HOME=/var/lib/{service['StateDirectory']}" in service["Environment"].split()
    assert service["DynamicUser"] == "yes"
    assert service["LoadCredential"].removeprefix("login:") in GUIDE
    assert "HEPTI_BROKER=%d/login" in service["Environment"].split()
    assert service.get("EnvironmentFile", "") in GUIDE
    assert path.name in GUIDE


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_a_unit_leaves_a_service_little_of_the_system(path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=20", "--no-pager", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-300:]


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_a_unit_lets_kernels_be_compiled_and_gives_up_where_only_people_can_help(path):
    text = path.read_text()
    assert not re.search(r"^MemoryDenyWriteExecute", text, re.MULTILINE)
    assert re.search(r"^MemoryMax=", text, re.MULTILINE)
    codes = re.search(r"^RestartPreventExitStatus=(.*)$", text, re.MULTILINE)
    assert codes is not None
    assert codes[1].split() == [str(ConfigError.exit_code), str(RefusedError.exit_code)]


def test_there_is_a_unit_for_the_agent_and_one_for_the_planner():
    assert [path.stem for path in UNITS] == ["hepti-agent", "hepti-planner"]


def test_the_guide_points_to_files_that_exist():
    links = re.findall(r"\]\(([^)#]+)\)", GUIDE)
    assert links
    assert all((ROOT / "docs" / link).exists() for link in links)


def test_the_guide_gives_the_settings_of_the_brokers_file():
    conf = (ROOT / "broker" / "mosquitto.conf").read_text().splitlines()
    given = re.findall(r"^    ((?:set_tcp_nodelay|max_\w+) \S+)$", GUIDE, re.MULTILINE)
    assert len(given) == 4
    assert set(given) <= set(conf)
