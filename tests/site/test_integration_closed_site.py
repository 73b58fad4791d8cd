"""Every command at a closed site: each with the login of its role, as `hepti site` writes it."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from closed_broker import ClosedSite, closed_broker
from site_processes import PATIENCE_S, SITE, ask_http, wait_for_plans

from hepti_mqtt.checkpoint import make_model
from hepti_mqtt.cli.main import COMMANDS
from hepti_mqtt.client import Hepti
from hepti_mqtt.core.errors import RefusedError
from hepti_mqtt.transport.url import BrokerUrl

ROOT = Path(__file__).parents[2]
USERS = {"a": "device", "b": "device", "c": "device", "alice": "client", "hall": "viewer"}
NOT_AT_A_BROKER = {"completion", "simulate", "model", "bench", "lab", "site", "broker"}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    directory = tmp_path_factory.mktemp("closed")
    model = make_model("tiny-bert", directory / "model", seed=3)
    with (
        closed_broker(directory / "site", USERS, SITE) as (folder, broker),
        ClosedSite(directory, broker, {"tiny": model}, folder) as closed_site,
    ):
        closed_site.planner()
        for name in ("a", "b"):
            closed_site.agent(name, "100MiB")
        with Hepti.connect(str(folder.login("alice")), site=SITE) as hepti:
            wait_for_plans(hepti, ["tiny"], "ab")
        yield closed_site


# Who runs what, with which exit code: 6 is "refused".
RUNS = [
    ("alice", "infer tiny --tokens 9 --check", 0),
    ("alice", "infer tiny --tokens 9 --client alice --strategy row --devices a,b --plan-only", 0),
    ("alice", "infer tiny --tokens 9 --client bob --timeout 20", 6),
    ("hall", "infer tiny --tokens 9 --timeout 20", 6),
    ("a", "infer tiny --tokens 9 --timeout 20", 6),
    ("a", "plan tiny --explain", 0),
    ("alice", "devices --wait 5", 0),
    ("hall", "top", 0),
    *((user, "doctor", 0) for user in ("planner", "c", "hall")),
    ("hall", "health planner", 0),
    ("a", "planner --model tiny=MODEL", 6),
    ("alice", "planner --model tiny=MODEL", 6),
    ("c", "agent --id b --cache CACHE --threads 1 --memory 100MiB", 6),
    ("alice", "agent --id alice --cache CACHE --threads 1 --memory 100MiB", 6),
    ("a", "model inspect MODEL", 0),
    ("a", "simulate MODEL --devices-file SITES/four-pi4.yaml --tokens 8", 0),
]


def test_no_command_is_left_out():
    ran = {command.split()[0] for _, command, _ in RUNS} | {"demo", "gateway", "dashboard", "wyoming"}
    assert set(COMMANDS) - NOT_AT_A_BROKER <= ran


@pytest.mark.parametrize(("user", "command", "code"), RUNS, ids=lambda value: str(value).replace(" ", "-")[:40])
def test_a_command(site, run, tmp_path, monkeypatch, user, command, code):
    monkeypatch.setenv("HEPTI_BROKER", str(site.folder.login(user)))
    monkeypatch.setenv("HEPTI_SITE", SITE)
    words = {"MODEL": str(site.models["tiny"]), "CACHE": str(tmp_path), "SITES": str(ROOT / "configs" / "sites")}
    for word, value in words.items():
        command = command.replace(word, value)
    got, out, err = run(*command.split())
    assert got == code, out + err
    assert (BrokerUrl.parse(str(site.folder.login(user))).password or "?") not in out + err


def test_exchanges_between_devices_are_encrypted_by_their_own_certificates(site):
    row = {"strategy": "row", "options": {"variant": "kv"}, "devices": ["a", "b"], "route": "mesh"}
    with Hepti.connect(str(site.folder.login("alice")), site=SITE) as hepti:
        version = hepti.infer("tiny", text="hello", **row, timeout_s=PATIENCE_S).plan["version"]
        assert [p["relayed"] for p in hepti.plan("tiny")["pinned"] if p["version"] == version] == [[]]
        by_device = {d["device"]: d for d in hepti.devices(wait_s=5)}
    assert len(by_device["a"]["endpoint"]["fingerprint"]) == 64
    assert by_device["a"]["endpoint"]["fingerprint"] != by_device["b"]["endpoint"]["fingerprint"]


def test_a_gateway_asks_as_its_user(site):
    for user, status in (("alice", 200), ("hall", 502)):
        port = site.serve("gateway", "--timeout", "20", name=user)
        assert ask_http(port, "/v1/embeddings", {"model": "tiny", "input": "hello"})[0] == status
        site.stop(user)


def test_a_service_of_speech_describes_itself_as_its_user(site):
    port = site.serve("wyoming", name="alice")
    with (
        socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connection,
        connection.makefile("rb") as said,
    ):
        connection.sendall(b'{"type": "describe"}\n')
        assert json.loads(said.readline())["type"] == "info"
    site.stop("alice")


def test_passwords_stay_out_of_logs_and_arguments(site):
    for name in ("planner", "a", "b"):
        password = BrokerUrl.parse(str(site.folder.login(name))).password
        assert password
        assert password not in site.log(name) + "".join(site.running[name].args)


def test_python_asks_as_its_user(site):
    with Hepti.connect(str(site.folder.login("alice")), site=SITE) as one:
        assert one.client_id == "alice"
        with Hepti.connect(str(site.folder.login("alice")), site=SITE) as other:
            for hepti in (one, other, one):
                assert len(hepti.infer("tiny", text="hello", timeout_s=PATIENCE_S).embedding) == 32
    bob = Hepti.connect(str(site.folder.login("alice")), site=SITE, client_id="bob")
    with bob, pytest.raises(RefusedError):
        bob.infer("tiny", text="hello", timeout_s=PATIENCE_S)
