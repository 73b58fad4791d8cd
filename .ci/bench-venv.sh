#!/bin/sh
# The environment of `make bench-quick`: Hepti, plots and the outside baselines; made once. Argument: the Python.
set -eu
cd "$(dirname "$0")/.."
venv=.cache/bench-venv
if ! [ -e "$venv/.done" ]; then
    "$1" -m venv "$venv"
    "$venv/bin/pip" install --quiet --index-url https://download.pytorch.org/whl/cpu torch==2.13.0 ||
        "$venv/bin/pip" install --quiet torch==2.13.0
    "$venv/bin/pip" install --quiet -r requirements-bench.lock
    touch "$venv/.done"
fi
"$venv/bin/pip" install --quiet --no-deps -e .
