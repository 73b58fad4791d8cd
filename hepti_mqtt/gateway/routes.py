"""The routes of OpenAI, TEI and Ollama: a body in, requests of the site, the answer in their shape."""

from __future__ import annotations

import base64
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hepti_mqtt import __version__
from hepti_mqtt.errors import RequestError
from hepti_mqtt.gateway.bodies import Body, texts_of
from hepti_mqtt.gateway.site import Site, Spoken

UNIT: Final = 1e-3  # how far the length of a normalised vector may be from 1

Vectors = NDArray[np.float32]
Handler = Callable[[Site, Body], Awaitable[Any]]


# -- OpenAI ------------------------------------------------------------------------------------------------------------


async def list_models(site: Site, _body: Body) -> Any:
    """GET /v1/models."""
    return {"object": "list", "data": [_model_object(name) for name in await site.models()]}


def _model_object(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "hepti"}


async def embeddings(site: Site, body: Body) -> Any:
    """POST /v1/embeddings; encoding_format: float, or base64 of little-endian f32."""
    name, value = body.take("model", str), body.take("input", (str, list))
    encoding = body.take("encoding_format", str, "float")
    size = body.take("dimensions", int)
    body.drop("user")
    body.end()
    if encoding not in ("float", "base64"):
        raise RequestError(f"encoding_format {encoding!r}; known are float and base64")
    model = await site.model_named(name)
    found = await site.embed(model, texts_of(value), dimensions=size)
    write = _base64 if encoding == "base64" else _floats
    data = [{"object": "embedding", "index": i, "embedding": write(row)} for i, row in enumerate(found.vectors)]
    return {"object": "list", "data": data, "model": model, "usage": _usage(found.tokens)}


def _usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def _floats(row: Vectors) -> list[float]:
    return [float(x) for x in row]


def _base64(row: Vectors) -> str:
    return base64.b64encode(row.astype("<f4").tobytes()).decode()


async def classify(site: Site, body: Body) -> Any:
    """POST /v1/classify: texts, or pictures as {"image": base64}, and all labels with their scores."""
    name, value = body.take("model", str), body.take("input", (str, list))
    top_k = body.take("top_k", int)
    body.drop("user")
    body.end()
    items = value if isinstance(value, list) else [value]
    pictures = [str(item["image"]) for item in items if isinstance(item, dict) and isinstance(item.get("image"), str)]
    if len(pictures) != len(items) and any(isinstance(item, dict) for item in items):
        raise RequestError("'input' holds texts, or objects with an 'image' in base64, and not both")
    for picture in pictures:
        refuse_address(picture)
    model = await site.model_named(name)
    options = {} if top_k is None else {"top_k": top_k}
    inputs, key = (pictures, "images") if pictures else (texts_of(value), "texts")
    found = await site.classify(model, inputs, key, **options)
    data = [{"index": i, "label": each[0]["label"], "labels": each} for i, each in enumerate(found.labels)]
    return {"object": "list", "data": data, "model": model, "usage": _usage(found.tokens)}


async def transcriptions(site: Site, body: Body) -> Any:
    """POST /v1/audio/transcriptions: a form with a file; response_format: json, text, verbose_json, srt or vtt."""
    return await _transcribe(site, body, "transcribe")


async def translations(site: Site, body: Body) -> Any:
    """POST /v1/audio/translations: the same, with the text in English."""
    return await _transcribe(site, body, "translate")


async def _transcribe(site: Site, body: Body, task: str) -> Any:
    file, name = body.take("file", bytes), body.take("model", str)
    language, form = body.take("language", str), body.take("response_format", str, "json")
    prompt, temperature = body.take("prompt", str), body.take("temperature", str) or "0"
    finer = [one for one in body.take("timestamp_granularities[]", list, []) if one != "segment"]
    if (stream := body.take("stream", str, "")) not in ("", "false", "False"):
        raise RequestError(f"stream {stream[:40]!r}: the text comes as a whole; leave it out")
    body.drop("user")
    body.end()
    if file is None:
        raise RequestError("the form has no field 'file' with a recording")
    if form not in TRANSCRIPT_FORMATS:
        raise RequestError(f"response_format {form[:40]!r}; known are {', '.join(TRANSCRIPT_FORMATS)}")
    if finer:
        raise RequestError(f"timestamp_granularities {finer[0][:40]!r}: segments are timed, words are not")
    try:
        drawn = float(temperature)
    except ValueError:
        raise RequestError(f"temperature {temperature[:40]!r} is no number") from None
    options = {"task": task, "language": language or None, "prompt": prompt or None, "temperature": drawn or None}
    timed = form not in ("json", "text")
    found = await site.transcribe(await site.model_named(name), file, timed=timed, **options)
    return TRANSCRIPT_FORMATS[form](found, task)


