"""Real clients from their own packages against a tiny site; each script of `clients` ends with ok.

They run in an environment of their own: `make test-clients`, or HEPTI_CLIENTS=PYTHON and HEPTI_NODE_MODULES=DIRECTORY.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from site_processes import client_of, running_site
from word_cases import bytes_tokenizer

from hepti_mqtt.checkpoint import make_model

SCRIPTS = Path(__file__).parent / "clients"
ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("HEPTI_CLIENTS", ROOT / ".venv-clients" / "bin" / "python"))
MODULES = Path(os.environ.get("HEPTI_NODE_MODULES", ROOT / ".venv-clients" / "node_modules"))
TEMPLATE = (
    "{% for one in messages %}{{ one.role + ' ' + one.content + ' ' }}{% endfor %}"
    "{% for tool in tools or [] %}{{ tool.function.name + ' ' }}{% endfor %}the"
)


def talker(directory):
    """Make a tiny decoder that writes bytes, so that its text may follow a schema, with room for a call of a tool."""
    path = make_model("tiny-llama", directory, seed=3)
    tokenizer = bytes_tokenizer(special=["<s>", "</s>"])
    tokenizer.save(str(path / "tokenizer.json"))
    config = json.loads((path / "config.json").read_text())
    vocab, size = config["vocab_size"], tokenizer.get_vocab_size()
    config |= {"vocab_size": size, "max_position_embeddings": 1024, "eos_token_id": size - 1, "bos_token_id": size - 2}
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    weights = load_file(path / "model.safetensors")
    rng = np.random.default_rng(4)
    for name, rows in weights.items():
        if rows.ndim == 2 and rows.shape[0] == vocab:
            added = rng.standard_normal((size - vocab, rows.shape[1])) * rows.std()
            weights[name] = np.concatenate([rows, added.astype(rows.dtype)])
    save_file(weights, path / "model.safetensors")
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    directory = tmp_path_factory.mktemp("clients")
    kinds = {"vectors": "tiny-minilm", "ranker": "tiny-bert-ranker", "speech": "tiny-whisper"}
    served = {name: make_model(kind, directory / name, seed=3) for name, kind in kinds.items()}
    served["talker"] = talker(directory / "talker")
    yield from running_site(directory, served, {"a": "300MiB"})


hepti = client_of()


@pytest.fixture(scope="module")
def run_client(site, hepti):
    """Run the command of a client, to which the environment names the gateway and Wyoming; its last line is ok."""
    gateway, wyoming = site.serve("gateway", "--model", "vectors"), site.serve("wyoming")
    places = {"HEPTI_GATEWAY": f"http://127.0.0.1:{gateway}", "HEPTI_WYOMING": f"tcp://127.0.0.1:{wyoming}"}

    def run(*command, cwd=None):
        how = {"cwd": cwd, "env": {**os.environ, **places}, "capture_output": True, "text": True, "timeout": 600}
        done = subprocess.run(command, check=False, **how)
        assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["ok"]), done.stderr[-3000:]

    return run


@pytest.mark.parametrize("script", [path.name for path in sorted(SCRIPTS.glob("*_client.py"))])
def test_a_client_of_python(script, run_client):
    if not PYTHON.is_file():
        pytest.skip(f"no {PYTHON}: make test-clients")
    run_client(PYTHON, SCRIPTS / script)


def test_the_clients_of_node(run_client, tmp_path):
    node = shutil.which("node")
    if node is None or not MODULES.is_dir():
        pytest.skip(f"no node, or no {MODULES}: make test-clients")
    (tmp_path / "node_modules").symlink_to(MODULES.resolve())
    shutil.copy(SCRIPTS / "clients.mjs", tmp_path)
    run_client(node, "clients.mjs", cwd=tmp_path)
