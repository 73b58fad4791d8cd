"""The routes of Text Embeddings Inference (TEI); their bodies name no model."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, ClassVar, Final, Literal

import numpy as np
from pydantic import Field

from hepti_mqtt import __version__
from hepti_mqtt.core.errors import RequestError
from hepti_mqtt.gateway.answers import LABEL, TEI_INFO, TEI_RANK
from hepti_mqtt.gateway.bodies import TEXTS_AT_ONCE, Body, Count, Key, TextList, Texts, checked
from hepti_mqtt.gateway.operations import JSON, PLAIN, Operation
from hepti_mqtt.gateway.routes import Documents, RerankBody
from hepti_mqtt.gateway.routes import rerank as rank_documents
from hepti_mqtt.gateway.site import Site
from hepti_mqtt.service.options import OPTIONS
from hepti_mqtt.service.task_outputs import unit

UNIT: Final = 1e-3  # how far the length of a normalised vector may be from 1


class Cut(Body):
    """Truncation of long texts, at their end only."""

    truncate: bool = False
    truncation_direction: Annotated[
        Literal["Right", "right"], Field(description="'Right': texts are cut at their end only")
    ] = "Right"


class EmbedAllBody(Cut):
    """Texts to embed token by token."""

    keys: ClassVar = {"prompt_name": Key(OPTIONS["prompt"])}
    inputs: Texts


class EmbedBody(EmbedAllBody):
    """Texts to embed."""

    keys: ClassVar = {**EmbedAllBody.keys, "dimensions": Key(OPTIONS["dimensions"])}
    normalize: bool = True


Words = Annotated[list[str], Field(min_length=1, max_length=2)]
Inputs = Annotated[
    str | Words | Annotated[list[Words], Field(min_length=1, max_length=TEXTS_AT_ONCE)],
    Field(description="a text, a list of one or two texts, or a list of such lists"),
]


class ClassifyParameters(Body):
    """Hugging Face's parameters of a text classification."""

    top_k: Count | None = None
    function_to_apply: Literal["none"] | None = None


class PredictBody(Cut):
    """Texts or pairs to classify."""

    inputs: Inputs
    raw_scores: bool = False
    parameters: ClassifyParameters = ClassifyParameters()


class RankBody(RerankBody, Cut):
    """A query, and texts (TEI) or documents (Jina) to rank."""

    texts: TextList | None = None
    raw_scores: bool = False
    return_text: bool = False
    documents: Documents | None = None  # type: ignore[assignment]


class SimilarityInputs(Body):
    """A sentence, and sentences to compare with it."""

    source_sentence: str
    sentences: TextList


class SimilarityBody(Body):
    """Sentences to compare."""

    inputs: SimilarityInputs
    parameters: Cut = Cut()


class AnyBody(Body):
    """The body of the model's own route."""

    inputs: Annotated[str | list[Any] | dict[str, Any], Field(description="what the model's own route reads")]
    parameters: dict[str, Any] = Field(default_factory=dict)
    #: Hugging Face's: whether an answer may be of another process, and whether to wait
    options: dict[str, Any] = Field(default_factory=dict)


async def embed(site: Site, body: EmbedBody) -> Any:
    """Embeddings, as TEI gives them."""
    model = await site.model_named(None)
    vectors = await site.embed(model, body.inputs, body.truncate, **body.chosen)
    if body.normalize:
        return unit(vectors.items).tolist()
    if np.all(np.abs(np.linalg.norm(vectors.items, axis=1) - 1) < UNIT):
        raise RequestError("normalize false: this model normalises its embeddings itself; leave normalize out")
    return vectors.items.tolist()


async def embed_all(site: Site, body: EmbedAllBody) -> Any:
    """The final hidden states of all tokens of each text."""
    model = await site.model_named(None)
    hidden = await site.hidden(model, body.inputs, body.truncate, **body.chosen)
    return [states.tolist() for states in hidden]


