"""The routes of Ollama, as its command line, its libraries, Open WebUI, VS Code and Home Assistant use them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Final, Literal, NamedTuple

from pydantic import Field

from hepti_mqtt.core.errors import RequestError
from hepti_mqtt.gateway import answers
from hepti_mqtt.gateway.bodies import Body, Key, Texts
from hepti_mqtt.gateway.chat import Tools
from hepti_mqtt.gateway.errors import ollama_error
from hepti_mqtt.gateway.operations import JSON, Operation
from hepti_mqtt.gateway.site import Site
from hepti_mqtt.gateway.streams import LINES, Stream, line
from hepti_mqtt.gateway.tool_calls import Call
from hepti_mqtt.gateway.writing import SAMPLED, Finished, Piece, Writing, bounded
from hepti_mqtt.service.options import MAX_NEW_TOKENS, OPTIONS

#: of Ollama's interface that is answered here: its clients ask for 0.6.4 and later
VERSION: Final = "0.12.6"
MARK: Final = "[img]"  # in a text, where the next of its pictures belongs
Fields = dict[str, Any]
_ABILITIES: Final = ("tools", "thinking", "vision")
_FOR_EVER: Final = "2318-01-01T00:00:00Z"  # as Ollama says it of a model that stays loaded


class SamplingOptions(Body):
    """Ollama's options."""

    keys: ClassVar = {
        **{name: key for name, key in SAMPLED.items() if name not in ("repetition_penalty", "logit_bias")},
        "repeat_penalty": SAMPLED["repetition_penalty"],
        "num_predict": Key(OPTIONS["max_new_tokens"], bounded),
    }
    #: they change how Ollama computes, and no token
    ignored = frozenset(
        {"num_ctx", "num_thread", "num_gpu", "num_batch", "num_keep", "main_gpu", "use_mmap", "use_mlock", "numa",
         "low_vram", "f16_kv", "vocab_only", "logits_all", "embedding_only", "num_gqa", "rope_frequency_base",
         "rope_frequency_scale", "penalize_newline", "num_parallel"}
    )  # fmt: skip
    neutral: ClassVar = {
        "mirostat": (0,), "mirostat_tau": (5, 5.0), "mirostat_eta": (0.1,), "tfs_z": (1, 1.0), "typical_p": (1, 1.0),
        "repeat_last_n": (64, -1), "draft_num_predict": (0,),
    }  # fmt: skip


class Loaded(Body):
    """A body with a model; keep_alive: models stay loaded."""

    model: Annotated[str | None, Field(description="the name of a served model")] = None
    keep_alive: float | str | None = None


class OllamaBody(Loaded):
    """Options of chat and generate."""

    neutral: ClassVar = {"logprobs": (False,), "top_logprobs": (0,), "truncate": (True,), "shift": (True,)}
    ignored = frozenset({"_debug_render_only"})
    stream: bool = True
    options: SamplingOptions = SamplingOptions()
    format: Annotated[Literal["", "json"] | dict[str, Any] | None, Field(description='"json", or a JSON schema')] = None
    think: Annotated[
        bool | Literal["low", "medium", "high"] | None, Field(description="whether thoughts come before the answer")
    ] = None

    def request(self) -> Fields:
        """Return the request of MQTT without its input."""
        about: Fields = {**self.options.chosen, "fit": True}
        if self.think is not None:
            about["thinking"] = bool(self.think)
        if self.format == "json":
            about["response_format"] = {"type": "json_object"}
        elif self.format:
            about["response_format"] = {"type": "json_schema", "json_schema": {"schema": self.format}}
        return about


class ChatBody(OllamaBody):
    """A conversation; without messages the model is loaded."""

    messages: list[dict[str, Any]] = Field(default_factory=list)
    tools: Tools | None = None


class GenerateBody(OllamaBody):
    """A text; without one the model is loaded."""

    neutral: ClassVar = {
        **OllamaBody.neutral, "suffix": (), "context": (), "template": (), "width": (0,), "height": (0,), "steps": (0,),
    }  # fmt: skip
    prompt: str = ""
    images: list[str] | None = None
    system: str = ""
    raw: bool = False


class EmbedBody(Loaded):
    """Texts to embed."""

    keys: ClassVar = {"dimensions": Key(OPTIONS["dimensions"])}
    ignored = frozenset({"options"})
    input: Texts
    truncate: bool = True


class EmbeddingsBody(Loaded):
    """A text to embed, as Ollama had it before `/api/embed`."""

    ignored = frozenset({"options"})
    prompt: str


class ShowBody(Body):
    """A model; name: as older clients call it."""

    ignored = frozenset({"verbose", "options", "system", "template"})
    model: str | None = None
    name: str | None = None


