"""What users set: flags, environment, options and YAML; each error names the key, the file and the line."""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from hepti_mqtt.cli.main import build, main
from hepti_mqtt.config import MAX_FILE_BYTES, Settings, load_yaml
from hepti_mqtt.config.options import (
    AgentOptions,
    PinOptions,
    PlannerOptions,
    add_site_arguments,
    index_range,
    non_negative_int,
    positive_int,
    settings_from_args,
    site_argv,
    tcp_port,
)
from hepti_mqtt.config.settings import check_environment, data_link, parse_size
from hepti_mqtt.errors import BadNameError, ConfigError
from hepti_mqtt.plan import Objective, Route, WeightDtype, WireDtype

NOWHERE = ["--broker", "mqtt://127.0.0.1:1"]


COMMANDS = (["agent", *NOWHERE, "--id", "d1"], ["planner", *NOWHERE, "--model", "m=nowhere"], ["demo"], ["doctor"])


def test_flags_come_before_the_environment_and_that_before_the_defaults(monkeypatch):
    environment = {"HEPTI_BROKER": "mqtt://env", "HEPTI_SITE": "env"}
    assert Settings.from_environment("mqtt://flag", "flag", environment) == Settings("mqtt://flag", "flag")
    assert Settings.from_environment(None, None, environment) == Settings("mqtt://env", "env")
    assert Settings.from_environment(None, None, {"HEPTI_BROKER": "", "HEPTI_SITE": ""}) == Settings(None, "home")
    monkeypatch.setenv("HEPTI_SITE", "process")
    monkeypatch.delenv("HEPTI_BROKER", raising=False)
    assert Settings.from_environment() == Settings(None, "process")


@pytest.mark.parametrize("site", ["Home", "a/b", "planner", "+"])
def test_a_site_that_cannot_stand_in_a_topic_is_refused(site):
    with pytest.raises(BadNameError):
        Settings.from_environment(site=site, environment={})
    with pytest.raises(BadNameError):
        Settings.from_environment(environment={"HEPTI_SITE": site})


def test_plain_data_is_read(tmp_path):
    path = tmp_path / "site.yaml"
    path.write_text(
        "devices:\n  pi-1: {gflops: 24.6, cores: 4}\n  pi-2: &x {gflops: 12}\n  pi-3:\n    <<: *x\n    cores: 2\n"
    )
    assert load_yaml(path) == {
        "devices": {
            "pi-1": {"gflops": 24.6, "cores": 4},
            "pi-2": {"gflops": 12},
            "pi-3": {"gflops": 12, "cores": 2},
        }
    }
    path.write_text("")
    assert load_yaml(str(path)) is None


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("a: 1\nb: [1, 2\n", "line 3"),
        ("a: 1\n\tb: 2\n", "line 2"),
        ("a: 1\nb: 2\na: 3\n", "line 3: 'a'"),
        ("a: !!python/object/apply:os.system ['true']\n", "line 1"),
        ("a: *nobody\n", "line 1"),
        ("a: 1\n---\nb: 2\n", "line 2"),
        ("[" * 10_000, ""),
        ("a: \x00\n", ""),
        ("? [1]\n: 2\n", "line 1"),
    ],
)
def test_a_mistake_is_named_with_file_and_line(tmp_path, text, named):
    path = tmp_path / "site.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_yaml(path)
    assert "site.yaml" in str(caught.value)
    assert named in str(caught.value)


def test_files_that_are_none(tmp_path):
    (tmp_path / "latin.yaml").write_bytes(b"a: \xe4\n")
    (tmp_path / "large.yaml").write_bytes(b"#" * (MAX_FILE_BYTES + 1))
    for name in ("none.yaml", ".", "latin.yaml", "large.yaml"):
        with pytest.raises(ConfigError):
            load_yaml(tmp_path / name)


@examples(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.text(max_size=60) | st.text("{}[]:,-&*!|>%@`\"' \na1", max_size=60))
def test_any_text_is_data_or_a_config_error(tmp_path, text):
    path = tmp_path / "any.yaml"
    path.write_text(text, encoding="utf-8", errors="ignore")
    with contextlib.suppress(ConfigError):  # and nothing else
        load_yaml(path)


WRONG = ("HEPTI_KERNELS_ISA", "HEPTI_KERNELS_DOT", "HEPTI_DATA_LINK")


@pytest.fixture(autouse=True)
def _unset(monkeypatch):
    for name in WRONG:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(("name", "command"), list(zip(WRONG, COMMANDS, strict=False)))
def test_a_command_says_what_is_wrong_before_it_begins(name, command, monkeypatch, capsys):
    monkeypatch.setenv(name, "mmx")
    assert main(command) == ConfigError.exit_code
    assert f"{name}='mmx'" in capsys.readouterr().err


