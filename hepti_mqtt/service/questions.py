"""What a request asks of a model's output beyond one answer for each input: rankings, labels of a user's own, spans.

A question is made when the request is read, and answers when the devices have computed: `results` has one object for
each input that the user sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding

from hepti_mqtt.checkpoint import Checkpoint
from hepti_mqtt.errors import UnsupportedModelError
from hepti_mqtt.models.config import JsonConfig
from hepti_mqtt.models.sentences import CrossEncoder, cross_encoder
from hepti_mqtt.models.towers import Similarity
from hepti_mqtt.spec import RequestShape

Floats = npt.NDArray[np.float32]
Result = dict[str, Any]


class Question(Protocol):
    """What is asked of an output of the spec's `output_shape`."""

    def results(self, checkpoint: Checkpoint, shape: RequestShape, output: Floats) -> list[Result]:
        """Return the JSON of each result."""


def softmax(logits: Floats) -> Floats:
    """Return exp(x) / sum(exp(x)) along the last dimension."""
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


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
    """Return how the model's files say that pairs are scored."""
    config = JsonConfig("config.json", checkpoint.config)
    return cross_encoder(config, checkpoint.extras, checkpoint.spec.head.outputs)


# ----------------------------------------------------------------------------------------------------------------------
# Documents by a query.


@dataclass(frozen=True)
class Ranking:
    """Documents, best first: by the score of each pair, or by the similarity to the first of several vectors.

    documents: to be returned, None if not. top_k: None for all. raw: the logits themselves.
    """

    top_k: int | None
    raw: bool = False
    documents: tuple[str, ...] | None = None

    def results(self, checkpoint: Checkpoint, _shape: RequestShape, output: Floats) -> list[Result]:
        """Return the ranking."""
        if checkpoint.spec.head.task == "embedding":
            scores = similarity(checkpoint.text_rules.similarity, output[0], output[1:])
        else:
            scores = output[:, 0] if self.raw else pair_scores(checkpoint, output[:, 0])
        found: list[Result] = [{"index": i, "score": float(scores[i])} for i in best(scores, self.top_k)]
        if self.documents is not None:
            found = [{**one, "document": self.documents[one["index"]]} for one in found]
        return [{"ranking": found}]


def pair_scores(checkpoint: Checkpoint, logits: Floats) -> Floats:
    """Return the scores of pairs; raises UnsupportedModelError for an activation that is not computed."""
    how = scoring(checkpoint)
    if how.sigmoid is None:
        raise UnsupportedModelError(
            f"model {checkpoint.model}: its files want the activation {how.activation!r} for scores, which is not "
            'supported; send "raw_scores": true for scores without it'
        )
    return sigmoid(logits) if how.sigmoid else logits


def similarity(name: str, one: Floats, others: Floats) -> Floats:
    """Return how similar vectors [n, h] are to one [h], by a function of sentence-transformers: more is nearer."""
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
# A user's own labels, by whether a text entails them.


@dataclass(frozen=True)
class OwnLabels:
    """Labels that a text is said to be about; output: the logits of each text with each label.

    several: each label has a score of its own, else they add up to 1. top_k: None for all.
    """

    labels: tuple[str, ...]
    several: bool
    top_k: int | None

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
    """Return the places of a model's labels for `it follows` and `it does not`; (-1, -1) if it has none such.

    As in transformers, what is not named a contradiction is the first label, or the last where that follows.
    """
    names = [label.lower() for label in labels]
    follows = next((i for i, name in enumerate(names) if name.startswith("entail")), -1)
    if follows < 0 or len(labels) < 2:
        return -1, -1
    contradicts = next((i for i, name in enumerate(names) if name.startswith("contra")), -1)
    return follows, contradicts if contradicts >= 0 else (0 if follows else len(labels) - 1)


@dataclass(frozen=True)
class Matched:
    """Labels that a picture is said to show; top_k: None for all."""

    labels: tuple[str, ...]
    similarity: Similarity
    top_k: int | None

    def results(self, _checkpoint: Checkpoint, _shape: RequestShape, output: Floats) -> list[Result]:
        """Return the labels of each picture; output: the vectors of sentences about the labels, then of pictures."""
        factor, bias, apart = self.similarity
        sentences, pictures = np.split(unit(output), [len(self.labels)])
        logits = pictures @ sentences.T * np.float32(factor) + np.float32(bias)
        return labelled(self.labels, (sigmoid if apart else softmax)(logits), self.top_k)


# ----------------------------------------------------------------------------------------------------------------------
# Parts of texts: entities, and answers.


