"""A site on this machine's own hosts: it answers, loses processes and gets them back, and says who died."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from hepti_mqtt.checkpoint import make_model
from hepti_mqtt.errors import ConfigError, LabError
from hepti_mqtt.lab.local import LocalHost
from hepti_mqtt.lab.site import Device, LabSite
from hepti_mqtt.lab.spec import HostSpec, LabSpec

pytestmark = [pytest.mark.processes, pytest.mark.broker]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LabSite]:
    directory = tmp_path_factory.mktemp("lab-site")
    model = make_model("tiny-bert", directory / "model", seed=3)
    with ExitStack() as stack:
        hub, *hosts = (stack.enter_context(LocalHost(n, directory / n)) for n in ("hub", "a", "b", "c"))
        devices = [Device(host, memory="100MiB") for host in hosts]
        yield stack.enter_context(LabSite(hub, devices, {"tiny": model}))


def ask(site: LabSite, *pins: str) -> dict:
    done = site.run_client(["infer", "tiny", "--tokens", "9", "--check", "--json", *pins])
    assert done.code == 0, done.err
    return json.loads(done.out)


def test_a_request_split_over_three_devices_is_answered_right(site):
    answer = ask(site, "--strategy", "row", "--devices", "a,b,c")
    assert "a" in json.dumps(answer)
    site.check()


def test_tiles_of_weights_lie_where_a_later_lab_finds_them_and_measurements_do_not(site):
    ask(site, "--strategy", "row", "--devices", "a,b,c")
    for device in site.devices:
        files = [path for path in Path(device.host.kept).rglob("*") if path.is_file()]
        assert files
        assert not any(path.name == "measurement.json" for path in files)


def test_a_killed_device_is_gone_and_comes_back(site):
    site.kill("b")
    with pytest.raises(LabError, match="b does not run"):
        site.signal("b", signal.SIGSTOP)
    ask(site)
    site.restart("b")
    online = {d["device"] for d in site.wait_ready()["devices"] if d["status"] == "online"}
    assert online == {"a", "b", "c"}


def test_the_broker_comes_back_on_its_port(site):
    url = site.url
    site.restart("broker")
    assert site.url == url
    site.wait_ready()
    ask(site)


def test_a_process_that_dies_by_itself_is_named_with_its_last_words(site):
    site._running["c"].signal(signal.SIGKILL)
    site._running["c"].wait(10)
    with pytest.raises(LabError, match=r"c \(exit code -9\)"):
        site.check()
    site.check(besides=["c"])
    site.restart("c")
    site.wait_ready()


def test_a_driver_on_the_hub_speaks_lines_and_knows_the_site(site):
    driver = site.talk("driver", ["-c", "import os; print(input() + os.environ['HEPTI_BROKER'])"])
    driver.send("at ")
    assert driver.receive(30) == f"at {site.url}"
    assert driver.wait(30) == 0
    del site._running["driver"]


def test_names_that_the_site_does_not_have(site):
    with pytest.raises(ConfigError, match="no 'z' on this site"):
        site.kill("z")


def test_a_lab_file_says_where_everything_runs(tmp_path: Path):
    spec = LabSpec("x", "emulated", (HostSpec("a", memory_bytes=1 << 30), HostSpec("b", threads=2)), broker="a")
    with ExitStack() as stack:
        hub, a, b = (stack.enter_context(LocalHost(n, tmp_path / n)) for n in ("hub", "a", "b"))
        site = LabSite.of(spec, hub, {"a": a, "b": b}, {})
        assert (site.hub, site.broker_host, site.planner_host) == (hub, a, a)
        assert site.devices == [Device(a, 1, str((1 << 30) - (256 << 20))), Device(b, 2, None)]
        assert LabSite.of(replace(spec, planner="hub"), hub, {"a": a, "b": b}, {}).planner_host is hub
        assert LabSite.of(replace(spec, broker=None), hub, {"a": a, "b": b}, {}).broker_host is hub


def test_devices_need_names_of_their_own(tmp_path: Path):
    with LocalHost("a", tmp_path / "a") as a, LocalHost("broker", tmp_path / "b") as broker:
        for hosts in ([a, a], [broker], []):
            with pytest.raises(ConfigError, match="names of their own"):
                LabSite(a, [Device(h) for h in hosts], {})


def test_an_agent_that_cannot_start_is_an_error_with_its_words(tmp_path: Path):
    model = make_model("tiny-bert", tmp_path / "model", seed=3)
    with (
        LocalHost("a", tmp_path / "a") as a,
        pytest.raises(LabError, match="is no size"),
        LabSite(a, [Device(a, memory="plenty")], {"tiny": model}),
    ):
        pass
