"""What the scripts of clients share: where the gateway is, its models, and what they are asked."""

import os

BASE = os.environ["HEPTI_GATEWAY"]  # http://127.0.0.1:PORT
WYOMING = os.environ.get("HEPTI_WYOMING", "")  # tcp://127.0.0.1:PORT
TALKER, VECTORS, RANKER, SPEECH = "talker", "vectors", "ranker", "speech"
HELLO = [{"role": "user", "content": "the room"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "light",
        "description": "the light",
        "parameters": {
            "type": "object",
            "properties": {"on": {"type": "boolean"}},
            "required": ["on"],
            "additionalProperties": False,
        },
    },
}
