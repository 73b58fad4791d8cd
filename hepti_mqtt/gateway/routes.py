"""The routes of OpenAI, of Jina and Cohere for reranking, and Hepti's own."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field

from hepti_mqtt.core.errors import RequestError
from hepti_mqtt.gateway import answers
from hepti_mqtt.gateway.bodies import FORM, TEXTS_AT_ONCE, Body, Count, Key, Picture, TextList, Texts
from hepti_mqtt.gateway.operations import JSON, PLAIN, Operation
from hepti_mqtt.gateway.site import Site, Spoken
from hepti_mqtt.service.languages import NAMES
from hepti_mqtt.service.options import OPTIONS

#: Cohere's names of prompts
_PROMPTS: Final = {"search_query": "query", "search_document": "document"}


class ModelName(Body):
    """A model in the path."""

    name: str


class EmbeddingsBody(Body):
    """Texts to embed."""

    keys: ClassVar = {
        "dimensions": Key(OPTIONS["dimensions"]),
        "prompt_name": Key(OPTIONS["prompt"]),
        "input_type": Key(OPTIONS["prompt"], lambda name: _PROMPTS.get(name, name) if isinstance(name, str) else name),
    }
    ignored = frozenset({"user"})
    model: str | None = None
    input: Texts
    encoding_format: Literal["float", "base64"] = "float"


class PictureBody(Body):
    """A picture."""

    image: Picture


class ClassifyBody(Body):
    """Texts or pictures to classify."""

    keys: ClassVar = {"top_k": Key(OPTIONS["top_k"])}
    ignored = frozenset({"user"})
    model: str | None = None
    input: Annotated[
        str | TextList | Annotated[list[PictureBody], Field(min_length=1, max_length=TEXTS_AT_ONCE)],
        Field(description=f'a text, a list of 1 to {TEXTS_AT_ONCE} texts, or one of {{"image": "<base64>"}}'),
    ]


class DocumentBody(Body):
    """A document of a ranking."""

    text: str


Documents = Annotated[list[str | DocumentBody], Field(min_length=1, max_length=TEXTS_AT_ONCE)]


class RerankBody(Body):
    """A query, and documents to rank, as Jina's and Cohere's interfaces have them."""

    ignored = frozenset({"user"})
    #: longer documents are truncated
    neutral: ClassVar = {
        "max_chunks_per_doc": (), "max_tokens_per_doc": (4096,), "return_embeddings": (), "priority": (0,),
    }  # fmt: skip
    model: str | None = None
    query: str
    documents: Documents
    top_n: Count | None = None
    return_documents: bool = True


class CohereBody(RerankBody):
    """Like `RerankBody`, but documents are returned only on request."""

    return_documents: bool = False


class InferBody(Body):
    """One text, or one picture."""

    model_config: ClassVar = {
        "json_schema_extra": {
            "oneOf": [{"required": [key], "properties": {key: {"type": "string"}}} for key in ("text", "image")]
        }
    }
    model: str | None = None
    text: str | None = None
    image: Picture | None = None


#: the forms of a transcript
Form = Literal["json", "text", "verbose_json", "srt", "vtt"]


class RecordingBody(Body):
    """A recording."""

    model_config: ClassVar = {"strict": False}  # the fields of a form are texts
    ignored = frozenset({"user"})
    neutral: ClassVar = {"stream": ("false", "False"), "chunking_strategy": ("auto",), "include[]": ()}
    file: Annotated[bytes, Field(json_schema_extra={"format": "binary"})]
    model: str | None = None
    language: str | None = None
    response_format: Form = "json"
    prompt: Annotated[str | None, Field(description="text before the recording, or names to expect")] = None
    temperature: Annotated[
        float | None, Field(ge=0, le=1, description="a number from 0 to 1; without it, higher ones are tried in doubt")
    ] = None
    granularities: Annotated[
        tuple[Literal["segment", "word"], ...],
        Field(alias="timestamp_granularities[]", description="of verbose_json: which times it has"),
    ] = ("segment",)


async def list_models(site: Site, _body: None) -> Any:
    """The served models."""
    return {"object": "list", "data": [_model_object(name) for name in await site.models()]}


async def one_model(site: Site, body: ModelName) -> Any:
    """A served model."""
    return _model_object(await site.model_named(body.name))


def _model_object(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "hepti"}


async def embeddings(site: Site, body: EmbeddingsBody) -> Any:
    """Embeddings as lists of numbers, or as base64 of little-endian f32."""
    model = await site.model_named(body.model)
    vectors = await site.embed(model, body.input, **body.chosen)
    rows: list[Any] = vectors.items.tolist()
    if body.encoding_format == "base64":
        rows = [base64.b64encode(row.astype("<f4").tobytes()).decode() for row in vectors.items]
    data = [{"object": "embedding", "index": i, "embedding": row} for i, row in enumerate(rows)]
    return {"object": "list", "data": data, "model": model, "usage": _usage(vectors.tokens)}


def _usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": tokens, "total_tokens": tokens}


async def classify(site: Site, body: ClassifyBody) -> Any:
    """Labels with scores of texts, or of pictures in base64, best first."""
    inputs = [body.input] if isinstance(body.input, str) else body.input
    values = [one.image if isinstance(one, PictureBody) else one for one in inputs]
    model = await site.model_named(body.model)
    key = "images" if isinstance(inputs[0], PictureBody) else "texts"
    classes = await site.classify(model, values, key, **body.chosen)
    data = [{"index": i, "label": labels[0]["label"], "labels": labels} for i, labels in enumerate(classes.items)]
    return {"object": "list", "data": data, "model": model, "usage": _usage(classes.tokens)}


async def transcriptions(site: Site, body: RecordingBody) -> Any:
    """The text of a recording, in its own language."""
    return await _transcribe(site, body, "transcribe")


async def translations(site: Site, body: RecordingBody) -> Any:
    """The text of a recording, in English."""
    return await _transcribe(site, body, "translate")


async def _transcribe(site: Site, body: RecordingBody, task: str) -> Any:
    timed: bool | str = body.response_format not in ("json", "text")
    if "word" in body.granularities:
        if body.response_format != "verbose_json":
            message = "words have times in response_format verbose_json alone; choose it, or leave 'word' out"
            raise RequestError(message, "timestamp_granularities[]")
        timed = "word"
    model = await site.model_named(body.model)
    options: dict[str, Any] = {
        "language": body.language,
        "prompt": body.prompt,
        "temperature": body.temperature or None,
    }
    speech = await site.transcribe(model, body.file, timed=timed, task=task, **options)
    answer = TRANSCRIPT_FORMATS[body.response_format](speech, task)
    if timed == "word":
        answer["words"] = [{**one, "word": one["word"].strip()} for part in speech.segments for one in part["words"]]
        if "segment" not in body.granularities:
            del answer["segments"]
    return answer


#: OpenAI's keys of a segment, and Hepti's
_SEGMENT_KEYS: Final = {
    "start": "start", "end": "end", "text": "text", "tokens": "ids", "temperature": "temperature",
    "avg_logprob": "score", "compression_ratio": "compression", "no_speech_prob": "no_speech",
}  # fmt: skip


def _verbose(speech: Spoken, task: str) -> dict[str, Any]:
    segments = [
        {"id": number, "seek": round(100 * piece["seek"])} | {key: piece[own] for key, own in _SEGMENT_KEYS.items()}
        for number, piece in enumerate(speech.segments)
    ]
    about = {"task": task, "language": NAMES.get(speech.language, speech.language), "duration": speech.seconds}
    return {**about, "text": speech.text, "segments": segments}


def _subtitles(speech: Spoken, comma: str) -> list[str]:
    """Return the parts of a file of subtitles: from when to when, and the text."""

    def clock(seconds: float) -> str:
        whole, ms = divmod(round(seconds * 1000), 1000)
        return f"{whole // 3600:02}:{whole // 60 % 60:02}:{whole % 60:02}{comma}{ms:03}"

    return [
        f"{clock(one['start'])} --> {clock(one['end'])}\n{one['text'].strip().replace('-->', '->')}\n"
        for one in speech.segments
    ]


TRANSCRIPT_FORMATS: Final[Mapping[str, Callable[[Spoken, str], Any]]] = {
    "json": lambda speech, _: {"text": speech.text},
    "text": lambda speech, _: f"{speech.text}\n",
    "verbose_json": _verbose,
    "srt": lambda speech, _: "\n".join(f"{i}\n{part}" for i, part in enumerate(_subtitles(speech, ","), 1)),
    "vtt": lambda speech, _: "\n".join(["WEBVTT\n", *_subtitles(speech, ".")]),
}


async def rerank(site: Site, body: RerankBody) -> Any:
    """Documents by their score for a query, best first."""
    texts = [one.text if isinstance(one, DocumentBody) else one for one in body.documents]
    model = await site.model_named(body.model)
    ranking = await site.rank(model, body.query, texts)
    results = [
        {"index": one["index"], "relevance_score": one["score"]}
        | ({"document": {"text": texts[one["index"]]}} if body.return_documents else {})
        for one in ranking.items[: body.top_n]
    ]
    return {"model": model, "results": results, "usage": _usage(ranking.tokens)}


async def cohere_rerank(site: Site, body: CohereBody) -> Any:
    """Documents by their score for a query, in Cohere's format."""
    return await rerank(site, body)


