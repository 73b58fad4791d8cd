"""Wyoming's own client: the described service, and the text of silence."""

import asyncio

from common import SPEECH, WYOMING
from wyoming.asr import Transcribe, Transcript
from wyoming.audio import AudioChunk, AudioStart, AudioStop
from wyoming.client import AsyncClient
from wyoming.info import Describe, Info


async def main() -> None:
    async with AsyncClient.from_uri(WYOMING) as client:
        await client.write_event(Describe().event())
        info = Info.from_event(await client.read_event())
        assert [model.name for model in info.asr[0].models] == [SPEECH]
        for language in ("en", "en-US", "nb-NO", "auto", None):
            await client.write_event(Transcribe(language=language).event())
            await client.write_event(AudioStart(rate=16_000, width=2, channels=1).event())
            await client.write_event(AudioChunk(rate=16_000, width=2, channels=1, audio=bytes(8000)).event())
            await client.write_event(AudioStop().event())
            assert Transcript.from_event(await client.read_event()).text == ""


asyncio.run(main())
print("ok")
