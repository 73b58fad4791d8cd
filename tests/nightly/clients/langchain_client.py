"""LangChain: ChatOpenAI, OpenAI, OpenAIEmbeddings, ChatOllama, OllamaLLM, OllamaEmbeddings."""

from common import BASE, TALKER, TOOL, VECTORS
from langchain_ollama import ChatOllama, OllamaEmbeddings, OllamaLLM
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

opened = {"base_url": f"{BASE}/v1", "api_key": "none", "max_retries": 0}
chat = ChatOpenAI(model=TALKER, max_tokens=6, temperature=0, **opened)
whole = chat.invoke("the room").content
assert "".join(part.content for part in chat.stream("the room")) == whole
called = ChatOpenAI(model=TALKER, **opened).bind_tools([TOOL], tool_choice="required").invoke("the room")
assert called.tool_calls[0]["name"] == "light"
text = OpenAI(model=TALKER, max_tokens=6, temperature=0, **opened)
assert isinstance(text.invoke("the room"), str)
assert len(text.generate(["the room", "a door"]).generations) == 2
assert "".join(text.stream("the room")) == text.invoke("the room")
vectors = OpenAIEmbeddings(model=VECTORS, check_embedding_ctx_length=False, **opened)
assert len(vectors.embed_documents(["the room", "a door"])) == 2
assert isinstance(ChatOllama(model=TALKER, base_url=BASE, num_predict=6).invoke("the room").content, str)
assert isinstance(OllamaLLM(model=TALKER, base_url=BASE, num_predict=6).invoke("the room"), str)
assert OllamaEmbeddings(model=VECTORS, base_url=BASE).embed_query("the room")
print("ok")
