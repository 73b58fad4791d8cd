"""Pictures in requests: what is read of them, what is refused before it costs memory or time, labels and maps."""

import base64
import contextlib
import io
import struct
import sys
import urllib.parse
import zlib
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFile
from question_cases import put
from service_support import encoded, noise, run

from hepti_mqtt.checkpoint import Checkpoint, make_model
from hepti_mqtt.core.errors import ModelError, RequestError
from hepti_mqtt.service import boxed_pictures, pictures
from hepti_mqtt.service.requests import read_input


@pytest.fixture(scope="module")
def vision(tmp_path_factory):
    with Checkpoint.open(
        make_model("tiny-vit-classifier", tmp_path_factory.mktemp("models") / "vit", seed=1)
    ) as opened:
        yield opened


def test_a_picture_is_scaled_to_the_models_size(vision):
    picture = noise(33, 57)
    prepared = read_input(vision, {"image": encoded(picture)})
    want = np.asarray(picture.resize((20, 20), Image.Resampling.BILINEAR)).transpose(2, 0, 1)
    np.testing.assert_array_equal(prepared.inputs, want[None])
    assert prepared.inputs.dtype == np.uint8
    assert prepared.inputs.flags.c_contiguous
    assert prepared.shape.lengths == (17,)


@pytest.mark.parametrize(
    ("mode", "kind"),
    [("RGB", "JPEG"), ("RGB", "WEBP"), ("RGB", "BMP"), ("RGB", "PPM"), ("RGBA", "PNG"), ("L", "PNG"), ("LA", "PNG")],
)
def test_pictures_of_other_formats_and_modes_are_read(vision, mode, kind):
    assert read_input(vision, {"image": encoded(noise(21, 22, mode), kind)}).inputs.shape == (1, 3, 20, 20)


def test_a_palette_with_transparency_wrapped_base64_and_a_turned_camera_are_read(vision):
    picture = noise(20, 20).quantize(8)
    want = np.asarray(picture.convert("RGB")).transpose(2, 0, 1)
    wrapped = "\n".join(encoded(picture, transparency=bytes(range(8)))[i : i + 76] for i in range(0, 2000, 76))
    np.testing.assert_array_equal(read_input(vision, {"image": wrapped}).inputs[0], want)
    turned = read_input(vision, {"image": encoded(picture, exif=turned_exif())}).inputs
    np.testing.assert_array_equal(turned[0, :, ::-1, ::-1], want)


def turned_exif():
    exif = Image.Exif()
    exif[0x0112] = 3
    return exif


@pytest.mark.parametrize("form", ["data:image/png;base64,{}", "DATA:;base64,{}", "{}"])
def test_urls_and_their_alphabet_are_read(vision, form):
    picture = noise(20, 20)
    text = form.format(encoded(picture).replace("+", "-").replace("/", "_").rstrip("="))
    want = np.asarray(picture).transpose(2, 0, 1)
    np.testing.assert_array_equal(read_input(vision, {"image": text}).inputs[0], want)
    quoted = form.format(urllib.parse.quote(encoded(picture), safe=""))
    if form != "{}":
        np.testing.assert_array_equal(read_input(vision, {"image": quoted}).inputs[0], want)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_sixteen_bits_of_grey_are_scaled(vision, kind):
    values = np.linspace(0, 65535, 400).astype(np.uint16).reshape(20, 20)
    got = read_input(vision, {"image": encoded(Image.fromarray(values), kind)}).inputs[0]
    np.testing.assert_array_equal(got, np.broadcast_to(values >> 8, (3, 20, 20)))


# 60 x 40 pixels.
HEIC = (
    "AAAAHGZ0eXBoZWljAAAAAG1pZjFoZWljbWlhZgAAAX1tZXRhAAAAAAAAACFoZGxyAAAAAAAAAABwaWN0AAAAAAAAAAAAAAAAAAAAACJpbG9jAAAA"
    "AERAAAEAAQAAAAABoQABAAAAAAAAAFEAAAAjaWluZgAAAAAAAQAAABVpbmZlAgAAAAABAABodmMxAAAAAA5waXRtAAAAAAABAAAA/WlwcnAAAADd"
    "aXBjbwAAAHZodmNDAQNwAAAAkAAAAAAAHvAA/P34+AAADwNgAAEAGEABDAH//wNwAAADAJAAAAMAAAMAHroCQGEAAQAqQgEBA3AAAAMAkAAAAwAA"
    "AwAeoCCBBZbq5Ka5uAhoMCAAAAMDIAAAAwAhYgABAAZEAcFzwIkAAAATY29scm5jbHgAAQANAAaAAAAAFGlzcGUAAAAAAAAAQAAAAEAAAAAoY2xh"
    "cAAAADwAAAABAAAAKAAAAAH////8AAAAAv///+gAAAACAAAAEHBpeGkAAAAAAwgICAAAABhpcG1hAAAAAAAAAAEAAQWBAgMFhAAAAFltZGF0AAAA"
    "TSgBrxmA70xoIhNb8CbfujqLVrA0ZIxNfJa/E3+zlqHjD61JN/QPTrAzJoHOXxN/fIgVKhoPTfW5J65s4dkRfYnMJ1GswMeNX1dCiJGA"
)


