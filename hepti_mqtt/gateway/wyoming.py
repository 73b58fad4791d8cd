"""Speech to text for programs that speak Wyoming, as Home Assistant does: events over TCP.

An event is a line of JSON (type, data, data_length, payload_length), then as many bytes of further data and of payload.
A client asks `describe`, or sends `transcribe`, audio-start, audio-chunk ... and audio-stop, and gets `transcript`. Of
each event no more than its bound is read, and a client that stops half-way is dropped after a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from hepti_mqtt import __version__
from hepti_mqtt.client import Hepti
from hepti_mqtt.client.discovery import EVERYWHERE, SPEECH, registered
from hepti_mqtt.core.errors import HeptiError, NetworkError, RequestError, WireError
from hepti_mqtt.gateway.site import PIECE_S, Show, Site
from hepti_mqtt.service.languages import language_code
from hepti_mqtt.service.silence import LEAST_S
from hepti_mqtt.service.sound import wav_file
from hepti_mqtt.transport.broker_limits import is_loopback

_log = logging.getLogger(__name__)

VERSION: Final = "1.10.2"  # of the protocol's reference implementation
MAX_LINE: Final = 64 << 10  # bytes
MAX_PART: Final = 4 << 20  # of data, or of the payload, of an event
MAX_AUDIO: Final = 12_000_000  # of a recording: as much as fits into a request
CLIENTS: Final = 64  # at once; further ones are turned away
IDLE_S: Final = 600.0  # between two events; Home Assistant opens a connection for each command
STALL_S: Final = 30.0  # within a recording
_HOME: Final = {"name": "Hepti", "url": "https://www.home-assistant.io/integrations/wyoming/"}


class Event(NamedTuple):
    """An event of the protocol."""

    type: str
    data: Mapping[str, Any] = {}
    payload: bytes = b""


async def read_event(reader: asyncio.StreamReader) -> Event | None:
    """Return the next event, None at the end of the stream; raises WireError if it is malformed or too large."""
    try:
        line = await reader.readuntil(b"\n")
    except asyncio.IncompleteReadError as error:
        if error.partial.strip():
            raise WireError("the connection ended within an event") from None
        return None
    except asyncio.LimitOverrunError:
        raise WireError(f"an event's line is longer than {MAX_LINE} bytes") from None
    head = _object(line)
    sizes = [head.get(f"{part}_length") or 0 for part in ("data", "payload")]
    if not all(isinstance(size, int) and 0 <= size <= MAX_PART for size in sizes):
        raise WireError(f"an event of {sizes} bytes; at most {MAX_PART} of data or payload are read")
    try:
        more, payload = await reader.readexactly(sizes[0]), await reader.readexactly(sizes[1])
    except asyncio.IncompleteReadError:
        raise WireError("the connection ended within an event") from None
    data = head.get("data") or {}
    kind = head.get("type")
    if not isinstance(kind, str) or not isinstance(data, dict):
        raise WireError("an event has no type, or data that is no object")
    return Event(kind, {**data, **(_object(more) if more else {})}, payload)


def _object(raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise WireError(f"an event is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise WireError("an event is not an object of JSON")
    return value


def encode_event(event: Event) -> bytes:
    """Return the bytes of an event."""
    data = json.dumps(event.data, ensure_ascii=False).encode() if event.data else b""
    head: dict[str, Any] = {"type": event.type, "version": VERSION}
    head |= {"data_length": len(data)} if data else {}
    head |= {"payload_length": len(event.payload)} if event.payload else {}
    return json.dumps(head).encode() + b"\n" + data + event.payload


@dataclass
class Recording:
    """The PCM since audio-start, all in one format."""

    form: tuple[int, int, int] = (0, 0, 0)  # rate, bytes of a sample, channels
    pcm: bytearray = field(default_factory=bytearray)

    def add(self, event: Event) -> None:
        """Take an audio-chunk; raises RequestError for one of another format, or one too many."""
        rate, width, channels = form = tuple(event.data.get(key) for key in ("rate", "width", "channels"))
        if not (isinstance(rate, int) and isinstance(width, int) and isinstance(channels, int)) or not (
            rate > 0 and 1 <= width <= 4 and 1 <= channels <= 8
        ):
            raise RequestError(f"audio of rate, width and channels {form} is not read; send PCM of 1 to 4 bytes")
        if self.pcm and form != self.form:
            raise RequestError(f"audio changes from {self.form} to {form} within a recording")
        if len(self.pcm) + len(event.payload) > MAX_AUDIO:
            raise RequestError(f"a recording of more than {MAX_AUDIO} bytes; stop it earlier")
        self.form = (rate, width, channels)
        self.pcm += event.payload

    @property
    def seconds(self) -> float:
        """Return its length."""
        rate, width, channels = self.form
        return len(self.pcm) / (rate * width * channels) if self.pcm else 0.0

    def wav(self) -> bytes:
        """Return it as a WAV file."""
        rate, width, channels = self.form
        frame = width * channels
        return wav_file(self.pcm[: len(self.pcm) // frame * frame], rate, width, channels)


Speech = Callable[[], Awaitable[Mapping[str, Sequence[str]]]]  # the languages of each model of speech


class Wyoming:
    """Answers clients, each on a connection of its own.

    speech: returns the served speech models and their languages. model: for clients that name none. languages: the
    spoken ones, for clients that name no other; empty for all. prompt: names to expect.
    """

    def __init__(
        self,
        site: Site,
        speech: Speech,
        model: str | None = None,
        languages: Sequence[str] = (),
        prompt: str | None = None,
    ) -> None:
        self._site, self._speech, self._model = site, speech, model
        self._languages, self._prompt = languages, prompt
        self._clients = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one client until it leaves, or breaks the protocol."""
        self._clients += 1
        try:
            if self._clients > CLIENTS:
                raise RequestError(f"{CLIENTS} clients are connected already; try again later")
            await _Conversation(self, reader, writer).run()
        except (HeptiError, TimeoutError) as error:
            # Home Assistant waits for a transcript until the connection ends.
            _log.warning("a client of Wyoming got an error: %s", error or "it was silent for too long")
            await _send(writer, Event("error", {"text": str(error), "code": getattr(error, "code", "timeout")}))
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # it has left
        finally:
            self._clients -= 1
            writer.close()

    async def describe(self) -> Event:
        """Return the served speech models with their languages."""
        models = [
            {
                **_artifact(name, f"{name}, divided over the devices of this site"),
                "languages": [
                    code
                    for code in languages
                    if not self._languages or any(language_code(one, [code]) for one in self._languages)
                ],
            }
            for name, languages in (await self._speech()).items()
            if self._model in (None, name)
        ]
        about = _artifact("hepti", "speech over the devices of a site")
        program = {**about, "models": models, "supports_transcript_streaming": True}
        return Event(
            "info", {"asr": [program], **{kind: [] for kind in ("tts", "handle", "intent", "wake", "mic", "snd")}}
        )

    async def transcribe(self, recording: Recording, wish: Mapping[str, Any], show: Show) -> Event:
        """Return the transcript, empty for a very short recording; raises HeptiError.

        show: receives the text of each window of a long recording.
        """
        if recording.seconds < LEAST_S:
            return Event("transcript", {"text": ""})
        served = await self._speech()
        name = wish.get("name") or self._model or (next(iter(served)) if len(served) == 1 else None)
        if not isinstance(name, str) or name not in served:
            raise RequestError(f"name a model of speech, one of: {', '.join(served) or 'none is served'}")
        languages = served[name]
        allowed = [code for one in self._languages if (code := language_code(one, languages)) is not None]
        code = language_code(str(wish.get("language") or ""), allowed or languages)
        # A language that the model, or this home, does not know is detected.
        speech = await self._site.transcribe(
            name,
            recording.wav(),
            language=code or allowed or None,
            prompt=_expected(self._prompt, wish),
            show=show if recording.seconds > PIECE_S else None,
        )
        return Event("transcript", {"text": speech.text, "language": speech.language})


