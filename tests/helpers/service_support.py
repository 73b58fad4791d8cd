"""Pictures to send, and requests answered without devices."""

from __future__ import annotations

import base64
import io
import json

import numpy as np
from PIL import Image

from hepti_mqtt import models
from hepti_mqtt.service.answers import decode_output
from hepti_mqtt.service.requests import read_input


def encoded(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return base64.b64encode(file.getvalue()).decode()


def noise(width, height, mode="RGB"):
    rng = np.random.default_rng(0)
    shape = (height, width) if mode == "L" else (height, width, len(mode))
    return Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8), mode=None)


def run(checkpoint, request):
    """Answer a request with the oracle in the devices' place, through JSON on both sides."""
    prepared = read_input(checkpoint, json.loads(json.dumps(request)))
    _, output = models.reference(checkpoint.spec, checkpoint.tensors(), prepared.inputs, prepared.shape)
    reply = decode_output(checkpoint, prepared, output)
    assert json.loads(json.dumps(reply, allow_nan=False)) == reply
    return reply
