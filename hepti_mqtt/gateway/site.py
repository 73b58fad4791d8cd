"""Requests of HTTP clients to the site, as awaitables, divided into requests of permitted size."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from importlib.util import find_spec
from math import inf
from typing import Any, Final, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from hepti_mqtt.client import Answer, Hepti
from hepti_mqtt.client.connection import AnswerStream
from hepti_mqtt.core.errors import DeadlineError, HeptiError, RequestError, UnknownModelError
from hepti_mqtt.gateway.statistics import GatewayStatistics
from hepti_mqtt.models.mel import RATE
from hepti_mqtt.service import sound
from hepti_mqtt.service.silence import is_silent
from hepti_mqtt.service.sound import Floats

TEXTS: Final = 64  # of one request
FRESH_S: Final = 2.0  # age of the list of models; reading it takes 0.2 s
KNOWN_S: Final = 60.0  # age of the list to check a name; the planner refuses a model that is gone
PIECE_S: Final = 30.0  # of a recording in one request
LONGEST_S: Final = 3600.0  # of a recording in all
LEAST_S: Final = 0.02  # of the rest of a recording that is read
KEPT_TEMPERATURE: Final = 0.5  # of a text that the next window is given, as in the reference
PING_S: Final = 10.0  # pause after which a stream sends a ping, so that proxies and clients keep waiting
AT_ONCE: Final = 4  # concurrent requests of one HTTP request, so that a long list leaves room for others


Vectors = NDArray[np.float32]
#: tokens of a text, None for a pause, then the whole answer
Parts = AsyncIterator[Mapping[str, Any] | Answer | None]
Show = Callable[[str], Awaitable[None]]


Items = TypeVar("Items")


class Computed(NamedTuple, Generic[Items]):
    """Results of inputs, in their order or ranked, and the number of tokens computed."""

    items: Items
    tokens: int


class Spoken(NamedTuple):
    """The transcript of a recording."""

    text: str
    language: str
    seconds: float
    #: start, end, text, ids, words; of their window: seek (its begin), temperature, score, compression, no_speech
    segments: tuple[Mapping[str, Any], ...] = ()


def samples_of(recording: bytes) -> Floats | None:
    """Return a recording's samples at 16 kHz; None if the extra for its format is missing."""
    if recording[:4] != b"RIFF" and find_spec("av") is None:
        return None
    return sound.read_file("file", recording, LONGEST_S)


def _first(language: Any) -> str:
    """Return the language of a request as a text."""
    return str((language[0] if isinstance(language, list) and language else language) or "")