class Card(NamedTuple):
    """The planner's description of a model."""

    name: str
    about: Mapping[str, Any]

    @property
    def details(self) -> Fields:
        """Return it in Ollama's words."""
        about = self.about
        family = str(about.get("architecture", ""))
        billions = about.get("parameters", 0) / 1e9
        size = f"{billions:.1f}B" if billions >= 1 else f"{1e3 * billions:.1f}M"
        dtype = str(about.get("dtype", "")).upper()
        form = "gguf" if "_" in dtype else "safetensors"
        families = {"parent_model": "", "format": form, "family": family, "families": [family]}
        return {**families, "parameter_size": size, "quantization_level": dtype}

    def to_dict(self) -> Fields:
        """Return an entry of Ollama's lists."""
        name, about = f"{self.name}:latest", self.about
        size = {"size": about.get("bytes", 0), "digest": about.get("digest", ""), "details": self.details}
        return {"name": name, "model": name, "modified_at": _moment(about.get("modified", 0.0)), **size}

    @property
    def capabilities(self) -> list[str]:
        """Return what the model does, in Ollama's words."""
        about = self.about
        task = about.get("task")
        abilities = {"completion": task == "generation", **{key: about.get(key) for key in _ABILITIES}}
        return [name for name, has in {**abilities, "embedding": task == "embedding"}.items() if has]


