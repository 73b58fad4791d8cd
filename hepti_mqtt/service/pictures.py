"""Decode pictures to pixels: read all headers first, to refuse a too large request before decoding."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from hepti_mqtt.core.errors import RequestError
from hepti_mqtt.models.shapes import ImageInput
from hepti_mqtt.models.views import Box, Cut, Views
from hepti_mqtt.service.boxed_pictures import UnreadablePicture, is_boxed, unboxed
from hepti_mqtt.service.encoded import read_base64
from hepti_mqtt.service.requests import MAX_PIXELS, MAX_SCANS, MAX_SEQUENCES

_FORMATS: Final = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
_GREY: Final = frozenset({"I;16", "I;16B", "I;16L"})  # 16 bits per pixel
_MODES: Final = frozenset({"1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", *_GREY})
# Pillow decodes these in Python: seconds per megabyte, holding the interpreter lock.
_SLOW: Final = {
    "ppm": "PPM with a maximum value other than 255",
    "ppm_plain": "PPM in plain text",
    "bmp_rle": "BMP with run lengths",
}
_WEIGHT: Final[Mapping[str | None, int]] = {"WEBP": 2}  # memory for decoding a pixel
_BOXED_WEIGHT: Final = 2  # of AVIF and HEIC
_LISTED: Final = f"{', '.join(_FORMATS)}, AVIF"
_LONG: Final = 4  # times the shorter side
_SCAN: Final = b"\xff\xda"  # marker in a JPEG file

Image.MAX_IMAGE_PIXELS = None  # MAX_PIXELS is stricter, with a better message


def decode(items: Sequence[tuple[str, Any]], reads: ImageInput, resample: int) -> npt.NDArray[np.uint8]:
    """Return base64 pictures as uint8 [B, C, S, S]; mean and std are applied on the device.

    items: with the names for errors. resample: the number of Pillow's filter. Raises RequestError for an invalid
    picture, or too many pixels in total.
    """
    files = _files(items, reads)
    return np.stack([_pixels(name, file, reads, resample) for name, file in files.items()])


def decode_views(
    items: Sequence[tuple[str, Any]], reads: ImageInput, views: Views, whole: Collection[int] = ()
) -> tuple[npt.NDArray[np.uint8], list[Cut]]:
    """Return all views of base64 pictures as uint8 [V, C, S, S], and the cut of each picture.

    items: with the names for errors. whole: indices of pictures with a single view. Raises RequestError as `decode`
    does, and for too many views.
    """
    cuts, pixels = list[Cut](), list[npt.NDArray[np.uint8]]()
    for i, (name, file) in enumerate(_files(items, reads).items()):
        with _opened(name, file) as picture:
            colours = _colours(picture)
            cut = views.cut(*colours.size, whole=i in whole)
            if len(pixels) + len(cut.boxes) > MAX_SEQUENCES:
                raise RequestError(f"{name}: the pictures have more than {MAX_SEQUENCES} views; send fewer or smaller")
            for size in cut.sizes:
                colours = colours.resize(size, views.resample)
            pixels += [_view(colours, box, reads, views) for box in cut.boxes]
        cuts.append(cut)
    return np.stack(pixels), cuts


def _view(picture: Image.Image, box: Box, reads: ImageInput, views: Views) -> npt.NDArray[np.uint8]:
    """Return a part of a picture as uint8 [C, S, S], without the pixels of incomplete patches."""
    part = picture.crop(box)
    part = part if part.size == (views.side,) * 2 else part.resize((views.side,) * 2, views.resample)
    pixels = np.asarray(part, np.uint8)[: reads.size, : reads.size]
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


def _files(items: Sequence[tuple[str, Any]], reads: ImageInput) -> dict[str, bytes]:
    """Return the pictures' files by name; raises RequestError for too many pixels in total."""
    files = {name: read_base64(name, value, "picture") for name, value in items}
    boxed = [name for name, file in files.items() if is_boxed(file)]
    total = 0
    for name, file in files.items():
        if name not in boxed:
            with _opened(name, file) as picture:
                total += picture.width * picture.height * _WEIGHT.get(picture.format, 1)
            if total > MAX_PIXELS:
                raise _too_large(name, f"of {picture.width} x {picture.height} pixels", reads)
    if boxed:
        try:
            plain = unboxed([files[name] for name in boxed], (MAX_PIXELS - total) // _BOXED_WEIGHT)
        except UnreadablePicture as error:
            if error.too_large:
                raise _too_large(boxed[error.index], str(error), reads) from error
            raise RequestError(
                f"{boxed[error.index]} is not a picture that can be read ({error}); send {_LISTED}"
            ) from error
        files.update(zip(boxed, plain, strict=True))
    return files


def _too_large(name: str, size: str, reads: ImageInput) -> RequestError:
    return RequestError(
        f"{name}, {size}, is too large, or too many pictures precede it: send at most {MAX_PIXELS} pixels in one "
        f"request, half of that as WebP, AVIF or HEIC (the model reads {reads.size} x {reads.size} of each)"
    )


@contextlib.contextmanager
def _opened(name: str, file: bytes) -> Iterator[Image.Image]:
    """Open a picture and read only its header; raises RequestError for each error until it is closed."""
    try:
        with Image.open(io.BytesIO(file), formats=_FORMATS) as opened:
            if opened.mode not in _MODES:
                raise RequestError(f"{name} has the pixel format {opened.mode}; send 8 bits per channel")
            if opened.format == "TIFF" and {tile.codec_name for tile in opened.tile} != {"raw"}:
                raise RequestError(f"{name} is a compressed TIFF, which is not supported; send PNG or JPEG")
            slow = next((_SLOW[tile.codec_name] for tile in opened.tile if tile.codec_name in _SLOW), None)
            if slow is not None:
                raise RequestError(f"{name} is {slow}, which takes too long to read; send PNG or JPEG")
            if opened.format in ("JPEG", "MPO") and (scans := file.count(_SCAN)) > MAX_SCANS:
                raise RequestError(f"{name} has {scans} scans, the maximum is {MAX_SCANS}; save it again")
            yield opened
    except RequestError:
        raise
    except Exception as error:  # Pillow's decoders raise anything on hostile bytes
        raise RequestError(
            f"{name} is not a picture that can be read ({type(error).__name__}); send {_LISTED}"
        ) from error


def _pixels(name: str, file: bytes, reads: ImageInput, resample: int) -> npt.NDArray[np.uint8]:
    """Return a picture as uint8 [C, S, S]."""
    with _opened(name, file) as picture:
        colours = _colours(picture)
        resized = _middle(colours, reads, resample) if reads.shortest else colours.resize((reads.size,) * 2, resample)
        return np.ascontiguousarray(np.asarray(resized, np.uint8).transpose(2, 0, 1))


def _colours(picture: Image.Image) -> Image.Image:
    """Return an open picture in RGB, rotated by its EXIF orientation."""
    ImageOps.exif_transpose(picture, in_place=True)
    # Without this step Pillow drops a palette's transparency with a warning.
    colours = picture.convert("RGBA") if "transparency" in picture.info else picture
    if colours.mode in _GREY:
        colours = Image.fromarray((np.asarray(colours) >> 8).astype(np.uint8))
    return colours if colours.mode == "RGB" else colours.convert("RGB")


def _middle(picture: Image.Image, reads: ImageInput, resample: int) -> Image.Image:
    """Return the middle S x S of a picture scaled to a shorter side `shortest`; an odd remainder is cut at the end.

    Of a long picture only the crop is resized, which may change a few pixels by one, so that a line of a million
    pixels stays cheap.
    """
    width, height = picture.size
    short = min(width, height)
    sides = (reads.shortest * width // short, reads.shortest * height // short)
    sides = (reads.shortest,) * 2 if reads.square else sides
    left, top = ((side - reads.size) // 2 for side in sides)
    if max(sides) <= _LONG * reads.shortest:
        return picture.resize(sides, resample).crop((left, top, left + reads.size, top + reads.size))
    x, y = (side / scaled for side, scaled in zip((width, height), sides, strict=True))
    box = (left * x, top * y, (left + reads.size) * x, (top + reads.size) * y)
    return picture.resize((reads.size,) * 2, resample, box)
