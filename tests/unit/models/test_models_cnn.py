"""Convolutional nets: architectures by their published sizes, pictures by their preprocessor, and bad input."""

import numpy as np
import pytest
from sites import TOLERANCE, plan, request, tensors
from small_cnns import cnn, conv, dense
from together import run_programs

from hepti_mqtt import models
from hepti_mqtt.checkpoint import KINDS, Checkpoint, make_model, spec_of_kind
from hepti_mqtt.checkpoint.safetensors_file import WeightsFile
from hepti_mqtt.core.errors import ModelError
from hepti_mqtt.models.cnn import nodes
from hepti_mqtt.models.cnn.nodes import node_from_dict
from hepti_mqtt.models.shapes import ImageBatch
from hepti_mqtt.strategies.plan_programs import device_programs

NORM = dict.fromkeys(("weight", "bias", "mean", "variance"), "n")
WRONG_FIELDS = {
    "kernel": (3, [3, 3, 3]),
    "stride": ([0, 0],),
    "dilation": ([1, True],),
    "pad": (1, [1, 1, 1, -1]),
    "groups": (0,),
    "channels": ("4",),
    "inputs": ("image", [["image"]]),
    "name": ({},),
    "weight": (1,),
    "norm": ("bn1", {**NORM, "eps": "small"}),
}
PRE = "preprocessor_config.json"


def spec_of(kind, pre=None, **changes):
    known = {"image_mean": 0.5, "image_std": 0.5, "resample": 2}
    extras = KINDS[kind].extras if pre is None else {PRE: known | pre}
    return models.spec_from_config({**KINDS[kind].config, **changes}, extras)


def test_a_norm_is_folded_and_channels_come_last(tmp_path):
    path = make_model("tiny-resnet", tmp_path / "m", seed=2)
    with Checkpoint.open(path) as checkpoint:
        tensors = dict(checkpoint.tensors())
    file = WeightsFile(path / "model.safetensors")

    def stored(name):
        tensor = file.tensors[name]
        return tensor.read(0, 1, int(np.prod(tensor.shape)))[0].reshape(tensor.shape).astype(np.float64)

    factor = stored("bn1.weight") / np.sqrt(stored("bn1.running_var") + 1e-5)
    weight = stored("conv1.weight") * factor[:, None, None, None]  # [n, C, ky, kx]
    np.testing.assert_allclose(tensors["conv1.weight"], weight.transpose(2, 3, 1, 0).reshape(147, 4), rtol=1e-6)
    np.testing.assert_allclose(
        tensors["conv1.bias"], stored("bn1.bias") - stored("bn1.running_mean") * factor, rtol=1e-6, atol=1e-7
    )
    file.close()


def test_every_node_travels_as_plain_data():
    listed = {node.to_dict()["op"]: node for kind in KINDS for node in getattr(spec_of_kind(kind), "nodes", ())}
    listed["average_pool"] = nodes.AveragePool(name="a", inputs=("image",), kernel=(3, 2), pad=(1, 0, 1, 1))
    assert set(listed) == set(nodes.NODE_TYPES)
    for node in listed.values():
        assert node_from_dict(node.to_dict()) == node


@pytest.mark.parametrize(
    ("pre", "size", "shortest"),
    [
        ({"size": {"shortest_edge": 70}, "image_processor_type": "CLIPImageProcessor", "crop_size": 61}, 61, 70),
        ({"size": {"shortest_edge": 70}, "do_center_crop": True, "crop_size": {"height": 61, "width": 61}}, 61, 70),
        ({"size": {"shortest_edge": 61}, "feature_extractor_type": "ConvNextFeatureExtractor"}, 61, 69),
        ({"size": 61, "image_processor_type": "ConvNextImageProcessorFast", "crop_pct": 0.8}, 61, 76),
        ({"size": {"height": 61, "width": 61}}, 61, 0),
        ({"size": {"height": 70, "width": 70}, "do_center_crop": True, "crop_size": 61}, 61, 70),
    ],
)
def test_what_of_a_picture_is_seen_is_what_the_preprocessor_says(pre, size, shortest):
    spec = spec_of("tiny-resnet", pre)
    assert (spec.input_spec.size, spec.input_spec.shortest) == (size, shortest)


def test_without_a_size_of_its_own_the_preprocessor_says_how_large_pictures_are():
    spec = spec_of("tiny-hf-resnet", {"size": {"shortest_edge": 96}, "crop_pct": 0.75})
    assert (spec.size, spec.shortest) == (96, 128)
    assert spec_of("tiny-hf-resnet", {"size": {"shortest_edge": 384}, "crop_pct": 1.0}).shortest == 0


