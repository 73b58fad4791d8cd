"""The routes of OpenAI, of Jina for reranking, and Hepti's own: a body in, requests of the site, the answer."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import Any, Final

from hepti_mqtt.errors import RequestError
from hepti_mqtt.gateway import schemas as s
from hepti_mqtt.gateway.operations import (
    FORM,
    INPUT,
    JSON,
    LABEL,
    MODEL,
    PLAIN,
    TEXTS_AT_ONCE,
    USAGE,
    VECTOR,
    Operation,
    texts_of,
)
from hepti_mqtt.gateway.site import Site, Spoken, Vectors

Asked = dict[str, Any]


async def list_models(site: Site, _asked: Asked) -> Any:
    """The served models."""
    return {"object": "list", "data": [_model_object(name) for name in await site.models()]}


def _model_object(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "hepti"}


async def embeddings(site: Site, asked: Asked) -> Any:
    """Embeddings as lists of numbers, or as base64 of little-endian f32."""
    model = await site.model_named(asked["model"])
    found = await site.embed(model, texts_of(asked["input"]), dimensions=asked["dimensions"])
    write = _base64 if asked["encoding_format"] == "base64" else _floats
    data = [{"object": "embedding", "index": i, "embedding": write(row)} for i, row in enumerate(found.vectors)]
    return {"object": "list", "data": data, "model": model, "usage": _usage(found.tokens)}


def _usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def _floats(row: Vectors) -> list[float]:
    found: list[float] = row.tolist()
    return found


def _base64(row: Vectors) -> str:
    return base64.b64encode(row.astype("<f4").tobytes()).decode()


async def classify(site: Site, asked: Asked) -> Any:
    """Labels with scores of texts, or of pictures in base64, best first."""
    value = asked["input"]
    pictures = [one["image"] for one in value if isinstance(one, dict)] if isinstance(value, list) else []
    for picture in pictures:
        refuse_address(picture)
    model = await site.model_named(asked["model"])
    options = {} if asked["top_k"] is None else {"top_k": asked["top_k"]}
    inputs, key = (pictures, "images") if pictures else (texts_of(value), "texts")
    found = await site.classify(model, inputs, key, **options)
    data = [{"index": i, "label": each[0]["label"], "labels": each} for i, each in enumerate(found.labels)]
    return {"object": "list", "data": data, "model": model, "usage": _usage(found.tokens)}


async def transcriptions(site: Site, asked: Asked) -> Any:
    """The text of a recording, in its own language."""
    return await _transcribe(site, asked, "transcribe")


async def translations(site: Site, asked: Asked) -> Any:
    """The text of a recording, in English."""
    return await _transcribe(site, asked, "translate")


async def _transcribe(site: Site, asked: Asked, task: str) -> Any:
    options = {key: asked[key] or None for key in ("language", "prompt")}
    try:
        drawn = float(asked["temperature"] or 0)
    except ValueError:
        raise RequestError(f"'temperature' is {asked['temperature'][:40]!r}, which is no number") from None
    form = asked["response_format"]
    timed = form not in ("json", "text")
    model = await site.model_named(asked["model"])
    found = await site.transcribe(model, asked["file"], timed=timed, task=task, temperature=drawn or None, **options)
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


async def rerank(site: Site, asked: Asked) -> Any:
    """Documents by their score for a query, best first."""
    texts = [one["text"] if isinstance(one, dict) else one for one in asked["documents"]]
    model = await site.model_named(asked["model"])
    found = await site.rank(model, asked["query"], texts)
    results = [
        {"index": one["index"], "relevance_score": one["score"]}
        | ({"document": {"text": texts[one["index"]]}} if asked["return_documents"] else {})
        for one in found.ranking[: asked["top_n"]]
    ]
    return {"model": model, "results": results, "usage": _usage(found.tokens)}


async def infer(site: Site, asked: Asked) -> Any:
    """The answer to one text, or one picture in base64, as MQTT gives it, with what it took."""
    text, image = asked.get("text"), asked.get("image")
    refuse_address(image or "")
    request = {"image": image} if text is None else {"text": text, "truncate": site.truncate or None}
    answer = await site.infer(await site.model_named(asked["model"]), request)
    return {**answer.raw, "latency_ms": answer.latency_ms}


def _list_of(name: str, item: s.Schema) -> s.Schema:
    return s.answer(name, object=s.TEXT, data=s.array(item), model=s.TEXT, usage=USAGE)


_MODELS: Final = s.answer(
    "Models",
    object=s.TEXT,
    data=s.array(s.answer("Model", id=s.TEXT, object=s.TEXT, created=s.INTEGER, owned_by=s.TEXT)),
)
_EMBEDDING: Final = s.answer(
    "Embedding", object=s.TEXT, index=s.INTEGER, embedding={"anyOf": [VECTOR, {**s.TEXT, "contentEncoding": "base64"}]}
)
_PICTURE: Final = {"type": "string", "description": "a picture in base64, not its address"}
_PICTURES: Final = s.array(s.body({"image": _PICTURE}), "", 1, TEXTS_AT_ONCE)
_CLASSIFIED: Final = s.answer("Classification", index=s.INTEGER, label=s.TEXT, labels=s.array(LABEL))
_DOCUMENT: Final[s.Schema] = {"anyOf": [s.TEXT, s.body({"text": s.TEXT})]}
_RANKED: Final = s.answer("Ranked", index=s.INTEGER, relevance_score=s.NUMBER)
_SEGMENT: Final = s.answer(
    "Segment",
    **dict.fromkeys(("id", "seek"), s.INTEGER),
    **dict.fromkeys(("start", "end", "temperature", "avg_logprob", "compression_ratio", "no_speech_prob"), s.NUMBER),
    text=s.TEXT,
    tokens=s.array(s.INTEGER),
)
_TRANSCRIPT: Final[s.Schema] = {
    "anyOf": [
        s.answer(
            "VerboseTranscript",
            **dict.fromkeys(("task", "language", "text"), s.TEXT),
            duration=s.NUMBER,
            segments=s.array(_SEGMENT),
        ),
        s.answer("Transcript", text=s.TEXT),
    ]
}


def _only(why: str, *values: str) -> s.Schema:
    """Return the schema of a form's field whose other values would change the answer."""
    return {"type": "string", "enum": ["", *values], "description": why}


