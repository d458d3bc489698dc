#!/usr/bin/env bash
# Makes a base image out of Debian packages, for machines that reach no registry of images: python for our images, and
# redis-server, so that one image serves for both. Also offers this machine's wheels and certificates to the build.
# Needs root, debootstrap and a running Docker engine. Prints the variables that the compose file takes.
set -euo pipefail

image=${1:-kvrelay-test-base}
root=$(cd "$(dirname "$0")/../.." && pwd)
offline=$root/compose/offline
python=${PYTHON:-$root/.venv/bin/python}

if ! docker image inspect "$image" >/dev/null 2>&1; then
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    debootstrap --variant=minbase --include=python3,python3-venv,python3-pip,ca-certificates,redis-server \
        bookworm "$work" >&2
    tar -C "$work" -c . | docker import - "$image" >&2
fi

# torch for CPUs as development uses it, and everything else, so that a build needs no network.
if ! ls "$offline"/torch-*.whl >/dev/null 2>&1; then
    (cd "$root" && "$python" compose/requirements.py node) >"$offline/requirements.txt"
    "$python" -m pip --quiet --disable-pip-version-check download --dest "$offline" -c "$root/constraints.txt" \
        -r "$offline/requirements.txt" "hatchling>=1.27" async-timeout setuptools wheel >&2
fi
if [ -n "${SSL_CERT_FILE:-}" ] && [ -f "${SSL_CERT_FILE:-}" ]; then
    cp "$SSL_CERT_FILE" "$offline/ca.pem"
fi
echo "KVRELAY_BASE_IMAGE=$image"
echo "KVRELAY_REDIS_IMAGE=$image"
echo "KVRELAY_PIP_ARGS=--no-index"
