"""A request's JSON from what Python users have at hand."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Final, Union

from PIL import Image

from hepti_mqtt.errors import RequestError

Picture = Union[str, bytes, "PathLike[str]", Image.Image]
_LONGEST_PATH: Final = 1024


def encode_picture(picture: Picture) -> str:
    """Return a picture as base64, from a file's path, a file's bytes, a Pillow image, or base64 as it is.

    Raises RequestError if the file cannot be read.
    """
    if isinstance(picture, Image.Image):
        buffer = io.BytesIO()
        picture.save(buffer, "PNG")
        return base64.b64encode(buffer.getvalue()).decode()
    if isinstance(picture, bytes | bytearray):
        return base64.b64encode(picture).decode()
    if isinstance(picture, str) and (len(picture) > _LONGEST_PATH or not os.path.isfile(picture)):
        if Path(picture[-_LONGEST_PATH:]).suffix:  # base64 has no dot
            raise RequestError(f"there is no picture {picture[-80:]!r}")
        return picture
    try:
        return base64.b64encode(Path(picture).read_bytes()).decode()
    except OSError as error:
        raise RequestError(f"cannot read the picture {picture}: {error.strerror or error}") from error


def request_body(
    *,
    image: Picture | None = None,
    images: Sequence[Picture] | None = None,
    devices: Sequence[str] | None = None,
    options: Mapping[str, str] | None = None,
    **others: Any,
) -> dict[str, Any]:
    """Return the JSON object of a request without the keys whose value is None."""
    body: dict[str, Any] = {
        **others,
        "image": None if image is None else encode_picture(image),
        "images": None if images is None else [encode_picture(i) for i in images],
        "devices": None if devices is None else list(devices),
        "options": None if options is None else dict(options),
    }
    return {key: value for key, value in body.items() if value is not None}
