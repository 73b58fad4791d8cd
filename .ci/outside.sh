#!/bin/sh
# Test the outside baselines where PyTorch and ONNX Runtime are: .ci/outside.sh PYTHON
set -eu
venv=.cache/bench-venv
[ -x "$venv/bin/pip" ] || "$1" -m venv "$venv"
# torch first and pinned: other versions bring gigabytes of CUDA packages.
"$venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
"$venv/bin/pip" install --quiet --disable-pip-version-check -r requirements-bench.lock
"$venv/bin/pip" install --quiet --disable-pip-version-check pytest hypothesis
"$venv/bin/pip" install --quiet --disable-pip-version-check --no-deps --editable .
"$venv/bin/python" -m pytest tests/bench/test_bench_outside.py
