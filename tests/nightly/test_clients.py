"""Real clients from their own packages against a tiny site; each script of `clients` ends with ok.

They run in an environment of their own: `make test-clients`, or HEPTI_CLIENTS=PYTHON and HEPTI_NODE_MODULES=DIRECTORY.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from site_processes import PATIENCE_S, Site, free_port, poll, running_site
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from hepti_mqtt.checkpoint import make_model
from hepti_mqtt.client import Hepti

SCRIPTS = Path(__file__).parent / "clients"
ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("HEPTI_CLIENTS", ROOT / ".venv-clients" / "bin" / "python"))
MODULES = Path(os.environ.get("HEPTI_NODE_MODULES", ROOT / ".venv-clients" / "node_modules"))
TEMPLATE = (
    "{% for one in messages %}{{ one.role + ' ' + one.content + ' ' }}{% endfor %}"
    "{% for tool in tools or [] %}{{ tool.function.name + ' ' }}{% endfor %}the"
)


def talker(directory: Path) -> Path:
    """Make a tiny decoder that writes bytes, so that its text may follow a schema, with room for a call of a tool."""
    path = make_model("tiny-llama", directory, seed=3)
    pieces = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    tokenizer.save(str(path / "tokenizer.json"))
    config = json.loads((path / "config.json").read_text())
    vocab, more = config["vocab_size"], len(pieces) - config["vocab_size"]
    config |= {"vocab_size": len(pieces), "max_position_embeddings": 1024, "eos_token_id": 1, "bos_token_id": 0}
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    weights = load_file(path / "model.safetensors")
    rng = np.random.default_rng(4)
    for name, rows in weights.items():
        if rows.ndim == 2 and rows.shape[0] == vocab:
            added = rng.standard_normal((more, rows.shape[1])) * rows.std()
            weights[name] = np.concatenate([rows, added.astype(rows.dtype)])
    save_file(weights, path / "model.safetensors")
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("clients")
    kinds = {"vectors": "tiny-minilm", "ranker": "tiny-bert-ranker", "speech": "tiny-whisper"}
    served = {name: make_model(kind, directory / name, seed=3) for name, kind in kinds.items()}
    served["talker"] = talker(directory / "talker")
    yield from running_site(directory, served, {"a": "300MiB"})


@pytest.fixture(scope="module")
def places(site: Site) -> dict[str, str]:
    """Return where the gateway and Wyoming are."""
    gateway, wyoming = free_port(), free_port()
    site.start("gateway", "gateway", "--port", str(gateway), "--model", "vectors")
    site.start("wyoming", "wyoming", "--port", str(wyoming))
    poll(lambda: "listening" in site.log("gateway") and "listening" in site.log("wyoming"), "the services' start")
    with Hepti.connect(site.url, site.name) as hepti:
        for model in ("talker", "vectors", "ranker", "speech"):
            hepti.wait_ready(model, PATIENCE_S)
    return {"HEPTI_GATEWAY": f"http://127.0.0.1:{gateway}", "HEPTI_WYOMING": f"tcp://127.0.0.1:{wyoming}"}


@pytest.mark.parametrize("script", [path.name for path in sorted(SCRIPTS.glob("*_client.py"))])
def test_a_client_of_python(script: str, places: dict[str, str]) -> None:
    if not PYTHON.is_file():
        pytest.skip(f"no {PYTHON}: make test-clients")
    ran = subprocess.run(
        [PYTHON, SCRIPTS / script],
        check=False,
        env={**os.environ, **places},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert (ran.returncode, ran.stdout.splitlines()[-1:]) == (0, ["ok"]), ran.stderr[-3000:]


def test_the_clients_of_node(places: dict[str, str], tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None or not MODULES.is_dir():
        pytest.skip(f"no node, or no {MODULES}: make test-clients")
    (tmp_path / "node_modules").symlink_to(MODULES.resolve())
    shutil.copy(SCRIPTS / "clients.mjs", tmp_path)
    ran = subprocess.run(
        [node, "clients.mjs"],
        check=False,
        cwd=tmp_path,
        env={**os.environ, **places},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert (ran.returncode, ran.stdout.splitlines()[-1:]) == (0, ["ok"]), ran.stderr[-3000:]
