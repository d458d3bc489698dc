"""The step thread: it alone owns the scheduler and the device, and it never waits for the network.

Commands come by queue and are obeyed between two steps, never during one. What happened goes back to the event loop by
call_soon_threadsafe, once per step for all sequences. Where a device computes, it is said while the next step does: the
loop, once woken, wants the interpreter that a step needs to be launched. With nothing to run the thread blocks on its
queue.
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvrelay.core.clock import Clock, monotonic
from kvrelay.core.errors import ServeError
from kvrelay.core.time_fit import TimeFit
from kvrelay.core.types import Counters, FinishReason, SampledToken
from kvrelay.decode_node.engine import DecodeEngine, SequenceState
from kvrelay.decode_node.local_prefill import Chunk, LocalPrompts, Prompt
from kvrelay.decode_node.scheduler import DecodeScheduler, Sequence

log = logging.getLogger(__name__)
AWAKE_EVERY_S = 0.02  # between empty steps while latents come in and nothing runs
AWAKE_FOR_S = 0.25  # behind the last ones that came: layers of a long chunk are so far apart


@dataclass(frozen=True, slots=True)
class Join:
    """Let a sequence take part; its page table and sampler come with it."""

    sequence: Sequence
    state: SequenceState


@dataclass(frozen=True, slots=True)
class Prepare:
    """A sequence will join: its state may be made ready."""

    state: SequenceState


@dataclass(frozen=True, slots=True)
class Compute:
    """Complete a prompt; its sequence takes part from its first token on. Answered by `Prefilled`."""

    prompt: Prompt
    state: SequenceState


@dataclass(frozen=True, slots=True)
class Leave:
    """Stop a sequence, running or not; answered by `Left`."""

    key: int


@dataclass(frozen=True, slots=True)
class Wake:
    """Latents are coming in: an idle device is to be ready for their first step."""

    lasting: bool = True  # for a while


@dataclass(frozen=True, slots=True)
class Joined:
    key: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Left:
    """The step thread will not touch the pages of this sequence again."""

    key: int


@dataclass(frozen=True, slots=True)
class Chosen:
    """What a step did for one sequence: a token, or the error that ends it."""

    key: int
    token: SampledToken | ServeError
    finish: FinishReason | None  # set: the sequence has ended with this token


@dataclass(frozen=True, slots=True)
class Stepped:
    """One step. Sequences that ended in it are not touched again."""

    chosen: tuple[Chosen, ...]
    step_s: float
    context_tokens: int = 0  # of all its sequences together, before it


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A prompt is complete: its rows are written, and its first token is chosen."""

    first: Chosen
    at_s: float


@dataclass(frozen=True, slots=True)
class Crashed:
    """A bug ended the step thread; nothing is touched again."""

    reason: str


Report = Joined | Left | Stepped | Prefilled | Crashed


def count_step(counters: Counters, stepped: Stepped) -> None:
    """Count a step, its tokens and its time, also by batch size: 1, up to 2, up to 4, ... sequences."""
    bucket = 1 << (len(stepped.chosen) - 1).bit_length()
    counters.add("steps")
    counters.add("tokens", sum(isinstance(one.token, SampledToken) for one in stepped.chosen))
    counters.add(f"steps_batch_{bucket}")
    counters.add(f"step_ms_batch_{bucket}", stepped.step_s * 1000)


