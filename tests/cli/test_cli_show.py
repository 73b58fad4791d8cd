"""What `hepti plan` prints of a record, without a site."""

from __future__ import annotations

import re

import pytest

from hepti_mqtt.cli.show import print_story


def test_a_story_is_a_table_with_times(capsys: pytest.CaptureFixture[str]) -> None:
    step = {"time": 1.7e9, "plan": "m 9.1", "from": "active", "to": "retiring", "cause": "lost: d1 went offline"}
    print_story("m", {"story": [step, {**step, "time": 1.7e9 + 0.25}]})
    title, head, *lines = capsys.readouterr().out.splitlines()
    assert "story of the plans for m" in title
    assert head.split() == ["time", "plan", "from", "to", "cause"]
    cells = [re.split(r"\s{2,}", line.strip()) for line in lines]
    assert [c[1:] for c in cells] == [["m 9.1", "active", "retiring", "lost: d1 went offline"]] * 2
    assert [c[0][-4:] for c in cells] == [".000", ".250"]


@pytest.mark.parametrize("record", [{}, {"story": []}])
def test_a_planner_that_tells_no_story_has_an_empty_one(record: dict, capsys: pytest.CaptureFixture[str]) -> None:
    print_story("m", record)
    assert len(capsys.readouterr().out.splitlines()) == 2
