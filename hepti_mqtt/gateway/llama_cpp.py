"""The interface of llama.cpp's server, as far as programs ask it for vectors: Frigate's search by meaning does."""

from __future__ import annotations

import base64
import binascii
from typing import Any, Final

from hepti_mqtt.errors import RequestError
from hepti_mqtt.gateway.bodies import Body
from hepti_mqtt.gateway.site import Site, unit

MARKER: Final = "<__media__>"  # where a picture stands in a prompt


async def props(_site: Site, _body: Body) -> Any:
    """GET /props: what stands for a picture."""
    return {"media_marker": MARKER}


async def embeddings(site: Site, body: Body) -> Any:
    """POST /embeddings: texts, and pictures as multimodal_data in base64; vectors have length 1."""
    name, content = body.take("model", str), body.take("content", (str, list, dict))
    body.end()
    items = content if isinstance(content, list) else [content]
    if not items or content is None:
        raise RequestError("'content' is missing or empty; send texts, or objects with a prompt_string")
    read = [_item(item) for item in items]
    model = await site.model_named(name)
    texts = [value for value in read if isinstance(value, str)]
    pictures = [value for value in read if isinstance(value, bytes)]
    rows = iter(unit((await site.embed(model, texts)).vectors) if texts else ())
    seen = iter(unit((await site.embed_pictures(model, pictures)).vectors) if pictures else ())
    ordered = [next(rows if isinstance(value, str) else seen).tolist() for value in read]
    return [{"index": i, "embedding": [row]} for i, row in enumerate(ordered)]


def _item(item: Any) -> str | bytes:
    """Return a text, or a picture; raises RequestError."""
    if isinstance(item, str):
        return item
    if not isinstance(item, dict) or not isinstance(item.get("prompt_string"), str):
        raise RequestError("'content' holds something that is neither a text nor an object with a prompt_string")
    if unknown := sorted(map(str, item.keys() - {"prompt_string", "multimodal_data"})):
        raise RequestError(f"'content' has the keys {', '.join(unknown)}, which are not known; leave them out")
    data, prompt = item.get("multimodal_data"), str(item["prompt_string"])
    if not data:
        return prompt
    if not isinstance(data, list) or len(data) != 1 or prompt.strip() != MARKER:
        raise RequestError(f"a picture stands alone: one in multimodal_data, and {MARKER} as the prompt_string")
    try:
        return base64.b64decode(data[0], validate=True)
    except (TypeError, ValueError, binascii.Error) as error:
        raise RequestError(f"multimodal_data is not base64 ({error})") from None
