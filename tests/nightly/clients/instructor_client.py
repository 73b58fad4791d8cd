"""instructor: answers as pydantic models, by a JSON schema and by a tool."""

import instructor
import openai
from common import BASE, HELLO, TALKER
from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    """An answer: without other keys, which a model of random weights would write for ever."""

    model_config = ConfigDict(extra="forbid")
    on: bool


client = openai.OpenAI(base_url=f"{BASE}/v1", api_key="none", max_retries=0)
for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS):
    patched = instructor.from_openai(client, mode=mode)
    answer = patched.chat.completions.create(model=TALKER, messages=HELLO, response_model=Answer, max_retries=0)
    assert isinstance(answer.on, bool)
print("ok")