def _verbose(found: Spoken, task: str) -> dict[str, Any]:
    segments = [
        {
            "id": number,
            "seek": round(100 * piece["seek"]),
            "start": piece["start"],
            "end": piece["end"],
            "text": piece["text"],
            "tokens": piece["ids"],
            "temperature": piece["temperature"],
            "avg_logprob": piece["score"],
            "compression_ratio": piece["compression"],
            "no_speech_prob": piece["no_speech"],
        }
        for number, piece in enumerate(found.segments)
    ]
    about = {"task": task, "language": found.language, "duration": found.seconds}
    return {**about, "text": found.text, "segments": segments}


def _subtitles(found: Spoken, comma: str) -> list[str]:
    """Return the parts of a file of subtitles: from when to when, and the text."""

    def clock(seconds: float) -> str:
        whole, ms = divmod(round(seconds * 1000), 1000)
        return f"{whole // 3600:02}:{whole // 60 % 60:02}:{whole % 60:02}{comma}{ms:03}"

    return [
        f"{clock(one['start'])} --> {clock(one['end'])}\n{one['text'].strip().replace('-->', '->')}\n"
        for one in found.segments
    ]


TRANSCRIPT_FORMATS: Final[Mapping[str, Callable[[Spoken, str], Any]]] = {
    "json": lambda found, _: {"text": found.text},
    "text": lambda found, _: f"{found.text}\n",
    "verbose_json": _verbose,
    "srt": lambda found, _: "\n".join(f"{i}\n{part}" for i, part in enumerate(_subtitles(found, ","), 1)),
    "vtt": lambda found, _: "\n".join(["WEBVTT\n", *_subtitles(found, ".")]),
}


def refuse_address(picture: str) -> None:
    """Raise RequestError for a picture's address."""
    if picture.startswith(("http://", "https://")):
        raise RequestError("Hepti fetches nothing: send the picture itself in base64, not its address")


async def rerank(site: Site, body: Body) -> Any:
    """POST /v1/rerank of Jina and Cohere; documents: texts, or {"text"}; best first."""
    name, query, value = body.take("model", str), body.take("query", str), body.take("documents", list)
    most, whole = body.take("top_n", int), body.take("return_documents", bool, True)
    body.drop("user")
    body.end()
    if most is not None and most < 1:
        raise RequestError("top_n is 1 or more")
    if query is None:
        raise RequestError("'query' is missing; send a text")
    given = [one.get("text") if isinstance(one, dict) and one.keys() == {"text"} else one for one in value or []]
    model, texts = await site.model_named(name), texts_of(given, "documents")
    found = await site.rank(model, query, texts)
    results = [
        {"index": one["index"], "relevance_score": one["score"]}
        | ({"document": {"text": texts[one["index"]]}} if whole else {})
        for one in found.ranking[:most]
    ]
    return {"model": model, "results": results, "usage": _usage(found.tokens)}


async def infer(site: Site, body: Body) -> Any:
    """POST /infer: one text, or one picture in base64, and the answer as MQTT gives it, with what it took."""
    name, text, image = body.take("model", str), body.take("text", str), body.take("image", str)
    body.end()
    if (text is None) == (image is None):
        raise RequestError("send either 'text' or 'image'")
    refuse_address(image or "")
    asked = {"image": image} if text is None else {"text": text, "truncate": site.truncate or None}
    answer = await site.infer(await site.model_named(name), asked)
    return {**answer.raw, "latency_ms": answer.latency_ms}


# -- Text Embeddings Inference -----------------------------------------------------------------------------------------


async def tei_embed(site: Site, body: Body) -> Any:
    """POST /embed of TEI."""
    texts = texts_of(body.take("inputs", (str, list)), "inputs")
    truncate, normalize = body.take("truncate", bool, False), body.take("normalize", bool, True)
    size, direction = body.take("dimensions", int), body.take("truncation_direction", str, "Right")
    prompt = body.take("prompt_name", str)
    body.end()
    _check_direction(direction)
    found = await site.embed(await site.model_named(None), texts, truncate, dimensions=size, prompt=prompt)
    lengths = np.linalg.norm(found.vectors, axis=1, keepdims=True)
    if normalize:
        return (found.vectors / np.maximum(lengths, np.finfo(np.float32).tiny)).tolist()
    if np.all(np.abs(lengths - 1) < UNIT):
        raise RequestError("normalize false: this model normalises its embeddings itself; leave normalize out")
    return found.vectors.tolist()


def _check_direction(direction: str) -> None:
    if direction.lower() != "right":
        raise RequestError("truncation_direction: texts are cut at their end (Right) only")


