"""Names of cached blocks."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np

from kvrelay.core import prefix_hash

_SCRIPT = """
import numpy as np
from kvrelay.core import prefix_hash
seed = prefix_hash.seed(fingerprint=b"layout", tenant_salt=b"tenant")
print(prefix_hash.chain(seed, np.arange(1000, dtype=np.int32), block_tokens=64)[-1].hex())
"""


def _in_a_process(hash_seed: str) -> str:
    env = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run([sys.executable, "-c", _SCRIPT], env=env, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_i3_hashes_are_the_same_in_every_process() -> None:
    here = prefix_hash.chain(
        prefix_hash.seed(fingerprint=b"layout", tenant_salt=b"tenant"),
        np.arange(1000, dtype=np.int32),
        block_tokens=64,
    )[-1].hex()

    assert _in_a_process("1") == _in_a_process("2") == here


def test_only_full_blocks_have_a_name() -> None:
    seed = prefix_hash.seed(fingerprint=b"f")
    tokens = np.arange(130, dtype=np.int32)

    assert prefix_hash.chain(seed, tokens[:63], block_tokens=64) == []
    assert prefix_hash.chain(seed, tokens[:0], block_tokens=64) == []
    assert len(prefix_hash.chain(seed, tokens, block_tokens=64)) == 2


def test_a_hash_names_the_whole_prefix() -> None:
    seed = prefix_hash.seed(fingerprint=b"f")
    tokens = np.arange(256, dtype=np.int32)
    changed = tokens.copy()
    changed[0] += 1

    whole = prefix_hash.chain(seed, tokens, block_tokens=64)
    other = prefix_hash.chain(seed, changed, block_tokens=64)

    assert not set(whole) & set(other)


def test_a_chain_continues_from_any_block() -> None:
    seed = prefix_hash.seed(fingerprint=b"f")
    tokens = np.arange(256, dtype=np.int32)
    whole = prefix_hash.chain(seed, tokens, block_tokens=64)

    assert prefix_hash.chain(whole[1], tokens[128:], block_tokens=64) == whole[2:]


def test_i8_tenants_and_layouts_never_share_names() -> None:
    tokens = np.arange(64, dtype=np.int32)
    seeds = {
        prefix_hash.seed(fingerprint=b"f", tenant_salt=b"a"),
        prefix_hash.seed(fingerprint=b"f", tenant_salt=b"b"),
        prefix_hash.seed(fingerprint=b"fa"),
        prefix_hash.seed(fingerprint=b"g", tenant_salt=b"a"),
    }

    assert len({prefix_hash.chain(seed, tokens, block_tokens=64)[0] for seed in seeds}) == 4
