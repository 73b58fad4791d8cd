"""`hepti site`: a closed site in one command, and what to copy where."""

import json
from pathlib import Path

import pytest

from hepti_mqtt.cli.main import main


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    for name in ("HEPTI_BROKER", "HEPTI_SITE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def run(capsys):
    def run(*arguments):
        code = main(["site", *arguments])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def test_a_site_in_one_command_says_what_to_copy_where_and_no_password(run, tmp_path):
    place = tmp_path / "home"
    code, init, err = run("init", "--dir", str(place))
    assert (code, err) == (0, "")
    for name in ("mosquitto.conf", "broker.crt", "broker.key", "passwd", "acl"):
        assert any(f"{place}/broker/{name}" in line and "/etc/mosquitto" in line for line in init.splitlines())
    assert f"{place}/logins/planner.login" in init
    code, added, _ = run("add", "device", "pi-1", "--dir", str(place))
    revoked, gone, _ = run("revoke", "pi-1", "--dir", str(place))
    assert (code, revoked) == (0, 0)
    assert f"{place}/logins/pi-1.login" in added
    assert "pi-1.login" not in gone
    for text in place.rglob("*.login"):
        password = text.read_text().splitlines()[1].partition("@")[0].rpartition(":")[2]
        assert password not in init + added + gone


def test_as_json(run, tmp_path, monkeypatch):
    place = tmp_path / "home"
    code, out, _ = run(
        "init", "--dir", str(place), "--json", "--site", "attic", "--host", "broker.lan", "--port", "18883"
    )
    made = json.loads(out)
    assert (code, made["site"], made["broker"], made["users"]) == (
        0,
        "attic",
        "broker.lan:18883",
        {"planner": "planner"},
    )
    assert len(made["copy"]) == 6
    assert "listener 18883\n" in (place / "broker" / "mosquitto.conf").read_text()
    monkeypatch.chdir(place)
    for role, name in (("device", "pi-1"), ("client", "alice"), ("viewer", "hall"), ("home", "ha")):
        code, out, _ = run("--json", "add", role, name)
        assert code == 0
        found = json.loads(out)
        assert found["users"][name] == role
        assert [Path(c["file"]).name for c in found["copy"]] == ["passwd", "acl", f"{name}.login"]
    assert "hepti/v1/attic/infer/+/req/alice" in (place / "broker" / "acl").read_text()


@pytest.mark.parametrize(
    "arguments",
    [
        "add device planner",
        "add device pi-1",
        "revoke nobody",
        "init",
        "init --dir x --host a/b",
        "init --dir x --port 0",
        "init x",
    ],
)
def test_what_is_wrong_ends_with_2(run, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "something").touch()
    if "planner" in arguments:
        run("init", "--dir", "here")
        arguments += " --dir here"
    try:
        code, _, err = run(*arguments.split())
    except SystemExit as end:  # argparse
        code, err = end.code, "usage"
    assert code == 2
    assert err
