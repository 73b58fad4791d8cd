"""The error for a broker that takes too small packets."""

from __future__ import annotations

import re

from hepti_mqtt.protocol.limits import packet_limit_error


def test_too_small_a_limit_names_the_setting():
    error = packet_limit_error(1000, 2_000_000, "the plan of bert", "the broker at here:1")
    assert "--wire f16" in str(error)
    weights = packet_limit_error(1000, 2_000_000, "bringing weights", "the broker at here:1", narrows=False)
    assert "--wire" not in str(weights), "weights come as they are"
    assert re.search(r"the plan of bert needs .*2000000.*here:1.*1000.*max_packet_size", str(error))
