"""Processes with clocks that are months apart, put right while they serve, and restarted: every request is answered."""

from __future__ import annotations

import os
import sys
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

    def start(self, name, *arguments, **_):
        if not (file := self.directory / f"{name}.clock").exists():
            file.write_text("0")
        return super().start(name, *arguments, program=[sys.executable, str(PROGRAM), str(file)])

    def shift(self, name, days):
        new = self.directory / f"{name}.new"
        new.write_text(str(days * DAY))
        os.replace(new, self.directory / f"{name}.clock")

    def restart(self, name):
        self.kill(name)
        self.planner() if name == "planner" else self.agent(name)


@pytest.fixture
def site(tmp_path, monkeypatch):
    model = make_model("tiny-bert", tmp_path / "tiny", seed=3)
    monkeypatch.setattr("site_processes.Site", ShiftedSite)
    for name, days in (("planner", 40), ("a", -60)):
        (tmp_path / f"{name}.clock").write_text(str(days * DAY))
    yield from running_site(tmp_path, {"tiny": model}, {"a": "300MiB"})


def test_requests_are_answered_and_the_odd_clock_is_named(site, capsys):
    with Hepti.connect(site.url, site=SITE) as hepti:

        def ask():
            return bool(hepti.infer("tiny", ids=[4, 5, 6], timeout_s=PATIENCE_S).raw["ok"])

        assert ask()
        poll(lambda: {"a", "the planner"} <= odd(hepti), "both odd clocks")
        site.shift("planner", 0)
        assert ask()
        site.restart("planner")
        assert ask()
        poll(lambda: odd(hepti) == {"a"}, "one odd clock")
        for command in (["devices", "--wait", "3"], ["doctor"]):

            def said(command=command):
                main([command[0], "--broker", site.url, "--site", SITE, *command[1:]])
                return " ".join(capsys.readouterr().out.split())

            poll(lambda said=said: "the clock of a is 60 days behind" in said(), f"the clock in {command[0]}")


def odd(hepti):
    """Return whose clocks are said to be wrong."""
    return {line.removeprefix("the clock of ").rpartition(" is ")[0] for line in hepti.odd_clocks(hepti.devices(1.0))}
