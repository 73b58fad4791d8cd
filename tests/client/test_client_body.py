"""Requests from what Python users have at hand."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
from PIL import Image

from hepti_mqtt.client.client import encode_picture, request_body
from hepti_mqtt.errors import RequestError


@pytest.fixture
def picture():
    return Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3))


def pixels(encoded):
    with Image.open(io.BytesIO(base64.b64decode(encoded))) as opened:
        return np.asarray(opened.convert("RGB"))


def test_a_picture_in_any_form_is_the_same_picture(picture, tmp_path):
    file = tmp_path / "p.png"
    picture.save(file)
    data = file.read_bytes()
    forms = [picture, file, str(file), data, base64.b64encode(data).decode()]
    for form in forms:
        np.testing.assert_array_equal(pixels(encode_picture(form)), np.asarray(picture))


def test_base64_that_would_be_too_long_a_name_is_no_file():
    encoded = base64.b64encode(bytes(300)).decode()
    assert "/" not in encoded
    assert encode_picture(encoded) == encoded


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(RequestError, match=r"nothing\.png"):
        encode_picture(tmp_path / "nothing.png")
    with pytest.raises(RequestError, match=r"nothing\.png"):
        encode_picture(str(tmp_path / "nothing.png"))


def test_a_body_has_only_what_was_given(picture):
    assert request_body(text="hello", want=None, devices=("a", "b"), options={"variant": "kv"}) == {
        "text": "hello",
        "devices": ["a", "b"],
        "options": {"variant": "kv"},
    }
    assert set(request_body(images=[picture, picture])) == {"images"}
    assert request_body(truncate=False) == {"truncate": False}
