"""Writes the golden files of models that see: what transformers' processor and model make of pictures and a prompt.

`python tests/helpers/make_picture_answers.py` with torch, torchvision and transformers. Everything runs in float64.
"""

from __future__ import annotations

import importlib
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from picture_cases import CASES, TOKENS, picture
from PIL import Image

from hepti_mqtt.checkpoint import make_model

transformers.logging.set_verbosity_error()


def main() -> None:
    for case in CASES:
        if case.file.exists():
            continue
        with tempfile.TemporaryDirectory() as root:
            path = make_model(case.kind, Path(root) / "model", case.seed)
            results = answers(path, case)
        np.savez_compressed(case.file, **results)
        print(f"{case.file.name}: {case.file.stat().st_size} bytes, { ({k: v.shape for k, v in results.items()}) }")


def answers(path, case):
    """Return views u8, the tower's rows, the ids of the prompt, the logits behind it, and the likeliest tokens."""
    config = transformers.AutoConfig.from_pretrained(path)
    given = processor(path, config)(
        images=[[Image.fromarray(picture(*size)) for size in case.sizes]], text=[case.text], return_tensors="pt"
    )
    name = config.architectures[0]
    model = getattr(transformers, name).from_pretrained(path, attn_implementation="eager").double().eval()
    pixels = given["pixel_values"].double()
    given["pixel_values"] = pixels
    with torch.no_grad():
        rows = model.get_image_features(pixels).pooler_output
        logits = model(**given).logits[0, -1]
        written = model.generate(**given, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
    views = pixels.reshape(-1, *pixels.shape[-3:])
    return {
        "views": np.rint((views.numpy() * 0.5 + 0.5) * 255).astype(np.uint8),
        "rows": np.concatenate([one.numpy() for one in rows]).reshape(-1, logits_width(model)).astype(np.float32),
        "ids": given["input_ids"][0].numpy().astype(np.int32),
        "logits": logits.numpy().astype(np.float32),
        "tokens": written[0, given["input_ids"].shape[1] :].numpy().astype(np.int32),
    }


def logits_width(model):
    return model.config.text_config.hidden_size


def processor(path, config):
    """Return the processor of a model, with pictures scaled by Pillow."""
    if config.model_type == "gemma3":
        marks = {"boi_token": "<start_of_image>", "image_token": "<image_soft_token>", "eoi_token": "<end_of_image>"}
        tokens = transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(path / "tokenizer.json"), extra_special_tokens=marks
        )
        module = importlib.import_module("transformers.models.gemma3.image_processing_pil_gemma3")
        pictures = module.Gemma3ImageProcessorPil.from_pretrained(path)
        return transformers.Gemma3Processor(pictures, tokens, image_seq_length=config.mm_tokens_per_image)
    tokens = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path / "tokenizer.json"))
    kind = "idefics3"  # SmolVLM's own differs in videos alone
    module = importlib.import_module(f"transformers.models.{kind}.image_processing_pil_{kind}")
    pictures = module.Idefics3ImageProcessorPil.from_pretrained(path)
    rows = (config.vision_config.image_size // config.vision_config.patch_size // config.scale_factor) ** 2
    return transformers.Idefics3Processor(pictures, tokens, image_seq_len=rows)


if __name__ == "__main__":
    main()
