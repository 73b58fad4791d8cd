"""The wheel is all that Hepti needs: built, installed, and tried in an empty directory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Return the `hepti` of an environment that has the wheel, and the packages of this one."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)], check=True)
    (wheel,) = folder.glob("hepti-*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    python = folder / "venv" / "bin" / "python"
    subprocess.run([*pip, "--python", str(python), "install", "--quiet", "--no-deps", str(wheel)], check=True)
    packages = next((folder / "venv" / "lib").glob("python*")) / "site-packages"
    ours = next(path for path in map(Path, sys.path) if (path / "numba").is_dir())
    (packages / "ours.pth").write_text(f"{ours}\n")
    return folder / "venv" / "bin" / "hepti"


def hepti(program, directory, *arguments):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(program), *arguments], cwd=directory, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.wide
def test_what_comes_with_hepti_is_found_without_a_checkout(installed, tmp_path):
    where = hepti(installed, tmp_path, "simulate", "bert-base", "--devices-file", "four-pi4", "--json")
    assert json.loads(where)
    assert "--methods" in hepti(installed, tmp_path, "bench", "--help")
    python = installed.parent / "python"
    code = (
        "import hepti_mqtt; from hepti_mqtt.config import examples; print(hepti_mqtt.__file__);"
        "print(*(name for kind in ('sites', 'systemd') for name in examples.names(kind)));"
        "print(*sorted(path.name for path in (examples.FOLDER / 'systemd').iterdir()))"
    )
    place, names, units = subprocess.run(
        [str(python), "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert Path(place).is_relative_to(installed.parents[1])
    expected = [path.stem for kind in ("sites", "systemd") for path in sorted((ROOT / "configs" / kind).glob("*.yaml"))]
    assert names.split() == expected
    assert units.split() == ["hepti-agent.service", "hepti-planner.service"]
    assert not list(tmp_path.iterdir())
