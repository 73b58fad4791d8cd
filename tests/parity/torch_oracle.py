"""What PyTorch and transformers compute for a model directory; needs torch, transformers, and nothing of ours but data.

Everything runs in float64, so that a difference is ours.
"""

from __future__ import annotations

import numpy as np
import torch
import transformers

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def outputs(path, architecture, inputs, shape, pooling=None):
    """Return (final hidden states [m, h], the task's output), one sequence or image after the other.

    pooling: "mean" for sentence embeddings (mean over the tokens, then L2), None for what the architecture returns.
    """
    model = getattr(transformers, architecture).from_pretrained(path, attn_implementation="eager").double().eval()
    hidden, output = [], []
    for i, (start, length) in enumerate(zip(shape.starts, shape.lengths, strict=True)):
        if architecture.startswith("ViT"):
            given = {"pixel_values": torch.from_numpy((inputs[i : i + 1] / 255 - 0.5) / 0.5)}
        elif shape.cache:  # the cached rows, none, and then the ids
            given = {"input_ids": torch.from_numpy(inputs[1:].astype(np.int64))[None]}
        else:
            given = {"input_ids": torch.from_numpy(inputs[start : start + length].astype(np.int64))[None]}
        with torch.no_grad():
            rows = model.base_model(**given).last_hidden_state[0]
            result = model(**given)
        if shape.cache:
            hidden.append(rows.numpy())
            output.append(result.logits[0, -1:].numpy())
            continue
        masks = [row - start for row in shape.mask_rows if start <= row < start + length]
        hidden.append(rows.numpy())
        output.append(_task(result, rows, masks, pooling))
    return np.concatenate(hidden), np.concatenate(output)


def _task(result, rows, masks, pooling):
    if pooling == "mean":
        mean = rows.mean(dim=0, keepdim=True)
        return torch.nn.functional.normalize(mean, dim=1).numpy()
    if "logits" not in result:
        # A family without a pooler gives the first row as it is.
        return rows[:1].numpy() if result.get("pooler_output") is None else result.pooler_output.numpy()
    logits = result.logits
    return (logits[0, masks] if logits.ndim == 3 else logits).numpy()
