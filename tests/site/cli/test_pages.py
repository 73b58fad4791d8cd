"""Commands on the pages for users run as they are printed, where they need no site, no root and no download."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hepti_mqtt.cli.main import main

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", ROOT / "docs" / "quickstart.md", *sorted((ROOT / "docs" / "guide").glob("*.md"))]
LONGEST = {"README.md": 130}
ALL_PAGES = 2000
#: Commands that need nothing but the package, and files that a page makes before them.
OFFLINE = re.compile(r"hepti (simulate|site (init|add|revoke)|completion) ")


def blocks(page: Path) -> Iterator[str]:
    """Yield the code blocks of a page, each as one text."""
    for block in re.findall(r"(?:^    .*\n)+", page.read_text("utf-8"), re.MULTILINE):
        yield "\n".join(line.removeprefix("    ") for line in block.splitlines()).replace("\\\n", " ")


def offline_commands() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for block in blocks(page):
            lines = re.sub(r"for device in (.*?); do (.*?); done", _unrolled, block).splitlines()
            found += [(page.name, line.strip()) for line in lines if OFFLINE.match(line.strip())]
    return found


def _unrolled(loop: re.Match[str]) -> str:
    return "\n".join(loop[2].replace("$device", device) for device in loop[1].split())


def test_pages_stay_short() -> None:
    lines = {page.name: len(page.read_text("utf-8").splitlines()) for page in PAGES}
    assert {name: lines[name] for name, most in LONGEST.items() if lines[name] > most} == {}
    assert sum(lines.values()) <= ALL_PAGES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_lines_for_a_shell_are_ones(page: Path) -> None:
    programs = ("hepti", "sudo", "export", "pip", "mosquitto_", "docker", "make", "scp", "for ")
    for block in blocks(page):
        if not block.strip().startswith(programs) or re.search(r"^(?:from|with|h\.)", block, re.MULTILINE):
            continue
        done = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True, check=False)
        assert done.returncode == 0, block + done.stderr


def test_offline_commands_run_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = offline_commands()
    assert len(commands) > 12, "the pages are read"
    done = set()
    for page in dict.fromkeys(page for page, _ in commands):
        (tmp_path / page).mkdir()  # each page is a walk of its own
        monkeypatch.setenv("HOME", str(tmp_path / page))
        monkeypatch.chdir(tmp_path / page)
        for line in (line for where, line in commands if where == page):
            _, *words = shlex.split(line, comments=True)
            words = [str(Path(word).expanduser()) if word.startswith("~") else word for word in words]
            if tuple(words) in done:  # of this page, or one that writes no file
                continue
            done.add(tuple(words))
            assert main(words) == 0, f"{page}: {line}\n{capsys.readouterr().err}"
            capsys.readouterr()
