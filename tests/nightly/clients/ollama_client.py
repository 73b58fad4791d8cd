"""Ollama's Python library: lists, show, chats, generate, vectors, tools, formats, loading, errors."""

import json

import ollama
from common import BASE, HELLO, TALKER, TOOL, VECTORS

client = ollama.Client(host=BASE, timeout=120)
listed = {model.model for model in client.list().models}
assert f"{TALKER}:latest" in listed
shown = client.show(TALKER)
assert "completion" in shown.capabilities
assert shown.modelinfo["general.parameter_count"] > 0
assert client.ps().models
whole = client.chat(TALKER, HELLO, options={"num_predict": 8, "temperature": 0, "num_ctx": 4096}, think=False)
assert whole.done
assert whole.eval_duration >= 0
parts = list(client.chat(TALKER, HELLO, options={"num_predict": 8, "temperature": 0}, stream=True))
assert "".join(part.message.content for part in parts) == whole.message.content
assert client.generate(TALKER, "the room", options={"num_predict": 4}).response is not None
assert client.generate(TALKER).done_reason == "load"
assert len(client.embed(VECTORS, ["the room", "a door"]).embeddings) == 2
assert client.embeddings(VECTORS, "the room").embedding
schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
formed = client.chat(TALKER, HELLO, format=schema)
assert "a" in json.loads(formed.message.content)
assert client.chat(TALKER, HELLO, tools=[TOOL], options={"num_predict": 4}).done
for wrong in ({"options": {"mirostat": 2}}, {"think": True}, {"format": "xml"}):
    try:
        client.chat(TALKER, HELLO, **wrong)
    except (ollama.ResponseError, ValueError) as error:
        why = str(error)
    else:
        why = ""
    assert why, wrong
try:
    client.chat("nobody", HELLO)
except ollama.ResponseError as error:
    refused = error.status_code, "nobody" in error.error
else:
    refused = 0, False
assert refused == (404, True)
print("ok")
