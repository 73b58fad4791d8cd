"""Conversions of outputs beyond the model's task: rankings, a user's own labels, spans of text.

The request handler builds a question with the request. After the run, `results` returns an object per input of the
user.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding

from hepti_mqtt.checkpoint import Checkpoint
from hepti_mqtt.core.errors import UnsupportedModelError
from hepti_mqtt.core.spec import RequestShape
from hepti_mqtt.models.config import JsonConfig
from hepti_mqtt.models.plain import softmax
from hepti_mqtt.models.sentences import CrossEncoder, cross_encoder
from hepti_mqtt.models.towers import Similarity

Floats = npt.NDArray[np.float32]
Result = dict[str, Any]


class Question(Protocol):
    """Conversion of an output of the spec's `output_shape` to results."""

    def results(self, checkpoint: Checkpoint, shape: RequestShape, output: Floats) -> list[Result]:
        """Return the JSON of each result."""


def sigmoid(logits: Floats) -> Floats:
    """Return 1 / (1 + exp(-x)) of each element."""
    return np.asarray(0.5 * (1 + np.tanh(logits / 2)))


def best(scores: Floats, count: int | None = None) -> list[int]:
    """Return the indices of the best scores, best first; ties by index."""
    order: list[int] = np.argsort(-scores, kind="stable")[:count].tolist()
    return order


def labelled(labels: Sequence[str], scores: Floats, count: int | None) -> list[Result]:
    """Return the labels of each row of scores, best first."""
    return [{"labels": [{"label": labels[i], "score": float(row[i])} for i in best(row, count)]} for row in scores]


def scoring(checkpoint: Checkpoint) -> CrossEncoder:
    """Return the cross-encoder settings of the model's files."""
    config = JsonConfig("config.json", checkpoint.config)
    return cross_encoder(config, checkpoint.extras, checkpoint.spec.head.outputs)


# ----------------------------------------------------------------------------------------------------------------------
# Ranking of documents.


@dataclass(frozen=True)
class Ranking:
    """Rank documents by the score of each pair, or by the similarity to the first vector, the query's."""

    top_k: int | None  #: None for all
    raw: bool = False  #: scores are logits
    documents: tuple[str, ...] | None = None  #: texts to return, None for indices only

    def results(self, checkpoint: Checkpoint, _shape: RequestShape, output: Floats) -> list[Result]:
        """Return the ranking."""
        if checkpoint.spec.head.task == "embedding":
            scores = similarity(checkpoint.text_rules.similarity, output[0], output[1:])
        else:
            scores = output[:, 0] if self.raw else pair_scores(checkpoint, output[:, 0])
        ranking: list[Result] = [{"index": i, "score": float(scores[i])} for i in best(scores, self.top_k)]
        if self.documents is not None:
            ranking = [{**one, "document": self.documents[one["index"]]} for one in ranking]
        return [{"ranking": ranking}]


def pair_scores(checkpoint: Checkpoint, logits: Floats) -> Floats:
    """Return the scores of pairs; raises UnsupportedModelError for an unsupported activation."""
    how = scoring(checkpoint)
    if how.sigmoid is None:
        raise UnsupportedModelError(
            f"model {checkpoint.model}: its files require the activation {how.activation!r} for scores, which is not "
            'supported; send "raw_scores": true for scores without it'
        )
    return sigmoid(logits) if how.sigmoid else logits


def similarity(name: str, one: Floats, others: Floats) -> Floats:
    """Return the similarity of vectors [n, h] to a vector [h], by a function of sentence-transformers."""
    if name == "euclidean":
        return np.asarray(-np.linalg.norm(others - one, axis=1))
    if name == "manhattan":
        return np.asarray(-np.abs(others - one).sum(axis=1))
    if name == "cosine":
        one, others = unit(one), unit(others)
    return np.asarray(others @ one)


