"""A device falls for a minute and recovers: it is left out soon, and taken back although nothing runs on it."""

from __future__ import annotations

from math import inf
from pathlib import Path
from statistics import median

import pytest

from benchmarks.weather import make_truth, play
from benchmarks.weather.truth import STEP_S
from hepti_mqtt.checkpoint import spec_of_kind
from hepti_mqtt.config.settings import find_bundled_site
from hepti_mqtt.config.sites import load_site
from hepti_mqtt.service.solver import solve

FILE, SPEC = load_site(find_bundled_site(Path("four-pi4-240"))), spec_of_kind("bert-large")
FALL_S, BACK_S = 80.0, 150.0
LINK, CPU = 50 / 240, 4.0  # factors on its line and on its slowdown


@pytest.mark.parametrize(
    ("what", "seed", "left_out_s", "taken_back_s"),
    [
        ("link", 0, 12, 20),  # of the root, whose place only a whole search gives to another one
        ("link", 1, 8, 20),
        ("cpu", 0, 18, 40),
        ("cpu", 1, 18, 40),
    ],
)
def test_a_device_that_falls_is_left_out_and_taken_back(what, seed, left_out_s, taken_back_s):
    truth, device = make_truth("still", FILE, 4, seed), seed % 4
    for factors in (truth.real, truth.said):
        changed, by = (factors.rate, LINK) if what == "link" else (factors.slowdown, CPU)
        changed[round(FALL_S / STEP_S) : round(BACK_S / STEP_S), device] *= by
    history = play(FILE, SPEC, truth, solve, resident=True)
    name, story = truth.names[device], "\n".join(change.text for change in history.changes)
    assert not history.refused, story
    out_s = next((c.now for c in history.changes if c.now > FALL_S and name not in c.plan.devices), inf)
    back_s = next((c.now for c in history.changes if c.now > out_s and name in c.plan.devices), inf)
    assert out_s <= FALL_S + left_out_s, story
    assert BACK_S < back_s <= BACK_S + taken_back_s, story
    before, after = (
        median(a.seconds for a in history.answers if start <= a.asked_s < stop)
        for start, stop in ((40, FALL_S), (back_s, truth.seconds))
    )
    assert after < 1.15 * before, story