async def tei_predict(site: Site, body: Body) -> Any:
    """POST /predict of TEI: labels with scores of one text or pair, or of each of a list of lists of one or two."""
    inputs, truncate = body.take("inputs", (str, list)), body.take("truncate", bool, False)
    raw, direction = body.take("raw_scores", bool, False), body.take("truncation_direction", str, "Right")
    body.end()
    _check_direction(direction)
    several = isinstance(inputs, list) and any(isinstance(one, list) for one in inputs)
    items = inputs if several else [[inputs] if isinstance(inputs, str) else inputs]
    if not items or not all(isinstance(one, list) and len(one) in (1, 2) for one in items):
        raise RequestError("'inputs' is a text, a list of one or two texts, or a list of such lists")
    if len({len(one) for one in items}) > 1:
        raise RequestError("'inputs' holds texts, or pairs of texts, and not both")
    texts_of([text for one in items for text in one], "inputs")
    key, asked = ("pairs", items) if len(items[0]) == 2 else ("texts", [one[0] for one in items])
    options = {"truncate": truncate, "raw_scores": raw or None}
    found = await site.classify(await site.model_named(None), asked, key, **options)
    return found.labels if several else found.labels[0]


async def tei_rerank(site: Site, body: Body) -> Any:
    """POST /rerank of TEI: scores are sigmoids of the logits, whatever the model's files say."""
    query, texts = body.take("query", str), texts_of(body.take("texts", list), "texts")
    raw, whole = body.take("raw_scores", bool, False), body.take("return_text", bool, False)
    truncate, direction = body.take("truncate", bool, False), body.take("truncation_direction", str, "Right")
    body.end()
    _check_direction(direction)
    if query is None:
        raise RequestError("'query' is missing; send a text")
    found = await site.rank(await site.model_named(None), query, texts, truncate, raw_scores=True)
    return [
        {"index": one["index"], "score": one["score"] if raw else float(0.5 * (1 + np.tanh(one["score"] / 2)))}
        | ({"text": texts[one["index"]]} if whole else {})
        for one in found.ranking
    ]


async def tei_similarity(site: Site, body: Body) -> Any:
    """POST /similarity of TEI: of each sentence to the first one, in their order."""
    inputs = Body(body.take("inputs", dict, {}))
    body.end()
    source, sentences = inputs.take("source_sentence", str), texts_of(inputs.take("sentences", list), "sentences")
    inputs.end()
    if source is None:
        raise RequestError("'source_sentence' is missing; send a text")
    found = await site.rank(await site.model_named(None), source, sentences)
    return [one["score"] for one in sorted(found.ranking, key=lambda one: int(one["index"]))]


async def tei_info(site: Site, _body: Body) -> Any:
    """GET /info of TEI, as far as the gateway knows it."""
    return {"model_id": await site.model_named(None), "version": __version__, "max_client_batch_size": 2048}


# -- Ollama ------------------------------------------------------------------------------------------------------------


async def ollama_embed(site: Site, body: Body) -> Any:
    """POST /api/embed of Ollama; durations in nanoseconds."""
    begun = time.perf_counter()
    name, texts = body.take("model", str), texts_of(body.take("input", (str, list)))
    truncate, size = body.take("truncate", bool, True), body.take("dimensions", int)
    body.drop("keep_alive", "options")
    body.end()
    model = await site.model_named(name)
    found = await site.embed(model, texts, truncate, dimensions=size)
    spent_ns = int((time.perf_counter() - begun) * 1e9)
    durations = {"total_duration": spent_ns, "load_duration": 0}
    return {
        "model": name or model,
        "embeddings": found.vectors.tolist(),
        **durations,
        "prompt_eval_count": found.tokens,
    }


async def ollama_tags(site: Site, _body: Body) -> Any:
    """GET /api/tags of Ollama."""
    return {"models": [{"name": name, "model": name, "size": 0, "details": {}} for name in await site.models()]}


async def ollama_version(_site: Site, _body: Body) -> Any:
    """GET /api/version of Ollama."""
    return {"version": __version__}


FORMS: Final = frozenset({"/v1/audio/transcriptions", "/v1/audio/translations"})  # whose bodies are no JSON
# method, path -> what answers it
ROUTES: Final[Mapping[tuple[str, str], Handler]] = {
    ("GET", "/v1/models"): list_models,
    ("POST", "/v1/embeddings"): embeddings,
    ("POST", "/v1/classify"): classify,
    ("POST", "/v1/rerank"): rerank,
    ("POST", "/infer"): infer,
    ("POST", "/v1/audio/transcriptions"): transcriptions,
    ("POST", "/v1/audio/translations"): translations,
    ("POST", "/embed"): tei_embed,
    ("POST", "/predict"): tei_predict,
    ("POST", "/rerank"): tei_rerank,
    ("POST", "/similarity"): tei_similarity,
    ("GET", "/info"): tei_info,
    ("POST", "/api/embed"): ollama_embed,
    ("GET", "/api/tags"): ollama_tags,
    ("GET", "/api/version"): ollama_version,
}
