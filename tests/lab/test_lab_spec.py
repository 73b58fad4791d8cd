"""Lab files: what is read, what is refused and in which words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hepti_mqtt.errors import ConfigError, LabError
from hepti_mqtt.lab.spec import HostSpec, check_quotas, load, parse

LABS = Path(__file__).resolve().parents[2] / "configs" / "lab"
TARGETS = {
    "four-pi4": [24.6] * 4,
    "two-pi4": [24.6] * 2,
    "mixed-four": [70.6, 24.6, 24.6, 12.0],
    "primary-secondary": [24.6, 70.6],
    "eight": [12.0] * 8,
}


def small(**more: Any) -> dict[str, Any]:
    return {"name": "small", "hosts": {"a": {"gflops": 24.6, "memory": "1GiB"}, "b": None}, **more}


@pytest.mark.parametrize("path", sorted(LABS.glob("*.yaml")), ids=lambda p: p.stem)
def test_the_labs_of_the_project_can_be_read(path: Path) -> None:
    spec = load(path)
    assert spec.name == path.stem
    if spec.name in TARGETS:
        assert spec.kind == "emulated"
        assert [h.gflops for h in spec.hosts] == TARGETS[spec.name]
        assert spec.rate_of("hub") == 940
        assert spec.with_rate(240).rate_of(spec.hosts[0].name) == 240


def test_a_lab_says_hosts_links_and_roles() -> None:
    spec = parse(small(rate=100, broker="a", planner="b", defaults={"threads": 2}), "here")
    assert spec.hosts == (HostSpec("a", 24.6, 2**30, 2), HostSpec("b", threads=2))
    assert (spec.broker, spec.planner, spec.hub_cpu, spec.kind) == ("a", "b", 0.3, "emulated")
    own = parse(small(rate=100, hosts={"a": {"rate": 50}, "b": {}}), "here")
    assert (own.rate_of("a"), own.rate_of("b"), own.rate_of("hub")) == (50, 100, 100)
    assert own.with_rate(10).rate_of("a") == 10


def test_a_dilated_lab_is_slower_in_all_and_says_what_it_stands_for() -> None:
    spec = parse(small(rate=100, dilation=2), "here").with_rate(240)
    assert (spec.rate_of("a"), spec.hosts[0].gflops) == (240, 24.6)
    assert (spec.slowed(spec.rate_of("a")), spec.slowed(spec.hosts[0].gflops), spec.slowed(None)) == (120, 12.3, None)
    assert spec.with_dilation(4).slowed(100) == 25
    assert load(LABS / "four-pi4.yaml").dilation == 1
    assert load(LABS / "four-pi4.yaml", 3).dilation == 3
    with pytest.raises(ConfigError, match="`dilation` slows emulated hosts only"):
        load(LABS / "this-machine.yaml", 2)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([], "mapping"),
        ({"hosts": {"a": {}}}, "`name:`"),
        ({"name": "x"}, "`hosts:`"),
        (small(hosts={}), "`hosts`"),
        (small(hosts=["a"]), "`hosts`"),
        (small(hosts={"hub": {}}), "hub"),
        (small(hosts={"A b": {}}), "A b"),
        (small(hosts={3: {}}), "3"),
        (small(name="x" * 40), "longer"),
        (small(speed=3), "'speed'"),
        (small(hosts={"a": {"gflop": 3}}), "'gflop'"),
        (small(hosts={"a": {"gflops": -1}}), "`gflops`"),
        (small(hosts={"a": {"gflops": float("nan")}}), "`gflops`"),
        (small(hosts={"a": {"gflops": True}}), "`gflops`"),
        (small(hosts={"a": {"memory": "much"}}), "`memory`"),
        (small(hosts={"a": {"memory": 5}}), "`memory`"),
        (small(hosts={"a": {"threads": 1.5}}), "`threads`"),
        (small(dilation=0.5), "`dilation` is 0.5"),
        (small(isa="mmx"), "`isa` is 'mmx'; hosts can be held to avx2"),
        (small(kind="local", isa="avx2", hosts={"a": {}}), "`isa` holds emulated hosts to it only"),
        (small(hosts={"a": {"ssh": "pi@x"}}), "'ssh'"),
        (small(rate=0), "`rate`"),
        (small(rate="fast"), "`rate`"),
        (small(rate=1e9), "`rate`"),
        (small(kind="cloud"), "`kind`"),
        (small(broker="c"), "`broker`"),
        (small(planner="c"), "`planner`"),
        (small(hub_cpu=0), "`hub_cpu`"),
        ({"name": "x", "kind": "local", "rate": 3, "hosts": {"a": {}}}, "`rate`"),
        ({"name": "x", "kind": "ssh", "address": "h", "hosts": {"a": {}}}, "`ssh:"),
        ({"name": "x", "kind": "ssh", "hosts": {"a": {"ssh": "h"}}}, "`address:`"),
    ],
)
def test_what_is_wrong_is_named(data: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(data, "labs/x.yaml")
    assert str(caught.value).startswith("labs/x.yaml: ")
    assert words in str(caught.value)


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(),
        lambda s: (
            st.lists(s)
            | st.dictionaries(
                st.sampled_from(["name", "hosts", "rate", "kind", "a", "gflops", "memory", "defaults"]), s
            )
        ),
    )
)
def test_any_data_is_a_lab_or_a_config_error(data: Any) -> None:
    try:
        spec = parse(data, "x")
    except ConfigError as error:
        said = str(error)
    else:
        said = f"x: {len(spec.hosts)} hosts"
    assert said.startswith("x: ")


def test_quotas_over_the_machine_are_refused_with_the_numbers() -> None:
    four = load(LABS / "four-pi4.yaml")
    assert check_quotas(four, 140.0, 2) == pytest.approx(0.3 + 4 * 24.6 / 140)
    with pytest.raises(LabError, match=r"pi1 62%.*200 %.*--dilation 2"):
        check_quotas(four, 40.0, 2)
    assert check_quotas(four.with_dilation(2), 40.0, 2) == pytest.approx(0.3 + 4 * 12.3 / 40)
    with pytest.raises(LabError, match=r"--dilation 3"):  # the hub is not slowed down: 2 would not be enough
        check_quotas(four, 28.0, 2)
    assert check_quotas(four.with_dilation(3), 28.0, 2) < 2
    with pytest.raises(LabError, match=r"pi1 is to reach 24.6 GFLOP/s with 1 thread.*--dilation 2"):
        check_quotas(four, 20.0, 64)