def test_avif_is_read_and_heic_where_its_library_is(vision, monkeypatch):
    picture = Image.linear_gradient("L").resize((60, 40)).convert("RGB")
    want = np.asarray(picture.resize((20, 20), Image.Resampling.BILINEAR)).transpose(2, 0, 1)
    files = [encoded(picture, "AVIF", quality=95, speed=10, **more) for more in ({}, {"exif": turned_exif()})]
    plain, turned = read_input(vision, {"images": files}).inputs.astype(int)
    assert abs(plain - want).max() < 9
    assert abs(turned[:, ::-1, ::-1] - want).max() < 9
    if find_spec("pi_heif") is not None:
        assert read_input(vision, {"image": HEIC}).inputs.shape == (1, 3, 20, 20)
    monkeypatch.setitem(sys.modules, "pi_heif", None)
    with pytest.raises(RequestError):
        read_input(vision, {"image": HEIC})


def test_what_avif_says_of_its_size_bounds_no_memory_so_the_kernel_does(vision, monkeypatch):
    """A frame of 2000 x 2000 pixels under a header of 16 x 16 is read within the limit, and refused without room."""
    file = io.BytesIO()
    Image.new("RGB", (2000, 2000), (9, 90, 9)).save(file, "AVIF", speed=10)
    at = file.getvalue().index(b"ispe") + 8
    small = base64.b64encode(file.getvalue()[:at] + struct.pack(">II", 16, 16) + file.getvalue()[at + 8 :]).decode()
    assert read_input(vision, {"image": small}).inputs.shape == (1, 3, 20, 20)
    program = Path(boxed_pictures.__file__)
    narrow = vision.path / "narrow.py"
    narrow.write_text(program.read_text().replace("384 << 20", "6 << 20"))
    monkeypatch.setattr(boxed_pictures, "__file__", str(narrow))
    with pytest.raises(RequestError):
        read_input(vision, {"image": small})