async def infer(site: Site, body: InferBody) -> Any:
    """The answer to one text, or one picture in base64, as MQTT gives it, with what it took."""
    if (body.text is None) == (body.image is None):
        raise RequestError("send either 'text' or 'image'")
    request = {"image": body.image} if body.text is None else {"text": body.text, "truncate": site.truncate or None}
    answer = await site.infer(await site.model_named(body.model), request)
    return {**answer.raw, "latency_ms": answer.latency_ms}


_TRANSCRIPTS: Final = {JSON: answers.VERBOSE_TRANSCRIPT | answers.TRANSCRIPT, PLAIN: str}
OPERATIONS: Final = (
    Operation("GET", "/v1/models", list_models, {JSON: answers.MODELS}),
    Operation("GET", "/v1/models/{name}", one_model, {JSON: answers.MODEL}, ModelName),
    Operation("POST", "/v1/embeddings", embeddings, {JSON: answers.EMBEDDINGS}, EmbeddingsBody),
    Operation("POST", "/v1/classify", classify, {JSON: answers.CLASSIFICATIONS}, ClassifyBody),
    Operation("POST", "/v1/rerank", rerank, {JSON: answers.RANKING}, RerankBody),
    Operation("POST", "/v2/rerank", cohere_rerank, {JSON: answers.RANKING}, CohereBody),
    Operation("POST", "/infer", infer, {JSON: dict[str, Any]}, InferBody),
    Operation("POST", "/v1/audio/transcriptions", transcriptions, _TRANSCRIPTS, RecordingBody, FORM),
    Operation("POST", "/v1/audio/translations", translations, _TRANSCRIPTS, RecordingBody, FORM),
)