@dataclass(frozen=True)
class Source:
    """One sequence and the texts that it was made of.

    starts, stops: of each token in its text. text: of each token, 0 or 1, or -1 for the model's own tokens. words: by
    token, -1 for none.
    """

    starts: npt.NDArray[np.int32]
    stops: npt.NDArray[np.int32]
    text: npt.NDArray[np.int8]
    words: npt.NDArray[np.int32]

    @classmethod
    def of(cls, encoding: Encoding) -> Source:
        """Return the places of an encoding's tokens."""
        starts, stops = np.array(encoding.offsets, np.int32).reshape(-1, 2).T
        text = [-1 if place is None else place for place in encoding.sequence_ids]
        words = [-1 if word is None else word for word in encoding.word_ids]
        return cls(starts, stops, np.array(text, np.int8), np.array(words, np.int32))


@dataclass(frozen=True)
class Entities:
    """Parts of texts with their labels, as the token classification of transformers has them.

    simple: neighbours with one label are one part. texts, sources: of each sequence; of a user's own ids there are
    none, and the parts are numbers of tokens. own: ids of the model's own tokens among them.
    """

    simple: bool
    texts: tuple[str, ...] = ()
    sources: tuple[Source, ...] = ()
    own: tuple[npt.NDArray[np.bool_], ...] = ()

    def results(self, checkpoint: Checkpoint, shape: RequestShape, output: Floats) -> list[Result]:
        """Return the entities of each sequence."""
        stops = np.cumsum(shape.sizes)
        labels = checkpoint.spec.head.labels
        found = []
        for i, scores in enumerate(np.split(softmax(output), stops[:-1])):
            source = self.sources[i] if self.sources else None
            tokens = np.flatnonzero(source.text == 0 if source is not None else ~self.own[i])
            parts = self._parts(labels, scores, tokens)
            found.append({"entities": [self._entity(i, *part) for part in parts if part[0] != "O"]})
        return found

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
        found: Result = {"label": label, "score": score, "tokens": [first, last + 1]}
        if not self.sources:
            return found
        start, stop = int(self.sources[item].starts[first]), int(self.sources[item].stops[last])
        return found | {"start": start, "end": stop, "text": self.texts[item][start:stop]}


def _kind(label: str) -> str:
    """Return a label without the mark of a part's beginning or inside."""
    return label[2:] if label[:2] in ("B-", "I-") else label


NULL: Final = -10_000.0  # the logit of a token that no answer has


@dataclass(frozen=True)
class Extraction:
    """The part of a context that answers a question, as extractive question answering has it.

    windows: each sequence of the question with a part of the context. most: tokens of an answer. empty: whether the
    answer may be that there is none. Without windows the sequence is a user's own ids, and the answer is tokens of it.
    """

    most: int
    empty: bool = False
    context: str = ""
    windows: tuple[Source, ...] = ()

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
        found: Result = {"answer": self.context[start:stop], "score": score, "start": start, "end": stop}
        if self.empty and nothing > score:
            found = {"answer": "", "score": nothing, "start": 0, "end": 0}
        return [{**found, "no_answer_score": nothing}]

    def _own(self, logits: Floats) -> Result:
        possible = np.arange(len(logits)) > 0
        score, first, last, none = _span(logits, possible if len(logits) > 1 else ~possible, self.most)
        return {"tokens": [first, last + 1], "score": score, "no_answer_score": none}


def _span(logits: Floats, possible: npt.NDArray[np.bool_], most: int) -> tuple[float, int, int, float]:
    """Return score, first and last token of the best answer, and the score of none, which the first token has."""
    chances = []
    for column in logits.T.astype(np.float64):
        kept = np.where(possible | (np.arange(len(column)) == 0), column, NULL)
        chances.append(softmax(kept))
    none = float(chances[0][0] * chances[1][0])
    starts, stops = (np.where(possible, chance, 0.0) for chance in chances)
    ends = range(min(most, len(starts)))
    scores = [starts[: len(starts) - more] * stops[more:] for more in ends]  # of answers of one token, of two ...
    firsts = [int(score.argmax()) for score in scores]
    more = max(ends, key=lambda more: scores[more][firsts[more]])
    return float(scores[more][firsts[more]]), firsts[more], firsts[more] + more, none


def _whole_words(source: Source, first: int, last: int) -> tuple[int, int]:
    """Return where an answer's first word begins in its text and its last one ends."""

    def word(token: int) -> npt.NDArray[np.bool_]:
        inside = (source.words == source.words[token]) & (source.text == source.text[token])
        return np.asarray(inside if source.words[token] >= 0 else np.arange(len(source.text)) == token)

    return int(source.starts[word(first)].min()), int(source.stops[word(last)].max())
