"""What labs write down about themselves, and what of it is found and removed by a later process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hepti_mqtt.errors import LabError
from hepti_mqtt.lab import leftovers
from hepti_mqtt.lab.leftovers import Record


def record(lab: str = "x", **more: Any) -> Record:
    fields = {"owner": leftovers.me(), "kept": False, "directory": "/d", "namespaces": [], "groups": [], "hosts": {}}
    return Record(lab, **{**fields, **more})


def test_a_name_is_taken_while_its_lab_is_written_down(tmp_path: Path) -> None:
    states = tmp_path / "states"
    first = record()
    leftovers.claim(first, states)
    with pytest.raises(LabError, match=f"process {os.getpid()}"):
        leftovers.claim(record(), states)
    leftovers.claim(record("y"), states)
    assert [found.lab for found in leftovers.records(states)] == ["x", "y"]
    first.kept = True
    leftovers.update(first, states)
    assert leftovers.records(states)[0] == first


def test_the_state_of_a_lab_follows_its_owner(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    start = leftovers.started(ended.pid)
    assert start is not None
    lab = record(owner=(ended.pid, start))
    assert lab.state == "running"
    ended.communicate(b"\n")
    assert (lab.state, record(owner=lab.owner, kept=True).state) == ("leftover", "up")
    # The same number, given to another process since.
    assert record(owner=(os.getpid(), leftovers.me()[1] + 1)).state == "leftover"
    leftovers.claim(lab, tmp_path)
    with pytest.raises(LabError, match="hepti lab down x"):
        leftovers.claim(record(), tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 99, "owner": [1, 2]}'])
def test_a_state_file_that_is_none_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(LabError, match=r"x\.json"):
        leftovers.records(tmp_path)


def test_only_what_is_called_like_ours_and_belongs_to_no_lab_is_a_stray() -> None:
    lab = record(namespaces=["hepti-x-a"], groups=["/c/hepti/x/a"])
    names = ["hepti-x-a", "hepti-old-a", "docker", "my-hepti-x"]
    strays = leftovers.sift([lab], names, [Path("/c/hepti/x/a"), Path("/c/hepti/old/a")])
    assert strays.namespaces == ["hepti-old-a"]
    assert strays.groups == [Path("/c/hepti/old/a")]
    assert strays.names() == ["namespace hepti-old-a", "group /c/hepti/old/a"]
    assert json.loads(json.dumps(strays.data()))["stray_groups"] == ["/c/hepti/old/a"]