_RECORDING: Final = s.form(
    {"file": {"type": "file"}},
    {
        "model": MODEL,
        "language": s.TEXT,
        "response_format": {"type": "string", "enum": [*TRANSCRIPT_FORMATS], "default": "json"},
        "prompt": {**s.TEXT, "description": "what was said before"},
        "temperature": {**s.TEXT, "description": "a number from 0 to 1; without it, higher ones are tried in doubt"},
        "timestamp_granularities[]": s.array(
            {"type": "string", "enum": ["segment"]}, "segments are timed, words are not"
        ),
        "stream": _only("false: the text comes as a whole", "false", "False"),
        "user": s.TEXT,
    },
)
_TRANSCRIPTS: Final = {JSON: _TRANSCRIPT, PLAIN: s.TEXT}
OPERATIONS: Final = (
    Operation("GET", "/v1/models", list_models, {JSON: _MODELS}),
    Operation(
        "POST",
        "/v1/embeddings",
        embeddings,
        {JSON: _list_of("Embeddings", _EMBEDDING)},
        s.body(
            {"input": INPUT},
            {
                "model": MODEL,
                "encoding_format": {"type": "string", "enum": ["float", "base64"], "default": "float"},
                "dimensions": s.COUNT,
                "user": s.IGNORED,
            },
        ),
    ),
    Operation(
        "POST",
        "/v1/classify",
        classify,
        {JSON: _list_of("Classifications", _CLASSIFIED)},
        s.body(
            {"input": {"anyOf": [*INPUT["anyOf"], _PICTURES]}}, {"model": MODEL, "top_k": s.COUNT, "user": s.IGNORED}
        ),
    ),
    Operation(
        "POST",
        "/v1/rerank",
        rerank,
        {JSON: s.answer("Ranking", model=s.TEXT, results=s.array(_RANKED), usage=USAGE)},
        s.body(
            {"query": s.TEXT, "documents": s.array(_DOCUMENT, "", 1, TEXTS_AT_ONCE)},
            {
                "model": MODEL,
                "top_n": s.COUNT,
                "return_documents": {**s.FLAG, "default": True},
                "user": s.IGNORED,
            },
        ),
    ),
    Operation(
        "POST",
        "/infer",
        infer,
        {JSON: s.OBJECT},
        {
            "anyOf": [s.body({"text": s.TEXT}, {"model": MODEL}), s.body({"image": _PICTURE}, {"model": MODEL})],
            "description": "an object with either 'text' or 'image', and with 'model'",
        },
    ),
    Operation("POST", "/v1/audio/transcriptions", transcriptions, _TRANSCRIPTS, _RECORDING, FORM),
    Operation("POST", "/v1/audio/translations", translations, _TRANSCRIPTS, _RECORDING, FORM),
)