def unit(vectors: Floats) -> Floats:
    """Return vectors [..., h] of length 1; zeros stay."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return np.asarray(vectors / np.maximum(lengths, np.float32(1e-12)))


# ----------------------------------------------------------------------------------------------------------------------
# A user's own labels (zero-shot classification).


@dataclass(frozen=True)
class OwnLabels:
    """Zero-shot classification of texts; output: the entailment logits of each text with each label."""

    labels: tuple[str, ...]
    several: bool  #: score labels independently, else the scores add up to 1
    top_k: int | None  #: None for all

    def results(self, checkpoint: Checkpoint, _shape: RequestShape, output: Floats) -> list[Result]:
        """Return the labels of each text."""
        entailed, against = entailment(checkpoint.spec.head.labels)
        by_text = output.reshape(-1, len(self.labels), output.shape[1])
        if self.several or len(self.labels) == 1:
            scores = softmax(by_text[:, :, [against, entailed]])[:, :, 1]
        else:
            scores = softmax(by_text[:, :, entailed])
        return labelled(self.labels, scores, self.top_k)


def entailment(labels: Sequence[str]) -> tuple[int, int]:
    """Return the indices of a model's labels for entailment and contradiction; (-1, -1) without entailment.

    As in transformers, the contradiction defaults to the first label, or to the last label if the first is entailment.
    """
    names = [label.lower() for label in labels]
    follows = next((i for i, name in enumerate(names) if name.startswith("entail")), -1)
    if follows < 0 or len(labels) < 2:
        return -1, -1
    contradicts = next((i for i, name in enumerate(names) if name.startswith("contra")), -1)
    return follows, contradicts if contradicts >= 0 else (0 if follows else len(labels) - 1)


@dataclass(frozen=True)
class Matched:
    """Zero-shot classification of pictures; top_k: None for all."""

    labels: tuple[str, ...]
    similarity: Similarity
    top_k: int | None

    def results(self, _checkpoint: Checkpoint, _shape: RequestShape, output: Floats) -> list[Result]:
        """Return the labels of each picture; output: vectors of the labels' sentences, then of the pictures."""
        factor, bias, apart = self.similarity
        sentences, pictures = np.split(unit(output), [len(self.labels)])
        logits = pictures @ sentences.T * np.float32(factor) + np.float32(bias)
        return labelled(self.labels, (sigmoid if apart else softmax)(logits), self.top_k)


# ----------------------------------------------------------------------------------------------------------------------
# Spans of texts: entities and answers.


@dataclass(frozen=True)
class Source:
    """Positions of a sequence's tokens in its source texts."""

    starts: npt.NDArray[np.int32]  #: of each token in its text
    stops: npt.NDArray[np.int32]
    text: npt.NDArray[np.int8]  #: index of each token's text, -1 for special tokens
    words: npt.NDArray[np.int32]  #: word index of each token, -1 without a word

    @classmethod
    def of(cls, encoding: Encoding) -> Source:
        """Return the positions of an encoding's tokens."""
        starts, stops = np.array(encoding.offsets, np.int32).reshape(-1, 2).T
        text = [-1 if place is None else place for place in encoding.sequence_ids]
        words = [-1 if word is None else word for word in encoding.word_ids]
        return cls(starts, stops, np.array(text, np.int8), np.array(words, np.int32))


@dataclass(frozen=True)
class Entities:
    """Labelled spans of texts, as in transformers' token classification."""

    simple: bool  #: join neighbouring tokens with the same label
    texts: tuple[str, ...] = ()  #: of each sequence, () for a user's own ids
    sources: tuple[Source, ...] = ()  #: of each sequence, () for a user's own ids; spans are then token indices
    own: tuple[npt.NDArray[np.bool_], ...] = ()  #: masks of special tokens in a user's own ids

    def results(self, checkpoint: Checkpoint, shape: RequestShape, output: Floats) -> list[Result]:
        """Return the entities of each sequence."""
        stops = np.cumsum(shape.sizes)
        labels = checkpoint.spec.head.labels
        results = []
        for i, scores in enumerate(np.split(softmax(output), stops[:-1])):
            source = self.sources[i] if self.sources else None
            tokens = np.flatnonzero(source.text == 0 if source is not None else ~self.own[i])
            parts = self._parts(labels, scores, tokens)
            results.append({"entities": [self._entity(i, *part) for part in parts if part[0] != "O"]})
        return results

    def _parts(
        self, labels: Sequence[str], scores: Floats, tokens: npt.NDArray[np.intp]
    ) -> Iterator[tuple[str, float, int, int]]:
        """Yield label, score, first and last token of each part."""
        chosen = scores.argmax(axis=1)
        group: list[int] = []
        for token in tokens.tolist():
            label = labels[chosen[token]]
            before = labels[chosen[group[-1]]] if group else ""
            if group and not (self.simple and _kind(label) == _kind(before) and not label.startswith("B-")):
                yield self._part(labels[chosen[group[0]]], scores, chosen, group)
                group = []
            group.append(token)
        if group:
            yield self._part(labels[chosen[group[0]]], scores, chosen, group)

    def _part(
        self, label: str, scores: Floats, chosen: npt.NDArray[np.intp], group: Sequence[int]
    ) -> tuple[str, float, int, int]:
        score = float(np.mean([scores[token, chosen[token]] for token in group]))
        return _kind(label) if self.simple else label, score, group[0], group[-1]

    def _entity(self, item: int, label: str, score: float, first: int, last: int) -> Result:
        entity: Result = {"label": label, "score": score, "tokens": [first, last + 1]}
        if not self.sources:
            return entity
        start, stop = int(self.sources[item].starts[first]), int(self.sources[item].stops[last])
        return entity | {"start": start, "end": stop, "text": self.texts[item][start:stop]}


