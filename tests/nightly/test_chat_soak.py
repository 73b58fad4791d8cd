"""Concurrent chats, some cancelled, have the same tokens as each chat alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from chat_soak import run

from hepti_mqtt.transport.sockets import mesh_possible


@pytest.mark.skipif(not mesh_possible(), reason="the mesh needs Linux")
def test_chats_that_take_over_each_other_s_caches_have_the_tokens_that_they_have_alone(tmp_path: Path) -> None:
    result = run(10_000, tmp_path)
    assert result.good, str(result)
