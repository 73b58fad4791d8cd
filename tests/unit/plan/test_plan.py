"""Plans survive the wire, and shares divide exactly."""

import itertools
from dataclasses import replace

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.plan import Plan, apportion


def test_round_trip_through_msgpack():
    plan = Plan(
        "m",
        PlanVersion(7, 3),
        "block",
        ("a", "b"),
        "b",
        {"variant": "x"},
        {"rows": (1.0, 2.5)},
        {"heads": ((0, 3), (3, 4))},
    )
    assert "layouts" not in plan.to_dict()
    plan = replace(plan, route="mesh", relayed_pairs=(("a", "b"),), layouts={"x": 2, "y": 32})
    assert Plan.from_dict(msgpack.unpackb(msgpack.packb(plan.to_dict()))) == plan


@pytest.mark.parametrize("data", [{}, {"version": [1]}, {"version": "x"}])
def test_other_data_is_refused(data):
    with pytest.raises((KeyError, TypeError, ValueError)):
        Plan.from_dict(data)


@pytest.mark.parametrize(
    "wrong",
    [
        {"weights": []},
        {"ranges": 5},
        {"ranges": {"rows": [[float("inf"), 1]]}},
        {"version": [1, float("inf")]},
        {"replicas": ["x"]},
        {"layouts": ["row"]},
        {"layouts": {"row": float("inf")}},
    ],
    ids=str,
)
def test_a_plan_with_a_field_of_another_kind_is_refused(wrong):
    right = Plan("m", PlanVersion(1, 1), "row", ("a",), "a").to_dict()
    with pytest.raises(ValueError):
        Plan.from_dict({**right, **wrong})


@given(st.integers(0, 5000), st.lists(st.floats(0, 1e6), min_size=1, max_size=9).filter(any))
def test_apportion_covers_everything_and_is_near_the_exact_share(total, weights):
    ranges = apportion(total, weights)
    assert ranges[0][0] == 0
    assert ranges[-1][1] == total
    assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))
    for (start, stop), weight in zip(ranges, weights, strict=True):
        assert abs(stop - start - total * weight / sum(weights)) <= 1 + 1e-6 * total
        assert weight > 0 or start == stop


@pytest.mark.parametrize("weights", [(0.0, 0.0), (-1.0, 2.0), ()])
def test_shares_that_are_none(weights):
    with pytest.raises(ValueError):
        apportion(4, weights)
