"""What rank 0 remembers of one job, and what the ranks are told of it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.core.shard import Span
from kvrelay.prefill_node.closing import Closing
from kvrelay.prefill_node.jobs import Job, Phase
from kvrelay.prefill_node.owned_runs import owned_runs
from kvrelay.prefill_node.pages import RequestPages
from kvrelay.prefill_node.scheduler import NextChunk
from kvrelay.proto.convert import pack_ids, span_to_pb
from kvrelay.proto.v1 import ring_pb2


@dataclass(slots=True)
class JobRecord:
    """Owned by `RingControl`."""

    job: Job
    submitted_s: float
    phase: Phase = Phase.QUEUED
    pages: RequestPages | None = None
    short_since: int | None = None  # state of the room, as counted by RingControl, in which it found none
    sent_pages: int = 0  # prompt pages that the ranks know
    committed_blocks: int = 0
    overtaken: int = 0
    waits_for: bytes | None = None  # block that is coming, by another job or by a copy
    waiting_since_s: float = 0.0
    is_weighed: bool = False  # whether what host memory has of it should be loaded
    closing: Closing | None = None  # set in phase CLOSING


def open_message(record: JobRecord, *, page_tokens: int) -> ring_pb2.RingOpen:
    """Return what the ranks are told of a job that has its pages; they then know those of its cached tokens."""
    assert record.pages is not None, "a job opens with its pages"
    job, cached_tokens = record.job, record.pages.cached_tokens
    record.sent_pages = cached_tokens // page_tokens
    return ring_pb2.RingOpen(
        request=job.request,
        prompt_tokens=job.prompt_tokens,
        cached_tokens=cached_tokens,
        cached_pages=owned_runs(record.pages.pages, Span(0, record.sent_pages)),
        ticket=job.ticket,
        ticket_follows=job.ticket_follows,
        prompt_logprobs=job.sampling.prompt_logprobs,
    )


def chunk_message(record: JobRecord, chunk: NextChunk, *, page_tokens: int) -> ring_pb2.RingChunk:
    """Return what the ranks are told of a chunk; they then know the pages that it begins to fill."""
    assert record.pages is not None, "a running job has pages"
    if chunk.resumes:
        return ring_pb2.RingChunk(
            request_id=chunk.request_id, tokens=span_to_pb(chunk.tokens), is_last=chunk.is_last, resumes=True
        )
    prompt_T = record.job.prompt_T
    known, record.sent_pages = record.sent_pages, -(-chunk.tokens.end // page_tokens)
    return ring_pb2.RingChunk(
        request_id=chunk.request_id,
        tokens=span_to_pb(chunk.tokens),
        packed_ids=pack_ids(prompt_T[chunk.tokens.start : chunk.tokens.end]),
        new_pages=owned_runs(record.pages.pages, Span(known, record.sent_pages)),
        is_last=chunk.is_last,
        next_id=None if chunk.is_last else int(prompt_T[chunk.tokens.end]),
    )
