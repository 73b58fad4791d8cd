"""Types of the gateway's answers for its OpenAPI document; handlers write the answers themselves."""

from __future__ import annotations

from typing import Any, NotRequired

from typing_extensions import TypedDict


def shape(name: str, about: str, /, **fields: Any) -> Any:
    """Return the type of an object in JSON; [kind] stands for a list of a kind."""
    kinds = {key: list[kind[0]] if isinstance(kind, list) else kind for key, kind in fields.items()}  # type: ignore[valid-type]
    kind_of_answer = TypedDict(name, kinds)  # type: ignore[misc]
    kind_of_answer.__doc__ = about
    return kind_of_answer


Object, Missing = dict[str, Any], NotRequired

_ERROR = shape("ErrorBody", "An error; param: the key at fault.", message=str, type=str, param=str | None, code=str)
ERROR = shape("Error", "An error in OpenAI's shape.", error=_ERROR)
OLLAMA_ERROR = shape("OllamaError", "An error in Ollama's shape.", error=str)

# -- OpenAI, Jina and Cohere -------------------------------------------------------------------------------------------

USAGE = shape("Usage", "Tokens of a request.", prompt_tokens=int, total_tokens=int)
_LIST: dict[str, Any] = {"object": str}
MODEL = shape("Model", "A served model.", id=str, object=str, created=int, owned_by=str)
MODELS = shape("Models", "The served models.", **_LIST, data=[MODEL])
_EMBEDDING = shape(
    "Embedding",
    "A vector: numbers, or base64 of little-endian f32.",
    object=str, index=int, embedding=list[float] | str,
)  # fmt: skip
_OF_MODEL: dict[str, Any] = {"model": str, "usage": USAGE}
EMBEDDINGS = shape("Embeddings", "Vectors in the order of the texts.", **_LIST, data=[_EMBEDDING], **_OF_MODEL)
LABEL = shape("Label", "A label with its score.", label=str, score=float)
_LABELLED = shape("Classification", "Labels of an input, best first.", index=int, label=str, labels=[LABEL])
CLASSIFICATIONS = shape("Classifications", "Labels in the order of the inputs.", **_LIST, data=[_LABELLED], **_OF_MODEL)
_RANKED = shape("Ranked", "A document's place.", index=int, relevance_score=float, document=Missing[dict[str, str]])
RANKING = shape("Ranking", "Documents, best first.", model=str, results=[_RANKED], usage=USAGE)
_SEGMENT = shape(
    "Segment",
    "A part of a transcript.",
    id=int, seek=int, start=float, end=float, text=str, tokens=[int], temperature=float, avg_logprob=float,
    compression_ratio=float, no_speech_prob=float,
)  # fmt: skip
_SPOKEN = shape("SpokenWord", "A word, and when it is said.", word=str, start=float, end=float)
VERBOSE_TRANSCRIPT = shape(
    "VerboseTranscript",
    "A transcript with times.",
    task=str, language=str, duration=float, text=str,
    segments=Missing[list[_SEGMENT]], words=Missing[list[_SPOKEN]],  # type: ignore[valid-type]
)  # fmt: skip
TRANSCRIPT = shape("Transcript", "A transcript.", text=str)

_CACHED = shape("CachedTokens", "Tokens of a prompt that were computed before.", cached_tokens=int)
_WRITTEN = shape(
    "CompletionUsage",
    "Tokens of prompt and text.",
    prompt_tokens=int, completion_tokens=int, total_tokens=int, prompt_tokens_details=_CACHED,
)  # fmt: skip
_ABOUT: dict[str, Any] = {"id": str, "object": str, "created": int, "model": str}
_END: dict[str, Any] = {"logprobs": Object | None, "finish_reason": str}
_CHAT_CHOICE = shape("ChatChoice", "A message.", index=int, message=Object, **_END)
_TEXT_CHOICE = shape("TextChoice", "A text.", index=int, text=str, **_END)
CHAT = shape("ChatCompletion", "The next message of a conversation.", **_ABOUT, choices=[_CHAT_CHOICE], usage=_WRITTEN)
COMPLETION = shape("Completion", "The continuation of texts.", **_ABOUT, choices=[_TEXT_CHOICE], usage=_WRITTEN)

# -- Ollama ------------------------------------------------------------------------------------------------------------

_DURATIONS: dict[str, Any] = dict.fromkeys(
    ("total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration", "eval_count", "eval_duration"),
    Missing[int],
)
_WHOLE: dict[str, Any] = {"model": str, "created_at": str, "done": bool, "done_reason": str, **_DURATIONS}
OLLAMA_MESSAGE = shape("OllamaMessage", "The next message.", **_WHOLE, message=Object)
OLLAMA_TEXT = shape("OllamaText", "A continuation.", **_WHOLE, response=str, thinking=Missing[str])
OLLAMA_EMBEDDINGS = shape(
    "OllamaEmbeddings",
    "Vectors in the order of the texts.",
    model=str, embeddings=[list[float]], total_duration=int, load_duration=int, prompt_eval_count=int,
)  # fmt: skip
_OLLAMA_MODEL = shape(
    "OllamaModel", "A model of a list.", name=str, model=str, modified_at=str, size=int, digest=str, details=Object
)
OLLAMA_MODELS = shape("OllamaModels", "The served models.", models=[_OLLAMA_MODEL])

# -- others ------------------------------------------------------------------------------------------------------------

TEI_RANK = shape("TeiRank", "A text's place.", index=int, score=float, text=Missing[str])
TEI_INFO = shape(
    "TeiInfo", "The served model.", model_id=str, version=str, max_client_batch_size=int, auto_truncate=bool
)
IMMICH_PREDICTION = shape(
    "ImmichPrediction",
    "A vector, as a list in a string, and the size of the photo.",
    clip=str, imageHeight=Missing[int], imageWidth=Missing[int],
)  # fmt: skip
LLAMA_CPP_PROPS = shape("LlamaCppProps", "The mark of a picture.", media_marker=str)
LLAMA_CPP_VECTOR = shape("LlamaCppVector", "A vector in a list.", index=int, embedding=[list[float]])
