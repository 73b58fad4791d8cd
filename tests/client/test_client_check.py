"""What answers are checked with."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
from PIL import Image

from hepti_mqtt.checkpoint import spec_of_kind
from hepti_mqtt.client.described import random_input


@pytest.mark.parametrize(("photographs", "kind"), [(False, "PNG"), (True, "JPEG")])
def test_random_pictures_are_noise_or_like_a_camera_s_and_seeded(photographs: bool, kind: str) -> None:
    spec = spec_of_kind("vgg16")
    files = [base64.b64decode(random_input(spec, 1, seed, photographs)["image"]) for seed in (0, 0, 1)]
    assert files[0] == files[1] != files[2]
    opened = [Image.open(io.BytesIO(file)) for file in files]
    assert {picture.format for picture in opened} == {kind}
    pixels = np.asarray(opened[0], np.float32)
    assert pixels.shape == (224, 224, 3)
    assert pixels.std() > 30
    between = np.abs(np.diff(pixels, axis=1)).mean()  # of neighbours
    assert bool(between < 20) is photographs
    assert len(random_input(spec, 2, 0, photographs)["images"]) == 2
