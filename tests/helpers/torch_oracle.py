"""What PyTorch and transformers compute for a model directory; needs torch, transformers, and nothing of ours but data.

Everything runs in float64, so that a difference is ours.
"""

from __future__ import annotations

import json

import numpy as np
import torch
import torchvision
import transformers
from safetensors.torch import load_file

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def outputs(path, architecture, inputs, shape, pooling=None):
    """Return (final hidden states [m, h], the task's output), one sequence or image after the other.

    pooling: "mean" for sentence embeddings (mean over the tokens, then L2), "last" for the last row, None for what the
    architecture returns.
    """
    if (net := _net(path, architecture)) is not None:
        return of_net(net, scaled(path, inputs))
    model = getattr(transformers, architecture).from_pretrained(path, attn_implementation="eager").double().eval()
    model.set_experts_implementation("eager")  # PyTorch groups no products in double precision
    if model.main_input_name == "input_features":
        return of_speech(model, inputs, shape)
    hidden, output = [], []
    for i, (start, length) in enumerate(zip(shape.starts, shape.lengths, strict=True)):
        if model.main_input_name == "pixel_values":
            given = {"pixel_values": torch.from_numpy(scaled(path, inputs[i : i + 1]))}
        elif shape.session_rows:  # the cached rows, none, and then the ids
            given = {"input_ids": torch.from_numpy(inputs[1:].astype(np.int64))[None]}
        else:
            given = {"input_ids": torch.from_numpy(inputs[start : start + length].astype(np.int64))[None]}
        with torch.no_grad():
            rows = model.base_model(**given).last_hidden_state[0]
            if "CLIPVision" in architecture:  # whose states are those before the last norm
                rows = model.base_model.post_layernorm(rows)
            result = model(**given)
        if shape.session_rows:
            hidden.append(rows.numpy())
            output.append(result.logits[0, -1:].numpy())
            continue
        masks = [row - start for row in shape.mask_rows if start <= row < start + length]
        hidden.append(rows.numpy())
        every = slice(None) if "TokenClassification" in architecture else masks
        output.append(_task(result, rows, every, pooling))
    return np.concatenate(hidden), np.concatenate(output)


def greedy(path, architecture, ids, steps):
    """Return the `steps` likeliest tokens behind ids, one after the other."""
    model = getattr(transformers, architecture).from_pretrained(path, attn_implementation="eager").double().eval()
    model.set_experts_implementation("eager")
    tokens = [int(token) for token in ids]
    with torch.no_grad():
        for _ in range(steps):
            tokens.append(int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(ids) :]


def of_speech(model, inputs, shape):
    """Return (the encoder's states, logits behind the first and the last token)."""
    bands = model.config.num_mel_bins
    frames = torch.from_numpy(inputs[1 + shape.new_rows :].reshape(-1, bands).T * 2.0**-20)[None]
    ids = torch.from_numpy(inputs[1 : 1 + shape.new_rows].astype(np.int64))[None]
    with torch.no_grad():
        states = model.model.encoder(frames).last_hidden_state[0]
        logits = model(input_features=frames, decoder_input_ids=ids).logits[0]
    return states.numpy(), logits[[0, -1]].numpy()


def is_in_transformers(config):
    """Return whether PyTorch's libraries have the architecture of a config.json; torchvision's in one width only."""
    narrow = {"width", "width_mult"} & config.keys()
    return hasattr(transformers, config["architectures"][0]) or (config["model_type"] == "torchvision" and not narrow)


def _net(path, architecture):
    """Return a convolutional net, None if it is none."""
    if architecture.removesuffix("ForImageClassification") in ("ResNet", "MobileNetV2", "ConvNext", "EfficientNet"):
        return getattr(transformers, architecture).from_pretrained(path).double().eval()
    if json.loads((path / "config.json").read_text())["model_type"] != "torchvision":
        return None
    model = getattr(torchvision.models, architecture)().double().eval()
    mismatch = model.load_state_dict(load_file(path / "model.safetensors"), strict=False)
    assert not mismatch.unexpected_keys
    assert all(name.endswith("num_batches_tracked") for name in mismatch.missing_keys)
    return model


def scaled(path, pixels):
    """Return pixels [B, 3, S, S] as a net reads them, by the preprocessor's mean and deviation."""
    file = path / "preprocessor_config.json"
    read = json.loads(file.read_text()) if file.is_file() else {}
    mean = read.get("image_mean", [0.485, 0.456, 0.406])
    std = read.get("image_std", [0.229, 0.224, 0.225])
    return (pixels / 255 - np.array(mean)[:, None, None]) / np.array(std)[:, None, None]


def of_net(model, pictures):
    """Return (what the last dense layer reads, the logits)."""
    outputs = []
    last = [module for module in model.modules() if isinstance(module, torch.nn.Linear)][-1]
    hook = last.register_forward_hook(lambda _module, given, _result: outputs.append(given[0]))
    with torch.no_grad():
        result = model(torch.from_numpy(pictures))
    hook.remove()
    return outputs[0].numpy(), getattr(result, "logits", result).numpy()


def _task(result, rows, masks, pooling):
    if pooling == "mean":
        mean = rows.mean(dim=0, keepdim=True)
        return torch.nn.functional.normalize(mean, dim=1).numpy()
    if "start_logits" in result:
        return torch.stack([result.start_logits[0], result.end_logits[0]], dim=1).numpy()
    if (vectors := result.get("text_embeds", result.get("image_embeds"))) is not None:
        return vectors.numpy()
    if "logits" not in result:
        # A family without a pooler gives the first row as it is.
        if result.get("pooler_output") is not None:
            return result.pooler_output.numpy()
        return (rows[-1:] if pooling == "last" else rows[:1]).numpy()
    logits = result.logits
    return (logits[0, masks] if logits.ndim == 3 else logits).numpy()
