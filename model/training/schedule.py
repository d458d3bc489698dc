"""What is trained when: two stages over one budget, measured in seconds or in steps."""

from dataclasses import dataclass, replace

WARM_UP = 0.01


@dataclass(frozen=True, slots=True)
class Stage:
    """A stretch of training with one row length."""

    name: str
    until: float  # fraction of the whole budget
    row_tokens: int
    rows: int
    yarn: bool
    recall_share: float  # rows of a step that are recall episodes
    shortest_episode_tokens: int


# The window stage learns language and recall; the long stage adapts to YaRN at the lengths it is for.
TINY_STAGES = (
    Stage("short", 0.14, 1024, 128, yarn=False, recall_share=0.5, shortest_episode_tokens=192),
    Stage("window", 0.76, 4096, 32, yarn=False, recall_share=0.4, shortest_episode_tokens=512),
    Stage("long", 1.0, 16384, 8, yarn=True, recall_share=0.5, shortest_episode_tokens=2048),
)
SMOKE_STAGES = (
    replace(TINY_STAGES[1], until=0.8, row_tokens=256, rows=8, shortest_episode_tokens=160),
    replace(TINY_STAGES[2], row_tokens=512, rows=4, shortest_episode_tokens=160),
)


def stage_at(stages: tuple[Stage, ...], progress: float) -> Stage:
    return next((stage for stage in stages if progress < stage.until), stages[-1])


def learning_rate(progress: float, peak: float) -> float:
    """Linear warm-up, then linear decay to zero at the end of the budget."""
    return peak * min(progress / WARM_UP + 1e-3, (1 - progress) / (1 - WARM_UP), 1.0)
