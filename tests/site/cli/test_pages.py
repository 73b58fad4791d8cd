"""Commands on the pages for users run as they are printed, where they need no site, no root and no download."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess

import pytest
from pages import PAGES, blocks, offline_commands, run_as_printed

from hepti_mqtt.cli.main import build

LONGEST = {"README.md": 130}
ALL_PAGES = 2000


def test_pages_stay_short():
    lines = {page.name: len(page.read_text("utf-8").splitlines()) for page in PAGES}
    assert {name: lines[name] for name, most in LONGEST.items() if lines[name] > most} == {}
    assert sum(lines.values()) <= ALL_PAGES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_lines_for_a_shell_are_ones(page):
    programs = ("hepti", "sudo", "export", "pip", "mosquitto_", "docker", "make", "scp", "for ")
    for block in blocks(page):
        if not block.strip().startswith(programs) or re.search(r"^(?:from|with|h\.)", block, re.MULTILINE):
            continue
        done = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True, check=False)
        assert done.returncode == 0, block + done.stderr


COMMANDS = offline_commands()
SEARCHES = [(page, line) for page, line in COMMANDS if line.startswith("hepti simulate")]


@pytest.mark.parametrize(
    "commands",
    [[one for one in COMMANDS if one not in SEARCHES], pytest.param(SEARCHES, marks=pytest.mark.nightly)],
    ids=["sites", "simulations"],
)
def test_offline_commands_run_as_printed(commands, tmp_path, monkeypatch, capsys):
    assert len(commands) > 3, "the pages are read"
    run_as_printed(commands, tmp_path, monkeypatch, capsys)


def test_simulations_on_the_pages_have_options_that_exist():
    for _, line in SEARCHES:
        build().parse_args(shlex.split(line, comments=True)[1:])
