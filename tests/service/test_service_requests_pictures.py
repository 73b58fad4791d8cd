"""Pictures in requests: formats that are read, and what is refused before it costs memory or time."""

from __future__ import annotations

import base64
import io
import json
import struct
import zlib

import numpy as np
import pytest
from PIL import Image
from service_support import encoded, noise, run

from hepti_mqtt.checkpoint import Checkpoint, make_model
from hepti_mqtt.errors import ModelError, RequestError
from hepti_mqtt.service import requests
from hepti_mqtt.service.requests import prepare


@pytest.fixture(scope="module")
def vision(tmp_path_factory):
    with Checkpoint.open(
        make_model("tiny-vit-classifier", tmp_path_factory.mktemp("models") / "vit", seed=1)
    ) as opened:
        yield opened


def test_a_picture_is_scaled_to_the_models_size(vision):
    picture = noise(33, 57)
    prepared = prepare(vision, {"image": encoded(picture)})
    want = np.asarray(picture.resize((20, 20), Image.Resampling.BILINEAR)).transpose(2, 0, 1)
    np.testing.assert_array_equal(prepared.inputs, want[None])
    assert prepared.inputs.dtype == np.uint8
    assert prepared.inputs.flags.c_contiguous
    assert prepared.shape.lengths == (17,)


def test_pictures_get_labels(vision):
    pictures = [noise(20, 20), noise(40, 30)]
    results = run(vision, {"images": [encoded(p) for p in pictures], "top_k": 2})["results"]
    assert [len(result["labels"]) for result in results] == [2, 2]
    assert (
        run(vision, {"image": encoded(pictures[1]), "top_k": 2})["labels"][0]["label"]
        == (results[1]["labels"][0]["label"])
    )


@pytest.mark.parametrize(
    ("mode", "kind"),
    [("RGB", "JPEG"), ("RGB", "WEBP"), ("RGB", "BMP"), ("RGB", "PPM"), ("RGBA", "PNG"), ("L", "PNG"), ("LA", "PNG")],
)
def test_pictures_of_other_formats_and_modes_are_read(vision, mode, kind):
    assert prepare(vision, {"image": encoded(noise(21, 22, mode), kind)}).inputs.shape == (1, 3, 20, 20)


def test_a_palette_with_transparency_and_wrapped_base64_are_read(vision):
    picture = noise(20, 20).quantize(8)
    wrapped = "\n".join(encoded(picture, transparency=bytes(range(8)))[i : i + 76] for i in range(0, 2000, 76))
    prepared = prepare(vision, {"image": wrapped})
    np.testing.assert_array_equal(prepared.inputs[0], np.asarray(picture.convert("RGB")).transpose(2, 0, 1))


def test_a_picture_is_turned_as_its_camera_says(vision):
    picture = noise(20, 20)
    exif = Image.Exif()
    exif[0x0112] = 3
    turned = prepare(vision, {"image": encoded(picture, exif=exif)}).inputs
    np.testing.assert_array_equal(turned[0, :, ::-1, ::-1], np.asarray(picture).transpose(2, 0, 1))


