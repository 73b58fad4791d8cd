#!/bin/sh
# Sample the experiments that come with Hepti within a time: .ci/bench-quick.sh BENCHMARKS OUT SECONDS NAME...
# What the time cuts off keeps the turns that it has, and its report; what is not reached at all is named at the end.
set -u
bench=$1 out=$2 seconds=$3
shift 3
begun=$(date +%s)
missed="" cut="" failed=""
left() { echo $((begun + seconds - $(date +%s))); }

mkdir -p "$out"
# Fifteen seconds of each are for taking a lab down and for the report of what was cut off. Nobody may take more than
# twice its share of what is left: so the last ones are reached too.
for name in "$@"; do
    limit=$((2 * $(left) / $# - 15))
    [ "$limit" -le $(($(left) - 15)) ] || limit=$(($(left) - 15))
    shift
    if [ "$limit" -lt 15 ]; then
        missed="$missed $name"
        continue
    fi
    # INT, as from a keyboard: a lab is taken down by who made it. What does not end by that is killed.
    more=""
    [ "$name" != kernels ] || more="seconds=10"
    timeout -s INT -k 30 "$limit" $bench "$name" --quick --out "$out/$name" $more
    status=$?
    case $status in
        0) ;;
        124 | 137)
            cut="$cut $name"
            ;;
        130) exit 130 ;;
        *) failed="$failed $name" ;;
    esac
    echo "$name: $(($(date +%s) - begun)) s of $seconds"
done
echo "reports:"
ls "$out"/*/report.md 2>/dev/null
[ -z "$cut" ] || echo "cut off, so that $seconds s are enough for all:$cut"
[ -z "$missed" ] || echo "not reached in $seconds s:$missed; QUICK=\"$(echo $missed)\" samples them"
[ -z "$failed" ] || echo "failed:$failed"
[ -z "$failed" ]
