#!/bin/bash
# Everything that needs two GPUs, in one go: the benches, and the tests marked two_gpus. Each part has a time limit and
# leaves its results and its log in OUT, so that a part that fails costs no other one.
#
#   [PARTS="split relay tests rings"] bench/two_gpus.sh OUT [PYTHON]
set -uo pipefail
cd "$(dirname "$0")/.."
out=$(realpath -m "$1")
python=${2:-python3}
mkdir -p "$out"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4} PYTHONUNBUFFERED=1

# The random checkpoint is 31 GB: in memory, where loading is fastest.
checkpoint=$(mktemp -d)
mount -t tmpfs -o size=48g none "$checkpoint" 2>/dev/null && trap 'umount "$checkpoint"' EXIT

part() { # NAME SECONDS COMMAND...: run it, keep its log, say how it ended
    local name=$1 limit=$2 began=$SECONDS
    shift 2
    timeout -s INT -k 25 "$limit" "$@" >"$out/$name.log" 2>&1
    echo "== $name: status $? after $((SECONDS - began)) s"
    tail -n "${SHOWN:-6}" "$out/$name.log" | cut -c1-1500
}
bench() { # NAME SECONDS ARGUMENTS...
    local name=$1 limit=$2
    shift 2
    part "$name" "$limit" "$python" -m kvrelay.cli.main bench "$@" --out "$out/$name"
}
tests() { # NAME SECONDS FILES...
    local name=$1 limit=$2
    shift 2
    PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 part "$name" "$limit" "$python" -m pytest -p pytest_asyncio.plugin \
        -p pytest_timeout -p no:cacheprovider --tb=short --durations=5 -m two_gpus "$@"
}

wants() { [[ " ${PARTS:-split relay tests rings} " == *" $1 "* ]]; }

if wants split; then
    bench split 300 split --folder "$checkpoint" --pairs 12 6 3 --batch 8 1 --rounds 2
fi
if wants relay; then
    bench relay 60 relay --reader cuda:1
fi
if wants tests; then
    # Side by side: these two measure nothing. What runs in the background ignores SIGINT, so it is what needs no clearing up.
    tests nccl 150 tests/gpu/test_ring_on_gpus.py &
    tests three_processes 150 tests/gpu/test_three_processes.py tests/gpu/test_split_on_gpu.py
    wait
fi
if wants rings; then
    bench ring128 60 ring --heads 128 --tokens 32768 131072 --rounds 3
    bench ring16 60 ring --tokens 32768 131072 --rounds 5 --ways latent expanded --exchange --png "$out/ring.png"
    bench ring1m 70 ring --tokens 1048576 --ways latent --rounds 1
fi
