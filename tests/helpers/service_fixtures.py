"""A tiny model."""

from __future__ import annotations

import pytest

from hepti_mqtt.checkpoint import Checkpoint, make_model


@pytest.fixture(scope="session")
def kept_hashes(tmp_path_factory):
    """Hashes of weights are kept in a directory of the test run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def bert(tmp_path_factory, kept_hashes):
    with Checkpoint.open(make_model("tiny-bert", tmp_path_factory.mktemp("models") / "bert", seed=1), "bert") as opened:
        yield opened
