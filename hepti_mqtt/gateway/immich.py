"""The part of Immich's machine learning interface for its search by content: vectors of photos and texts."""

from __future__ import annotations

import asyncio
import io
import json
from typing import Annotated, Any, ClassVar, Final

import numpy as np
from PIL import Image, UnidentifiedImageError
from pydantic import Field

from hepti_mqtt.core.errors import RequestError
from hepti_mqtt.core.ids import valid_name
from hepti_mqtt.gateway.answers import IMMICH_PREDICTION
from hepti_mqtt.gateway.bodies import FORM, Body
from hepti_mqtt.gateway.errors import HttpError
from hepti_mqtt.gateway.operations import JSON, Operation
from hepti_mqtt.gateway.site import Site, Vectors
from hepti_mqtt.service.task_outputs import unit

TASK: Final = "clip"
_TYPES: Final = {"visual": "image", "textual": "text"}
_DIGITS: Final = 9  # which distinguish any two f32


class PhotoBody(Body):
    """A photo or a searched text, with its tasks."""

    model_config: ClassVar = {"strict": False}
    entries: str | None = None
    image: Annotated[bytes | None, Field(description="a picture's file", json_schema_extra={"format": "binary"})] = None
    text: str | None = None


async def predict_form(site: Site, body: PhotoBody) -> Any:
    """Vectors of a photo or a searched text, of length 1, as Immich's machine learning gives them."""
    image, text = body.image, body.text
    name, reads = _wanted(body.entries)
    if image is None and text is None:
        raise RequestError("the form has neither an image nor a text")
    if (image is None) == (reads == "image"):
        raise RequestError(f"'entries' names {reads}, but the form brings {'a text' if image is None else 'an image'}")
    model = await site.model_named(valid_name(name), f"{name!r} is served as --model {valid_name(name)}=DIRECTORY")
    if image is None:
        vectors = await site.embed(model, [text or ""], truncate=True)
        return {TASK: _written(vectors.items)}
    width, height = await asyncio.to_thread(_size, image)
    vectors = await site.embed_pictures(model, [image])
    return {TASK: _written(vectors.items), "imageHeight": height, "imageWidth": width}


def _wanted(entries: str | None) -> tuple[str, str]:
    """Return the model's name and what it is to read; raises HttpError, RequestError for another task."""
    try:
        tasks = json.loads(entries or "")
        wanted = [(task, kind, entry["modelName"], entry) for task, by in tasks.items() for kind, entry in by.items()]
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        raise HttpError("unprocessable", "'entries' is not JSON of the form {task: {type: {modelName}}}") from None
    if others := sorted(
        {f"{task} ({kind})"[:60] for task, kind, _, _ in wanted if (task, kind in _TYPES) != (TASK, True)}
    ):
        raise RequestError(
            f"the gateway computes {TASK} alone, not {', '.join(others)}: turn that off in Immich, or add the address "
            "of Immich's own machine learning after this one"
        )
    if len(wanted) != 1:
        raise HttpError("unprocessable", f"'entries' asks for {len(wanted)} vectors; ask for one")
    _, kind, name, entry = wanted[0]
    options = entry.get("options") or {}
    # Of texts in several languages, which these models read alike.
    if entry.keys() > {"modelName", "options"} or not isinstance(options, dict) or options.keys() - {"language"}:
        raise HttpError("unprocessable", f"'entries' has unknown options: {json.dumps(entry)[:200]}")
    if not isinstance(name, str) or not valid_name(name):
        raise HttpError("unprocessable", "modelName is no name")
    return name, _TYPES[kind]


def _size(picture: bytes) -> tuple[int, int]:
    try:
        with Image.open(io.BytesIO(picture)) as opened:
            return opened.size
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError) as error:
        raise RequestError(f"the image is not a picture that can be read ({type(error).__name__})") from None


def _written(vectors: Vectors) -> str:
    """Return a vector as Immich hands it on to its database: a list in a string."""
    return f"[{','.join(np.format_float_positional(x, _DIGITS, fractional=False, trim='0') for x in unit(vectors)[0])}]"


OPERATIONS: Final = (Operation("POST", "/predict", predict_form, {JSON: IMMICH_PREDICTION}, PhotoBody, FORM),)
