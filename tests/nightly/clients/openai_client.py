"""OpenAI's Python library: models, vectors, chats, completions, responses, streams, tools, formats, speech, errors."""

import io
import json
import wave

import openai
from common import BASE, HELLO, SPEECH, TALKER, TOOL, VECTORS

client = openai.OpenAI(base_url=f"{BASE}/v1", api_key="none", max_retries=0, timeout=120)
assert TALKER in {model.id for model in client.models.list()}
assert client.models.retrieve(TALKER).id == TALKER
embeddings = client.embeddings.create(model=VECTORS, input=["the room", "a door"])
assert len(embeddings.data) == 2
assert len(embeddings.data[0].embedding) > 8

whole = client.chat.completions.create(model=TALKER, messages=HELLO, max_tokens=8, temperature=0, n=1, seed=-5)
assert whole.usage.completion_tokens <= 8
assert whole.usage.prompt_tokens_details.cached_tokens >= 0
parts = client.chat.completions.create(
    model=TALKER, messages=HELLO, max_tokens=8, temperature=0, stream=True, stream_options={"include_usage": True}
)
chunks = list(parts)
text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
assert text == whole.choices[0].message.content
assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
longest = client.chat.completions.create(model=TALKER, messages=HELLO, max_completion_tokens=128_000)
assert longest.choices[0].finish_reason in ("stop", "length")

both = client.completions.create(model=TALKER, prompt=["the room", "a door"], max_tokens=3)
assert [choice.index for choice in both.choices] == [0, 1]

called = client.chat.completions.create(model=TALKER, messages=HELLO, tools=[TOOL], tool_choice="required")
(call,) = called.choices[0].message.tool_calls
assert call.function.name == "light"
assert isinstance(json.loads(call.function.arguments)["on"], bool)
turns = [*HELLO, called.choices[0].message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "ok"}]
assert client.chat.completions.create(model=TALKER, messages=turns, tools=[TOOL], max_tokens=4).choices

schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
formed = client.chat.completions.create(
    model=TALKER,
    messages=HELLO,
    response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
)
assert isinstance(json.loads(formed.choices[0].message.content)["a"], bool)

response = client.responses.create(model=TALKER, input="the room", max_output_tokens=8, temperature=0)
assert response.status in ("completed", "incomplete")
assert response.output_text == text
with client.responses.stream(model=TALKER, input="the room", max_output_tokens=8, temperature=0) as stream:
    events = list(stream)
shown = "".join(one.delta for one in events if one.type == "response.output_text.delta")
assert events[-1].response.output_text == shown == text

for wrong, param in (({"n": 2}, "n"), ({"temperature": 9}, "temperature"), ({"extra_body": {"foo": 1}}, "foo")):
    try:
        client.chat.completions.create(model=TALKER, messages=HELLO, **wrong)
    except openai.BadRequestError as error:
        refused = error.param
    else:
        refused = None
    assert refused == param, wrong
try:
    client.chat.completions.create(model=TALKER, messages=[{"role": "user", "content": "the room " * 5000}])
except openai.BadRequestError as error:
    code = error.code
else:
    code = None
assert code == "context_length_exceeded"

file = io.BytesIO()
with wave.open(file, "wb") as out:
    out.setparams((1, 2, 16_000, 0, "NONE", ""))
    out.writeframes(bytes(8000))
assert client.audio.transcriptions.create(model=SPEECH, file=("a.wav", file.getvalue())).text == ""
print("ok")
