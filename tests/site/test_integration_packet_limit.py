"""A broker that takes only small packets: what does not get through is refused by name, the rest works."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from broker_kinds import needs_mosquitto
from site_processes import PATIENCE_S, SITE, Site, poll, running_site, wait_for_plans

from hepti_mqtt.checkpoint import make_model
from hepti_mqtt.client import Hepti
from hepti_mqtt.core.errors import PacketLimitError

pytestmark = [needs_mosquitto]

LIMIT = 40_000  # the tiles of `tiny` are below it, those of `wide` (256 KiB) above


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("packet-limit")
    models = {
        "tiny": make_model("tiny-bert", directory / "tiny", seed=3),
        "wide": make_model("minilm", directory / "wide", layers=1),
    }
    try:
        yield from running_site(directory, models, {"a": "300MiB", "b": "300MiB"}, max_packet_bytes=LIMIT)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="module")
def hepti(site: Site) -> Iterator[Hepti]:
    with Hepti.connect(site.url, site=SITE) as client:
        wait_for_plans(client, ["tiny"], "ab")
        yield client


def test_devices_know_the_limit(hepti: Hepti) -> None:
    assert {d["largest_packet_bytes"] for d in hepti.devices(wait_s=3.0)} == {LIMIT - 1}


def test_weights_over_the_limit_are_refused_with_the_setting(hepti: Hepti) -> None:
    with pytest.raises(PacketLimitError):
        hepti.infer("wide", ids=[1, 2, 3], timeout_s=PATIENCE_S)
    error = poll(lambda: hepti.plan("wide")["error"], "the record of its plans, which may come behind the answer")
    assert error["code"] == "packet_limit"


def test_what_fits_works(hepti: Hepti) -> None:
    answer = hepti.infer("tiny", ids=[1, 2, 3], strategy="row", devices=["a", "b"], timeout_s=PATIENCE_S)
    assert answer.plan["strategy"] == "row"


def test_a_request_over_the_limit_never_leaves(hepti: Hepti) -> None:
    with pytest.raises(PacketLimitError):
        hepti.infer("tiny", text="word " * LIMIT, truncate=True, timeout_s=PATIENCE_S)


def test_an_answer_over_the_limit_becomes_an_error_that_names_the_setting(site: Site, hepti: Hepti) -> None:
    ids = [[5 + i % 190 for i in range(40)]] * 10  # 400 x 32 hidden states: 51 kB, and more as base64
    with pytest.raises(PacketLimitError):
        hepti.infer("tiny", ids=ids, want="hidden", timeout_s=PATIENCE_S)
    assert hepti.infer("tiny", text="still here", timeout_s=PATIENCE_S).raw["ok"]
