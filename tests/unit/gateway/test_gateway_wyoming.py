"""Wyoming, heard by the protocol's own reference client, and by clients that break off."""

import asyncio
import io
import json
import wave

import numpy as np
import pytest
from wyoming.asr import Transcribe, Transcript
from wyoming.audio import AudioChunk, AudioStart, AudioStop
from wyoming.client import AsyncTcpClient
from wyoming.error import Error
from wyoming.info import Describe, Info
from wyoming.ping import Ping, Pong

from hepti_mqtt.core.errors import DeadlineError
from hepti_mqtt.gateway import wyoming
from hepti_mqtt.gateway.site import Spoken
from hepti_mqtt.gateway.wyoming import Event, Wyoming, encode_event, read_event

SOUND = np.random.default_rng(2).integers(-9000, 9000, 16_000, np.int16)
PATIENCE_S = 30.0


class FakeSite:
    """Hears how long a recording is; several at once wait for each other."""

    def __init__(self, error=None, together=1):
        self.asked = []
        self.error, self.barrier = error, asyncio.Barrier(together)

    async def transcribe(self, model, recording, **options):
        self.asked.append((model, recording, options))
        await self.barrier.wait()
        if self.error is not None:
            raise self.error
        if options["show"] is not None:
            for part in ("one", " two"):
                await options["show"](part)
        return Spoken(f"{len(recording)} bytes", str(options["language"] or "en"), 1.0)


def conversation(site, talk, **options):
    """Serve while `talk`, which is given the port, runs."""

    async def speech():
        return {"whisper": ["de", "en"]}

    async def main():
        service = Wyoming(site, speech, **options)
        server = await asyncio.start_server(service.serve, "127.0.0.1", 0, limit=wyoming.MAX_LINE)
        async with server, asyncio.timeout(PATIENCE_S):
            await talk(server.sockets[0].getsockname()[1])

    asyncio.run(main())


async def say(client, pcm, rate=16_000, channels=1):
    await client.write_event(AudioStart(rate, 2, channels).event())
    for first in range(0, len(pcm), 1024):
        await client.write_event(AudioChunk(rate, 2, channels, pcm[first : first + 1024].tobytes()).event())
    await client.write_event(AudioStop().event())


async def program(client):
    await client.write_event(Describe().event())
    return Info.from_event(await client.read_event()).asr[0]


async def transcript(client, pcm, *form):
    await say(client, pcm, *form)
    return Transcript.from_event(await client.read_event())


def with_client(site, talk, **options):
    async def connect(port):
        async with AsyncTcpClient("127.0.0.1", port) as client:
            await talk(client)

    conversation(site, connect, **options)


def test_a_command_is_described_spoken_and_written():
    site = FakeSite()

    async def talk(client):
        await client.write_event(Ping("here").event())
        assert Pong.from_event(await client.read_event()).text == "here"
        assert [(m.name, m.languages) for m in (await program(client)).models] == [("whisper", ["de", "en"])]
        await client.write_event(Transcribe(language="de-CH").event())
        said = await transcript(client, SOUND)
        assert (said.text, said.language) == (f"{44 + SOUND.nbytes} bytes", "de")
        assert (await transcript(client, np.repeat(SOUND, 2), 22_050, 2)).text, "another format, the same connection"

    with_client(site, talk)
    with wave.open(io.BytesIO(site.asked[0][1])) as file:
        assert (file.getframerate(), file.getnchannels()) == (16_000, 1)
        assert file.readframes(len(SOUND)) == SOUND.tobytes()
    assert [options["language"] for _, _, options in site.asked] == ["de", None]


def test_a_home_has_languages_and_names():
    site, both = FakeSite(), ["de", "en"]

    async def talk(client):
        assert (await program(client)).models[0].languages == both
        for fields in (*({"language": one} for one in ("de-CH", "nb-NO", None)), {"transcript_names": ["Attic"]}):
            await client.write_event(Transcribe(**fields).event())
            await transcript(client, SOUND)

    with_client(site, talk, languages=["de", "en-GB"], prompt="Kitchen")
    assert [options["language"] for _, _, options in site.asked] == ["de", both, both, both]
    assert [options["prompt"] for _, _, options in site.asked] == ["Kitchen"] * 3 + ["Kitchen, Attic"]


