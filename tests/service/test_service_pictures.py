"""Pictures of any size for convolutional nets: the middle that the preprocessor says, and labels or a map as answer."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
from PIL import Image

from hepti_mqtt import models
from hepti_mqtt.checkpoint import Checkpoint, make_model
from hepti_mqtt.service.answers import answer
from hepti_mqtt.service.requests import prepare


def encoded(values):
    file = io.BytesIO()
    Image.fromarray(values).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def noise(width, height):
    return np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    root = tmp_path_factory.mktemp("pictures")
    found = {kind: Checkpoint.open(make_model(kind, root / kind)) for kind in ("tiny-resnet", "tiny-yolo")}
    yield found
    for checkpoint in found.values():
        checkpoint.close()


@pytest.mark.parametrize(("width", "height"), [(61, 61), (70, 70), (200, 131), (97, 311), (40, 30)])
def test_the_middle_is_that_of_the_whole_picture_scaled(opened, width, height):
    """Resized as a whole and then cut, as preprocessors do."""
    values = noise(width, height)
    got = prepare(opened["tiny-resnet"], {"image": encoded(values)}).inputs[0].transpose(1, 2, 0)
    sides = [70 * side // min(width, height) for side in (width, height)]
    whole = Image.fromarray(values).resize(sides, Image.Resampling.BILINEAR)
    left, top = ((side - 61) // 2 for side in sides)
    want = np.asarray(whole.crop((left, top, left + 61, top + 61)), np.int32)
    assert np.abs(got - want).max() <= 1  # where rounding to whole numbers was near


def test_a_line_of_pixels_costs_no_more_than_any_picture(opened):
    got = prepare(opened["tiny-resnet"], {"image": encoded(noise(60000, 1))})
    assert got.inputs.shape == (1, 3, 61, 61)


def computed(checkpoint, prepared):
    return models.reference(checkpoint.spec, checkpoint.tensors(), prepared.inputs, prepared.shape)[1]


def test_each_picture_gets_its_labels(opened):
    checkpoint = opened["tiny-resnet"]
    pictures = [encoded(noise(90, 80)), encoded(noise(61, 300))]
    prepared = prepare(checkpoint, {"images": pictures, "top_k": 2})
    results = answer(checkpoint, prepared, computed(checkpoint, prepared))["results"]
    for picture, result in zip(pictures, results, strict=True):
        alone = prepare(checkpoint, {"image": picture, "top_k": 2})
        assert answer(checkpoint, alone, computed(checkpoint, alone)) == result
        assert len(result["labels"]) == 2
        assert result["labels"][0]["score"] >= result["labels"][1]["score"]


def test_each_picture_gets_its_map(opened):
    checkpoint = opened["tiny-yolo"]
    prepared = prepare(checkpoint, {"images": [encoded(noise(90, 80)), encoded(noise(50, 300))]})
    output = computed(checkpoint, prepared)
    results = answer(checkpoint, prepared, output)["results"]
    for place, result in enumerate(results):
        assert (result["map"]["dtype"], result["map"]["shape"]) == ("f32", [25, 14])
        values = np.frombuffer(base64.b64decode(result["map"]["base64"]), "<f4").reshape(25, 14)
        np.testing.assert_array_equal(values, output[25 * place : 25 * (place + 1)])
