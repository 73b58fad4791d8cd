"""pytorch_model.bin, read without PyTorch: the tensors of it, and nothing that a pickle could run."""

import collections
import io
import json
import pickle
import sys
import types
import zipfile

import numpy as np
import pytest
from safetensors.numpy import load_file

from hepti_mqtt.checkpoint import Checkpoint
from hepti_mqtt.core.errors import ModelError

STORAGES = {"float32": "FloatStorage", "float16": "HalfStorage", "float64": "DoubleStorage", "int64": "LongStorage"}


class Storage:
    """A storage, which a pickle names by a persistent id."""

    def __init__(self, key, data):
        self.key, self.data = key, data


class Tensor:
    """A part of a storage, pickled as PyTorch does."""

    def __init__(self, storage, offset, shape, strides=None):
        self.parts = storage, offset, shape, strides or np.zeros(shape, np.int8).strides

    def __reduce__(self):
        return sys.modules["torch._utils"]._rebuild_tensor_v2, (*self.parts, False, collections.OrderedDict())


@pytest.fixture
def torch(monkeypatch):
    """Modules with the names that a file of PyTorch has in it."""
    module, utils = types.ModuleType("torch"), types.ModuleType("torch._utils")
    for name in STORAGES.values():
        setattr(module, name, type(name, (), {"__module__": "torch"}))

    def _rebuild_tensor_v2(*_):
        raise AssertionError("nothing of a pickle is called")

    _rebuild_tensor_v2.__module__, _rebuild_tensor_v2.__qualname__ = "torch._utils", "_rebuild_tensor_v2"
    utils._rebuild_tensor_v2 = _rebuild_tensor_v2
    monkeypatch.setitem(sys.modules, "torch", module)
    monkeypatch.setitem(sys.modules, "torch._utils", utils)
    return module


def save(path, state, torch, compression=zipfile.ZIP_STORED):
    """Write a file as `torch.save` does; arrays of `state` get storages of their own."""
    storages = []

    def wrapped(value):
        if not isinstance(value, np.ndarray):
            return value
        storages.append(Storage(str(len(storages)), value))
        return Tensor(storages[-1], 0, value.shape)

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj):
            if not isinstance(obj, Storage):
                return None
            if obj not in storages:
                storages.append(obj)
            kind = getattr(torch, STORAGES[str(obj.data.dtype)])
            return "storage", kind, obj.key, "cpu", obj.data.size

    file = io.BytesIO()
    described = collections.OrderedDict((k, wrapped(v)) for k, v in state.items()) if isinstance(state, dict) else state
    Pickler(file, 2).dump(described)
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", file.getvalue())
        archive.writestr("archive/byteorder", "little")
        for storage in storages:
            archive.writestr(f"archive/data/{storage.key}", storage.data.tobytes())


@pytest.fixture
def stored(bert):
    tensors = load_file(bert / "model.safetensors")
    (bert / "model.safetensors").unlink()
    return tensors


def opened(path):
    with Checkpoint.open(path, "m") as checkpoint:
        return checkpoint.manifest, dict(checkpoint.tensors())


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
def test_it_is_the_same_model_as_in_safetensors(made, bert, stored, torch, dtype):
    (bert / "onnx").mkdir()
    for other in ("onnx/model.onnx", "sparse_linear.pt"):  # of the same repository, for other programs
        (bert / other).write_text("...")
    _, want = opened(made["tiny-bert"])
    position_ids = {"bert.embeddings.position_ids": np.arange(40)}
    save(bert / "pytorch_model.bin", {**{k: v.astype(dtype) for k, v in stored.items()}, **position_ids}, torch)
    manifest, tensors = opened(bert)
    assert tensors.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_array_equal(tensors[name], value.astype(dtype).astype(np.float32))
    assert opened(bert)[0] == manifest


def test_shards_views_and_nested_dictionaries_are_read(made, bert, stored, torch):
    _, want = opened(made["tiny-bert"])
    names = sorted(stored)
    whole = Storage("both", np.concatenate([stored[name].ravel() for name in names[:2]]))
    views = {names[0]: Tensor(whole, 0, stored[names[0]].shape)}
    views[names[1]] = Tensor(whole, stored[names[0]].size, stored[names[1]].shape)
    save(bert / "a.bin", {"state_dict": views}, torch)
    save(bert / "b.bin", {name: stored[name] for name in names[2:]}, torch)
    weight_map = {name: "a.bin" if name in views else "b.bin" for name in names}
    (bert / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    _, tensors = opened(bert)
    for name, value in want.items():
        np.testing.assert_array_equal(tensors[name], value)


def harm(what):
    pytest.fail(f"{what} was called")


class Evil:
    def __reduce__(self):
        return harm, ("it",)


def test_what_is_no_tensor_is_refused_and_never_called(bert, stored, torch):
    for state in ({**stored, "x": Evil()}, Evil(), [1, 2], {"state_dict": 3}):
        save(bert / "pytorch_model.bin", state, torch)
        with pytest.raises(ModelError):
            Checkpoint.open(bert)


@pytest.mark.parametrize(
    ("name", "size", "parts"),
    [("bias", 8, (0, (32,))), ("weight", 2048, (0, (32, 32), (1, 32))), ("bias", 64, (-8, (32,)))],
    ids=["outside", "strided", "negative"],
)
def test_tensors_that_lie_elsewhere_are_refused(bert, stored, torch, name, size, parts):
    tensor = Tensor(Storage("s", np.zeros(size, np.float32)), *parts)
    save(bert / "pytorch_model.bin", {**stored, f"bert.pooler.dense.{name}": tensor}, torch)
    with pytest.raises(ModelError):
        Checkpoint.open(bert)


def test_damaged_compressed_and_old_files_are_refused(bert, stored, torch):
    file = bert / "pytorch_model.bin"
    save(file, stored, torch, zipfile.ZIP_DEFLATED)
    with pytest.raises(ModelError):
        Checkpoint.open(bert)
    save(file, stored, torch)
    whole = file.read_bytes()
    for damaged in (
        whole[:-100],
        whole[:1000],
        b"",
        pickle.dumps({"a": 1}),
        whole.replace(b"PK\x03\x04", b"PK\x03\x05"),
    ):
        file.write_bytes(damaged)
        with pytest.raises(ModelError):
            Checkpoint.open(bert)