class Site:
    """Requests to one site; timeout_s: of one HTTP request. model: for bodies without a model.

    text_timeout_s: of a request that generates text, and between two parts of a stream; by default timeout_s.
    """

    def __init__(
        self,
        client: Hepti,
        timeout_s: float,
        model: str | None = None,
        *,
        truncate: bool = False,
        text_timeout_s: float | None = None,
    ) -> None:
        self._timeout_s, self._model, self.truncate = timeout_s, model, truncate
        self._text_timeout_s = text_timeout_s or timeout_s
        self._served: list[str] = []
        self._listed_s = -inf
        self._listing = asyncio.Lock()
        self.statistics = GatewayStatistics()
        self.client = client

    async def models(self, older_than_s: float = FRESH_S) -> list[str]:
        """Return the names of the served models, at most this old; raises NetworkError without a planner."""
        async with self._listing:
            if time.monotonic() - self._listed_s > older_than_s:
                self._served = await asyncio.to_thread(self.client.models)
                self._listed_s = time.monotonic()
            return self._served

    async def model_named(self, name: str | None, advice: str = "") -> str:
        """Return the model that a body names, or the gateway's own; raises UnknownModelError, RequestError.

        advice: how to serve a missing model, for the error.
        """
        served = await self.models(KNOWN_S)
        wanted = name or self._model or (served[0] if len(served) == 1 else None)
        if wanted is None:
            raise RequestError(f"name a model, one of: {', '.join(served) or 'none is served'}")
        # Ollama's clients append a tag.
        wanted = wanted.removesuffix(":latest")
        if wanted not in served and wanted not in (served := await self.models()):
            raise UnknownModelError(
                f"model {wanted!r} is not served here; served: {', '.join(served) or 'none'}{advice and f'; {advice}'}"
            )
        return wanted

    async def card(self, model: str) -> Mapping[str, Any]:
        """Return the planner's description of a model; empty from an older planner."""
        return dict((await asyncio.to_thread(self.client.plan, model)).get("card") or {})

    async def is_loaded(self, model: str) -> bool:
        """Return whether a plan of a model is active."""
        return (await asyncio.to_thread(self.client.plan, model))["active"] is not None

    async def embed(
        self, model: str, texts: Sequence[str], truncate: bool | None = None, **options: Any
    ) -> Computed[Vectors]:
        """Return the embeddings of texts; raises the planner's errors, RequestError for a model that makes none.

        options: `dimensions` and `prompt`, None for none.
        """
        answers = await self._ask_cut(model, [{"texts": [*part]} for part in _parts(texts)], truncate, options)
        return Computed(np.concatenate([a.embeddings for a in answers]), sum(a.tokens for a in answers))

    async def embed_pictures(self, model: str, pictures: Sequence[bytes]) -> Computed[Vectors]:
        """Return the embeddings of pictures, each its file; raises as `embed` does."""
        answers = await self._ask_all(model, [{"image": picture} for picture in pictures])
        return Computed(np.concatenate([a.embeddings for a in answers]), sum(a.tokens for a in answers))

    async def hidden(
        self, model: str, texts: Sequence[str], truncate: bool | None = None, **options: Any
    ) -> list[NDArray[np.float32]]:
        """Return the final hidden states [tokens, h] of each text; raises as `embed` does."""
        bodies = [{"text": text, "want": "hidden"} for text in texts]
        answers = await self._ask_cut(model, bodies, truncate, options)
        return [a.hidden for a in answers]

    async def rank(
        self, model: str, query: str, documents: Sequence[str], truncate: bool | None = None, **options: Any
    ) -> Computed[list[dict[str, Any]]]:
        """Return {"index", "score"} of documents ranked by a query, of several requests if they are many.

        Raises as `embed` does.
        """
        bodies = [{"query": query, "documents": [*part]} for part in _parts(documents)]
        answers = await self._ask_cut(model, bodies, truncate, options)
        offsets = zip(range(0, len(documents), TEXTS), answers, strict=True)
        ranked = [{**one, "index": one["index"] + first} for first, answer in offsets for one in answer.ranking]
        return Computed(sorted(ranked, key=lambda one: (-one["score"], one["index"])), sum(a.tokens for a in answers))

    async def classify(
        self, model: str, inputs: Sequence[Any], key: str, **options: Any
    ) -> Computed[list[list[dict[str, Any]]]]:
        """Return the labels of inputs, best first; key: `texts`, `pairs` or `images`. Raises as `embed` does."""
        answers = await self._ask_all(model, [{key: list(part)} for part in _parts(inputs)], **options)
        return Computed([labels for a in answers for labels in a.labels], sum(a.tokens for a in answers))

    async def transcribe(
        self, model: str, recording: bytes, *, timed: bool | str = False, show: Show | None = None, **options: Any
    ) -> Spoken:
        """Return the transcript of a recording; raises as `embed` does.

        timed: with times of segments; "word": also of words. options: of the request. A recording longer than a window
        is always timed; show: receives the text of each window.
        """
        samples = await asyncio.to_thread(samples_of, recording)
        if samples is not None and await asyncio.to_thread(is_silent, samples):
            return Spoken("", _first(options.get("language")), len(samples) / RATE)
        if samples is None or (len(samples) <= PIECE_S * RATE and not timed):
            body = {"audio": recording, "timestamps": timed or None}
            result = (await self._ask_all(model, [body], **options))[0].result
            segments = tuple(_segment(result, one, 0.0) for one in result.get("segments", ()))
            return Spoken(result["text"], result["language"], result["seconds"], segments)
        return await self._read_on(model, samples, timed or True, show, **options)

    async def _read_on(
        self,
        model: str,
        samples: Floats,
        timed: bool | str,
        show: Show | None,
        *,
        language: str | Sequence[str] | None = None,
        prompt: str | None = None,
        **options: Any,
    ) -> Spoken:
        """Return the transcript of a long recording, as the reference reads: a window begins after the last segment.

        Each window receives the previous text, unless that was drawn at a high temperature. Without a language, that of
        the first window holds for all.
        """
        segments, at_s, said = list[Mapping[str, Any]](), 0.0, list[str | int]([prompt] if prompt else [])
        while (first := round(at_s * RATE)) + LEAST_S * RATE < len(samples) or not first:
            piece = await asyncio.to_thread(sound.wav_of, samples[first : first + round(PIECE_S * RATE)])
            body = {"audio": piece, "timestamps": timed, "language": language, "prompt": [*said] or None}
            result = (await self._ask_all(model, [body], **options))[0].result
            is_whole = not 0 < result["seek"] < result["seconds"]
            kept = [one for one in result["segments"] if is_whole or one["start"] < result["seek"]]
            segments += [_segment(result, one, at_s) for one in kept]
            if show is not None:
                await show("".join(one["text"] for one in kept))
            said += [token for one in kept for token in one["ids"]]
            if result["temperature"] > KEPT_TEMPERATURE:
                said.clear()
            if language is None or not isinstance(language, str):
                language = result["language"]
            at_s += result["seconds"] if is_whole else result["seek"]
        text = "".join(one["text"] for one in segments).strip()
        return Spoken(text, _first(language), len(samples) / RATE, tuple(segments))

    async def infer(self, model: str, body: dict[str, Any]) -> Answer:
        """Return the answer to one request as MQTT gives it; raises as `embed` does."""
        return (await self._ask_all(model, [body]))[0]

    async def write(self, model: str, bodies: Sequence[dict[str, Any]]) -> list[Answer]:
        """Return a decoder's answers; raises as `embed` does."""
        return await self._ask_all(model, bodies, self._text_timeout_s)

    async def stream(self, model: str, body: dict[str, Any]) -> Parts:
        """Return an iterator of a decoder's tokens on arrival, None for each pause of `PING_S`, then the whole answer.

        An error before the first item is raised by this call, a later one by the iterator.
        """
        loop, parts = asyncio.get_running_loop(), asyncio.Queue[Mapping[str, Any] | None]()

        def put(part: Mapping[str, Any] | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(parts.put_nowait, part)

        request = {**body, "deadline_ms": self._text_timeout_s * 1e3}
        read = self._read(model, self.client.stream(model, request, put), parts)
        return _joined(await anext(read), read)

    async def _read(
        self, model: str, stream: AnswerStream, parts: asyncio.Queue[Mapping[str, Any] | None]
    ) -> AsyncGenerator[Mapping[str, Any] | Answer | None, None]:
        self.statistics.waiting[model] += 1
        waited_s = 0.0
        try:
            while True:
                ping_s = min(PING_S, self._text_timeout_s - waited_s)
                try:
                    part = await asyncio.wait_for(parts.get(), ping_s)
                except TimeoutError:
                    waited_s += ping_s
                    if waited_s >= self._text_timeout_s:
                        raise self._late(model, self._text_timeout_s) from None
                    yield None
                    continue
                waited_s = 0.0
                if part is None:
                    break
                for token in stream.take(part):
                    self.statistics.add_token(time.time())
                    yield token
            yield stream.result()
        except HeptiError as error:
            self.statistics.add_error(model, error, time.time())
            raise
        finally:
            self.statistics.waiting[model] -= 1
            stream.cancel()

    def _late(self, model: str, limit_s: float) -> DeadlineError:
        return DeadlineError(f"no answer within {limit_s:g} s; see `hepti plan {model}`")

    async def _ask_cut(
        self, model: str, bodies: Sequence[dict[str, Any]], truncate: bool | None, options: Mapping[str, Any]
    ) -> list[Answer]:
        cut = self.truncate if truncate is None else truncate
        return await self._ask_all(model, bodies, truncate=cut or None, **options)

    async def _ask_all(
        self, model: str, bodies: Sequence[dict[str, Any]], timeout_s: float | None = None, **options: Any
    ) -> list[Answer]:
        slots, limit_s = asyncio.Semaphore(AT_ONCE), timeout_s or self._timeout_s
        deadline_ms = limit_s * 1e3

        async def ask(body: dict[str, Any]) -> Answer:
            async with slots:
                return await asyncio.wrap_future(self.client.submit(model, **body, **options, deadline_ms=deadline_ms))

        self.statistics.waiting[model] += len(bodies)
        try:
            async with asyncio.timeout(limit_s), asyncio.TaskGroup() as group:
                tasks = [group.create_task(ask(body)) for body in bodies]
        except TimeoutError:
            late = self._late(model, limit_s)
            self.statistics.add_error(model, late, time.time())
            raise late from None
        except BaseExceptionGroup as several:
            if isinstance(first := several.exceptions[0], HeptiError):
                self.statistics.add_error(model, first, time.time())
            raise first from None
        finally:
            self.statistics.waiting[model] -= len(bodies)
        return [task.result() for task in tasks]


async def _joined(
    first: Mapping[str, Any] | Answer | None, rest: AsyncGenerator[Mapping[str, Any] | Answer | None, None]
) -> Parts:
    async with contextlib.aclosing(rest):
        yield first
        async for part in rest:
            yield part


def _segment(result: Mapping[str, Any], segment: Mapping[str, Any], at_s: float) -> Mapping[str, Any]:
    """Return a segment of a window that begins at `at_s` in the recording."""
    about = {key: result[key] for key in ("temperature", "score", "compression", "no_speech")}
    words = [{**one, "start": at_s + one["start"], "end": at_s + one["end"]} for one in segment.get("words", ())]
    times = {"start": at_s + segment["start"], "end": at_s + segment["end"], "seek": at_s}
    return {**segment, **about, **times, "words": words}


def _parts(inputs: Sequence[Any]) -> list[Sequence[Any]]:
    return [inputs[at : at + TEXTS] for at in range(0, len(inputs), TEXTS)]
