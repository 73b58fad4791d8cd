"""Processes with clocks that are months apart, put right while they serve, and restarted: every request is answered."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from site_processes import PATIENCE_S, SITE, Site, poll, running_site

from hepti_mqtt.checkpoint import make_model
from hepti_mqtt.cli.main import main
from hepti_mqtt.client import Hepti

DAY = 86_400
PROGRAM = Path(__file__).parent.parent / "helpers" / "shifted_clock.py"


class ShiftedSite(Site):
    """Every process has a clock of its own, which `shift` sets."""

    def start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        if not (file := self.directory / f"{name}.clock").exists():
            file.write_text("0")
        with (self.directory / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                [sys.executable, str(PROGRAM), str(file), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment,
                cwd=self.directory,
            )
        return self.running[name]

    def shift(self, name: str, days: float) -> None:
        new = self.directory / f"{name}.new"
        new.write_text(str(days * DAY))
        os.replace(new, self.directory / f"{name}.clock")

    def restart(self, name: str) -> None:
        self.kill(name)
        self.planner() if name == "planner" else self.agent(name)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ShiftedSite]:
    model = make_model("tiny-bert", tmp_path / "tiny", seed=3)
    monkeypatch.setattr("site_processes.Site", ShiftedSite)
    for name, days in (("planner", 40), ("a", -60)):
        (tmp_path / f"{name}.clock").write_text(str(days * DAY))
    yield from running_site(tmp_path, {"tiny": model}, {"a": "300MiB"})  # type: ignore[misc]


def steps(site: ShiftedSite, count: int, seed: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield changes of the site in a random order."""
    rng = random.Random(seed)
    for _ in range(count):
        name, days = rng.choice(("planner", "a", "b")), rng.choice((-60, -31, 0, 0, 10, 40))
        yield f"{name}'s clock {days} days", lambda name=name, days=days: site.shift(name, days)  # type: ignore[misc]
        if rng.random() < 0.6:
            who = rng.choice(("planner", "a", "b"))
            yield f"{who} starts again", lambda who=who: site.restart(who)  # type: ignore[misc]


def test_requests_are_answered_and_the_odd_clock_is_named(
    site: ShiftedSite, capsys: pytest.CaptureFixture[str]
) -> None:
    with Hepti.connect(site.url, site=SITE) as hepti:

        def ask() -> bool:
            return bool(hepti.infer("tiny", ids=[4, 5, 6], timeout_s=PATIENCE_S).raw["ok"])

        assert ask()
        poll(lambda: {"a", "the planner"} <= odd(hepti), "both odd clocks")
        site.shift("planner", 0)
        assert ask()
        site.restart("planner")
        assert ask()
        poll(lambda: odd(hepti) == {"a"}, "one odd clock")
        for command in (["devices", "--wait", "3"], ["doctor"]):

            def said(command: list[str] = command) -> str:
                main([command[0], "--broker", site.url, "--site", SITE, *command[1:]])
                return " ".join(capsys.readouterr().out.split())

            poll(lambda said=said: "the clock of a is 60 days behind" in said(), f"the clock in {command[0]}")


def odd(hepti: Hepti) -> set[str]:
    """Return whose clocks are said to be wrong."""
    return {line.removeprefix("the clock of ").rpartition(" is ")[0] for line in hepti.odd_clocks(hepti.devices(1.0))}


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(2))
def test_any_order_of_clocks_and_restarts(site: ShiftedSite, seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The slowest answer is printed; the first of a start waits for the devices to be there."""
    took = {}
    site.agent("b")
    with Hepti.connect(site.url, site=SITE) as hepti:
        hepti.infer("tiny", ids=[4, 5, 6], timeout_s=PATIENCE_S)
        for what, act in steps(site, 8, seed):
            act()
            began = time.monotonic()
            assert hepti.infer("tiny", ids=[4, 5, 6], timeout_s=PATIENCE_S).raw["ok"], what
            took[what] = time.monotonic() - began
    with capsys.disabled():
        print(f"\nslowest answer {max(took.values()):.1f} s, after: {max(took, key=lambda what: took[what])}", end="")
