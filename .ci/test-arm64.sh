#!/bin/sh
# Run the kernels' tests on real aarch64 code under user-mode emulation: .ci/test-arm64.sh PYTHON [CPU...]
# CPUs: cortex-a72 (Raspberry Pi 4, no dot product) and cortex-a76 (Raspberry Pi 5, sdot). Not qemu's `max`: LLVM
# knows no such CPU. What is fetched and compiled stays in .cache/arm64. Tests that start processes are left to `make test`.
set -eu
cd "$(dirname "$0")/.."
python=$1
shift
[ $# -gt 0 ] || set -- cortex-a72 cortex-a76
cache=$PWD/.cache/arm64
root=$cache/root
site=$cache/site
suite=bookworm # the system whose Python (3.11) the wheels are for
mirror=${DEBIAN_MIRROR:-http://deb.debian.org/debian}

missing=
command -v qemu-aarch64-static >/dev/null || missing="$missing qemu-user-static"
command -v debootstrap >/dev/null || [ -x /usr/sbin/debootstrap ] || missing="$missing debootstrap"
command -v dpkg-deb >/dev/null || missing="$missing dpkg"
if [ -n "$missing" ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
    missing=
fi
if [ -n "$missing" ]; then
    echo "The emulation of ARM needs$missing. Install them (Debian, Ubuntu: sudo apt install$missing), then try again." >&2
    exit 1
fi

if [ ! -e "$root/.done" ]; then
    if [ "$(id -u)" != 0 ]; then
        echo "debootstrap needs root to make the ARM system, once: sudo make test-arm64" >&2
        exit 1
    fi
    mkdir -p "$root"
    echo "Fetching an ARM system ($suite) into $root"
    PATH=$PATH:/usr/sbin debootstrap --arch=arm64 --foreign --variant=minbase --include=python3,libstdc++6 \
        "$suite" "$root" "$mirror" >"$cache/debootstrap.log" 2>&1 || {
        tail -n 5 "$cache/debootstrap.log" >&2
        echo "The ARM system could not be fetched from $mirror; name another: DEBIAN_MIRROR=http://..." >&2
        exit 1
    }
    # Unpacked, not configured: nothing of it runs but Python.
    for package in "$root"/var/cache/apt/archives/*.deb; do
        dpkg-deb -x "$package" "$root"
    done
    touch "$root/.done"
fi

wanted=$cache/requirements.txt
grep -E '^(pytest|pytest-cov|coverage|hypothesis|iniconfig|pluggy|packaging|pygments|sortedcontainers|attrs)==' requirements-dev.lock |
    cat requirements.lock - | sort -u >"$wanted.new"
if ! cmp -s "$wanted" "$wanted.new"; then
    echo "Fetching the locked packages for aarch64 into $site"
    rm -rf "$site"
    "$python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$site" \
        --only-binary=:all: --implementation cp --python-version 3.11 \
        --platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 \
        --platform manylinux_2_17_aarch64 --platform manylinux2014_aarch64 -r "$wanted.new"
    mv "$wanted.new" "$wanted"
fi

# What Linux says of a CPU, by which LLVM knows it; without this the emulated Python reads the host's. "part features dot".
describe() {
    case $1 in
    cortex-a72) part=0xd08 features='fp asimd evtstrm crc32 cpuid' dot=plain ;;
    cortex-a76)
        part=0xd0b dot=dotprod
        features='fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp'
        ;;
    *)
        echo "What Linux says of $1 is not known here; use cortex-a72 or cortex-a76, or add it to $0" >&2
        exit 1
        ;;
    esac
}

failed=0
for cpu in "$@"; do
    describe "$cpu"
    if ! qemu-aarch64-static -cpu help | grep -qw "$cpu"; then
        echo "This qemu-aarch64-static does not know $cpu; install qemu 7.1 or later" >&2
        exit 1
    fi
    mkdir -p "$root/proc"
    printf '%s\t: %s\n' processor 0 Features "$features" 'CPU implementer' 0x41 'CPU architecture' 8 \
        'CPU variant' 0x0 'CPU part' "$part" 'CPU revision' 0 >"$root/proc/cpuinfo"
    echo "== $cpu"
    PYTHONPATH=$PWD:$site NUMBA_CACHE_DIR=$cache/numba-$cpu PYTHONDONTWRITEBYTECODE=1 OPENBLAS_NUM_THREADS=1 \
        nice qemu-aarch64-static -cpu "$cpu" -L "$root" "$root/usr/bin/python3.11" -c '
import sys, pytest
import llvmlite.binding as llvm
from hepti_mqtt.kernels import isa, warm_up
from hepti_mqtt.kernels.cpu import dot
cpu, expected, *arguments = sys.argv[1:]
assert (llvm.get_host_cpu_name(), isa(), dot()) == (cpu, "neon", expected), (llvm.get_host_cpu_name(), isa(), dot())
print("neon, int8 by %s: %d kernels compiled, %d from the cache" % (dot(), *warm_up()), flush=True)
sys.exit(pytest.main(arguments))' "$cpu" "$dot" \
        -p no:cacheprovider --ignore=tests/site/kernels/test_kernels_jit.py \
        -k 'not instruction_set_of_this_machine and not other_threads_allocate_meanwhile and not given_back and not disturbs and not one_of_the_processes and not what_one_process_leaves' tests/unit/kernels ||
        failed=1
done
exit $failed
