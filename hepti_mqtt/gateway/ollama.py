"""The routes of Ollama."""

from __future__ import annotations

import time
from typing import Any, Final

from hepti_mqtt import __version__
from hepti_mqtt.gateway.operations import INPUT, JSON, MODEL, VECTOR, Operation, texts_of
from hepti_mqtt.gateway.schemas import COUNT, FLAG, IGNORED, INTEGER, OBJECT, TEXT, answer, array, body
from hepti_mqtt.gateway.site import Site


async def embed(site: Site, asked: dict[str, Any]) -> Any:
    """Embeddings, as Ollama gives them; durations in nanoseconds."""
    begun = time.perf_counter()
    model = await site.model_named(asked["model"])
    found = await site.embed(model, texts_of(asked["input"]), asked["truncate"], dimensions=asked["dimensions"])
    spent_ns = int((time.perf_counter() - begun) * 1e9)
    return {
        "model": asked["model"] or model,
        "embeddings": found.vectors.tolist(),
        "total_duration": spent_ns,
        "load_duration": 0,
        "prompt_eval_count": found.tokens,
    }


async def tags(site: Site, _asked: dict[str, Any]) -> Any:
    """The served models, as Ollama lists them."""
    return {"models": [{"name": name, "model": name, "size": 0, "details": {}} for name in await site.models()]}


async def version(_site: Site, _asked: dict[str, Any]) -> Any:
    """The version of Hepti."""
    return {"version": __version__}


OPERATIONS: Final = (
    Operation(
        "POST",
        "/api/embed",
        embed,
        {
            JSON: answer(
                "OllamaEmbeddings",
                model=TEXT,
                embeddings=array(VECTOR),
                total_duration=INTEGER,
                load_duration=INTEGER,
                prompt_eval_count=INTEGER,
            )
        },
        body(
            {"input": INPUT},
            {
                "model": MODEL,
                "truncate": {**FLAG, "default": True},
                "dimensions": COUNT,
                "keep_alive": IGNORED,
                "options": IGNORED,
            },
        ),
    ),
    Operation(
        "GET",
        "/api/tags",
        tags,
        {
            JSON: answer(
                "OllamaModels", models=array(answer("OllamaModel", name=TEXT, model=TEXT, size=INTEGER, details=OBJECT))
            )
        },
    ),
    Operation("GET", "/api/version", version, {JSON: answer("OllamaVersion", version=TEXT)}),
)
