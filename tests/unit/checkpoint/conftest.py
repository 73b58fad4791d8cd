from __future__ import annotations

import shutil

import pytest

from hepti_mqtt.checkpoint import make_model


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    root = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(root))
    return root


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("made")
    return {
        kind: make_model(kind, root / kind, seed=2)
        for kind in ("tiny-bert", "tiny-bert-classifier", "tiny-bert-mlm", "tiny-vit", "tiny-minilm")
    }


@pytest.fixture
def bert(made, tmp_path):
    """Return a copy of a model's directory to spoil."""
    return shutil.copytree(made["tiny-bert"], tmp_path / "bert")
