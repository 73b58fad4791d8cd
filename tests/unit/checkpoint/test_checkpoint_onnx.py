"""ONNX files: what is computed is what ONNX's own evaluator computes; what is not supported is refused."""

import json
import os
import sys
from dataclasses import replace

import numpy as np
import pytest

from hepti_mqtt import models
from hepti_mqtt.checkpoint import Checkpoint
from hepti_mqtt.core.errors import ModelError, UnsupportedModelError
from hepti_mqtt.models.shapes import ImageBatch

onnx = pytest.importorskip("onnx", reason="the extra `onnx` is not installed")
evaluator = pytest.importorskip("onnx.reference")
helper, FLOAT = onnx.helper, onnx.TensorProto.FLOAT
SIDE = 13


class Made:
    """A model in the making: every weight is random."""

    def __init__(self):
        self.nodes, self.weights, self.rng = [], [], np.random.default_rng(0)

    def weight(self, *shape, at=0.0, spread=0.4):
        array = (at + spread * self.rng.standard_normal(shape)).astype(np.float32)
        return self.constant(array)

    def constant(self, value, dtype=np.float32):
        name = f"w{len(self.weights)}"
        self.weights.append(onnx.numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def put(self, op, *inputs, **attributes):
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [name], name=f"the {op}", **attributes))
        return name

    def norm(self, x, n):
        positive = self.constant(1 + np.abs(self.rng.standard_normal(n)))
        parts = (self.weight(n, at=1.0), self.weight(n), self.weight(n), positive)
        return self.put("BatchNormalization", x, *parts, epsilon=1e-3)

    def save(self, path, last, dims=(1, 3, SIDE, SIDE), more=()):
        given = helper.make_tensor_value_info("x", FLOAT, dims)
        ends = [helper.make_tensor_value_info(name, FLOAT, None) for name in (last, *more)]
        graph = helper.make_graph(self.nodes, "net", [given], ends, self.weights)
        pictures = {"size": SIDE, "resample": 2, "image_mean": 0.4, "image_std": 0.3}
        (path.parent / "preprocessor_config.json").write_text(json.dumps(pictures))
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
        return path


