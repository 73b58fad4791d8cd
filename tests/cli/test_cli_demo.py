"""What two demos of one user at once must not share."""

from __future__ import annotations

from pathlib import Path

import pytest

from hepti_mqtt.cli import demo
from hepti_mqtt.cli.shared import Processes


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_a_second_demo_has_places_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with demo.own_places(tmp_path / "one") as first:
        assert first is None
        with demo.own_places(tmp_path / "two") as second, demo.own_places(tmp_path / "three") as third:
            assert (second, third) == (tmp_path / "two", tmp_path / "three")
    assert capsys.readouterr().err.count("another demo runs") == 2
    with demo.own_places(tmp_path / "one") as again:
        assert again is None


def test_agents_keep_their_files_where_they_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: dict[str, list[str]] = {}
    monkeypatch.setattr(
        Processes, "start", lambda _self, name, arguments, _environment: started.update({name: arguments})
    )
    for cache in (None, tmp_path / "c"):
        demo.start_site(Processes(), "mqtt://h", "home", tmp_path, cache)
        for agent in demo.AGENTS:
            assert ("--cache" in started[agent.device]) is (cache is not None)
