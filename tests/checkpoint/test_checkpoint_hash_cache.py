from __future__ import annotations

import hashlib
import os

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from hepti_mqtt.checkpoint import Checkpoint, directory
from hepti_mqtt.protocol.manifest import tile_hash


class Counter:
    def __init__(self, monkeypatch):
        self.calls = 0
        monkeypatch.setattr(directory, "tile_hash", self.hash)

    def hash(self, data):
        self.calls += 1
        return tile_hash(data)


def manifest_of(path, name="a"):
    with Checkpoint.open(path, name) as checkpoint:
        return checkpoint.manifest


def test_a_second_start_hashes_nothing(bert, monkeypatch):
    counter = Counter(monkeypatch)
    first = manifest_of(bert)
    assert counter.calls > 0
    counter.calls = 0
    assert manifest_of(bert) == first
    assert manifest_of(bert, "b").entries == first.entries
    assert manifest_of(bert, "b").model == "b"
    assert counter.calls == 0


def test_changed_weights_are_hashed_again(bert):
    first = manifest_of(bert)
    file = bert / "model.safetensors"
    save_file({name: value + np.float32(1) for name, value in load_file(file).items()}, file)
    os.utime(file, ns=(1, 1))
    second = manifest_of(bert)
    assert all(a.hashes != b.hashes for a, b in zip(first.entries, second.entries, strict=True))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data[:-1],
        lambda data: b"",
        lambda data: data[:50] + b"x" + data[51:],
        lambda data: hashlib.sha256(b"no manifest").digest() + b"no manifest",
    ],
)
def test_a_damaged_cache_is_made_again(bert, cache, monkeypatch, spoil):
    first = manifest_of(bert)
    (kept,) = (cache / "hepti" / "manifests").iterdir()
    good = kept.read_bytes()
    kept.write_bytes(spoil(good))
    counter = Counter(monkeypatch)
    assert manifest_of(bert) == first
    assert counter.calls > 0
    assert kept.read_bytes() == good


def test_a_cache_that_cannot_be_written_is_done_without(bert, cache):
    (cache / "hepti").write_text("a file where the directory should be")
    assert manifest_of(bert).entries
