#!/usr/bin/env bash
# Builds the wheel, installs it in a clean environment, and lets a cluster from it answer a request outside this tree.
# Uses BIN (where python of the development environment is) and PYTHON (the interpreter of the clean environment).
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
up_pid=
stop() {
    if [ -n "$up_pid" ]; then
        kill -TERM "$up_pid" 2>/dev/null || true
        wait "$up_pid" 2>/dev/null || true
    fi
    rm -rf "$work"
}
trap stop EXIT

"$BIN/python" -m hatchling build -t wheel -d "$work/dist" >/dev/null
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" --quiet --disable-pip-version-check install -c "$root/constraints.txt" "torch>=2.11"
"$work/venv/bin/pip" --quiet --disable-pip-version-check install -c "$root/constraints.txt" \
    "kvrelay[all] @ file://$(echo "$work"/dist/*.whl)"

# Only a GPU's node reads these, and the request below meets none.
diff <(ls "$root/kernels/kvrelay/kernels/cuda") <(ls "$work"/venv/lib/python*/site-packages/kvrelay/kernels/cuda)

cd "$work"
"$work/venv/bin/kvrelay" --version
mkfifo ready
"$work/venv/bin/kvrelay" up --listen 127.0.0.1:0 --prefill 1 --ring-size 1 --decode 1 >ready 2>up.log &
up_pid=$!
if ! read -r -t 120 word endpoint <ready || [ "$word" != ready ]; then
    cat up.log
    exit 1
fi
if ! answer=$("$work/venv/bin/kvrelay" generate "Hello" --endpoint "$endpoint" --max-tokens 8 --json); then
    cat up.log
    exit 1
fi
echo "$answer" | tail -n 1
kill -TERM "$up_pid"
wait "$up_pid"
up_pid=
echo "wheel-check: ok"
