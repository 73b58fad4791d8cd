"""Every kind of experiment once, small, on this machine; and an emulated lab that leaves nothing behind."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.lab import cgroups, network
from benchmarks.lab import lab as labs
from benchmarks.lab.changes import Change
from benchmarks.lab.lab import Lab
from benchmarks.lab.spec import parse
from benchmarks.outside import BASELINES
from benchmarks.provenance import read
from hepti_mqtt.core.errors import HeptiError

pytestmark = pytest.mark.nightly


def why_not() -> str:
    """Return why this machine cannot have emulated hosts, "" where it can."""
    if lacking := labs._why_not():
        return f"emulated hosts need {lacking}"
    try:
        cgroups.this_machine()
        network.command(["ip", "netns", "add", name := f"hepti-try-{uuid.uuid4().hex[:8]}"])
        network.remove([name])
    except HeptiError as error:
        return str(error)
    return ""


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., str]:
    """Return a function that runs an experiment and returns its report."""

    def run(*words: str) -> str:
        out = tmp_path / "out"
        places = ["--out", str(out)]
        assert main([*words, *places]) == 0
        records = read(out).records
        assert records
        assert all(r.get("ok", True) for r in records), [r for r in records if not r.get("ok", True)]
        return (out / "report.md").read_text()

    return run


def test_methods_are_timed_on_a_site_of_this_machine(run: Callable[..., str]) -> None:
    small = ["models=[minilm]", "layers=1", "lengths=[16]", "devices=[1,2]", "rates=[]", "lab=this-machine"]
    text = run("aa", "--quick", *small, "rounds=2", "repetitions=1")
    assert "A/A single x1" in text
    assert "row/kv x2" in text


@pytest.mark.parametrize("name", BASELINES)
def test_outside_baselines_give_the_same_hidden_states(run: Callable[..., str], name: str) -> None:
    if missing := [package for package in BASELINES[name].packages if find_spec(package) is None]:
        pytest.skip(f"{missing[0]} is not installed")
    small = ["models=[minilm]", "layers=2", "lengths=[16]", "devices=[1,2]", "rates=[]", "lab=this-machine"]
    assert name in run("aa", "--quick", *small, f"outside=[{name}]", "strategies=[single]", "repetitions=1")


def test_the_chain_is_measured_on_two_hosts_of_this_machine(run: Callable[..., str], tmp_path: Path) -> None:
    lab = tmp_path / "pair.yaml"
    lab.write_text(json.dumps({"name": "pair", "kind": "local", "hosts": {"primary": {}, "secondary": {}}}))
    words = ["rates=[]", "cpu=[100]", "rows=[4]", "shares=[50]", "chunks=2", "rounds=1", f"lab={lab}"]
    assert "Best share" in run("matmul-chain", *words)


def test_every_way_carries_messages(run: Callable[..., str]) -> None:
    text = run("transport", "kilobytes=[1]", "rounds=1", "repeat=4")
    assert "broker, ours" in text
    assert "All-gather" in text


def test_kernels_are_checked_and_timed(run: Callable[..., str]) -> None:
    assert "speed-up over" in run("kernels", "--quick", "groups=[int8]", "threads=[1]", "rounds=1")


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_an_emulated_lab_has_links_and_quotas_and_leaves_nothing(tmp_path: Path) -> None:
    name = f"t{uuid.uuid4().hex[:10]}"
    spec = parse({"name": name, "rate": 100, "hosts": {"a": {}, "b": {"memory": "1GiB"}}}, "test")
    with Lab(spec, tmp_path) as lab:
        a, b = lab.hosts["a"], lab.hosts["b"]
        assert network.namespace(name, "a") in network.namespaces()
        said = b.run([b.python, "-c", "print('here')"])
        assert (said.code, said.out) == (0, "here\n")
        listener = a.talk("listen", "benchmarks.lab.probe", "listen", a.address)
        port = json.loads(listener.receive(60))["port"]
        sent = b.run([b.python, "-m", "benchmarks.lab.probe", "send", a.address, str(port)])
        assert 50 < json.loads(sent.out)["up_mbit_per_s"] < 150
        waiting = b.start("wait", ["sleep", "1000"])
        lab.apply(Change(0.0, "kill", "b"))
        assert waiting.poll() is not None
        with pytest.raises(HeptiError, match="in use"), Lab(spec, tmp_path / "other"):
            pass
    assert not [space for space in network.namespaces() if space.startswith(f"hepti-{name}-")]
    assert not list(Path("/sys/fs/cgroup").glob(f"**/hepti/{name}/"))
    assert name not in labs.leftovers()
    os.unlink(labs.LOCKS / f"{name}.lock")
