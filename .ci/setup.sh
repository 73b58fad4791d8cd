#!/bin/sh
# Make a virtual environment with the locked packages: .ci/setup.sh PYTHON VENV LOCK...
# The locks are complete, so nothing beyond them is resolved or installed.
set -eu
python=$1
venv=$2
shift 2
fail() {
    echo "$1" >&2
    exit 1
}
command -v "$python" >/dev/null ||
    fail "Hepti needs Python 3.11 or newer, and there is no $python here. Name another: make PYTHON=python3.12 ..."
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "Hepti needs Python 3.11 or newer; $python is $("$python" --version 2>&1). Name another: make PYTHON=python3.12 ..."
"$python" -c 'import sys; sys.exit(sys.maxsize < 2**32)' ||
    fail "Hepti needs a 64-bit system, and $python is 32-bit: its packages have no 32-bit wheels. Install the 64-bit edition."
if [ ! -x "$venv/bin/pip" ]; then
    # Debian ships python3 without ensurepip unless python3-venv is installed; the system's pip can fill the gap.
    "$python" -m venv --clear "$venv" >/dev/null 2>&1 || {
        "$python" -m venv --clear --without-pip "$venv" &&
        "$python" -m pip --python "$venv/bin/python" install --quiet --disable-pip-version-check pip
    } >/dev/null 2>&1 || {
        rm -rf "$venv"
        fail "No pip: install python3-venv (Debian, Ubuntu, Raspberry Pi OS: apt install python3-venv), then try again."
    }
fi
log=$venv/pip.log
for lock in "$@"; do
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps -r "$lock" >"$log" 2>&1 ||
        fail "pip cannot install $lock: check the network or PIP_INDEX_URL, then try again. What pip says: $log"
done
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --editable . >"$log" 2>&1 ||
    fail "pip cannot install this checkout: check the network or PIP_INDEX_URL, then try again. What pip says: $log"
