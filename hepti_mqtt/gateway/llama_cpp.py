"""The interface of llama.cpp's server, as far as programs ask it for vectors: Frigate's search by meaning does."""

from __future__ import annotations

import base64
import binascii
from typing import Any, Final

from hepti_mqtt.errors import RequestError
from hepti_mqtt.gateway import schemas as s
from hepti_mqtt.gateway.operations import JSON, MODEL, VECTOR, Operation
from hepti_mqtt.gateway.site import Site, unit

MARKER: Final = "<__media__>"  # where a picture stands in a prompt


async def props(_site: Site, _asked: dict[str, Any]) -> Any:
    """What stands for a picture in a prompt."""
    return {"media_marker": MARKER}


async def multimodal_embeddings(site: Site, asked: dict[str, Any]) -> Any:
    """Vectors of texts, and of pictures as multimodal_data in base64, of length 1."""
    content = asked["content"]
    read = [_item(item) for item in (content if isinstance(content, list) else [content])]
    model = await site.model_named(asked["model"])
    texts = [value for value in read if isinstance(value, str)]
    pictures = [value for value in read if isinstance(value, bytes)]
    rows = unit((await site.embed(model, texts)).vectors).tolist() if texts else []
    seen = unit((await site.embed_pictures(model, pictures)).vectors).tolist() if pictures else []
    ordered = [(rows if isinstance(value, str) else seen).pop(0) for value in read]
    return [{"index": i, "embedding": [row]} for i, row in enumerate(ordered)]


def _item(item: Any) -> str | bytes:
    """Return a text, or a picture; raises RequestError."""
    if isinstance(item, str):
        return item
    data, prompt = item["multimodal_data"], str(item["prompt_string"])
    if not data:
        return prompt
    if len(data) != 1 or prompt.strip() != MARKER:
        raise RequestError(f"a picture stands alone: one in multimodal_data, and {MARKER} as the prompt_string")
    try:
        return base64.b64decode(data[0], validate=True)
    except (ValueError, binascii.Error) as error:
        raise RequestError(f"multimodal_data is not base64 ({error})") from None


_ITEM: Final = {"anyOf": [s.TEXT, s.body({"prompt_string": s.TEXT}, {"multimodal_data": s.array(s.TEXT)})]}
_ITEMS: Final = s.array(_ITEM, "a list of texts, or of objects with a prompt_string and perhaps multimodal_data", 1)
_VECTOR: Final = s.answer("LlamaCppVector", index=s.INTEGER, embedding=s.array(VECTOR))
OPERATIONS: Final = (
    Operation("GET", "/props", props, {JSON: s.answer("LlamaCppProps", media_marker=s.TEXT)}),
    Operation(
        "POST",
        "/embeddings",
        multimodal_embeddings,
        {JSON: s.array(_VECTOR)},
        s.body({"content": {"anyOf": [_ITEMS, *_ITEM["anyOf"]]}}, {"model": MODEL}),
    ),
)
