"""huggingface_hub's InferenceClient: chats, vectors, speech, at the gateway's own address."""

from common import BASE, HELLO, TALKER
from huggingface_hub import InferenceClient

client = InferenceClient(base_url=f"{BASE}/v1", api_key="none", timeout=120)
whole = client.chat_completion(HELLO, model=TALKER, max_tokens=6, temperature=0)
parts = client.chat_completion(HELLO, model=TALKER, max_tokens=6, temperature=0, stream=True)
assert "".join(part.choices[0].delta.content or "" for part in parts) == whole.choices[0].message.content
vectors = InferenceClient(model=BASE, timeout=120).feature_extraction("the room")
assert vectors.shape[-1] > 8
print("ok")