def _expected(prompt: str | None, wish: Mapping[str, Any]) -> str | None:
    """Return the names to expect: the server's and the client's."""
    lists = [wish.get(key) for key in ("transcript_names", "transcript_terms")]
    names = [name for one in lists if isinstance(one, list) for name in one if isinstance(name, str)]
    return ", ".join([*([prompt] if prompt else []), *names]) or None


def _artifact(name: str, description: str) -> dict[str, Any]:
    return {
        "name": name, "description": description, "attribution": _HOME, "installed": True, "version": __version__,
    }  # fmt: skip


async def _send(writer: asyncio.StreamWriter, event: Event) -> None:
    try:
        writer.write(encode_event(event))
        async with asyncio.timeout(STALL_S):
            await writer.drain()
    except (ConnectionError, TimeoutError):
        pass  # it has left, or reads nothing


class _Conversation:
    """The connection of one client: its wishes and its recording."""

    def __init__(self, whole: Wyoming, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._whole, self._reader, self._writer = whole, reader, writer
        self._wish: Mapping[str, Any] = {}
        self._recording = Recording()
        #: parts of a transcript were sent, and not its end
        self._shows = False

    async def run(self) -> None:
        while True:
            async with asyncio.timeout(STALL_S if self._recording.pcm else IDLE_S):
                event = await read_event(self._reader)
            if event is None:
                return
            if (answer := await self._answer(event)) is not None:
                await _send(self._writer, answer)

    async def _answer(self, event: Event) -> Event | None:
        """Return the answer to an event, or None; unknown events are ignored."""
        match event.type:
            case "describe":
                return await self._whole.describe()
            case "ping":
                return Event("pong", {"text": event.data["text"]} if isinstance(event.data.get("text"), str) else {})
            case "transcribe":
                self._wish = event.data
            case "audio-start":
                self._recording = Recording()
            case "audio-chunk":
                self._recording.add(event)
            case "audio-stop":
                said, self._recording = self._recording, Recording()
                wish, self._wish = self._wish, {}
                text = await self._whole.transcribe(said, wish, self._show)
                await _send(self._writer, text)
                if self._shows:
                    await _send(self._writer, Event("transcript-stop"))
                self._shows = False
        return None

    async def _show(self, text: str) -> None:
        """Send a part of a transcript."""
        if not self._shows:
            await _send(self._writer, Event("transcript-start"))
        self._shows = True
        await _send(self._writer, Event("transcript-chunk", {"text": text}))


# ----------------------------------------------------------------------------------------------------------------------
# The server.


def speech_models(site: Site, client: Hepti) -> Speech:
    """Return a function that lists the site's speech models and their languages from the planner's records."""

    async def served() -> Mapping[str, Sequence[str]]:
        languages = {}
        for name in await site.models():
            with contextlib.suppress(HeptiError):  # a model that has just gone
                if codes := (await asyncio.to_thread(client.plan, name)).get("languages"):
                    languages[name] = codes
        return languages

    return served


async def serve(service: Wyoming, bind: str, port: int, name: str, listening: Callable[[], None]) -> None:
    """Serve until SIGTERM, announced by mDNS under a site's name where others reach it; raises NetworkError.

    listening: called once clients can connect.
    """
    try:
        server = await asyncio.start_server(service.serve, bind, port, limit=MAX_LINE)
    except OSError as error:
        why = error.strerror or error
        raise NetworkError(f"cannot listen on {bind} port {port}: {why}; choose another --port") from None
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    listening()
    with contextlib.ExitStack() as announced:
        if not is_loopback(bind):  # registering takes a second
            interfaces = None if bind in EVERYWHERE else (bind,)
            announcement = registered(SPEECH, f"Hepti {name} speech", port, {}, interfaces)
            await asyncio.to_thread(announced.enter_context, announcement)
        await stopped.wait()
    server.close()  # and wait for nobody: a client may keep its connection for hours