def _moment(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat().replace("+00:00", "Z")


async def tags(site: Site, _body: None) -> Any:
    """The served models, as Ollama lists them."""
    return {"models": [Card(name, await site.card(name)).to_dict() for name in await site.models()]}


async def loaded(site: Site, _body: None) -> Any:
    """The models that devices hold."""
    models = [Card(name, await site.card(name)) for name in await site.models() if await site.is_loaded(name)]
    return {
        "models": [
            {**one.to_dict(), "expires_at": _FOR_EVER, "size_vram": 0, "context_length": one.about.get("context", 0)}
            for one in models
        ]
    }


async def show(site: Site, body: ShowBody) -> Any:
    """What a model is and can do."""
    model = await site.model_named(body.model or body.name)
    card = Card(model, await site.card(model))
    family, about = card.details["family"], card.about
    files = {"license": "", "modelfile": f"FROM {model}\n", "parameters": "", "template": "{{ .Prompt }}"}
    return {
        **files,
        "details": card.details,
        "model_info": {
            "general.architecture": family,
            "general.basename": model,
            "general.parameter_count": about.get("parameters", 0),
            f"{family}.context_length": about.get("context", 0),
        },
        "capabilities": card.capabilities,
        "modified_at": _moment(about.get("modified", 0.0)),
    }


async def version(_site: Site, _body: None) -> Any:
    """The version of Ollama's interface."""
    return {"version": VERSION}


async def embed(site: Site, body: EmbedBody) -> Any:
    """Embeddings, as Ollama gives them; durations in nanoseconds."""
    begun = time.perf_counter()
    model = await site.model_named(body.model)
    vectors = await site.embed(model, body.input, body.truncate, **body.chosen)
    return {
        "model": body.model or model,
        "embeddings": vectors.items.tolist(),
        "total_duration": _since(begun),
        "load_duration": 0,
        "prompt_eval_count": vectors.tokens,
    }


async def embeddings(site: Site, body: EmbeddingsBody) -> Any:
    """One embedding, as Ollama gave it before `/api/embed`."""
    vectors = await site.embed(await site.model_named(body.model), [body.prompt], True)
    return {"embedding": vectors.items[0].tolist()}


async def chat(site: Site, body: ChatBody) -> Any:
    """The next message of a conversation, as Ollama gives it: by default line by line."""

    def as_fields(piece: Piece, calls: Sequence[Call] = ()) -> Fields:
        message: Fields = {"role": "assistant", "content": piece.text}
        message |= {"thinking": piece.thinking} if piece.thinking else {}
        if calls:
            functions = [{"name": call.name, "arguments": json.loads(call.arguments)} for call in calls]
            message["tool_calls"] = [{"function": one} for one in functions]
        return {"message": message}

    if not body.messages:
        return await _load(site, body, as_fields(Piece("")))
    messages = [_message(place, one) for place, one in enumerate(body.messages)]
    request = {**body.request(), "messages": messages, "tools": body.tools or None}
    return await _write(site, body, request, Writing(body.tools), as_fields)


def _message(place: int, message: Mapping[str, Any]) -> Fields:
    """Return a message with OpenAI's keys, without empty values."""
    names = {"thinking": "reasoning_content", "tool_name": "name"}
    fields = {
        names.get(key, key): value for key, value in message.items() if key != "images" and value not in (None, "")
    }
    images = message.get("images") or []
    if not isinstance(images, list):
        raise RequestError(f"messages[{place}].images must be a list of pictures in base64", "messages")
    return fields | ({"content": _with_pictures(images, str(message.get("content") or ""))} if images else {})


def _with_pictures(images: Sequence[Any], text: str) -> list[Fields]:
    """Return a message's content as parts: each picture at its mark, those without a mark before the text."""
    *texts, rest = text.split(MARK, len(images))
    marked = zip(texts, images[: len(texts)], strict=True)
    parts: list[Fields] = [{"type": "image", "image": image} for image in images[len(texts) :]]
    for before, image in marked:
        parts += [{"type": "text", "text": before}, {"type": "image", "image": image}]
    return [part for part in [*parts, {"type": "text", "text": rest}] if part.get("text") != ""]


async def generate(site: Site, body: GenerateBody) -> Any:
    """The continuation of a text, as Ollama gives it: with `raw` as it is, else as the answer to a message."""

    def as_fields(piece: Piece, _calls: Sequence[Call] = ()) -> Fields:
        return {"response": piece.text} | ({"thinking": piece.thinking} if piece.thinking else {})

    if not body.prompt:
        return await _load(site, body, as_fields(Piece("")))
    system = [{"role": "system", "content": body.system}] if body.system else []
    images = body.images or []
    content = _with_pictures(images, body.prompt) if images else body.prompt
    messages = [*system, {"role": "user", "content": content}]
    source: Fields = {"text": body.prompt, "images": images or None} if body.raw else {"messages": messages}
    request = {"max_new_tokens": MAX_NEW_TOKENS, **body.request(), **source}
    return await _write(site, body, request, Writing(), as_fields)


async def _load(site: Site, body: OllamaBody, fields: Fields) -> Fields:
    """Return the answer to a body without a text: Hepti's planner keeps models loaded, whatever a client asks."""
    model = await site.model_named(body.model)
    unloads = body.keep_alive is not None and str(body.keep_alive).rstrip("smh") in ("0", "0.0")
    about = {"model": body.model or model, "created_at": _moment(time.time())}
    return {**about, **fields, "done": True, "done_reason": "unload" if unloads else "load"}


def _since(begun: float) -> int:
    """Return the nanoseconds since a time of `perf_counter`."""
    return int((time.perf_counter() - begun) * 1e9)


async def _write(
    site: Site, body: OllamaBody, request: Fields, writing: Writing, as_fields: Callable[..., Fields]
) -> Any:
    begun = time.perf_counter()
    model = await site.model_named(body.model)

    def part_of(fields: Fields, **more: Any) -> Fields:
        return {"model": body.model or model, "created_at": _moment(time.time()), **fields, "done": False, **more}

    def last(end: Finished) -> Fields:
        spent = _since(begun)
        prompt = int((writing.begun_s - begun) * 1e9) if writing.begun_s else spent // (1 + end.tokens)
        reason = "length" if end.reason == "length" else "stop"
        counts = {"prompt_eval_count": end.prompt_tokens, "eval_count": end.tokens}
        times = {"total_duration": spent, "load_duration": 0}
        times |= {"prompt_eval_duration": prompt, "eval_duration": spent - prompt}
        return part_of(as_fields(end.rest, end.calls), done=True, done_reason=reason, **times, **counts)

    if not body.stream:
        return last(writing.end((await site.write(model, [request]))[0]))
    parts = await site.stream(model, request)

    events = writing.events(parts, lambda piece: line(part_of(as_fields(piece))), lambda end: [line(last(end))])
    return Stream(events, LINES)


_ANY: Final = {JSON: dict[str, Any]}
_OPERATIONS: Final = (
    Operation("POST", "/api/chat", chat, {JSON: answers.OLLAMA_MESSAGE, LINES: Any}, ChatBody),
    Operation("POST", "/api/generate", generate, {JSON: answers.OLLAMA_TEXT, LINES: Any}, GenerateBody),
    Operation("POST", "/api/embed", embed, {JSON: answers.OLLAMA_EMBEDDINGS}, EmbedBody),
    Operation("POST", "/api/embeddings", embeddings, {JSON: dict[str, list[float]]}, EmbeddingsBody),
    Operation("POST", "/api/show", show, _ANY, ShowBody),
    Operation("GET", "/api/tags", tags, {JSON: answers.OLLAMA_MODELS}),
    Operation("GET", "/api/ps", loaded, _ANY),
    Operation("GET", "/api/version", version, {JSON: dict[str, str]}),
)
OPERATIONS: Final = tuple(one._replace(as_error=ollama_error) for one in _OPERATIONS)
