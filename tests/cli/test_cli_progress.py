"""Progress of weights: bars that go away, or few lines."""

from __future__ import annotations

import io

from rich.console import Console

from hepti_mqtt.cli.processes import EVERY_S, LoadView

MIB = 2**20


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_without_a_terminal_lines_come_at_most_every_few_seconds() -> None:
    out, clock = io.StringIO(), Clock()
    with LoadView(Console(file=out, soft_wrap=True), clock) as view:
        for step in range(60):
            view.show("tiny", step * MIB, 60 * MIB)
            clock.now += 0.1
        view.show("other", 0, MIB)
        view.end("tiny", "tiny is here")
    lines = out.getvalue().splitlines()
    assert lines[0] == "loading tiny: 0.0 of 60.0 MiB"
    assert sum(line.startswith("loading tiny") for line in lines) == int(6.0 / EVERY_S)
    assert lines[-2:] == ["loading other: 0.0 of 1.0 MiB", "tiny is here"]
    assert "\x1b" not in out.getvalue()


def test_a_load_that_ended_may_begin_again_at_once() -> None:
    out, clock = io.StringIO(), Clock()
    view = LoadView(Console(file=out), clock)
    view.show("tiny", 1, MIB)
    view.end("tiny")
    view.show("tiny", 2, MIB)
    assert out.getvalue().count("loading tiny") == 2


def test_on_a_terminal_bars_are_drawn_and_taken_away() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, color_system=None)
    with LoadView(console) as view:
        view.show("tiny", 3 * MIB, 10 * MIB)
        view.show("other", MIB, 10 * MIB)
        assert view._bars is not None
        view.end("tiny", "tiny is here")
        assert view._bars is not None
        view.end("other")
        assert view._bars is None, "nothing redraws itself while nothing loads"
        view.show("third", MIB, MIB)
    assert view._bars is None
    text = out.getvalue()
    assert "loading tiny" in text
    assert "3.0/10.0 MiB" in text
    assert "tiny is here" in text


def test_an_end_without_a_beginning_is_only_said() -> None:
    out = io.StringIO()
    LoadView(Console(file=out)).end("tiny", "all of it was in the cache")
    assert out.getvalue() == "all of it was in the cache\n"


def test_words_are_said_when_they_change_and_not_too_often() -> None:
    out, clock = io.StringIO(), Clock()
    view = LoadView(Console(file=out), clock)
    for step in range(40):
        view.say("start", f"compiling kernels {step // 10} of 4")
        clock.now += 1.0
    view.say("start", "")
    assert out.getvalue().splitlines() == [f"compiling kernels {step} of 4" for step in range(4)]
