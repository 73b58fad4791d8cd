"""A broker that drops what is over its limits without a word: whoever finds that says it, and requests end."""

from __future__ import annotations

import pytest
from limited_broker import mosquitto_with
from site_processes import PATIENCE_S, SITE, Site, poll, wait_online

from hepti_mqtt.checkpoint import make_model
from hepti_mqtt.cli.main import main
from hepti_mqtt.client import Hepti
from hepti_mqtt.core.errors import PacketLimitError

LIMIT = 100_000  # of a message; below the 262 kB of a tile


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    directory = tmp_path_factory.mktemp("broker-limits")
    model = make_model("minilm", directory / "wide", layers=1)
    with (
        mosquitto_with(directory, f"message_size_limit {LIMIT}", "max_queued_messages 10") as broker,
        Site(directory, broker, {"wide": model}) as running,
    ):
        running.planner()
        running.agent("a", "300MiB")
        yield running


def test_requests_end_with_the_name_of_the_setting(site):
    with Hepti.connect(site.url, site=SITE) as hepti:
        wait_online(hepti, ["a"])
        with pytest.raises(PacketLimitError):
            hepti.infer("wide", ids=[1, 2, 3], timeout_s=PATIENCE_S)


def test_a_short_queue_of_the_broker_costs_no_request(tmp_path):
    model = make_model("tiny-bert", tmp_path / "tiny")
    with mosquitto_with(tmp_path, "max_queued_messages 10") as broker, Site(tmp_path, broker, {"tiny": model}) as site:
        site.planner()
        site.agent("a", "300MiB")
        with Hepti.connect(site.url, site=SITE) as hepti:
            hepti.wait_ready("tiny", PATIENCE_S)
            futures = [hepti.submit("tiny", ids=[5, 6 + n % 20]) for n in range(60)]
            assert all(future.result(PATIENCE_S).raw["ok"] for future in futures)


def test_planner_agent_and_doctor_name_the_settings(site, capsys):
    for name in ("planner", "a"):
        poll(lambda name=name: "rejects packets above about" in site.log(name), f"the warning of {name}")
        assert "message_size_limit must be 0" in site.log(name)
    main(["doctor", "--broker", site.url, "--site", SITE])
    said = " ".join(capsys.readouterr().out.split())
    assert all(word in said for word in ("message_size_limit", "queues only 10 messages", "max_queued_messages"))
    assert "access list" not in said
