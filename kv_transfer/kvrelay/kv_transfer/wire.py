"""Hand-off values to messages and back. What comes from a peer is checked here, so that the rest can rely on it."""

from __future__ import annotations

import asyncio

from kvrelay.core.errors import InvalidRequestError
from kvrelay.kv_transfer.transport import Address, Region
from kvrelay.kv_transfer.values import ChecksumKind, FenceProof, Manifest, Part, Request
from kvrelay.proto.convert import sampled_from_pb, sampled_to_pb, span_from_pb, span_to_pb
from kvrelay.proto.v1 import common_pb2, handoff_pb2

_PROOFS: dict[FenceProof, handoff_pb2.FenceProof.ValueType] = {
    FenceProof.HANDLES_DONE: handoff_pb2.FENCE_PROOF_HANDLES_DONE,
    FenceProof.CELL_WRITTEN: handoff_pb2.FENCE_PROOF_CELL_WRITTEN,
    FenceProof.NOTHING_POSTED: handoff_pb2.FENCE_PROOF_NOTHING_POSTED,
    FenceProof.LINK_CLOSED: handoff_pb2.FENCE_PROOF_LINK_CLOSED,
}
_CHECKSUM_KINDS: dict[ChecksumKind, handoff_pb2.ChecksumKind.ValueType] = {
    ChecksumKind.XXH3: handoff_pb2.CHECKSUM_KIND_XXH3,
    ChecksumKind.WORDS: handoff_pb2.CHECKSUM_KIND_WORDS,
}
_CHECKSUM_KINDS_BACK = {value: kind for kind, value in _CHECKSUM_KINDS.items()}
_PROOFS_BACK = {value: proof for proof, value in _PROOFS.items()}
_MANY_PARTS = 512  # converted in about 3 ms


def request_from_pb(message: common_pb2.RequestRef) -> Request:
    return Request(message.request_id, message.attempt)


def request_to_pb(value: Request) -> common_pb2.RequestRef:
    return common_pb2.RequestRef(request_id=value.request_id, attempt=value.attempt)


def checksum_kind_to_pb(kind: ChecksumKind) -> handoff_pb2.ChecksumKind.ValueType:
    return _CHECKSUM_KINDS[kind]


def checksum_kind_from_pb(value: handoff_pb2.ChecksumKind.ValueType) -> ChecksumKind:
    """Return the kind.

    Raises:
        InvalidRequestError: unknown here.
    """
    if value not in _CHECKSUM_KINDS_BACK:
        raise InvalidRequestError(f"checksums of kind {value} are unknown here")
    return _CHECKSUM_KINDS_BACK[value]


def address_from_pb(message: handoff_pb2.TransportAddress) -> Address:
    return Address(
        transport=message.transport,
        agent_name=message.agent_name,
        metadata=message.metadata,
        metadata_digest=message.metadata_digest,
        pool=Region(message.pool_address, message.pool_bytes, message.device_id),
        pool_pages=message.pool_pages,
        fence=Region(message.fence_address, message.fence_bytes, message.device_id),
        mapping=message.mapping,
        mapping_digest=message.mapping_digest,
    )


def address_to_pb(value: Address) -> handoff_pb2.TransportAddress:
    assert value.pool.device_id == value.fence.device_id, "a fence takes the same way as the data"
    return handoff_pb2.TransportAddress(
        transport=value.transport,
        agent_name=value.agent_name,
        metadata=value.metadata,
        metadata_digest=value.metadata_digest,
        pool_address=value.pool.address,
        pool_bytes=value.pool.num_bytes,
        pool_pages=value.pool_pages,
        fence_address=value.fence.address,
        fence_bytes=value.fence.num_bytes,
        device_id=value.pool.device_id,
        mapping=value.mapping,
        mapping_digest=value.mapping_digest,
    )


async def manifest_from_pb_on_loop(message: handoff_pb2.RankManifest, *, row_bytes: int) -> Manifest:
    """Return what `manifest_from_pb` does; for use on an event loop, which many parts would hold up."""
    if len(message.parts) < _MANY_PARTS:
        return manifest_from_pb(message, row_bytes=row_bytes)
    return await asyncio.to_thread(manifest_from_pb, message, row_bytes=row_bytes)


async def manifest_to_pb_on_loop(value: Manifest, *, row_bytes: int) -> handoff_pb2.RankManifest:
    """Return what `manifest_to_pb` does; for use on an event loop."""
    if len(value.parts) < _MANY_PARTS:
        return manifest_to_pb(value, row_bytes=row_bytes)
    return await asyncio.to_thread(manifest_to_pb, value, row_bytes=row_bytes)


def manifest_from_pb(message: handoff_pb2.RankManifest, *, row_bytes: int) -> Manifest:
    """Return the manifest.

    Raises:
        InvalidRequestError: its bytes are not those of its parts' tokens.
    """
    parts = tuple(Part(part.part_id, part.layer, span_from_pb(part.tokens), part.checksum) for part in message.parts)
    num_bytes = sum(part.tokens.num_tokens for part in parts) * row_bytes
    if message.num_bytes != num_bytes:
        raise InvalidRequestError(f"a manifest of {message.num_bytes} bytes whose parts have {num_bytes}")
    first_token = sampled_from_pb(message.first_token) if message.HasField("first_token") else None
    return Manifest(message.rank, parts, first_token, message.cached_tokens)


def manifest_to_pb(value: Manifest, *, row_bytes: int) -> handoff_pb2.RankManifest:
    return handoff_pb2.RankManifest(
        rank=value.rank,
        parts=[
            handoff_pb2.Part(
                part_id=part.part_id, layer=part.layer, tokens=span_to_pb(part.tokens), checksum=part.checksum
            )
            for part in value.parts
        ],
        num_bytes=sum(part.tokens.num_tokens for part in value.parts) * row_bytes,
        first_token=None if value.first_token is None else sampled_to_pb(value.first_token),
        cached_tokens=value.cached_tokens,
    )


def proof_from_pb(message: handoff_pb2.WriterFenced) -> FenceProof:
    """Return the proof.

    Raises:
        InvalidRequestError: it names none.
    """
    if message.proof not in _PROOFS_BACK:
        raise InvalidRequestError(f"fence proof {message.proof} is unknown")
    return _PROOFS_BACK[message.proof]


def proof_to_pb(proof: FenceProof) -> handoff_pb2.WriterFenced:
    return handoff_pb2.WriterFenced(proof=_PROOFS[proof])