def _kind(label: str) -> str:
    """Return a label without its prefix B- or I-."""
    return label[2:] if label[:2] in ("B-", "I-") else label


NULL: Final = -10_000.0  # logit of excluded tokens


@dataclass(frozen=True)
class Extraction:
    """Extractive question answering: the span of a context that answers a question."""

    most: int  #: tokens of an answer
    empty: bool = False  #: allow an empty answer
    context: str = ""
    windows: tuple[Source, ...] = ()  #: question and part of the context; () for a user's own ids, answered by tokens

    def results(self, _checkpoint: Checkpoint, shape: RequestShape, output: Floats) -> list[Result]:
        """Return the answer."""
        parts = np.split(output, np.cumsum(shape.sizes)[:-1])
        if not self.windows:
            return [self._own(part) for part in parts]
        spans, nothing = [], 1.0
        for source, logits in zip(self.windows, parts, strict=True):
            score, first, last, none = _span(logits, source.text == 1, self.most)
            spans.append((score, *_whole_words(source, first, last)))
            nothing = min(nothing, none)
        score, start, stop = max(spans, key=lambda span: span[0])
        answer: Result = {"answer": self.context[start:stop], "score": score, "start": start, "end": stop}
        if self.empty and nothing > score:
            answer = {"answer": "", "score": nothing, "start": 0, "end": 0}
        return [{**answer, "no_answer_score": nothing}]

    def _own(self, logits: Floats) -> Result:
        possible = np.arange(len(logits)) > 0
        score, first, last, none = _span(logits, possible if len(logits) > 1 else ~possible, self.most)
        return {"tokens": [first, last + 1], "score": score, "no_answer_score": none}


def _span(logits: Floats, possible: npt.NDArray[np.bool_], most: int) -> tuple[float, int, int, float]:
    """Return score, first and last token of the best answer, and the score of no answer (of the first token)."""
    chances = []
    for column in logits.T.astype(np.float64):
        kept = np.where(possible | (np.arange(len(column)) == 0), column, NULL)
        chances.append(softmax(kept))
    none = float(chances[0][0] * chances[1][0])
    starts, stops = (np.where(possible, chance, 0.0) for chance in chances)
    ends = range(min(most, len(starts)))
    scores = [
        starts[: len(starts) - more] * stops[more:] for more in ends
    ]  # by answer length: one token, two tokens, ...
    firsts = [int(score.argmax()) for score in scores]
    more = max(ends, key=lambda more: scores[more][firsts[more]])
    return float(scores[more][firsts[more]]), firsts[more], firsts[more] + more, none


def _whole_words(source: Source, first: int, last: int) -> tuple[int, int]:
    """Return the start of an answer's first word in its text, and the end of its last word."""

    def word(token: int) -> npt.NDArray[np.bool_]:
        inside = (source.words == source.words[token]) & (source.text == source.text[token])
        return np.asarray(inside if source.words[token] >= 0 else np.arange(len(source.text)) == token)

    return int(source.starts[word(first)].min()), int(source.stops[word(last)].max())
