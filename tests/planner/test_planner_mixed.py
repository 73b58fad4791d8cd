"""A mixed site on slow links: one device attends for all, and the others take rows behind it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from hepti_mqtt.bench.experiment import spec_of
from hepti_mqtt.bench.simulated import Point, cluster_of
from hepti_mqtt.config import settings
from hepti_mqtt.config.sites import load_site
from hepti_mqtt.cost.simulator import Naming
from hepti_mqtt.errors import ConfigError
from hepti_mqtt.ids import Epoch
from hepti_mqtt.models import shape_for
from hepti_mqtt.planner import Decision, Question, decide

MODEL = "bert-large"


def question(rate: float, **pins) -> Question:
    point = Point("mixed-four-roomy", rate, MODEL, 128, "", "f32", "f16", 4, "auto")
    cluster = cluster_of(load_site(settings.find_bundled_config("sites", Path(point.site))), point)
    spec = spec_of(MODEL)
    return Question(Naming("home", MODEL), spec, cluster, shape_for(spec, 128), Epoch(1, 1), wire="f16", **pins)


@cache
def best(rate: float, strategy: str, variant: str = "") -> Decision:
    return decide(question(rate, strategy=strategy, options={"variant": variant} if variant else {}))


@pytest.mark.parametrize(("rate", "gain"), [(940, 1.4), (240, 1.4), (100, 1.3)])
def test_rows_behind_one_devices_attention_gain_on_a_mixed_site(rate: float, gain: float) -> None:
    alone, split = best(rate, "single"), best(rate, "row", "mlp")
    assert alone.chosen.plan.devices == ("pc",)
    assert split.chosen.plan.head == "pc"
    assert len(split.chosen.plan.devices) > 2
    assert alone.chosen.price.seconds / split.chosen.price.seconds >= gain


def test_slower_links_leave_the_helpers_fewer_rows() -> None:
    kept = [best(rate, "row", "mlp").chosen.plan.weights["rows"][0] for rate in (940, 100)]
    assert kept[0] < kept[1]


def test_devices_that_a_method_cannot_use_are_refused() -> None:
    asked = question(240, strategy="single")
    with pytest.raises(ConfigError, match="single runs on 1 device at the most, and 2 are pinned: pc, pi1"):
        decide(replace(asked, devices=("pc", "pi1")))


@pytest.mark.wide
def test_the_search_finds_it() -> None:
    ranking = decide(question(100)).ranking
    assert ranking[0].name == "row/mlp"
    assert ranking[1].price.seconds > 1.15 * ranking[0].price.seconds
