#!/bin/sh
# Make the environment of the benchmarks with the rivals in it: .ci/bench-venv.sh PYTHON
set -eu
venv=.cache/bench-venv
[ -x "$venv/bin/pip" ] || "$1" -m venv "$venv"
# torch first and pinned: other versions bring gigabytes of CUDA packages.
"$venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
"$venv/bin/pip" install --quiet --disable-pip-version-check --no-deps -r requirements-bench.lock
"$venv/bin/pip" install --quiet --disable-pip-version-check --no-deps --editable .