def bomb(width, height):
    """Return a PNG of a few bytes that claims a size."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    return base64.b64encode(png).decode()


def sixteen_bits():
    return encoded(Image.fromarray(np.full((20, 20), 30000, np.uint16)))


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("not base64!", "not valid base64"),
        ("aGVsbG8", "not valid base64"),
        ("b\u00e4", "not valid base64"),
        ("", "not a picture"),
        ("aGVsbG8=", "not a picture"),
        (encoded(noise(64, 64))[:400], "not a picture"),
        (bomb(8000, 7000), "8000 x 7000 pixels, is too large.*send at most"),
        (bomb(10000, 10000), "picture|pixels"),
        (bomb(60000, 60000), "picture|pixels"),
        (bomb(0, 5), "not a picture"),
        (sixteen_bits(), "8 bits per channel"),
        (encoded(noise(8, 8), "TIFF"), "not a picture"),
        (7, "string of base64"),
    ],
)
def test_what_is_no_picture_is_refused(vision, value, says):
    with pytest.raises(RequestError, match=says):
        prepare(vision, {"image": value})


@pytest.mark.parametrize("seed", range(40))
def test_damaged_pictures_are_read_or_refused(vision, seed):
    rng = np.random.default_rng(seed)
    kind = ["PNG", "JPEG", "GIF", "WEBP", "BMP", "PPM"][seed % 6]
    data = bytearray(base64.b64decode(encoded(noise(24, 24), kind)))
    for at in rng.integers(0, len(data), 3):
        data[at] ^= 1 << int(rng.integers(8))
    try:
        prepared = prepare(vision, {"image": base64.b64encode(data).decode()})
    except RequestError:
        return
    assert prepared.inputs.shape == (1, 3, 20, 20)


def test_a_resample_that_pillow_does_not_know_is_a_model_error(tmp_path):
    path = make_model("tiny-vit", tmp_path / "m")
    file = path / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "resample": 9}))
    with Checkpoint.open(path) as checkpoint, pytest.raises(ModelError, match="'resample' must be"):
        prepare(checkpoint, {"image": encoded(noise(9, 9))})


def test_pixels_are_bounded_over_all_pictures_of_a_request(vision, monkeypatch):
    monkeypatch.setattr(requests, "MAX_PIXELS", 100)
    assert prepare(vision, {"images": [encoded(noise(5, 5))] * 4}).several
    with pytest.raises(RequestError, match=r"images\[4\], of 5 x 5 pixels, is too large, or too many"):
        prepare(vision, {"images": [encoded(noise(5, 5))] * 5})
    with pytest.raises(RequestError, match="half of that as WebP"):
        prepare(vision, {"image": encoded(noise(9, 9), "WEBP")})


def test_no_picture_is_decoded_of_a_request_that_has_too_many_pixels(vision, monkeypatch):
    monkeypatch.setattr(requests, "_pixels", lambda *_: pytest.fail("decoded"))
    with pytest.raises(RequestError, match="too large"):
        prepare(vision, {"images": [encoded(Image.new("1", (3000, 3000)))] * 3})


def test_pictures_that_take_long_to_read_are_refused(vision):
    for header, values in ((b"P6", b"\xc8" * 12), (b"P5", b"\xc8" * 4)):
        assert prepare(vision, {"image": base64.b64encode(header + b" 2 2 255\n" + values).decode()})
        with pytest.raises(RequestError, match="PPM of another largest value than 255"):
            prepare(vision, {"image": base64.b64encode(header + b" 2 2 254\n" + values).decode()})
    plain = b"P3\n2 2\n255\n" + b"0 0 0 " * 4
    with pytest.raises(RequestError, match="PPM in plain text"):
        prepare(vision, {"image": base64.b64encode(plain).decode()})
    bitmap = io.BytesIO()
    Image.new("P", (4, 4)).save(bitmap, "BMP")
    run_lengths = bytearray(bitmap.getvalue())
    run_lengths[30] = 1  # the kind of compression
    with pytest.raises(RequestError, match="BMP with run lengths"):
        prepare(vision, {"image": base64.b64encode(run_lengths).decode()})


@pytest.mark.parametrize(("kind", "more"), [("JPEG", {}), ("MPO", {"save_all": True, "append_images": [noise(8, 8)]})])
def test_scans_of_a_picture_are_bounded(kind, more, vision):
    """MPO is what phones write: several JPEG files behind each other, of which the first is read."""
    progressive = io.BytesIO()
    noise(8, 8).save(progressive, kind, progressive=True, **more)
    assert prepare(vision, {"image": base64.b64encode(progressive.getvalue()).decode()})
    before, end, behind = progressive.getvalue().partition(b"\xff\xd9")
    scans = before + b"\xff\xda\x00\x08\x01\x01\x00\x00\x00\x00" * 100 + end + behind
    with pytest.raises(RequestError, match="scans"):
        prepare(vision, {"image": base64.b64encode(scans).decode()})
