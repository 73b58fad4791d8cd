"""A broker that drops what is over its limits without a word: whoever finds that says it, and requests end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from limited_broker import mosquitto_with
from site_processes import PATIENCE_S, SITE, Site, poll

from hepti_mqtt.checkpoint import make_model
from hepti_mqtt.cli.main import main
from hepti_mqtt.client import Hepti
from hepti_mqtt.core.errors import PacketLimitError

LIMIT = 100_000  # of a message; below the 262 kB of a tile


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("broker-limits")
    model = make_model("minilm", directory / "wide", layers=1)
    with (
        mosquitto_with(directory, f"message_size_limit {LIMIT}", "max_queued_messages 10") as broker,
        Site(directory, broker, {"wide": model}) as running,
    ):
        running.planner()
        running.agent("a", "300MiB")
        yield running


def test_requests_end_with_the_name_of_the_setting(site: Site) -> None:
    poll(lambda: "a has joined" in site.log("planner"), "the device")
    with Hepti.connect(site.url, site=SITE) as hepti, pytest.raises(PacketLimitError):
        hepti.infer("wide", ids=[1, 2, 3], timeout_s=PATIENCE_S)


def test_a_short_queue_of_the_broker_costs_no_request(tmp_path: Path) -> None:
    model = make_model("tiny-bert", tmp_path / "tiny")
    with mosquitto_with(tmp_path, "max_queued_messages 10") as broker, Site(tmp_path, broker, {"tiny": model}) as site:
        site.planner()
        site.agent("a", "300MiB")
        with Hepti.connect(site.url, site=SITE) as hepti:
            hepti.wait_ready("tiny", PATIENCE_S)
            futures = [hepti.submit("tiny", ids=[5, 6 + n % 20]) for n in range(60)]
            assert all(future.result(PATIENCE_S).raw["ok"] for future in futures)


@pytest.mark.parametrize("who", ["planner", "a"])
def test_planner_and_agent_say_it_when_they_start(site: Site, who: str) -> None:
    poll(lambda: "rejects packets above about" in site.log(who), f"the word of {who}")
    assert "message_size_limit must be 0" in site.log(who)


def test_doctor_says_it(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--broker", site.url, "--site", SITE])
    said = " ".join(capsys.readouterr().out.split())
    assert "message_size_limit" in said
    assert "queues only 10 messages" in said
    assert "max_queued_messages" in said
    assert "access list" not in said