def bomb(width, height):
    """Return a PNG of a few bytes that claims a size."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    return base64.b64encode(png).decode()


def slow_pictures():
    """Yield pictures that take long to read for their size."""
    yield from (b"P6 2 2 254\n" + b"\xc8" * 12, b"P5 2 2 254\n" + b"\xc8" * 4, b"P3\n2 2\n255\n" + b"0 0 0 " * 4)
    bitmap = io.BytesIO()
    Image.new("P", (4, 4)).save(bitmap, "BMP")
    run_lengths = bytearray(bitmap.getvalue())
    run_lengths[30] = 1  # the kind of compression
    yield bytes(run_lengths)


@pytest.mark.parametrize(
    "value",
    [
        *("not base64!", "aGVsbG8", "b\u00e4", "", "aGVsbG8=", 7),
        encoded(noise(64, 64))[:400],
        *(bomb(*size) for size in ((8000, 7000), (10000, 10000), (60000, 60000), (0, 5))),
        encoded(Image.fromarray(np.zeros((8, 8), np.float32)), "TIFF"),
        *(encoded(noise(20, 20), "TIFF", compression=kind) for kind in ("tiff_lzw", "jpeg")),
        *(base64.b64encode(file).decode() for file in slow_pictures()),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_is_no_picture_or_takes_long_to_read_is_refused(vision, value):
    with pytest.raises(RequestError) as caught:
        read_input(vision, {"image": value})
    assert "image" in str(caught.value)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "PPM", "TIFF", "AVIF"])
def test_damaged_pictures_are_read_or_refused(vision, kind):
    whole = base64.b64decode(encoded(noise(24, 24), kind))
    for seed in range(4):
        rng, data = np.random.default_rng(seed), bytearray(whole)
        for at in rng.integers(0, len(data), 3):
            data[at] ^= 1 << int(rng.integers(8))
        with contextlib.suppress(RequestError):
            assert read_input(vision, {"image": base64.b64encode(data).decode()}).inputs.shape == (1, 3, 20, 20)


def test_a_resample_that_pillow_does_not_know_is_a_model_error(tmp_path):
    path = make_model("tiny-vit", tmp_path / "m")
    put("preprocessor_config.json", resample=9)(path)
    with pytest.raises(ModelError):
        Checkpoint.open(path)


def test_pixels_are_bounded_over_all_pictures_of_a_request(vision, monkeypatch):
    monkeypatch.setattr(pictures, "MAX_PIXELS", 100)
    assert read_input(vision, {"images": [encoded(noise(5, 5))] * 4}).is_list
    with pytest.raises(RequestError):
        read_input(vision, {"images": [encoded(noise(5, 5))] * 5})
    with pytest.raises(RequestError):
        read_input(vision, {"image": encoded(noise(9, 9), "WEBP")})
    assert read_input(vision, {"images": [encoded(noise(5, 5)), encoded(noise(6, 6), "AVIF")]}).is_list
    for images in ([encoded(noise(9, 9), "AVIF")], [encoded(noise(6, 6)), encoded(noise(6, 6), "AVIF")]):
        with pytest.raises(RequestError):
            read_input(vision, {"images": images})


def test_no_picture_is_decoded_of_a_request_that_has_too_many_pixels(vision, monkeypatch):
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda *_: pytest.fail("decoded"))
    with pytest.raises(RequestError):
        read_input(vision, {"images": [encoded(Image.new("1", (3000, 3000)))] * 3})


@pytest.mark.parametrize(("kind", "more"), [("JPEG", {}), ("MPO", {"save_all": True, "append_images": [noise(8, 8)]})])
def test_scans_of_a_picture_are_bounded(kind, more, vision):
    """MPO is what phones write: several JPEG files behind each other, of which the first is read."""
    progressive = io.BytesIO()
    noise(8, 8).save(progressive, kind, progressive=True, **more)
    assert read_input(vision, {"image": base64.b64encode(progressive.getvalue()).decode()})
    before, end, rest = progressive.getvalue().partition(b"\xff\xd9")
    scans = before + b"\xff\xda\x00\x08\x01\x01\x00\x00\x00\x00" * 100 + end + rest
    with pytest.raises(RequestError):
        read_input(vision, {"image": base64.b64encode(scans).decode()})


def picture_of(width, height):
    return Image.fromarray(np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    root = tmp_path_factory.mktemp("pictures")
    opened_models = {kind: Checkpoint.open(make_model(kind, root / kind)) for kind in ("tiny-resnet", "tiny-yolo")}
    yield opened_models
    for checkpoint in opened_models.values():
        checkpoint.close()


@pytest.mark.parametrize(("width", "height"), [(61, 61), (200, 131), (97, 311), (40, 30)])
def test_the_middle_is_that_of_the_whole_picture_scaled(opened, width, height):
    """Resized as a whole and then cut, as preprocessors do."""
    picture = picture_of(width, height)
    got = read_input(opened["tiny-resnet"], {"image": encoded(picture)}).inputs[0].transpose(1, 2, 0)
    sides = [70 * side // min(width, height) for side in (width, height)]
    left, top = ((side - 61) // 2 for side in sides)
    whole = picture.resize(sides, Image.Resampling.BILINEAR)
    want = np.asarray(whole.crop((left, top, left + 61, top + 61)), np.int32)
    assert np.abs(got - want).max() <= 1  # where rounding to whole numbers was near


def test_a_line_of_pixels_costs_no_more_than_any_picture(opened):
    got = read_input(opened["tiny-resnet"], {"image": encoded(picture_of(60000, 1))})
    assert got.inputs.shape == (1, 3, 61, 61)


@pytest.mark.parametrize("kind", ["tiny-resnet", "tiny-yolo"])
def test_each_picture_gets_its_own_labels_or_map(opened, kind):
    checkpoint = opened[kind]
    more = {"top_k": 2} if kind == "tiny-resnet" else {}
    pictures = [encoded(picture_of(90, 80)), encoded(picture_of(61, 300))]
    results = run(checkpoint, {"images": pictures, **more})["results"]
    assert results == [run(checkpoint, {"image": picture, **more}) for picture in pictures]
    if kind == "tiny-resnet":
        first, second = results[0]["labels"]
        assert first["score"] >= second["score"]
    else:
        values = np.frombuffer(base64.b64decode(results[0]["map"]["base64"]), "<f4")
        assert (results[0]["map"]["dtype"], results[0]["map"]["shape"], values.size) == ("f32", [25, 14], 25 * 14)
