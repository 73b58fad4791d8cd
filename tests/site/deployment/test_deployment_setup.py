"""Setting up: `.ci/setup.sh` says what is missing first, and the wheel is all that Hepti needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


# Stand-ins for a system's python3: the arguments of every call are kept in $CALLS.
OLD = """#!/bin/sh
case "$1" in --version) echo "Python 3.9.2";; *) exit 1;; esac
"""
NARROW = """#!/bin/sh
case "$2" in *maxsize*) exit 1;; esac
"""
WITHOUT_NETWORK = f"""#!/bin/sh
case "$2" in
venv) mkdir -p "$4/bin"; cd "$4/bin"; printf '#!/bin/sh\\necho no route to host; exit 1\\n' > python; chmod +x python;;
*) exec "{sys.executable}" "$@";;
esac
"""
WITHOUT_PIP = f"""#!/bin/sh
echo "$*" >> "$CALLS"
case "$2" in
venv) for venv; do :; done; mkdir -p "$venv/bin"; [ "$4" = --without-pip ];;
pip) echo "No module named pip" >&2; exit 1;;
*) exec "{sys.executable}" "$@";;
esac
"""

WITH_SYSTEM_PIP = f"""#!/bin/sh
echo "$*" >> "$CALLS"
case "$2" in
venv) for venv; do :; done; mkdir -p "$venv/bin"; [ "$4" = --without-pip ];;
pip) printf '#!/bin/sh\\necho "in venv: $*" >> "$CALLS"\\n' > "$4"; chmod +x "$4";;
*) exec "{sys.executable}" "$@";;
esac
"""


@pytest.fixture(params=["plain", "with spaces"])
def setup(request, tmp_path):
    """Run setup.sh with a stand-in for Python: stub text -> (code, words on stderr, lines called, venv)."""

    def run(stub):
        home = tmp_path / request.param
        home.mkdir()
        python, venv, calls = home / "python3", home / ".venv", home / "calls"
        if stub is not None:
            python.write_text(stub)
            python.chmod(0o755)
        done = subprocess.run(
            [str(ROOT / ".ci" / "setup.sh"), str(python), str(venv), "a.lock", "b.lock"],
            env={**os.environ, "CALLS": str(calls)},
            cwd=home,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stderr, calls.read_text().splitlines() if calls.exists() else [], venv

    return run


@pytest.mark.parametrize(
    ("stub", "said"),
    [
        (OLD, ("needs Python 3.11 or newer", "Python 3.9.2", "make PYTHON=")),
        (None, ("there is no ", "make PYTHON=")),
        (NARROW, ("64-bit",)),
        (WITHOUT_PIP, ("apt install python3-venv",)),
    ],
    ids=["too old", "absent", "32 bits", "no pip"],
)
def test_what_is_missing_is_named_and_nothing_is_left(setup, stub, said):
    code, words, _, venv = setup(stub)
    assert code == 1
    assert all(word in words for word in said)
    assert not venv.exists()


def test_without_network_one_sentence_says_what_to_check(setup):
    code, words, _, venv = setup(WITHOUT_NETWORK)
    assert code == 1
    assert "network" in words
    assert "a.lock" in words
    assert len(words.splitlines()) == 1
    assert (venv / "pip.log").read_text() == "no route to host\n"


def test_the_systems_pip_fills_an_environment_without_one(setup):
    code, words, calls, venv = setup(WITH_SYSTEM_PIP)
    assert (code, words) == (0, "")
    assert f"-m pip --python {venv}/bin/python install --quiet --disable-pip-version-check pip" in calls
    installed = [line for line in calls if line.startswith("in venv: -m pip install")]
    assert [line.rsplit(" ", 2)[1:] for line in installed] == [["-r", "a.lock"], ["-r", "b.lock"], ["--editable", "."]]
    assert all("--no-deps" in line for line in installed)


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


@pytest.mark.nightly
def test_what_comes_with_hepti_is_found_without_a_checkout(installed, tmp_path):
    where = hepti(installed, tmp_path, "simulate", "bert-base", "--devices-file", "four-pi4", "--json")
    assert json.loads(where)
    code = (
        "import hepti_mqtt; from pathlib import Path; place = Path(hepti_mqtt.__file__).parent; print(place);"
        "print(*(path.stem for path in sorted((place / 'configs' / 'sites').glob('*.yaml'))));"
        "print(*sorted(path.name for path in (place / 'configs' / 'systemd').iterdir()))"
    )
    place, names, units = subprocess.run(
        [str(installed.parent / "python"), "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert Path(place).is_relative_to(installed.parents[1])
    assert names.split() == [path.stem for path in sorted((ROOT / "configs" / "sites").glob("*.yaml"))]
    assert units.split() == ["hepti-agent.service", "hepti-planner.service"]
    assert not list(tmp_path.iterdir())
