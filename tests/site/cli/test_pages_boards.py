"""Tables of boards on the pages for users run as printed: together they take as long as all other commands."""

from __future__ import annotations

from pathlib import Path

import pytest
from pages import offline_commands, run_as_printed


def test_tables_of_boards_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = [(page, line) for page, line in offline_commands() if "--board" in line]
    assert len(commands) > 2, "the pages are read"
    run_as_printed(commands, tmp_path, monkeypatch, capsys)
