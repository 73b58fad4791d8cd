"""Texts by a JSON schema: whatever the model likes, the text is JSON by it; what is no schema is refused."""

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from word_cases import bytes_tokenizer, sentence_piece

from hepti_mqtt.core.errors import ModelError, RequestError
from hepti_mqtt.models.generation import TokenRules
from hepti_mqtt.models.shapes import TokenBatch
from hepti_mqtt.service.answers import decode_output
from hepti_mqtt.service.grammar import JsonGrammar, call_schema, read_choice, read_format, with_schema
from hepti_mqtt.service.requests import ModelInput

pytest.importorskip("llguidance")
PADDED = 5  # rows of the logits that are no token


def opened(tokenizer):
    ends = (tokenizer.token_to_id("<|end|>"),)
    return SimpleNamespace(model="m", has_tokenizer=True, tokenizer=tokenizer, end_tokens=ends, spec=None)


BYTE_LEVEL = bytes_tokenizer('{"', '":', "true", "\u0120{", "}}", special=["<|end|>"])
SENTENCE_PIECE = sentence_piece(["\u2581", '{"', "\u2581{"], ["<s>", "<|end|>"])
OPENED = {"byte level": opened(BYTE_LEVEL), "SentencePiece": opened(SENTENCE_PIECE)}
DOOR = {
    "type": "object",
    "properties": {"door": {"enum": ["front", "back"]}, "open": {"type": "boolean"}, "for": {"enum": [1, 2, None]}},
    "required": ["door", "open"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "additionalProperties": False}
FUNCTIONS = [{"name": "open", "parameters": DOOR}, {"name": "stop", "parameters": NOTHING}]


def is_door(value):
    values = {"door": ("front", "back"), "open": (True, False), "for": (1, 2, None)}
    return {"door", "open"} <= value.keys() and all(one in values[key] for key, one in value.items())


def is_call(value):
    right = {"open": is_door, "stop": lambda given: given == {}}
    return value.keys() == {"name", "arguments"} and right[value["name"]](value["arguments"])


SCHEMAS = {"an object": (DOOR, is_door), "a call": (call_schema(FUNCTIONS, "arguments"), is_call)}


@pytest.mark.parametrize("name", OPENED)
@pytest.mark.parametrize("schema", SCHEMAS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_text_is_json_by_its_schema_whatever_the_model_likes(name, schema, temperature):
    checkpoint, (wanted, fits) = OPENED[name], SCHEMAS[schema]
    vocab = checkpoint.tokenizer.get_vocab_size() + PADDED
    for seed in range(10):
        rng, tokens = np.random.default_rng(seed), []
        rules = with_schema(checkpoint, TokenRules(checkpoint.end_tokens, seed=seed), wanted, vocab)
        while not rules.ends(tokens):
            logits = rng.standard_normal((1, vocab), np.float32) * 4
            token, _ = rules.choose(logits, tokens, temperature)
            if len(tokens) % 7 == 3:  # as after a run that was lost
                rules.choose(logits, tokens[:2], temperature)
                assert rules.choose(logits, tokens, temperature)[0] == token
            tokens.append(token)
            assert len(tokens) < 400
        assert fits(json.loads(checkpoint.tokenizer.decode(tokens)))
        for most, why in ((len(tokens), "stop"), (len(tokens) - 1, "length")):
            prepared = ModelInput(TokenBatch((1,)), np.zeros(2), False, 0, new_tokens=most, rules=rules)
            assert decode_output(checkpoint, prepared, np.array(tokens[:most]))["finish"] == why


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "door"},
        {"properties": 5},
        {"$ref": "#/nowhere"},
        {"$ref": "#"},
        {"type": "string", "pattern": "("},
        {"type": "object", "unevaluatedProperties": False},
        {"enum": []},
        {"description": "x" * 200_000},
    ],
)
def test_a_schema_that_is_none_or_not_supported_is_refused(schema):
    with pytest.raises(RequestError):
        JsonGrammar(OPENED["byte level"], schema, 300)


def test_no_token_at_all_is_an_error_and_no_text():
    grammar = JsonGrammar(OPENED["byte level"], DOOR, 8)  # all tokens that the schema allows are beyond the logits
    with pytest.raises(ModelError):
        grammar.allowed([])


@pytest.mark.parametrize(
    ("value", "schema"),
    [
        *((value, None) for value in (None, {"type": "text"})),
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_schema", "json_schema": {"name": "d", "schema": DOOR}}, DOOR),
        *((value, RequestError) for value in ("json", {"type": "xml"}, {"type": "json_schema"}, [])),
        ({"type": "json_schema", "json_schema": {"schema": "x"}}, RequestError),
    ],
)
def test_formats(value, schema):
    if schema is RequestError:
        with pytest.raises(RequestError):
            read_format(value)
    else:
        assert read_format(value) == schema


TOOLS = [{"type": "function", "function": function} for function in FUNCTIONS]


@pytest.mark.parametrize(
    ("choice", "tools", "names"),
    [
        (None, TOOLS, []),
        ("auto", None, []),
        ("required", TOOLS, ["open", "stop"]),
        ({"type": "function", "function": {"name": "stop"}}, TOOLS, ["stop"]),
        ("required", None, None),
        ("any", TOOLS, None),
        ({"type": "function", "function": {"name": "close"}}, TOOLS, None),
        ({"function": 5}, TOOLS, None),
        (5, TOOLS, None),
    ],
)
def test_a_choice_of_tools_names_what_must_be_called(choice, tools, names):
    if names is None:
        with pytest.raises(RequestError):
            read_choice(choice, tools)
    else:
        assert [function["name"] for function in read_choice(choice, tools)] == names


def test_without_the_library_a_schema_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError):
        JsonGrammar(OPENED["byte level"], DOOR, 300)
