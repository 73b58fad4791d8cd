import errno
import os
import subprocess
import sys

import pytest

from device_agent.agent import device_lock, directories
from hepti_mqtt.errors import BadNameError, ConfigError


def test_directories_by_site_and_device(tmp_path):
    places = directories(tmp_path, "home", "d1")
    assert places.state == tmp_path / "home" / "d1"
    assert places.state.is_dir()
    assert places.tiles.is_dir()
    assert directories(tmp_path, "home", "d2").state != places.state


def test_directories_without_root_are_the_users_own(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    places = directories(None, "home", "d1")
    assert places.state.is_relative_to(tmp_path / "state")
    assert places.tiles.is_relative_to(tmp_path / "cache")


@pytest.mark.parametrize(("site", "device"), [("home", "../x"), ("a/b", "d1"), ("home", "all"), ("", "d1")])
def test_names_cannot_leave_the_directory(tmp_path, site, device):
    with pytest.raises(BadNameError):
        directories(tmp_path, site, device)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "home").write_text("a file")
    with pytest.raises(ConfigError, match="--cache"):
        directories(tmp_path, "home", "d1")


def test_second_agent_of_one_name_is_told_who_holds_the_lock(tmp_path):
    message = rf"process {os.getpid()}\b.*--id"
    with device_lock(tmp_path), pytest.raises(ConfigError, match=message), device_lock(tmp_path):
        pass
    with device_lock(tmp_path):
        pass


def test_a_killed_agent_leaves_no_lock(tmp_path):
    code = (
        "import os, signal; from pathlib import Path; from device_agent.agent import device_lock\n"
        f"with device_lock(Path({str(tmp_path)!r})): os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    with device_lock(tmp_path):
        pass


def test_a_full_disk_keeps_nobody_from_the_lock(tmp_path, monkeypatch):
    def full(_handle, _data):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with device_lock(tmp_path), pytest.raises(ConfigError, match="another agent"), device_lock(tmp_path):
            pass
