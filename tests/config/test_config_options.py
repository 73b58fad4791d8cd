"""Options of agents and planners: what is written is what is read, whoever reads it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hepti_mqtt.cli.main import build
from hepti_mqtt.config import Settings
from hepti_mqtt.config.options import (
    AgentOptions,
    PinOptions,
    PlannerOptions,
    add_site,
    natural,
    natural_range,
    port,
    positive,
    settings_of,
    site_arguments,
)
from hepti_mqtt.errors import ConfigError
from hepti_mqtt.plan import Objective, Route, Storage, WireDtype

NAMES = st.from_regex(r"[a-z0-9][a-z0-9_-]{0,8}", fullmatch=True)
SIZES = st.sampled_from(["400MiB", "2GB", "123", "0"])
PATHS = st.sampled_from([Path("/models/x"), Path("here"), Path("with space/a=b")])
AGENTS = st.builds(
    AgentOptions,
    device=NAMES,
    threads=st.none() | st.integers(1, 64),
    memory=st.none() | SIZES,
    cache=st.none() | PATHS,
    cache_size=st.none() | SIZES,
    retry=st.booleans(),
    hold=st.booleans(),
)
PINS = st.builds(
    PinOptions,
    strategy=st.none() | NAMES,
    variant=st.none() | NAMES,
    devices=st.none() | st.lists(NAMES, min_size=1, max_size=3).map(tuple),
    wire=st.none() | st.sampled_from(get_args(WireDtype)),
    route=st.none() | st.sampled_from((*get_args(Route), "auto")),
    weights=st.none() | st.sampled_from(get_args(Storage)),
    objective=st.none() | st.sampled_from(get_args(Objective)),
    accuracy=st.none() | st.floats(1e-9, 1.0),
)
PLANNERS = st.builds(
    PlannerOptions,
    models=st.dictionaries(NAMES, PATHS, min_size=1, max_size=3),
    pins=PINS,
    in_flight=st.integers(1, 9),
    batch=st.integers(1, 99),
    batch_delay_ms=st.sampled_from([0.0, 2.5, 60_000.0]),
    broker_mbit=st.none() | st.floats(0.5, 1e4),
)


def parsed(kind, arguments):
    """Return what the short parser of `python -m` and that of `hepti` read; they agree."""
    parser = argparse.ArgumentParser()
    kind.add(parser)
    command = "agent" if kind is AgentOptions else "planner"
    one, other = kind.of(parser.parse_args(arguments)), kind.of(build().parse_args([command, *arguments]))
    assert one == other
    return one


@given(AGENTS)
def test_an_agents_options_come_back_from_their_arguments(options):
    assert parsed(AgentOptions, options.arguments()) == options


@given(PLANNERS)
def test_a_planners_options_come_back_from_their_arguments(options):
    assert parsed(PlannerOptions, options.arguments()) == options


def test_what_is_not_said_is_left_to_the_program():
    assert AgentOptions("a").arguments() == ["--id", "a"]
    assert PlannerOptions({"m": "d"}).arguments() == ["--model", "m=d"]
    assert site_arguments(Settings(None)) == ["--site", "home"]


def test_broker_and_site_come_back_from_their_arguments():
    parser = argparse.ArgumentParser()
    add_site(parser)
    settings = Settings("mqtt://somewhere:1", "attic")
    assert settings_of(parser.parse_args(site_arguments(settings))) == settings


def test_pins_are_those_that_the_planner_takes():
    pins = PinOptions("row", "kv", ("a", "b"), None, "f16").pins()
    assert (pins.strategy, pins.options, pins.devices) == ("row", {"variant": "kv"}, ("a", "b"))
    assert (pins.wire, pins.storage, pins.route) == ("f32", "f16", None)
    assert PinOptions("megatron", "ring").pins().options == {"reduce": "ring"}
    assert PinOptions("decoupled", "megatron/everywhere").pins().options == {
        "original": "megatron",
        "last": "everywhere",
    }
    assert PinOptions("megatron", "kv").pins().options == {"variant": "kv"}  # which the planner refuses by name
    assert PinOptions(route="auto").pins().route is None
    assert PinOptions(route="mesh").pins().route == "mesh"
    assert pins.objective == "latency"
    asked = PinOptions("replicas", "groups=2", objective="throughput").pins()
    assert (asked.options, asked.objective) == ({"groups": "2"}, "throughput")


def test_a_port_for_peers_is_one():
    assert parsed(AgentOptions, ["--mesh-port", "7801"]).mesh_port == 7801
    parser = argparse.ArgumentParser(exit_on_error=False)
    AgentOptions.add(parser)
    for text in ("0", "70000"):
        with pytest.raises(argparse.ArgumentError, match=f"'{text}' is not a port from 1 to 65535"):
            parser.parse_args(["--mesh-port", text])


@pytest.mark.parametrize("kind", [natural, natural_range, port, positive])
@pytest.mark.parametrize("text", ["²", "٣", "-1", "+1", "1_0", " 1", "", "9" * 5000])
def test_numbers_are_plain_digits(kind, text):
    with pytest.raises(argparse.ArgumentTypeError, match="is n"):
        kind(text)


def test_numbers_come_as_they_are_written():
    assert (natural("0"), positive("007"), port("65535"), natural_range("2")) == (0, 7, 65535, range(2, 3))
    assert natural_range("0:3") == range(3)
    for text in ("3:3", "4:3"):
        with pytest.raises(argparse.ArgumentTypeError, match="is empty"):
            natural_range(text)
    for text in ("1:", ":2", "1:²"):
        with pytest.raises(argparse.ArgumentTypeError, match="is neither"):
            natural_range(text)


def test_a_model_that_is_named_twice_is_refused():
    with pytest.raises(ConfigError, match="m is given twice"):
        parsed(PlannerOptions, ["--model", "m=a", "--model", "m=b"])


def test_without_a_broker_the_error_says_how_to_name_one():
    with pytest.raises(ConfigError, match="HEPTI_BROKER"):
        Settings(None).require_broker()