class StepThread:
    """Runs steps until it is stopped."""

    def __init__(
        self,
        engine: DecodeEngine,
        *,
        max_batch: int,
        loop: asyncio.AbstractEventLoop,
        on_report: Callable[[Report], None],
        local_pause_s: float = 0.025,
        step_floor_s: float = 0.0,
        clock: Clock = monotonic,
    ) -> None:
        """
        Args:
            local_pause_s: longest pause between two steps for a chunk of a prompt that is completed here.
            step_floor_s: a step takes at least this long, as on a slower device.
        """
        self._engine = engine
        self._prompts = LocalPrompts(pause_s=local_pause_s)
        self._step_floor_s = step_floor_s
        self._scheduler = DecodeScheduler(max_batch=max_batch)
        self._states: dict[int, SequenceState] = {}
        self._loop = loop
        self._on_report = on_report
        self._clock = clock
        self._commands: queue.SimpleQueue[Join | Prepare | Compute | Leave | Wake | None] = queue.SimpleQueue()
        # x: sequences of a step, y: tokens of context that they have together
        self.step_times = TimeFit(prefer_start=True)
        self.chunk_times = TimeFit()  # x: tokens of a chunk, y: pairs of them with what they see
        self._busy_since_s: float | None = None  # last sign of progress; None while there is nothing to do
        self._last_step_s = -math.inf
        self._awake_until_s = -math.inf
        self._untold: Stepped | None = None  # the last step
        self._joined: list[Joined] = []  # not told yet; as steps are, while a device computes
        self._thread = threading.Thread(target=self._run, name="step", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self, sequence: Sequence, state: SequenceState) -> None:
        """Let a sequence take part from the next step on. Any thread."""
        self._commands.put(Join(sequence, state))

    def prepare(self, state: SequenceState) -> None:
        """Make ready what a sequence that will join needs. Any thread."""
        self._commands.put(Prepare(state))

    def compute(self, prompt: Prompt, state: SequenceState) -> None:
        """Complete a prompt between steps, then let its sequence take part. Any thread."""
        self._commands.put(Compute(prompt, state))

    def leave(self, key: int) -> None:
        """Stop a sequence; `Left` is reported in any case. Any thread."""
        self._commands.put(Leave(key))

    def keep_awake(self) -> None:
        """Run an empty step now and then while nothing else runs; told whenever latents have landed. Any thread.

        A GPU that is left alone slows down, and the first step after that takes several times as long. It goes on for
        a while by itself, so that none has to begin just when the last latents have landed and a real step is near.
        """
        if self._busy_since_s is None:
            self._commands.put(Wake())

    def stop(self) -> None:
        """End the thread after the step in work and wait for it."""
        self._commands.put(None)
        self._thread.join()

    def stuck_s(self) -> float:
        """Return for how long there has been work without a step that ended. Any thread."""
        since_s = self._busy_since_s
        return 0.0 if since_s is None else self._clock() - since_s

    def _run(self) -> None:
        try:
            self._engine.bind_thread()
            while self._obey_commands():
                if (chunk := self._prompts.next_chunk(alone=not len(self._scheduler))) is not None:
                    self._tell_last()
                    self._extend(chunk)
                if batch := self._scheduler.plan():
                    self._untold = self._step(batch)
                if not (self._engine.runs_beside and len(self._scheduler)):
                    self._tell_last()
            self._tell_last()
        except Exception as err:  # the outermost edge of this thread
            log.exception("the step thread ends by a bug")
            self._report(Crashed(f"{type(err).__name__}: {err}"))

    def _obey_commands(self) -> bool:
        """Obey what was asked; block while there is nothing to run. False: the thread is to end."""
        while True:
            is_idle = not len(self._scheduler) and not len(self._prompts)
            if is_idle and self._commands.empty():
                self._busy_since_s = None
            is_awake = is_idle and self._clock() < self._awake_until_s
            try:
                command = self._commands.get(block=is_idle, timeout=AWAKE_EVERY_S if is_awake else None)
            except queue.Empty:
                if not is_idle:
                    return True
                command = Wake(lasting=False)
            self._busy_since_s = self._clock()
            match command:
                case None:
                    return False
                case Wake(lasting):
                    self._wake(lasting=lasting, is_idle=is_idle)
                case Join(sequence, state):
                    self._scheduler.join(sequence)
                    self._states[sequence.key] = state
                    self._joined.append(Joined(sequence.key, self._clock()))
                    if not self._engine.runs_beside:
                        self._tell_last()
                case Prepare(state):
                    self._engine.prepare(state)
                case Compute(prompt, state):
                    self._prompts.add(prompt)
                    self._states[prompt.sequence.key] = state
                case Leave(key):
                    self._scheduler.leave(key)
                    self._prompts.leave(key)
                    self._states.pop(key, None)
                    self._report(Left(key))

    def _wake(self, *, lasting: bool, is_idle: bool) -> None:
        if lasting:
            self._awake_until_s = self._clock() + AWAKE_FOR_S
        if is_idle and self._clock() - self._last_step_s >= AWAKE_EVERY_S:
            self._engine.keep_awake()
            self._last_step_s = self._clock()

    def _extend(self, chunk: Chunk) -> None:
        """Compute a chunk of a prompt; with its last one the sequence joins."""
        began_s, tokens = self._clock(), chunk.tokens
        token = self._engine.extend(chunk, self._states[chunk.key])
        self._busy_since_s = self._last_step_s = ended_s = self._clock()
        self.chunk_times.observe(ended_s - began_s, x=tokens.num_tokens, y=tokens.num_pairs)
        sequence = self._prompts.ran(chunk, ended_s - began_s)
        if sequence is not None:
            assert token is not None, "a complete prompt has a first token"
            self._scheduler.join(sequence)
            self._report(Prefilled(self._take(chunk.key, token), ended_s))

    def _step(self, batch: tuple[Sequence, ...]) -> Stepped:
        began_s, context_tokens = self._clock(), sum(one.position for one in batch)
        states = [self._states[sequence.key] for sequence in batch]
        tokens = self._engine.step(batch, states, meanwhile=self._tell_last)
        if (early_s := began_s + self._step_floor_s - self._clock()) > 0:
            time.sleep(early_s)
        chosen = tuple(self._take(sequence.key, token) for sequence, token in zip(batch, tokens, strict=True))
        self._busy_since_s = ended_s = self._clock()
        return Stepped(chosen, ended_s - began_s, context_tokens)

    def _take(self, key: int, token: SampledToken | ServeError) -> Chosen:
        if isinstance(token, ServeError):
            self._scheduler.leave(key)
            finish = None
        else:
            finish = self._scheduler.take(key, token.token_id)
        if finish is not None or isinstance(token, ServeError):
            del self._states[key]
        return Chosen(key, token, finish)

    def _tell_last(self) -> None:
        """Report who joined and the last step, if that is still to be done."""
        for joined in self._joined:
            self._send(joined)
        self._joined.clear()
        if self._untold is None:
            return
        last, self._untold = self._untold, None
        self._send(last)
        self.step_times.observe(last.step_s, x=len(last.chosen), y=last.context_tokens)

    def _report(self, report: Report) -> None:
        self._tell_last()  # in the order in which it happened
        self._send(report)

    def _send(self, report: Report) -> None:
        try:
            self._loop.call_soon_threadsafe(self._on_report, report)
        except RuntimeError:  # the loop is closed: the process is ending and nobody listens
            log.debug("%s came after the event loop had ended", type(report).__name__)
