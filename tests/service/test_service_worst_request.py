"""The worst requests that are allowed: each is read, or refused, within the memory that docs/requests.md states."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import worst_request

from hepti_mqtt.service.requests import MAX_CHARACTERS

MOST_MB = 256
USUAL = ("megabytes-of-words", "wide-characters", "transparent")
KINDS = [kind if kind in USUAL else pytest.param(kind, marks=pytest.mark.wide) for kind in worst_request.WORST]


@pytest.mark.skipif(sys.platform != "linux", reason="what was in use at the most is read from /proc")
@pytest.mark.parametrize("kind", KINDS)
def test_the_worst_request_is_read_or_refused_in_bounded_memory(kind, tmp_path):
    program = Path(worst_request.__file__)
    done = subprocess.run(
        [sys.executable, program, kind, tmp_path / "model"], check=True, capture_output=True, text=True, timeout=300
    )
    found = json.loads(done.stdout)
    assert found["said"].startswith("job of ") or '"code": "bad_request"' in found["said"]
    assert found["mb"] <= MOST_MB
    assert found["tokenised"] <= MAX_CHARACTERS
    words = worst_request.WORST[kind][0] == "text" and kind not in ("ids", "objects")
    assert bool(found["tokenised"]) == words, "nothing is tokenised but texts, and these are"
