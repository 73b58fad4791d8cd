"""A broker that takes only small packets: what does not get through is refused by name, the rest works."""

from __future__ import annotations

import pytest
from broker_kinds import needs_mosquitto
from site_processes import PATIENCE_S, client_of, poll, site_of

from hepti_mqtt.core.errors import PacketLimitError

pytestmark = [needs_mosquitto]

LIMIT = 40_000  # the tiles of `tiny` are below it, those of `wide` (256 KiB) above
KINDS = {"tiny": "tiny-bert", "wide": ("minilm", 1)}
site = site_of(KINDS, {"a": "300MiB", "b": "300MiB"}, max_packet_bytes=LIMIT)
hepti = client_of("tiny")


def test_devices_know_the_limit(hepti):
    assert {d["largest_packet_bytes"] for d in hepti.devices(wait_s=3.0)} == {LIMIT - 1}


def test_weights_over_the_limit_are_refused_with_the_setting(hepti):
    with pytest.raises(PacketLimitError):
        hepti.infer("wide", ids=[1, 2, 3], timeout_s=PATIENCE_S)
    error = poll(lambda: hepti.plan("wide")["error"], "the record of its plans, which may come behind the answer")
    assert error["code"] == "packet_limit"


@pytest.mark.parametrize(
    "request_",
    [
        {"text": "word " * LIMIT, "truncate": True},  # never leaves
        {"ids": [[5 + i % 190 for i in range(40)]] * 10, "want": "hidden"},  # its answer: 400 x 32 states, 51 kB
    ],
    ids=["request", "answer"],
)
def test_what_is_over_the_limit_is_an_error_and_the_rest_works(hepti, request_):
    with pytest.raises(PacketLimitError):
        hepti.infer("tiny", **request_, timeout_s=PATIENCE_S)
    answer = hepti.infer("tiny", ids=[1, 2, 3], strategy="row", devices=["a", "b"], timeout_s=PATIENCE_S)
    assert answer.plan["strategy"] == "row"