@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        (WRONG[0], ["device_agent", *NOWHERE, "--id", "d1"]),
        (WRONG[2], ["hepti_mqtt.service", *NOWHERE, "--model", "m=n"]),
    ],
)
def test_so_does_a_module_that_is_run(name, arguments, tmp_path):
    environment = {**os.environ, name: "mmx", "HOME": str(tmp_path)}
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode in {1, ConfigError.exit_code}
    assert f"{name}='mmx'" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_is_unset_or_empty_is_no_error(monkeypatch):
    for name in WRONG:
        monkeypatch.setenv(name, "")
    check_environment()
    assert data_link() == "own"
    assert data_link({"HEPTI_DATA_LINK": "paho"}) == "paho"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("200MiB", 200 << 20),
        ("2GB", 2 * 10**9),
        ("1.5 gib", 3 << 29),
        ("1.5 GB", 1_500_000_000),
        ("4096", 4096),
        ("1kib", 1024),
        ("0", 0),
    ],
)
def test_sizes(text, value):
    assert parse_size(text) == value
    for none in ("", "MiB", "-1MiB", "1TiBs", "1e3", "²", "٣", "9" * 19, "9" * 400, "9" * 5000):
        with pytest.raises(ConfigError):
            parse_size(none)


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
    weights=st.none() | st.sampled_from(get_args(WeightDtype)),
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
    one, other = kind.from_args(parser.parse_args(arguments)), kind.from_args(build().parse_args([command, *arguments]))
    assert one == other
    return one


@given(AGENTS)
def test_an_agents_options_come_back_from_their_arguments(options):
    assert parsed(AgentOptions, options.arguments()) == options


@given(PLANNERS)
def test_a_planners_options_come_back_from_their_arguments(options):
    assert parsed(PlannerOptions, options.arguments()) == options


def test_what_is_not_said_is_left_to_the_program():
    assert AgentOptions("a").to_argv() == ["--id", "a"]
    assert PlannerOptions({"m": "d"}).to_argv() == ["--model", "m=d"]
    assert site_argv(Settings(None)) == ["--site", "home"]


def test_broker_and_site_come_back_from_their_arguments():
    parser = argparse.ArgumentParser()
    add_site_arguments(parser)
    settings = Settings("mqtt://somewhere:1", "attic")
    assert settings_from_args(parser.parse_args(site_argv(settings))) == settings


def test_pins_are_those_that_the_planner_takes():
    pins = PinOptions("row", "kv", ("a", "b"), None, "f16").to_pins()
    assert (pins.strategy, pins.options, pins.devices) == ("row", {"variant": "kv"}, ("a", "b"))
    assert (pins.wire, pins.weight_dtype, pins.route) == ("f32", "f16", None)
    assert PinOptions("megatron", "ring").to_pins().options == {"reduce": "ring"}
    assert PinOptions("decoupled", "megatron/everywhere").to_pins().options == {
        "original": "megatron",
        "last": "everywhere",
    }
    assert PinOptions("megatron", "kv").to_pins().options == {"variant": "kv"}  # which the planner refuses by name
    assert PinOptions(route="auto").to_pins().route is None
    assert PinOptions(route="mesh").to_pins().route == "mesh"
    assert pins.objective == "latency"
    asked = PinOptions("replicas", "groups=2", objective="throughput").to_pins()
    assert (asked.options, asked.objective) == ({"groups": "2"}, "throughput")


@pytest.mark.parametrize("kind", [non_negative_int, index_range, tcp_port, positive_int])
def test_numbers_are_plain_digits(kind):
    for text in ("²", "٣", "-1", "+1", "1_0", " 1", "", "9" * 5000):
        with pytest.raises(argparse.ArgumentTypeError):
            kind(text)


def test_a_model_that_is_named_twice_is_refused():
    with pytest.raises(ConfigError):
        parsed(PlannerOptions, ["--model", "m=a", "--model", "m=b"])
    with pytest.raises(ConfigError):
        Settings(None).require_broker()


def test_numbers_come_as_they_are_written():
    assert (non_negative_int("0"), positive_int("007"), tcp_port("65535"), index_range("2")) == (
        0,
        7,
        65535,
        range(2, 3),
    )
    assert index_range("0:3") == range(3)
    assert parsed(AgentOptions, ["--mesh-port", "7801"]).mesh_port == 7801
    for kind, texts in ((index_range, ("3:3", "4:3", "1:", ":2", "1:²")), (tcp_port, ("0", "70000"))):
        for text in texts:
            with pytest.raises(argparse.ArgumentTypeError):
                kind(text)