def every_operator(path):
    m = Made()
    x = m.put("Conv", "x", m.weight(6, 3, 3, 3), pads=[1, 1, 1, 1], kernel_shape=[3, 3])
    x = m.put("Relu", m.norm(x, 6))
    side = m.put("Conv", x, m.weight(6, 1, 3, 3), m.weight(6), group=6, dilations=[2, 2], pads=[2, 2, 2, 2])
    side = m.put("Clip", m.norm(side, 6), m.constant(0.0), m.constant(6.0))
    x = m.put("Add", m.put("Identity", side), x)
    x = m.put("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1)
    some = m.put("AveragePool", x, kernel_shape=[3, 3], pads=[1, 1, 1, 1], count_include_pad=1)
    other = m.put("AveragePool", x, kernel_shape=[3, 2], auto_pad="SAME_UPPER")
    x = m.put("Concat", some, other, x, axis=1)
    x = m.put("Conv", x, m.weight(6, 6, 3, 3), group=3, strides=[2, 1], pads=[1, 0, 1, 2], kernel_shape=[3, 3])
    x = m.put("LeakyRelu", x, alpha=0.1)
    flat = m.put("Flatten", m.put("Dropout", x))
    x = m.put("Add", m.put("MatMul", flat, m.weight(6 * 3 * 6, 9)), m.weight(9))
    x = m.put("Gemm", m.put("Relu", x), m.weight(5, 9), m.weight(5), transB=1)
    return m.save(path, m.put("Softmax", m.put("Gemm", x, m.weight(5, 5))))


def a_map(path):
    m = Made()
    x = m.put("Conv", "x", m.weight(4, 3, 1, 1), m.weight(4))
    return m.save(path, x, ("batch", 3, SIDE, SIDE))


def a_mean(path):
    m = Made()
    x = m.put("GlobalAveragePool", m.put("Conv", "x", m.weight(4, 3, 5, 5), strides=[3, 3]))
    return m.save(path, m.put("Reshape", x, m.constant([1, -1], np.int64)))


def two_flattenings(path):
    m = Made()
    x = m.put("Flatten", m.put("Flatten", m.put("Conv", "x", m.weight(4, 3, 5, 5), strides=[2, 2])))
    x = m.put("Reshape", m.put("Relu", x), m.constant([1, -1], np.int64))
    return m.save(path, m.put("Gemm", x, m.weight(5, 100), transB=1))


def a_sum_of_flattened_rows(path):
    m = Made()
    maps = [m.put("Conv", "x", m.weight(4, 3, 5, 5), strides=[2, 2]) for _ in range(2)]
    x = m.put("Relu", m.put("Add", *(m.put("Flatten", x) for x in maps)))
    return m.save(path, m.put("Gemm", x, m.weight(5, 100), transB=1))


def evaluated(path, pixels):
    """Return what ONNX's evaluator computes of pixels as they are, [rows, columns]."""
    found = evaluator.ReferenceEvaluator(str(path)).run(None, {"x": pixels})[0]
    return found[0].transpose(1, 2, 0).reshape(-1, found.shape[1]) if found.ndim == 4 else found


@pytest.mark.parametrize("make", [every_operator, a_map, a_mean, two_flattenings, a_sum_of_flattened_rows])
def test_the_reference_computes_what_onnx_computes(make, tmp_path):
    path = make(tmp_path / "Some Net.onnx")
    with Checkpoint.open(path) as checkpoint:
        assert checkpoint.model == "some-net"
        spec, shape = checkpoint.spec, ImageBatch(1)
        inputs = models.random_inputs(spec, shape, np.random.default_rng(1))
        _, output = models.reference(spec, checkpoint.tensors(), inputs, shape)
    assert models.spec_from_dict(spec.to_dict()) == replace(spec, head=replace(spec.head, labels=()))
    mean, std = (np.array(v)[:, None, None] for v in (spec.mean, spec.std))
    want = evaluated(path, ((inputs / 255 - mean) / std).astype(np.float32))
    if make is every_operator:  # whose softmax at the end is left out, since labels get their scores elsewhere
        output = np.exp(output - output.max()) / np.exp(output - output.max()).sum()
    assert output.shape == want.shape
    np.testing.assert_allclose(output, want, atol=2e-5 * max(1, np.abs(want).max()))


def test_the_hidden_state_before_a_flattening_has_the_channels_of_onnx(tmp_path):
    m = Made()
    flat = m.put("Flatten", m.put("Relu", m.put("Conv", "x", m.weight(4, 3, 5, 5), strides=[2, 2])))
    before = m.save(tmp_path / "flat.onnx", flat)
    path = m.save(tmp_path / "m.onnx", m.put("Gemm", flat, m.weight(5, 100), transB=1))
    with Checkpoint.open(path) as checkpoint:
        spec, shape = checkpoint.spec, ImageBatch(1).with_want("hidden")
        inputs = models.random_inputs(spec, shape, np.random.default_rng(1))
        hidden, _ = models.reference(spec, checkpoint.tensors(), inputs, shape)
    mean, std = (np.array(v)[:, None, None] for v in (spec.mean, spec.std))
    want = evaluated(before, ((inputs / 255 - mean) / std).astype(np.float32))
    assert hidden.shape == (25, 4)
    np.testing.assert_allclose(hidden.T.reshape(1, -1), want, atol=2e-5 * np.abs(want).max())


def test_a_directory_names_labels_and_pictures(tmp_path):
    every_operator(tmp_path / "model.onnx")
    (tmp_path / "config.json").write_text('{"id2label": {"0": "a", "1": "b", "2": "c", "3": "d", "4": "e"}}')
    with Checkpoint.open(tmp_path) as checkpoint:
        assert checkpoint.spec.head.labels == ("a", "b", "c", "d", "e")
        assert checkpoint.spec.shortest == 0


def test_weights_in_files_beside_are_hashed_again_when_they_change(tmp_path):
    m = Made()
    path = m.save(tmp_path / "model.onnx", m.put("Conv", "x", m.weight(4, 3, 1, 1), m.weight(4)))
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="weights", size_threshold=0)
    with Checkpoint.open(path) as checkpoint:
        first = checkpoint.manifest
    data = np.fromfile(tmp_path / "weights", np.float32)
    (data + 1).tofile(tmp_path / "weights")
    os.utime(tmp_path / "weights", ns=(1, 1))
    with Checkpoint.open(path) as checkpoint:
        second = checkpoint.manifest
        assert all(a.hashes != b.hashes for a, b in zip(first.entries, second.entries, strict=True))
        assert checkpoint.tile(second.entries[0].hashes[0])


