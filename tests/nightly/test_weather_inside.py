"""A device falls to a quarter of its speed in the middle of a long request, which goes on under another plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from hepti_mqtt.checkpoint import spec_of_kind
from hepti_mqtt.config.settings import find_bundled_config
from hepti_mqtt.config.sites import load_site
from hepti_mqtt.runtime.coordinator.moves import Moves
from hepti_mqtt.runtime.coordinator.requests import Pins
from hepti_mqtt.service.solver import solve
from hepti_mqtt.weather import History, Truth, make_truth, play
from hepti_mqtt.weather.truth import STEP_S

FILE, SPEC = load_site(find_bundled_config("sites", Path("four-pi4-240"))), spec_of_kind("bert-large")
ROW = Pins(strategy="row", options={"variant": "kv"})
LAYERS, REQUEST = 26, 3  # blocks of a request; which one the fall is in


def truth(seed: int, fall_s: float | None = None) -> Truth:
    """Return a site in which nothing changes but that the second device falls to a quarter of its speed."""
    made = make_truth("still", FILE, 1.2, seed)
    for factors in (made.real, made.said) if fall_s is not None else ():
        factors.slowdown[round(fall_s / STEP_S) :, 1] *= 4
    return made


def played(seed: int, fall_s: float | None = None) -> History:
    return play(FILE, SPEC, truth(seed, fall_s), solve, tokens=512, pins=ROW, resident=True)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_fall_at_the_fourth_layer_costs_a_fifth_less(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = played(seed).answers[REQUEST]
    fall_s = usual.asked_s + usual.seconds * 5 / LAYERS
    inside, ask = played(seed, fall_s), Moves.go_on
    monkeypatch.setattr(Moves, "go_on", lambda s, g, run, now: ask(s, g, run, now) if now < fall_s else None)
    outside = played(seed, fall_s)
    # The change may be believed only in the next request; each pair of requests begins with the same one.
    pairs = zip(inside.answers[REQUEST:], outside.answers[REQUEST:], strict=False)
    hit = next((a, b) for a, b in pairs if a.seconds != b.seconds)
    assert hit[0].seconds <= 0.82 * hit[1].seconds, [x[:3] for x in hit]
