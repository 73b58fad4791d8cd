"""Writes tests/golden/words.json: when transformers says that the tokens of `word_cases` are said, and its words.

`python tests/helpers/make_word_answers.py` needs torch and transformers >= 5.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "critical"}

import torch
from transformers import WhisperForConditionalGeneration
from transformers.generation import GenerateEncoderDecoderOutput
from transformers.models.whisper.tokenization_whisper import _combine_tokens_into_words
from word_cases import ANSWERS, CASES, PROMPT, TEXTS, WordCase, bytes_tokenizer

from hepti_mqtt.checkpoint import make_model

torch.set_num_threads(1)


def times(case: WordCase) -> list[float]:
    """Return the times of a text's tokens, of which the last one has no attention."""
    with tempfile.TemporaryDirectory() as root:
        path = make_model(case.kind, Path(root) / "model")
        model = WhisperForConditionalGeneration.from_pretrained(path, attn_implementation="eager").eval()
    layers, heads = model.config.decoder_layers, model.config.decoder_attention_heads
    every = [(layer, head) for layer in range(layers // 2, layers) for head in range(heads)]
    sound = torch.from_numpy(case.frames.T[None] / 2.0**20).float()
    ids = torch.tensor([[*PROMPT, *case.text[:-1]]])
    with torch.no_grad():
        output = model(sound, decoder_input_ids=ids, output_attentions=True)
    outputs = GenerateEncoderDecoderOutput(sequences=ids, cross_attentions=(output.cross_attentions,))
    frames = torch.tensor([2 * case.sound_rows])
    answer = model._extract_token_timestamps(outputs, case.heads or every, num_frames=frames, num_input_ids=len(PROMPT))
    return [round(float(t), 2) for t in answer[0][len(PROMPT) :]]


class Bytes:
    """A tokenizer as transformers asks for it."""

    eos_token_id = 1 << 20
    own = bytes_tokenizer()

    def decode(self, ids: list[int], decode_with_timestamps: bool) -> str:
        return self.own.decode(ids)


def words(name: str, text: str) -> list[str]:
    """Return the words that the tokens of a text write."""
    return _combine_tokens_into_words(Bytes(), Bytes.own.encode(text).ids, name)[0]


if __name__ == "__main__":
    answers = {case.name: times(case) for case in CASES} | {text: words(name, text) for _, name, text in TEXTS}
    lines = (f"{json.dumps(name)}: {json.dumps(answer)}" for name, answer in answers.items())
    ANSWERS.write_text("{" + ",\n".join(lines) + "}\n")
