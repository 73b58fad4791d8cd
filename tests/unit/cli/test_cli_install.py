"""The units that `hepti-agent install` writes."""

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hepti_mqtt.cli.install import agent_options, systemd_word, unit_text, words_of
from hepti_mqtt.cli.main import build, main

BUNDLED = (Path(__file__).parents[3] / "configs" / "systemd" / "hepti-agent.service").read_text()
COMMAND = ["/opt/hepti/bin/hepti-agent", "--id", "pi-1", "--cache", "/var/cache/hepti/tiles"]
WORDS = st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1)


@given(st.lists(WORDS, min_size=1))
def test_a_command_is_read_back_as_it_was(words):
    unit = unit_text(BUNDLED, words, {}, is_users=False)
    assert words_of(unit, "ExecStart") == words
    assert systemd_word("$HOME 100%") == '"$$HOME 100%%"'


def settings(unit):
    return [line for line in unit.splitlines() if line and not line.startswith("#")]


def test_the_systems_unit_differs_from_ours_in_command_and_site_alone():
    made, own = settings(unit_text(BUNDLED, COMMAND, {"HEPTI_SITE": "attic"}, is_users=False)), settings(BUNDLED)
    changed = [(a, b) for a, b in zip(own, made, strict=True) if a != b]
    assert [a.partition("=")[0] for a, _ in changed] == ["ExecStart", "Environment"]
    assert changed[1][1] == f"{changed[1][0]} HEPTI_SITE=attic"


def test_a_users_unit_asks_for_nothing_that_needs_root():
    unit = unit_text(BUNDLED, COMMAND, {"HEPTI_BROKER": "/home/me/.config/hepti/agent.login"}, is_users=True)
    keys = {line.partition("=")[0] for line in settings(unit)}
    assert keys.isdisjoint({"User", "DynamicUser", "LoadCredential", "PrivateUsers", "ProtectSystem", "After"})
    assert {"NoNewPrivileges", "SystemCallFilter", "MemoryMax", "RestartPreventExitStatus"} <= keys
    assert words_of(unit, "Environment") == ["HEPTI_BROKER=/home/me/.config/hepti/agent.login"]
    assert "WantedBy=default.target" in unit


@pytest.mark.parametrize("is_users", [False, True])
def test_systemd_takes_the_unit(is_users, tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    path = tmp_path / "hepti-agent.service"
    path.write_text(unit_text(BUNDLED, ["/bin/true", "--id", "a b"], {"HEPTI_SITE": "attic"}, is_users=is_users))
    command = ["systemd-analyze", *(["--user"] if is_users else []), "verify", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "Unknown" not in done.stderr
    assert "hepti-agent.service:" not in done.stderr


def test_options_are_those_that_were_given():
    given_ = ["--threads", "2", "--memory", "1GiB", "--no-mesh", "--metrics", "[::1]:9301"]
    args = build().parse_args(["agent", "install", "--broker", "mqtt://hub", "--id", "pi-1", "--user", *given_])
    assert sorted(agent_options(args)) == sorted(given_)
    assert agent_options(build().parse_args(["agent"])) == []


def test_what_cannot_be_installed_is_said(monkeypatch, tmp_path):
    install = ["agent", "install", "--broker", "mqtt://hub"]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(install) == 2, "there is no systemctl"
    (tmp_path / "systemctl").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "systemctl").chmod(0o755)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert main(install) == 2, "only root installs a service of the system"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for arguments in (["agent", "upgrade", "--user"], ["agent", "uninstall", "--user"]):
        assert main(arguments) == 2, "nothing is installed"
    assert main([*install, "--user", "--cache", "/x"]) == 2
    assert not (tmp_path / "config").exists()


def test_a_dry_run_prints_the_unit_and_writes_nothing(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    install = ["agent", "install", "--broker", "mqtt://hub", "--id", "pi-1", "--user", "--dry-run"]
    assert main(install) == 0
    shown = capsys.readouterr().out
    assert "--id" in words_of(shown, "ExecStart")
    assert str(tmp_path / "systemd/user/hepti-agent.service") in shown
    assert list(tmp_path.iterdir()) == []
    assert main(["agent", "upgrade", "--user", "--dry-run"]) == 2
    assert main(["agent", "--broker", "mqtt://hub", "--dry-run"]) == 2
