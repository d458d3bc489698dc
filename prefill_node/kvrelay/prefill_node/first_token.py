"""The first token of an answer, and whether it is the last one as well. Shapes in this file: V vocabulary."""

from __future__ import annotations

from torch import Tensor

from kvrelay.core.errors import ServeError
from kvrelay.core.types import FinishReason, SampledToken
from kvrelay.model.sampler import SamplerState, sample
from kvrelay.prefill_node.jobs import Job


def first_token(job: Job, logits_V: Tensor) -> tuple[SampledToken, FinishReason | None]:
    """Return a job's first token, and why its answer ends with it if it does.

    Args:
        logits_V: after the prompt's last token.

    Raises:
        ServeError: the logits allow no choice.
    """
    state = SamplerState(job.sampling, job.prompt_T, job.num_sent_tokens)
    (chosen,) = sample(logits_V[None], [state], [job.prompt_tokens])
    if isinstance(chosen, ServeError):
        raise chosen
    if chosen.token_id in job.sampling.stop_token_ids:
        return chosen, FinishReason.STOP
    return chosen, FinishReason.LENGTH if job.sampling.max_tokens == 1 else None