@pytest.mark.parametrize(
    ("keys", "mean", "std"),
    [
        ({}, 0.5, 0.25),  # divided by the deviation twice
        ({"include_top": False}, 0.5, 0.5),
        ({"include_top": False, "rescale_offset": True}, 1.5, 0.5),
        ({"do_normalize": False}, 0.0, 0.5),
    ],
)
def test_pixels_of_an_efficientnet_are_scaled_as_its_class_does(keys, mean, std):
    pre = {"image_processor_type": "EfficientNetImageProcessor", "size": {"height": 61, "width": 61}, **keys}
    spec = spec_of("tiny-efficientnet", pre)
    np.testing.assert_allclose([spec.mean, spec.std], [[mean] * 3, [std] * 3])


TIMM = {
    "architecture": "mobilenetv3_small_100",
    "num_classes": 7,
    "pretrained_cfg": {
        **{"input_size": [3, 96, 96], "crop_pct": 0.875, "interpolation": "bicubic", "crop_mode": "center"},
        **{"mean": [0.5, 0.5, 0.5], "std": [0.25, 0.25, 0.25]},
    },
}


def test_a_directory_of_timm_says_in_its_config_how_pictures_are_read():
    spec = models.spec_from_config(*models.with_hugging_face_keys(TIMM, {}))
    assert (spec.input_spec.size, spec.input_spec.shortest, len(spec.head.labels)) == (96, 109, 7)
    assert "blocks.1.0.conv_pwl.weight" in {source.name for source in models.tensor_sources(spec)}


@pytest.mark.parametrize(
    "change",
    [
        {"global_pool": "max"},
        {"model_args": {"drop_rate": 0.1}},
        {"label_names": ["one"]},
        *({"pretrained_cfg": {**TIMM["pretrained_cfg"], **more}} for more in (
            {"crop_mode": "border"}, {"interpolation": "random"}, {"input_size": [3, 96, 90]}, {"mean": None},
        )),
    ],
)  # fmt: skip
def test_what_timm_says_and_is_not_computed_is_refused(change):
    with pytest.raises(ModelError):
        models.spec_from_config(*models.with_hugging_face_keys({**TIMM, **change}, {}))


@pytest.mark.parametrize("key", WRONG_FIELDS)
def test_a_wrong_field_of_a_listed_node_is_named(key):
    first, *others = KINDS["tiny-convnet"].config["nodes"]
    for value in WRONG_FIELDS[key]:
        with pytest.raises(ModelError) as caught:
            spec_of("tiny-convnet", nodes=[{**first, key: value}, *others])
        assert f"'{key}'" in str(caught.value)


@pytest.mark.parametrize("name", ["n0", "image", "pixels", "rows", "answer"])
def test_a_name_that_is_taken_is_told(name):
    with pytest.raises(ModelError):
        cnn(6, conv(), conv(name=name), conv(inputs=[name]))


def test_several_pictures_are_rows_of_the_answer():
    spec = spec_of_kind("tiny-yolo")
    assert spec.output_shape(ImageBatch(2)) == (2 * 25, 14)
    assert spec_of_kind("tiny-vgg").output_shape(ImageBatch(3)) == (3, 7)


@pytest.mark.parametrize(
    ("product", "before"), [("n0", [conv()]), ("n2", [conv(), {"op": "flatten"}, dense(8)])], ids=["conv", "dense"]
)
def test_what_is_added_to_itself_is_there_twice(product, before):
    spec = cnn(6, *before, {"op": "add", "inputs": [product, product]})
    held, (shape, inputs) = tensors(spec), request(spec, (1,))
    got = run_programs(device_programs(spec, plan(spec, ("single", {}), (1.0,)), shape), held, inputs)
    np.testing.assert_allclose(got, models.reference(spec, held, inputs, shape)[1], rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("kind", "pre", "changes"),
    [
        *(
            ("tiny-resnet", pre, {})
            for pre in ({"size": 70}, {"do_resize": False}, {"size": {"height": 61, "width": 50}})
        ),
        ("tiny-resnet", {"size": {"shortest_edge": 50}, "do_center_crop": True, "crop_size": 61}, {}),
        ("tiny-resnet", None, {"depths": [1, 2]}),
        ("tiny-resnet", None, {"architectures": ["densenet121"]}),
        *(("tiny-vgg", {}, {"image_size": size}) for size in (96, 16)),
        ("tiny-convnet", None, {"nodes": [{"op": "erf"}]}),
        ("tiny-convnet", None, {"num_labels": 3, "id2label": None}),
        *(("tiny-hf-resnet", None, changes) for changes in ({"layer_type": "dense"}, {"depths": [1]})),
        ("tiny-hf-mobilenet", None, {"hidden_act": "swish"}),
        *(("tiny-convnext", None, changes) for changes in ({"num_stages": 4}, {"depths": [1]}, {"hidden_act": "mish"})),
        *(
            ("tiny-efficientnet", None, changes)
            for changes in ({"pooling_type": "max"}, {"strides": [1, 2, 3]}, {"hidden_dim": 99}, {"in_channels": [16]})
        ),
        ("tiny-resnet", {"size": 61, "include_top": True}, {}),
    ],
)
def test_wrong_configs_are_refused(kind, pre, changes):
    with pytest.raises(ModelError):
        spec_of(kind, pre, **changes)