async def predict(site: Site, body: PredictBody) -> Any:
    """Labels with scores of one text or pair, or of each of a list of lists of one or two texts."""
    inputs = body.inputs
    several = isinstance(inputs, list) and isinstance(inputs[0], list)
    items = inputs if several else [[inputs] if isinstance(inputs, str) else inputs]
    model = await site.model_named(None)
    raw = body.raw_scores or body.parameters.function_to_apply == "none"
    options = {"truncate": body.truncate or None, "raw_scores": raw or None, "top_k": body.parameters.top_k}
    by_place: dict[int, Any] = {}
    for size, key in ((1, "texts"), (2, "pairs")):
        places = [place for place, one in enumerate(items) if len(one) == size]
        if places:
            given = [items[place][0] if size == 1 else items[place] for place in places]
            by_place |= zip(places, (await site.classify(model, given, key, **options)).items, strict=True)
    labels = [by_place[place] for place in range(len(items))]
    return labels if several else labels[0]


async def rerank(site: Site, body: RankBody) -> Any:
    """Texts by their score for a query: sigmoids of the logits, or the logits; or documents, as Jina has them."""
    if body.documents is not None:
        return await rank_documents(site, body)
    if body.texts is None:
        raise RequestError("the body lacks 'texts' (or, as Jina has it, 'documents')", "texts")
    texts = body.texts
    ranking = await site.rank(await site.model_named(None), body.query, texts, body.truncate, raw_scores=True)
    score = (lambda raw: raw) if body.raw_scores else (lambda raw: float(0.5 * (1 + np.tanh(raw / 2))))
    return [
        {"index": one["index"], "score": score(one["score"])}
        | ({"text": texts[one["index"]]} if body.return_text else {})
        for one in ranking.items[: body.top_n]
    ]


async def similarity(site: Site, body: SimilarityBody) -> Any:
    """Of each sentence to the source sentence, in their order."""
    source, sentences = body.inputs.source_sentence, body.inputs.sentences
    ranking = await site.rank(await site.model_named(None), source, sentences, body.parameters.truncate)
    # A cosine in f32 may exceed 1 by rounding.
    bound = 1.0 if max(one["score"] for one in ranking.items) < 1 + UNIT else np.inf
    return [min(one["score"], bound) for one in sorted(ranking.items, key=lambda one: int(one["index"]))]


async def by_task(site: Site, body: AnyBody) -> Any:
    """The answer of the model's own route, for Hugging Face's clients."""
    card = await site.card(await site.model_named(None))
    compares = isinstance(body.inputs, dict) and "sentences" in body.inputs
    reads, handler = (
        (SimilarityBody, similarity) if compares else _BY_TASK.get(str(card.get("task")), (EmbedBody, embed))
    )
    values = {"inputs": body.inputs, **(body.parameters if reads is EmbedBody else {"parameters": body.parameters})}
    return await handler(site, checked(reads, values))


async def info(site: Site, _body: None) -> Any:
    """The served model."""
    return {
        "model_id": await site.model_named(None),
        "version": __version__,
        "max_client_batch_size": TEXTS_AT_ONCE,
        "auto_truncate": site.truncate,
    }


async def health(site: Site, _body: None) -> Any:
    """Whether a planner answers."""
    await site.models()
    return "ok"


_BY_TASK: Final[dict[str, tuple[type[Body], Callable[[Site, Any], Awaitable[Any]]]]] = {
    "embedding": (EmbedBody, embed),
    "classification": (PredictBody, predict),
}


Vectors = list[list[float]]
OPERATIONS: Final = (
    Operation("POST", "/embed", embed, {JSON: Vectors}, EmbedBody),
    Operation("POST", "/embed_all", embed_all, {JSON: list[Vectors]}, EmbedAllBody),
    Operation("POST", "/predict", predict, {JSON: list[LABEL] | list[list[LABEL]]}, PredictBody),
    Operation("POST", "/rerank", rerank, {JSON: list[TEI_RANK] | dict[str, Any]}, RankBody),
    Operation("POST", "/similarity", similarity, {JSON: list[float]}, SimilarityBody),
    Operation("POST", "/", by_task, {JSON: list[Any]}, AnyBody),
    Operation("GET", "/info", info, {JSON: TEI_INFO}),
    Operation("GET", "/health", health, {PLAIN: str}, is_open=True),
)
