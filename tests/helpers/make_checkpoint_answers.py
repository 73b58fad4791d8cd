"""Writes tests/golden/checkpoints.npz: what transformers and sentence-transformers answer for every changed directory.

`python tests/helpers/make_checkpoint_answers.py` needs torch, transformers >= 5 and sentence-transformers >= 5.4.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "critical"}

import numpy as np
import torch
import transformers
from checkpoint_changes import (
    ANSWERS,
    CHANGES,
    DECODERS,
    IMAGE,
    KINDS,
    LAST,
    base,
    key_change,
    picture,
    requests_of,
    write,
)
from sentence_transformers import SentenceTransformer

from hepti_mqtt.checkpoint import Checkpoint
from hepti_mqtt.core.errors import ModelError

transformers.logging.set_verbosity(50)
transformers.logging.disable_progress_bar()
torch.manual_seed(0)
torch.set_num_threads(1)


def main(*again):
    """Add the answers that are missing, and those of changes `again`; of directories that are refused here none.

    again: ends of their names.
    """
    answers_by_name = {name: value for name, value in stored().items() if not (again and name.endswith(again))}
    for kind in KINDS:
        began, before = time.monotonic(), len(answers_by_name)
        with tempfile.TemporaryDirectory() as root:
            files = base(kind, Path(root) / "base")
            cases = [change for change in CHANGES if kind in change.kinds]
            keys = keys_of(files["config.json"])
            answers_by_name[f"{kind}|keys"] = np.array(json.dumps(keys))
            cases += [key_change(kind, key, value) for key, value in keys]
            for i, change in enumerate(cases):
                if (name := f"{kind}|{change.name}") in answers_by_name:
                    continue
                path = write(Path(root) / str(i), files, change, Path(root) / "base" / "model.safetensors")
                with contextlib.suppress(ModelError):
                    Checkpoint.open(path, "model").close()
                    answers_by_name[name] = answer_or_error(path, kind)
        store(answers_by_name)
        print(kind, len(answers_by_name) - before, "new,", round(time.monotonic() - began, 1), "s", flush=True)


def stored():
    if not ANSWERS.is_file():
        return {}
    file = np.load(ANSWERS)
    return {name: file[str(i)] for name, i in json.loads(str(file["where"])).items()}


def store(answers_by_name):
    """Write all answers, each once: most changes change nothing."""
    arrays, where = {}, {}
    for name, value in answers_by_name.items():
        key = value.astype(np.float32).tobytes() if value.dtype.kind == "f" else str(value).encode()
        where[name] = arrays.setdefault(key, (len(arrays), value))[0]
    numbered = {str(i): v.astype(np.float32) if v.dtype.kind == "f" else v for i, v in arrays.values()}
    np.savez_compressed(ANSWERS, where=np.array(json.dumps(where)), **numbered)


def keys_of(config):
    """Return another value for every key that the reference's configuration has."""
    config_keys = getattr(transformers, config["architectures"][0]).config_class(**config).to_dict()
    skipped = {"architectures", "model_type", "transformers_version", "id2label", "label2id", "quantization_config"}
    return [(key, other(value)) for key, value in sorted(config_keys.items()) if key not in skipped]


def other(value):
    match value:
        case bool():
            return not value
        case int():
            return value + 1 if value % 2 else max(value // 2, 1)
        case float():
            return value * 3 + 0.01
        case str():
            return {"gelu": "relu", "float32": "float16"}.get(value, "other")
        case [first, *_] if isinstance(first, int):
            return [*value[:-1], value[-1] * 2]
    return 1


def answer_or_error(path, kind):
    try:
        return answers(path, kind)
    except Exception as error:  # whatever the reference raises, it gives no answer
        return np.array(f"{type(error).__name__}: {error}"[:100])


def generation_of(path):
    file = path / "generation_config.json"
    return file.read_bytes() if file.is_file() else b""


KEPT = {}


def loaded(path, architecture, *content):
    """Return the model; the last one again, if its files have the same content."""
    if content not in KEPT:
        KEPT.clear()
        model, info = getattr(transformers, architecture).from_pretrained(
            path, dtype=torch.float32, output_loading_info=True, attn_implementation="eager"
        )
        unused = ("num_batches_tracked", "mask_token")
        missing = {name for name in info["missing_keys"] if not name.endswith(unused) and "pooler" not in name}
        assert not missing, missing
        KEPT[content] = model.eval()
    return KEPT[content]


@torch.no_grad()
def answers(path, kind):
    """Return the numbers of all answers, or the tokens and the text of a decoder's."""
    config = json.loads((path / "config.json").read_text(encoding="utf-8-sig"))
    architecture = config["architectures"][0]
    if kind == "tiny-minilm":
        model = SentenceTransformer(str(path), device="cpu", local_files_only=True)
        model[0].tokenizer.split_special_tokens = True
        return np.concatenate([model.encode(r["text"], convert_to_numpy=True) for r in requests_of(kind, "")])
    model = loaded(path, architecture, (path / "config.json").read_bytes(), generation_of(path))
    if kind in IMAGE:
        pixels = transformers.AutoImageProcessor.from_pretrained(path)(picture(), return_tensors="pt")
        return numbers(model, model(**pixels, return_dict=True), kind)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    limit = min(tokenizer.model_max_length, positions(model.config))
    results = []
    for request in requests_of(kind, tokenizer.mask_token):
        new = request.get("max_new_tokens", 0)
        masks = kind.endswith("-mlm")
        given = tokenizer(
            request["text"], truncation=True, max_length=limit - new, return_tensors="pt", padding=False,
            split_special_tokens=not masks, return_token_type_ids=False,
        )  # fmt: skip
        if kind in DECODERS:
            out = model.generate(
                **given, max_new_tokens=new, do_sample=False, pad_token_id=0, return_dict_in_generate=False
            )
            tokens = out[0][given["input_ids"].shape[1] :].tolist()
            results.append(json.dumps([tokens, tokenizer.decode(tokens)]))
            continue
        result = model(**given, return_dict=True)
        results.append(numbers(model, result, kind, given["input_ids"][0] == tokenizer.mask_token_id))
    return np.array(results) if kind in DECODERS else np.concatenate(results)


def positions(config):
    longest = config.max_position_embeddings
    if config.model_type == "mpnet":
        return longest - 2
    return longest - config.pad_token_id - 1 if "roberta" in config.model_type else longest


def numbers(model, result, kind, masks=None):
    if kind.endswith("-mlm"):
        return torch.softmax(result.logits[0, masks], -1).numpy().ravel()
    if "logits" not in result:
        pooled = result.get("pooler_output")
        row = result.last_hidden_state[0, -1 if kind in LAST else 0]
        return (pooled[0] if pooled is not None else row).numpy().ravel()
    logits = result.logits[0]
    problem = model.config.problem_type
    if problem == "regression" or len(logits) == 1:
        return logits.numpy()
    return (torch.sigmoid(logits) if problem == "multi_label_classification" else torch.softmax(logits, -1)).numpy()


if __name__ == "__main__":
    main(*sys.argv[1:])
