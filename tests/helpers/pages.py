"""Commands on the pages for users, run as they are printed, where they need no site, no root and no download."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from hepti_mqtt.cli.main import main

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "docs" / "quickstart.md", *sorted((ROOT / "docs" / "guide").glob("*.md"))]
#: Commands that need nothing but the package, and files that a page makes before them.
OFFLINE = re.compile(r"hepti (simulate|site (init|add|revoke)|completion) ")


def blocks(page: Path) -> Iterator[str]:
    """Yield the code blocks of a page, each as one text."""
    for block in re.findall(r"(?:^    .*\n)+", page.read_text("utf-8"), re.MULTILINE):
        yield "\n".join(line.removeprefix("    ") for line in block.splitlines()).replace("\\\n", " ")


def offline_commands() -> list[tuple[str, str]]:
    """Return (page, line) of all of them."""
    commands = []
    for page in PAGES:
        for block in blocks(page):
            lines = re.sub(r"for device in (.*?); do (.*?); done", _unrolled, block).splitlines()
            commands += [(page.name, line.strip()) for line in lines if OFFLINE.match(line.strip())]
    return commands


def _unrolled(loop: re.Match[str]) -> str:
    return "\n".join(loop[2].replace("$device", device) for device in loop[1].split())


def run_as_printed(
    commands: list[tuple[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run (page, line); each page is a walk of its own."""
    done = set()
    for page in dict.fromkeys(page for page, _ in commands):
        (tmp_path / page).mkdir()
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
