"""litellm, by OpenAI's and by Ollama's interface."""

import litellm
from common import BASE, HELLO, TALKER, VECTORS

litellm.telemetry = False
for model, base in ((f"openai/{TALKER}", f"{BASE}/v1"), (f"ollama_chat/{TALKER}", BASE), (f"ollama/{TALKER}", BASE)):
    options = {
        "model": model,
        "api_base": base,
        "api_key": "none",
        "messages": HELLO,
        "max_tokens": 6,
        "temperature": 0,
    }
    whole = litellm.completion(**options).choices[0].message.content
    parts = "".join(chunk.choices[0].delta.content or "" for chunk in litellm.completion(**options, stream=True))
    assert parts.strip() == whole.strip(), (model, parts, whole)
for model, base in ((f"openai/{VECTORS}", f"{BASE}/v1"), (f"ollama/{VECTORS}", BASE)):
    embeddings = litellm.embedding(model=model, api_base=base, api_key="none", input=["the room"])
    assert len(embeddings.data[0]["embedding"]) > 8
print("ok")