def conv(m, size=1, **attributes):
    return m.put("Conv", "x", m.weight(4, 3, size, size), **attributes)


def two_orders(m):
    flat = m.put("Flatten", conv(m, 12))
    return m.put("Gemm", m.put("Add", flat, m.put("Gemm", flat, m.weight(16, 16))), m.weight(16, 5))


NETS = {
    "an operator": lambda m: m.put("Tanh", m.put("Sigmoid", conv(m))),
    "a slope": lambda m: m.put("LeakyRelu", conv(m), alpha=0.2),
    "a cut": lambda m: m.put("Clip", conv(m), m.constant(-1.0), m.constant(1.0)),
    "a sum with weights": lambda m: m.put("Add", conv(m), m.weight(4)),
    "a norm alone": lambda m: m.norm("x", 3),
    "a window larger than its map": lambda m: conv(m, 15),
    "a flat answer": lambda m: m.put("Relu", m.put("Flatten", conv(m))),
    "two orders of channels": two_orders,
    "no groups": lambda m: conv(m, group=0),
    "shares of pixels": lambda m: m.put("Softmax", conv(m), axis=1),
    "no matrix": lambda m: m.put("Gemm", m.put("Flatten", conv(m, 13))),
    "half a norm": lambda m: m.put("BatchNormalization", conv(m), m.weight(4), "", m.weight(4)),
    "one summand": lambda m: m.put("Add", conv(m)),
    "no number": lambda m: m.put("Clip", conv(m), m.constant([])),
    "no weights": lambda m: m.put("MaxPool", "x", kernel_shape=[2, 2]),
    "a constant answer": lambda m: (conv(m), m.weight(4))[1],
}
SIDES = [(1, 3, "h", "w"), (1, 3, 8, 9), (4, 3, 9, 9), (1, 1, 9, 9)]


@pytest.mark.parametrize(
    ("net", "dims"),
    [pytest.param(net, (1, 3, SIDE, SIDE), id=name) for name, net in NETS.items()] + [(conv, dims) for dims in SIDES],
)
def test_what_is_not_supported_is_refused(net, dims, tmp_path):
    m = Made()
    last = net(m)
    path = m.save(tmp_path / "m.onnx", last, dims)
    with pytest.raises(ModelError):
        Checkpoint.open(path)


def test_without_the_package_it_says_what_to_install(tmp_path, monkeypatch):
    path = a_map(tmp_path / "m.onnx")
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ModelError):
        Checkpoint.open(path)


def test_old_opsets_several_outputs_and_damaged_files_are_refused(tmp_path):
    m = Made()
    path = m.save(tmp_path / "m.onnx", m.put("Reshape", m.put("Conv", "x", m.weight(4, 3, 1, 1)), shape=[1, -1]))
    model = onnx.load(path)
    model.opset_import[0].version = 4  # its Reshape has the shape as an attribute, and its Add says how it broadcasts
    onnx.save(model, path)
    with pytest.raises(UnsupportedModelError):
        Checkpoint.open(path)
    m = Made()
    first = m.put("Conv", "x", m.weight(4, 3, 1, 1))
    with pytest.raises(UnsupportedModelError):
        Checkpoint.open(m.save(tmp_path / "m.onnx", m.put("Relu", first), more=(first,)))
    path = a_map(tmp_path / "m.onnx")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ModelError):
        Checkpoint.open(path)
