"""Answers as arrays, errors as exceptions."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from hepti_mqtt import errors
from hepti_mqtt.client import Answer
from hepti_mqtt.client.session import error_from


def answer(result):
    return Answer({"id": "q", "model": "m", "ok": True, "result": result, "plan": {"id": "1.1"}, "tokens": 3}, 1.5)


def test_embeddings_are_arrays():
    one = answer({"embedding": [1.0, 2.0]})
    assert one.embedding.dtype == np.float32
    assert one.embedding.tolist() == [1.0, 2.0]
    two = answer({"results": [{"embedding": [1.0]}, {"embedding": [2.0]}]})
    assert two.embeddings.tolist() == [[1.0], [2.0]]
    with pytest.raises(errors.RequestError, match="2 embeddings"):
        _ = two.embedding
    assert (one.id, one.model, one.plan, one.tokens, one.latency_ms) == ("q", "m", {"id": "1.1"}, 3, 1.5)


def test_labels_and_masks_follow_the_form_of_the_request():
    entry = {"label": "cat", "score": 0.9}
    assert answer({"labels": [entry]}).labels == [entry]
    assert answer({"results": [{"labels": [entry]}]}).labels == [[entry]]
    assert answer({"masks": [{"position": 1}]}).masks == [{"position": 1}]
    with pytest.raises(errors.RequestError, match="no embedding; it has labels"):
        _ = answer({"labels": [entry]}).embeddings


def test_hidden_states_are_decoded():
    values = np.arange(6, dtype="<f4").reshape(3, 2)
    data = base64.b64encode(values.tobytes()).decode()
    np.testing.assert_array_equal(answer({"dtype": "f32", "shape": [3, 2], "base64": data}).hidden, values)
    with pytest.raises(errors.RequestError, match="hidden"):
        _ = answer({"embedding": []}).hidden


def tree(cls):
    return [cls, *(d for child in cls.__subclasses__() for d in tree(child))]


@pytest.mark.parametrize("cls", [c for c in tree(errors.HeptiError) if c.__module__ == errors.__name__])
def test_every_error_comes_back_as_its_own_class(cls):
    error = error_from({"ok": False, "error": {"code": cls.code, "message": "why"}})
    assert type(error) is cls
    assert str(error) == "why"


def test_an_answer_without_a_result_says_why():
    answer = Answer({"id": "1", "model": "m", "ok": True, "result": None}, 1.0)
    assert answer.result is None
    for what in ("embedding", "labels", "masks", "hidden"):
        with pytest.raises(errors.RequestError, match="the answer has no"):
            getattr(answer, what)


def test_unknown_codes_are_remote_errors_and_nonsense_is_a_wire_error():
    assert type(error_from({"error": {"code": "from-the-future", "message": "x"}})) is errors.RemoteError
    for nonsense in ({}, {"error": "x"}, {"error": {"code": "failed"}}):
        with pytest.raises(errors.WireError):
            error_from(nonsense)
