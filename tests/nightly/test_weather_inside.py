"""A device falls to a quarter of its speed in the middle of a long request, which goes on under another plan."""

from __future__ import annotations

from pathlib import Path

from benchmarks.weather import make_truth, play
from benchmarks.weather.truth import STEP_S
from hepti_mqtt.checkpoint import spec_of_kind
from hepti_mqtt.config.settings import find_bundled_site
from hepti_mqtt.config.sites import load_site
from hepti_mqtt.runtime.coordinator.moves import Moves
from hepti_mqtt.runtime.coordinator.requests import Pins
from hepti_mqtt.service.solver import solve

FILE, SPEC = load_site(find_bundled_site(Path("four-pi4-240"))), spec_of_kind("bert-large")
ROW = Pins(strategy="row", options={"variant": "kv"})
BLOCKS, REQUEST = 26, 3  # of a request; which one the fall is in


def truth(seed, fall_s=None):
    """Return a site in which nothing changes but that the second device falls to a quarter of its speed."""
    simulated = make_truth("still", FILE, 1.7, seed)
    for factors in (simulated.real, simulated.said) if fall_s is not None else ():
        factors.slowdown[round(fall_s / STEP_S) :, 1] *= 4
    return simulated


def played(seed, fall_s=None):
    return play(FILE, SPEC, truth(seed, fall_s), solve, tokens=512, pins=ROW, resident=True)


def hit(seed, monkeypatch):
    """Return what the first request takes that is helped, with and without; the fall is in the one or two before."""
    usual = played(seed).answers[REQUEST]
    fall_s = usual.asked_s + usual.seconds * 5 / BLOCKS
    inside, ask = played(seed, fall_s), Moves.judge_run_handover
    with monkeypatch.context() as patch:
        patch.setattr(Moves, "judge_run_handover", lambda s, g, run, now: ask(s, g, run, now) if now < fall_s else None)
        outside = played(seed, fall_s)
    pairs = zip(inside.answers[REQUEST:], outside.answers[REQUEST:], strict=False)
    return next((a.seconds, b.seconds) for a, b in pairs if a.seconds != b.seconds)


def test_a_fall_at_the_fourth_layer_costs_a_fifth_less(monkeypatch):
    """How soon the fall is believed differs from site to site, so several are taken together."""
    losses = [hit(seed, monkeypatch) for seed in (1, 2, 3)]
    assert sum(a for a, _ in losses) <= 0.8 * sum(b for _, b in losses), losses
