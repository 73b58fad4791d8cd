"""The routes of Text Embeddings Inference (TEI), whose bodies name no model."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from hepti_mqtt import __version__
from hepti_mqtt.errors import RequestError
from hepti_mqtt.gateway.operations import (
    INPUT,
    JSON,
    LABEL,
    PLAIN,
    TEXTS,
    TEXTS_AT_ONCE,
    VECTOR,
    Operation,
    texts_of,
)
from hepti_mqtt.gateway.schemas import COUNT, FLAG, INTEGER, NUMBER, TEXT, Schema, answer, array, body
from hepti_mqtt.gateway.site import Site

UNIT: Final = 1e-3  # how far the length of a normalised vector may be from 1
_CUT: Final[dict[str, Schema]] = {
    "truncate": FLAG,
    "truncation_direction": {
        "type": "string",
        "enum": ["Right", "right"],
        "default": "Right",
        "description": "'Right': texts are cut at their end only",
    },
}
_PROMPT: Final[dict[str, Schema]] = {"prompt_name": TEXT}


async def embed(site: Site, asked: dict[str, Any]) -> Any:
    """Embeddings, as TEI gives them."""
    model = await site.model_named(None)
    options = {"dimensions": asked["dimensions"], "prompt": asked["prompt_name"]}
    found = await site.embed(model, texts_of(asked["inputs"]), asked["truncate"], **options)
    lengths = np.linalg.norm(found.vectors, axis=1, keepdims=True)
    if asked["normalize"]:
        return (found.vectors / np.maximum(lengths, np.finfo(np.float32).tiny)).tolist()
    if np.all(np.abs(lengths - 1) < UNIT):
        raise RequestError("normalize false: this model normalises its embeddings itself; leave normalize out")
    return found.vectors.tolist()


async def embed_all(site: Site, asked: dict[str, Any]) -> Any:
    """The final hidden states of all tokens of each text."""
    model = await site.model_named(None)
    found = await site.hidden(model, texts_of(asked["inputs"]), asked["truncate"], prompt=asked["prompt_name"])
    return [states.tolist() for states in found]


async def predict(site: Site, asked: dict[str, Any]) -> Any:
    """Labels with scores of one text or pair, or of each of a list of lists of one or two texts."""
    inputs = asked["inputs"]
    several = isinstance(inputs, list) and isinstance(inputs[0], list)
    items = inputs if several else [[inputs] if isinstance(inputs, str) else inputs]
    model, options = await site.model_named(None), {key: asked[key] or None for key in ("truncate", "raw_scores")}
    found: dict[int, Any] = {}
    for size, key in ((1, "texts"), (2, "pairs")):
        places = [place for place, one in enumerate(items) if len(one) == size]
        if places:
            given = [items[place][0] if size == 1 else items[place] for place in places]
            found |= zip(places, (await site.classify(model, given, key, **options)).labels, strict=True)
    labels = [found[place] for place in range(len(items))]
    return labels if several else labels[0]


async def rerank(site: Site, asked: dict[str, Any]) -> Any:
    """Texts by their score for a query: sigmoids of the logits, whatever the model's files say, or the logits."""
    texts = asked["texts"]
    found = await site.rank(await site.model_named(None), asked["query"], texts, asked["truncate"], raw_scores=True)
    return [
        {
            "index": one["index"],
            "score": one["score"] if asked["raw_scores"] else float(0.5 * (1 + np.tanh(one["score"] / 2))),
        }
        | ({"text": texts[one["index"]]} if asked["return_text"] else {})
        for one in found.ranking
    ]


async def similarity(site: Site, asked: dict[str, Any]) -> Any:
    """Of each sentence to the source sentence, in their order."""
    source, sentences = asked["inputs"]["source_sentence"], asked["inputs"]["sentences"]
    truncate = (asked["parameters"] or {}).get("truncate")
    found = await site.rank(await site.model_named(None), source, sentences, truncate)
    return [one["score"] for one in sorted(found.ranking, key=lambda one: int(one["index"]))]


async def info(site: Site, _asked: dict[str, Any]) -> Any:
    """What is served, as far as the gateway knows it."""
    return {
        "model_id": await site.model_named(None),
        "version": __version__,
        "max_client_batch_size": TEXTS_AT_ONCE,
        "auto_truncate": site.truncate,
    }


async def health(site: Site, _asked: dict[str, Any]) -> Any:
    """Whether a planner answers."""
    await site.models()
    return "ok"


_WORDS: Final = array(TEXT, "a list of one or two texts", 1, 2)
OPERATIONS: Final = (
    Operation(
        "POST",
        "/embed",
        embed,
        {JSON: array(VECTOR)},
        body({"inputs": INPUT}, {"normalize": {**FLAG, "default": True}, "dimensions": COUNT, **_PROMPT, **_CUT}),
    ),
    Operation(
        "POST", "/embed_all", embed_all, {JSON: array(array(VECTOR))}, body({"inputs": INPUT}, {**_PROMPT, **_CUT})
    ),
    Operation(
        "POST",
        "/predict",
        predict,
        {JSON: {"anyOf": [array(LABEL), array(array(LABEL))]}},
        body(
            {
                "inputs": {
                    "anyOf": [TEXT, _WORDS, array(_WORDS, "", 1, TEXTS_AT_ONCE)],
                    "description": "a text, a list of one or two texts, or a list of such lists",
                }
            },
            {"raw_scores": FLAG, **_CUT},
        ),
    ),
    Operation(
        "POST",
        "/rerank",
        rerank,
        {
            JSON: array(
                {
                    "title": "TeiRank",
                    "type": "object",
                    "properties": {"index": INTEGER, "score": NUMBER, "text": TEXT},
                    "required": ["index", "score"],
                }
            )
        },
        body({"query": TEXT, "texts": TEXTS}, {"raw_scores": FLAG, "return_text": FLAG, **_CUT}),
    ),
    Operation(
        "POST",
        "/similarity",
        similarity,
        {JSON: VECTOR},
        body({"inputs": body({"source_sentence": TEXT, "sentences": TEXTS})}, {"parameters": body({}, _CUT)}),
    ),
    Operation(
        "GET",
        "/info",
        info,
        {
            JSON: answer(
                "TeiInfo", model_id=TEXT, version=TEXT, max_client_batch_size=INTEGER, auto_truncate={"type": "boolean"}
            )
        },
    ),
    Operation("GET", "/health", health, {PLAIN: TEXT}, is_open=True),
)
