"""The part of llama.cpp's server for vectors, which Frigate's search by meaning uses."""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import Field

from hepti_mqtt.core.errors import RequestError
from hepti_mqtt.gateway.answers import LLAMA_CPP_PROPS, LLAMA_CPP_VECTOR
from hepti_mqtt.gateway.bodies import Body
from hepti_mqtt.gateway.operations import JSON, Operation
from hepti_mqtt.gateway.site import Site
from hepti_mqtt.service.encoded import read_base64
from hepti_mqtt.service.task_outputs import unit

MARKER: Final = "<__media__>"  # where a picture stands in a prompt


class PromptBody(Body):
    """A text, or the mark of a picture."""

    prompt_string: str
    multimodal_data: list[str] = Field(default_factory=list)


class ContentBody(Body):
    """Texts and pictures."""

    content: Annotated[
        str | PromptBody | Annotated[list[str | PromptBody], Field(min_length=1)],
        Field(description="a list of texts, or of objects with a prompt_string and perhaps multimodal_data"),
    ]
    model: str | None = None


async def props(_site: Site, _body: None) -> Any:
    """What stands for a picture in a prompt."""
    return {"media_marker": MARKER}


async def multimodal_embeddings(site: Site, body: ContentBody) -> Any:
    """Vectors of texts, and of pictures as multimodal_data in base64, of length 1."""
    content = body.content
    read = [_item(item) for item in (content if isinstance(content, list) else [content])]
    model = await site.model_named(body.model)
    texts = [value for value in read if isinstance(value, str)]
    pictures = [value for value in read if isinstance(value, bytes)]
    rows = unit((await site.embed(model, texts)).items).tolist() if texts else []
    images = unit((await site.embed_pictures(model, pictures)).items).tolist() if pictures else []
    ordered = [(rows if isinstance(value, str) else images).pop(0) for value in read]
    return [{"index": i, "embedding": [row]} for i, row in enumerate(ordered)]


def _item(item: str | PromptBody) -> str | bytes:
    """Return a text, or a picture; raises RequestError."""
    if isinstance(item, str):
        return item
    data, prompt = item.multimodal_data, item.prompt_string
    if not data:
        return prompt
    if len(data) != 1 or prompt.strip() != MARKER:
        raise RequestError(f"a picture stands alone: one in multimodal_data, and {MARKER} as the prompt_string")
    return read_base64("multimodal_data", data[0], "picture")


OPERATIONS: Final = (
    Operation("GET", "/props", props, {JSON: LLAMA_CPP_PROPS}),
    Operation("POST", "/embeddings", multimodal_embeddings, {JSON: list[LLAMA_CPP_VECTOR]}, ContentBody),
)