def test_a_long_recording_is_shown_as_it_is_written():
    async def talk(client):
        await say(client, np.tile(SOUND, 31))
        kinds = [await client.read_event() for _ in range(5)]
        assert [event.type.removeprefix("transcript") for event in kinds] == ["-start", "-chunk", "-chunk", "", "-stop"]
        assert (await transcript(client, SOUND)).text

    with_client(FakeSite(), talk)


@pytest.mark.parametrize("audio", [False, True])
def test_a_stop_without_sound_is_an_empty_text(audio):
    site = FakeSite()

    async def talk(client):
        for _ in range(2):
            if audio:
                assert (await transcript(client, SOUND[:16])).text == ""
            else:
                await client.write_event(AudioStop().event())
                assert Transcript.from_event(await client.read_event()).text == ""

    with_client(site, talk)
    assert not site.asked


def test_several_satellites_speak_at_once():
    async def talk(port):
        async def one(length):
            async with AsyncTcpClient("127.0.0.1", port) as client:
                return (await transcript(client, SOUND[:length])).text

        texts = await asyncio.gather(*(one(4000 * n) for n in (1, 2, 3)))
        assert texts == [f"{44 + 8000 * n} bytes" for n in (1, 2, 3)]

    conversation(FakeSite(together=3), talk)


def test_what_fails_is_an_error_and_the_end_of_the_connection():
    async def talk(client):
        await say(client, SOUND)
        assert Error.from_event(await client.read_event()).code == "deadline"
        assert await client.read_event() is None

    with_client(FakeSite(DeadlineError("too late")), talk)


BROKEN = [
    b"\xff\n",
    b"[]\n",
    b'{"data": {}}\n',
    b'{"type": "describe", "data": 3}\n',
    b'{"type": "audio-chunk", "payload_length": 99999999999}\n',
    b'{"type": "audio-chunk", "payload_length": -1}\n',
    b'{"type": "audio-chunk", "payload_length": "x"}\n',
    b"x" * (2 * wyoming.MAX_LINE) + b"\n",
    encode_event(Event("audio-chunk", {"rate": 0, "width": 2, "channels": 1}, b"ab")),
    encode_event(Event("audio-chunk", {"rate": 16_000, "width": 9, "channels": 1}, b"ab")),
    encode_event(Event("transcribe", {"name": "nobody"}))
    + encode_event(Event("audio-chunk", {"rate": 8_000, "width": 2, "channels": 1}, bytes(9000)))
    + encode_event(Event("audio-stop")),
]


def test_broken_clients_are_told_and_harm_nobody():
    async def talk(port):
        for data in BROKEN:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(data)
            answer = await read_event(reader)
            assert answer is not None
            assert answer.type == "error", data[:60]
            writer.close()
        for part in (b'{"type": "audio-', b'{"type": "audio-chunk", "payload_length": 50}\nabc', b""):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(part)
            writer.close()
        async with AsyncTcpClient("127.0.0.1", port) as client:
            await client.write_event(Describe().event())
            assert Info.is_type((await client.read_event()).type)

    conversation(FakeSite(), talk)


def test_one_client_too_many_and_a_silent_one_are_turned_away(monkeypatch):
    monkeypatch.setattr(wyoming, "CLIENTS", 1)
    monkeypatch.setattr(wyoming, "STALL_S", 0.05)

    async def talk(port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(encode_event(Event("audio-chunk", {"rate": 16_000, "width": 2, "channels": 1}, bytes(64))))
        other, mine = await asyncio.open_connection("127.0.0.1", port)
        assert json.loads(await other.readline())["type"] == "error"
        answer = await read_event(reader)
        assert answer is not None
        assert answer.data["code"] == "timeout"
        writer.close()
        mine.close()

    conversation(FakeSite(), talk)
