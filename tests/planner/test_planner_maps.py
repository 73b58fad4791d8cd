"""What the planner makes of CNNs: shares that fit their maps, and the gain on a mixed site."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

from hepti_mqtt.checkpoint import spec_of_kind
from hepti_mqtt.config.sites import load_site
from hepti_mqtt.cost.profiles import Cluster, Curve, DeviceProfile, Link
from hepti_mqtt.cost.simulator import Naming
from hepti_mqtt.errors import ConfigError
from hepti_mqtt.ids import Epoch
from hepti_mqtt.models import largest_shape
from hepti_mqtt.planner import Question, decide
from hepti_mqtt.planner.candidates import in_line
from hepti_mqtt.planner.search import Guess, guessed, unit_by_unit

MIXED = Path(__file__).parents[2] / "configs" / "sites" / "mixed-four.yaml"


def question(kind, cluster, **asked):
    spec = spec_of_kind(kind)
    return Question(Naming("home", "m"), spec, cluster, largest_shape(spec), Epoch(1, 1), **asked)


def test_shares_begin_with_the_speed_at_the_rows_of_a_map_and_not_at_one():
    """One picture is one token, but its maps are hundreds of rows of a matrix."""
    curves = {"d0": ((1, 1e-6), (512, 1e-4)), "d1": ((1, 1e-6), (512, 4e-4))}
    devices = {n: DeviceProfile(n, (Curve(64, 64, points),), 1e9, 1e9) for n, points in curves.items()}
    cluster = Cluster(devices, dict.fromkeys(curves, Link()))
    asked = question("tiny-vgg", cluster, strategy="map_rows", options={"cut": "none"}, devices=("d0", "d1"))
    plan = decide(asked).chosen.plan
    rows = {device: stop - start for device, (start, stop) in zip(plan.devices, plan.ranges["rows 32"], strict=True)}
    assert rows["d0"] > 2 * rows["d1"]


@pytest.mark.wide
@pytest.mark.parametrize(("kind", "gain"), [("vgg16", 1.2), ("resnet50", 1.1)])
def test_the_choice_on_a_mixed_site_is_faster_than_its_strongest_device(kind, gain):
    found = decide(question(kind, load_site(MIXED), route="mesh"))
    assert found.single is not None
    assert found.chosen.price.seconds * gain <= found.single.price.seconds
    published = [c for c in found.ranking if c.plan.strategy in ("fused_tiles", "modnn", "coedge", "edgeflow")]
    assert {c.plan.strategy for c in published} == {"fused_tiles", "modnn", "coedge", "edgeflow"}
    assert found.chosen.price.seconds <= 1.05 * min(c.price.seconds for c in published)


def test_the_fastest_device_has_its_neighbours_on_both_sides():
    assert [in_line("abcde"[:n]) for n in (1, 2, 3, 4, 5)] == [tuple(x) for x in ("a", "ba", "bac", "dbac", "dbace")]
    named = ("hub", "pi1", "pi2", "zero")
    asked = question("tiny-vgg", load_site(MIXED), strategy="map_rows", options={"cut": "none"}, devices=named)
    plan = decide(asked).chosen.plan
    assert plan.head in plan.devices[1:-1]


@pytest.mark.wide
def test_nobody_who_names_devices_gets_a_faster_plan_than_the_choice():
    """Rows of small maps round badly: by shares by speed alone, two devices looked faster than three."""
    site = load_site(MIXED)
    chosen = decide(question("vgg16", site, route="mesh")).chosen
    for named in combinations(site.devices, 3):
        found = decide(question("vgg16", site, route="mesh", strategy="map_rows", devices=named)).chosen
        assert chosen.price.seconds <= 1.03 * found.price.seconds, named


WATTS = """
deadline_ms: {deadline}
defaults: {{mbit: 940, round_trip_ms: 0.1, compute_watts: 3, link_watts: 1, frame_ms: 0.04, frame_ms_per_mb: 0.5}}
devices:
  hub: {{gflops: 0.8, compute_watts: 25}}
  pi1: {{gflops: 0.4}}
"""


def test_energy_under_a_deadline_is_kept_by_the_simulator_too(tmp_path):
    def found(deadline, **options):
        (tmp_path / "site.yaml").write_text(WATTS.format(deadline=deadline))
        cluster = load_site(tmp_path / "site.yaml")
        best = decide(question("tiny-vgg", cluster, strategy="coedge", options=options)).chosen
        return best.price.seconds * 1e3, best.price.joules(cluster)

    fast_ms, fast_j = found(1000)
    slow_ms, slow_j = found(1000, goal="energy")
    assert (slow_j < 0.5 * fast_j, slow_ms > fast_ms) == (True, True)  # all on the board that draws little
    between = (fast_ms + slow_ms) / 2
    ms, joules = found(between, goal="energy")
    assert ms <= between
    assert slow_j < joules < fast_j
    with pytest.raises(ConfigError, match=r"no shares meet the deadline of 0\.01 ms"):
        found(0.01, goal="energy")


@pytest.mark.parametrize("pins", [{}, {"strategy": "map_rows"}])
def test_narrow_weights_are_refused(pins):
    words = r"ConvNet.* can keep its weights in f32 alone, and w8a8 is asked for; leave out the weights, or ask for f32"
    with pytest.raises(ConfigError, match=words):
        decide(question("tiny-convnet", load_site(MIXED), storage="w8a8", **pins))


def test_energy_needs_watts():
    asked = question(
        "tiny-vgg", load_site(MIXED), strategy="coedge", options={"goal": "energy"}, devices=("pi1", "hub")
    )
    with pytest.raises(ConfigError, match="needs the watts of every device, and none are known of pi1, hub; give comp"):
        decide(asked)


def test_however_often_shares_are_changed_a_plan_has_parts_of_a_whole():
    """A device checks that what a plan says of shares is no number without end."""
    chosen = decide(question("tiny-vgg", load_site(MIXED), strategy="modnn")).chosen
    assert sum(chosen.plan.weights["speeds"]) == pytest.approx(1.0)


def test_single_rows_of_small_maps_are_tried_at_other_devices():
    """One weight per device cannot say that a device has three rows of 8 and half of 32."""
    asked = question("tiny-vgg", load_site(MIXED), strategy="map_rows", options={"cut": "none"}, devices=("hub", "pi1"))
    chosen = decide(asked).chosen
    by_speed = replace(chosen.plan, ranges={**chosen.plan.ranges, "rows 32": ((0, 4), (4, 32))})
    slow = guessed(asked, Guess(by_speed, chosen.weights))
    assert unit_by_unit(asked, slow).price.seconds < slow.price.seconds
    assert unit_by_unit(asked, chosen).price.seconds <= chosen.price.seconds
