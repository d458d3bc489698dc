"""One request's events for its client: text beside the tokens, progress with an estimate, the accounts at the end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass

from kvrelay.core.clock import Clock, monotonic
from kvrelay.core.types import FinishReason, PromptLogprobs, Usage
from kvrelay.index.reader import Confidence
from kvrelay.proto import convert
from kvrelay.proto.v1 import inference_pb2 as pb
from kvrelay.router.output import Output, Piece
from kvrelay.router.peers import Placed
from kvrelay.router.timesplit import TimeSplit

Send = Callable[[pb.GenerateEvent], Awaitable[None]]
_CONFIDENCE = {
    Confidence.EXACT: pb.INDEX_CONFIDENCE_EXACT,
    Confidence.DEGRADED: pb.INDEX_CONFIDENCE_DEGRADED,
    Confidence.FALLBACK: pb.INDEX_CONFIDENCE_FALLBACK,
}


def placement_to_pb(placed: Placed, *, with_decode: bool = True, is_local: bool = False) -> pb.Placement:
    """`is_local`: the decode node completed the prompt itself."""
    decode = placed.decode.incarnation.name if with_decode and placed.decode is not None else ""
    prefill = placed.decode if is_local and placed.decode is not None else placed.prefill
    return pb.Placement(
        prefill_node=prefill.incarnation.name,
        decode_node=decode,
        ring_size=prefill.ring_size,
        index_confidence=_CONFIDENCE[placed.confidence],
    )


@dataclass(slots=True)
class ClientStream:
    """Writes events. `send` is the call's own write, so a slow client slows its own request only."""

    request_id: str
    prompt_tokens: int
    output: Output
    send: Send
    clock: Clock = monotonic
    _progress_from: tuple[float, int] | None = None  # when and at how many tokens the rate began

    async def accepted(self, placed: Placed, *, seed: int, is_local: bool) -> None:
        nodes = placement_to_pb(placed, is_local=is_local)
        event = pb.Accepted(request_id=self.request_id, nodes=nodes, prompt_tokens=self.prompt_tokens, seed=seed)
        await self.send(pb.GenerateEvent(accepted=event))

    async def progress(self, prefilled_tokens: int) -> None:
        prefilled_tokens = min(prefilled_tokens, self.prompt_tokens)
        event = pb.Progress(
            prefilled_tokens=prefilled_tokens,
            prompt_tokens=self.prompt_tokens,
            eta_ms=self._eta_ms(prefilled_tokens),
        )
        await self.send(pb.GenerateEvent(progress=event))

    async def prompt_logprobs(self, logprobs: PromptLogprobs) -> None:
        await self.send(pb.GenerateEvent(prompt_logprobs=convert.prompt_logprobs_to_pb(logprobs)))

    async def tokens(self, piece: Piece) -> None:
        """Send what may leave; nothing when there is nothing."""
        if not piece:
            return
        logprobs = [convert.logprob_to_pb(one.logprob) for one in piece.tokens if one.logprob is not None]
        tokens = pb.Tokens(token_ids=[one.token_id for one in piece.tokens], text=piece.text, logprobs=logprobs)
        await self.send(pb.GenerateEvent(tokens=tokens))

    async def finished(self, reason: FinishReason, placement: pb.Placement, usage: Usage, time: TimeSplit) -> None:
        finished = pb.Finished(
            reason=convert.finish_to_pb(reason),
            usage=pb.Usage(**asdict(usage)),
            nodes=placement,
            time=pb.TimeSplit(**asdict(time)),
        )
        await self.send(pb.GenerateEvent(finished=finished))

    def _eta_ms(self, prefilled_tokens: int) -> int:
        """Return the time to the end of the prompt at the rate since the first report; 0 = unknown."""
        now_s = self.clock()
        if self._progress_from is None:
            self._progress_from = now_s, prefilled_tokens
        began_s, began_at = self._progress_from
        if prefilled_tokens <= began_at:
            return 0
        per_token_s = (now_s - began_s) / (prefilled_tokens - began_at)
        return convert.ms_to_pb((self.prompt_tokens - prefilled_tokens) * per_token_s)
