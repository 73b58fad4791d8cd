"""What users set: flags, environment, options and YAML; each error names the key, the file and the line."""

import argparse
import contextlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from device_agent.config import AgentConfig
from hepti_mqtt.cli.main import build, main
from hepti_mqtt.config import MAX_FILE_BYTES, Settings, load_yaml
from hepti_mqtt.config.options import PinOptions, PlannerOptions, index_range, non_negative_int, positive_int, tcp_port
from hepti_mqtt.config.settings import parse_size
from hepti_mqtt.core.errors import BadNameError, ConfigError
from hepti_mqtt.transport.url import BrokerUrl

NOWHERE = ["--broker", "mqtt://127.0.0.1:1"]


COMMANDS = (["agent", *NOWHERE, "--id", "d1"], ["planner", *NOWHERE, "--model", "m=nowhere"], ["demo"])


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
    path.write_text("pi-1: {gflops: 24.6, cores: 4}\npi-2: &x {gflops: 12}\npi-3:\n  <<: *x\n  cores: 2\n")
    pi_1, pi_2, pi_3 = {"gflops": 24.6, "cores": 4}, {"gflops": 12}, {"gflops": 12, "cores": 2}
    assert load_yaml(path) == {"pi-1": pi_1, "pi-2": pi_2, "pi-3": pi_3}
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
        ("[" * 3_000, "line 1"),
        ("- " * 3_000, "line 1"),
        ("a:\n  - {b: " + "{a: " * 3_000, "line 2"),
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


WRONG = ("HEPTI_KERNELS_ISA", "HEPTI_KERNELS_DOT")


@pytest.fixture(autouse=True)
def _unset(monkeypatch):
    for name in WRONG:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(("name", "command"), list(zip(WRONG, COMMANDS, strict=False)))
def test_a_command_says_what_is_wrong_before_it_begins(name, command, monkeypatch, capsys):
    monkeypatch.setenv(name, "mmx")
    assert main(command) == ConfigError.exit_code
    assert f"{name}='mmx'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("200MiB", 200 << 20), ("2GB", 2 * 10**9), ("1.5 gib", 3 << 29), ("1.5 GB", 1_500_000_000)),
        *(("4096", 4096), ("1kib", 1024), ("0", 0)),
    ],
)
def test_sizes(text, value):
    assert parse_size(text) == value
    for none in ("", "MiB", "-1MiB", "1TiBs", "1e3", "²", "٣", "9" * 19, "9" * 400, "9" * 5000):
        with pytest.raises(ConfigError):
            parse_size(none)


def planner_options(*arguments):
    return PlannerOptions.from_args(build().parse_args(["planner", *NOWHERE, *arguments]))


def agent_config(*arguments):
    return AgentConfig.from_args(build().parse_args(["agent", *NOWHERE, *arguments]))


def test_an_agents_options_are_in_its_configuration():
    usual = agent_config("--id", "d1")
    assert usual == AgentConfig(BrokerUrl.parse(NOWHERE[1]), "home", "d1")
    flags = "--id d2 --site attic --threads 1 --memory 1KiB --cache here --cache-size 0 --mesh-host 192.0.2.7"
    given = agent_config(*f"{flags} --mesh-port 7801 --mesh-tls own.pem --no-mesh --no-retry".split())
    assert (given.device_id, given.site, given.threads, given.memory_bytes) == ("d2", "attic", 1, 1024)
    assert (given.cache_dir, given.cache_bytes, given.retry) == (Path("here"), 0, False)
    mesh = (given.mesh, given.mesh_host, given.mesh_port, given.mesh_tls)
    assert mesh == (False, "192.0.2.7", 7801, Path("own.pem"))


def test_more_threads_than_cores_are_those_of_the_cores(monkeypatch, caplog):
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    assert [agent_config("--threads", str(n)).threads for n in (1, 4)] == [1, 4]
    assert not caplog.records
    assert agent_config("--threads", "99").threads == 4
    assert "99" in caplog.text


def test_without_an_id_a_device_is_named_after_its_host(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "Pi-4.lan")
    assert agent_config().device_id == "pi-4"


def test_a_planners_options_are_read():
    usual = planner_options("--model", "m=d")
    assert usual == PlannerOptions({"m": Path("d")})
    flags = "--model m=d --model n=e=f --in-flight 3 --batch 4 --batch-delay 2.5 --broker-mbit 100 --request-pins none"
    given = planner_options(*f"{flags} --strategy row --devices a,b --wire f16".split())
    pins = PinOptions("row", None, ("a", "b"), "f16")
    assert given == PlannerOptions({"m": Path("d"), "n": Path("e=f")}, pins, 3, 4, 2.5, 100.0, "none")
    with pytest.raises(ConfigError):  # two models of one name
        planner_options("--model", "m=a", "--model", "m=b")


@pytest.mark.parametrize(
    ("given", "strategy", "options"),
    [
        (("row", "kv"), "row", {"variant": "kv"}),
        (("megatron", "ring"), "megatron", {"reduce": "ring"}),
        (("decoupled", "megatron/everywhere"), "decoupled", {"original": "megatron", "last": "everywhere"}),
        (("megatron", "kv"), "megatron", {"variant": "kv"}),  # the planner refuses it by name
        (("replicas", "groups=2"), "replicas", {"groups": "2"}),
    ],
)
def test_a_pinned_variant_is_read_by_its_method(given, strategy, options):
    pins = PinOptions(*given).to_pins()
    assert (pins.strategy, pins.options, pins.wire, pins.objective) == (strategy, options, "f32", "latency")


def test_pins_are_those_that_the_planner_takes():
    pins = PinOptions(None, None, ("a", "b"), None, "f16", route="mesh", objective="throughput").to_pins()
    assert (pins.devices, pins.weight_dtype, pins.route, pins.objective) == (("a", "b"), "f16", "mesh", "throughput")
    assert PinOptions(route="auto").to_pins().route is None


def test_numbers_come_as_they_are_written():
    assert (non_negative_int("0"), positive_int("007"), tcp_port("65535")) == (0, 7, 65535)
    assert (index_range("2"), index_range("0:3")) == (range(2, 3), range(3))


NO_NUMBERS = ("²", "٣", "-1", "+1", "1_0", " 1", "", "9" * 5000)


@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        (non_negative_int, NO_NUMBERS),
        (positive_int, (*NO_NUMBERS, "0")),
        (index_range, (*NO_NUMBERS, "3:3", "4:3", "1:", ":2", "1:²")),
        (tcp_port, (*NO_NUMBERS, "0", "70000")),
    ],
)
def test_what_is_no_number_is_refused(kind, texts):
    for text in texts:
        with pytest.raises(argparse.ArgumentTypeError):
            kind(text)
