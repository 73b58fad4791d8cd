#!/bin/sh
# Test the outside baselines where PyTorch and ONNX Runtime are: .ci/outside.sh PYTHON
set -eu
.ci/bench-venv.sh "$1"
venv=.cache/bench-venv
"$venv/bin/pip" install --quiet --disable-pip-version-check pytest hypothesis
"$venv/bin/python" -m pytest -k outside benchmarks/tests
