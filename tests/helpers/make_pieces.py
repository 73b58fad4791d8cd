"""Writes tests/golden/pieces.json: a small vocabulary of SentencePiece's byte pairs, and ids of texts by its library.

`python tests/helpers/make_pieces.py`, with sentencepiece.
"""

from __future__ import annotations

import io
import json
from pathlib import Path

import sentencepiece

ROOT = Path(__file__).resolve().parent.parent
TEXTS = (
    "the room is warm", "", " ", "  a  b", "é ü 日本 🤖", "x\ty\nz", " lead", "temperature 21.5!", "MQTT", "end ",
    "a\n\n\nb    c     d", "<table> of <tab", "the<table>  room\n",
)  # fmt: skip
# Spaces in front, none, and pieces of users as Gemma has them, of which those with spaces count before all others.
CASES = ((True, ()), (False, ()), (False, ("▁▁", "▁▁▁", "\n", "\n\n", "<table>")))


def main() -> None:
    lines = [line for line in (ROOT.parent / "README.md").read_text().splitlines() if line.strip()]
    cases = []
    for prefix, users in CASES:
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_writer=model, vocab_size=480, model_type="bpe", byte_fallback=True,
            add_dummy_prefix=prefix, normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2,
            user_defined_symbols=list(users),
        )  # fmt: skip
        s = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
        every = range(s.get_piece_size())
        pieces = [s.id_to_piece(i) for i in every]
        kinds = [2 if s.is_unknown(i) else 3 if s.is_control(i) else 6 if s.is_byte(i) else 1 for i in every]
        kinds = [4 if piece in users else kind for piece, kind in zip(pieces, kinds, strict=True)]
        metadata = {
            "tokens": pieces, "scores": [s.get_score(i) for i in every],
            "token_type": kinds, "unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
            "add_space_prefix": prefix,
        }  # fmt: skip
        cases.append({"metadata": metadata, "ids": {text: s.encode(text) for text in TEXTS}})
    (ROOT / "golden" / "pieces.json").write_text(json.dumps(cases) + "\n")


if __name__ == "__main__":
    main()
