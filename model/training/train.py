"""Trains the embedded model; one command, and the same command again resumes.

    python model/training/train.py --data DATA --out OUT [--seconds 1000]   # one GPU
    python model/training/train.py --smoke --out OUT                          # a minute on a CPU, for tests

DATA is what corpus.py wrote. OUT receives state.pt (resumable), log.jsonl and model/ (Hugging Face folder).
"""

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from batches import Batches, loader, tokenise
from export import export
from measure import measure_bpb, measure_recall
from network import Network
from optimizer import Optimizer
from rows import ANSWER, TEXT
from schedule import SMOKE_STAGES, TINY_STAGES, Stage, learning_rate, stage_at
from shape import SMOKE, TINY, Shape
from tokenizers import Tokenizer
from torch import Tensor
from vocabulary import BOS, EOS, id_of, train_tokenizer, write_tokenizer


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything a run is given; `seconds` or `steps` is the whole budget, over all resumed parts."""

    data: Path
    out: Path
    shape: Shape
    stages: tuple[Stage, ...]
    device: str
    seconds: float | None
    steps: int | None
    stop_after_s: float | None
    peak_rate: float
    workers: int
    seed: int
    eval_every: int
    log_every: int


class Log:
    """Appends one JSON object per line, and prints it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, **values: Any) -> None:
        line = json.dumps({k: round(v, 5) if isinstance(v, float) else v for k, v in values.items()})
        print(line, flush=True)
        with self._path.open("a") as file:
            file.write(line + "\n")


class Run:
    """One training run: network, optimizer, counters; knows how to save and resume itself."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.log = Log(plan.out / "log.jsonl")
        self.tokenizer_path = plan.out / "model" / "tokenizer.json"
        self.tokens_path = plan.out / "tokens.npy"
        self.tokenizer = prepare(plan, self.tokenizer_path, self.tokens_path)
        self.held_out = (plan.data / "held_out.txt").read_text()
        torch.manual_seed(plan.seed)
        torch.set_float32_matmul_precision("high")
        self.network = Network(plan.shape).to(plan.device)
        self.on_gpu = plan.device != "cpu"
        self.optimizer = Optimizer(self.network)
        self.step, self.trained_s, self.tokens = 0, 0.0, 0
        self._loss = torch.compile(self.losses, dynamic=False) if self.on_gpu else self.losses
        if (plan.out / "state.pt").exists():
            self.resume()

    @property
    def progress(self) -> float:
        if self.plan.steps is not None:
            return min(1.0, self.step / self.plan.steps)
        assert self.plan.seconds is not None
        return min(1.0, self.trained_s / self.plan.seconds)

    def losses(self, ids: Tensor, kinds: Tensor, yarn: bool) -> tuple[Tensor, Tensor]:
        """Return the mean loss over text tokens and over answer tokens."""
        with torch.autocast(ids.device.type, dtype=torch.bfloat16):
            logits = self.network(ids[:, :-1], yarn=yarn)
        each = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        text, answer = ((kinds[:, 1:].flatten() == kind).float() for kind in (TEXT, ANSWER))
        return (each * text).sum() / text.sum(), (each * answer).sum() / answer.sum().clamp(min=1)

    def train_step(self, ids: Tensor, kinds: Tensor, stage: Stage) -> dict[str, Tensor]:
        device = self.plan.device
        ids, kinds = ids.to(device, non_blocking=True).long(), kinds.to(device, non_blocking=True)
        text, answer = self._loss(ids, kinds, stage.yarn)
        (text + answer).backward()
        norm = self.optimizer.step(learning_rate(self.progress, self.plan.peak_rate))
        self.network.balance(1e-3 * min(1.0, 2 * (1 - self.progress)))
        return {"text_loss": text.detach(), "answer_loss": answer.detach(), "grad_norm": norm}

    def train(self) -> None:
        """Train until the budget or `stop_after_s` is used up, then save."""
        began_s = time.monotonic()
        while self.progress < 1 and not self._must_stop(began_s):
            stage = stage_at(self.plan.stages, self.progress)
            self.train_stage(stage, began_s)
            self.save()
            if stage_at(self.plan.stages, self.progress) is not stage:
                self.export_to(self.plan.out / f"model-after-{stage.name}")
        self.log.write(event="stop", step=self.step, tokens=self.tokens, trained_s=self.trained_s)

    def train_stage(self, stage: Stage, began_s: float) -> None:
        plan = self.plan
        data = Batches(self.tokens_path, self.tokenizer_path, stage, seed=plan.seed, first_step=self.step)
        batches = loader(data, workers=plan.workers, pin=self.on_gpu)
        self.log.write(event="stage", stage=stage.name, step=self.step, trained_s=self.trained_s)
        self.network.train()
        self.train_step(*next(batches), stage)  # compiles: kept out of the clock, not out of the training
        self.step += 1
        clock_s, logged_step = self._now(), self.step
        while stage_at(plan.stages, self.progress) is stage and self.progress < 1 and not self._must_stop(began_s):
            values = self.train_step(*next(batches), stage)
            self.step += 1
            self.tokens += stage.rows * stage.row_tokens
            if self.step % plan.log_every == 0:
                elapsed_s = self._now() - clock_s
                self.trained_s += elapsed_s
                clock_s += elapsed_s
                speed = (self.step - logged_step) * stage.rows * stage.row_tokens / elapsed_s
                logged_step = self.step
                numbers = {name: float(value) for name, value in values.items()}
                self.log.write(
                    step=self.step, trained_s=self.trained_s, progress=self.progress, tokens_per_s=speed, **numbers
                )
            if self.step % plan.eval_every == 0:
                self.evaluate_quickly(stage)
                self.save()
                clock_s = self._now()  # evals are not training time

    def evaluate_quickly(self, stage: Stage) -> None:
        self.network.eval()
        window = min(stage.row_tokens, self.plan.shape.train_window_tokens)
        with torch.autocast(self.plan.device, dtype=torch.bfloat16, enabled=self.on_gpu):
            bpb = measure_bpb(
                self.network, self.tokenizer, self.held_out[:200_000], window_tokens=window, yarn=stage.yarn
            )
            recall = measure_recall(
                self.network,
                self.tokenizer,
                self.held_out,
                lengths=sorted({window, stage.row_tokens}),
                samples=2,
                yarn=stage.yarn,
            )
        load = self.network.worst_load()
        means = {length: sum(row) / len(row) for length, row in recall.items()}
        self.log.write(event="eval", step=self.step, bpb=bpb, recall=means, worst_load=load)
        self.network.train()

    def _now(self) -> float:
        if self.on_gpu:
            torch.cuda.synchronize()
        return time.monotonic()

    def _must_stop(self, began_s: float) -> bool:
        return self.plan.stop_after_s is not None and time.monotonic() - began_s > self.plan.stop_after_s

    def save(self) -> None:
        """Write state.pt (atomically) and the published folder."""
        state = {
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "counters": (self.step, self.trained_s, self.tokens),
        }
        torch.save(state, self.plan.out / "state.tmp")
        (self.plan.out / "state.tmp").replace(self.plan.out / "state.pt")
        self.export_to(self.plan.out / "model")

    def export_to(self, folder: Path) -> None:
        bos, eos = (id_of(self.tokenizer, token) for token in (BOS, EOS))
        export(self.network, folder, bos=bos, eos=eos)

    def resume(self) -> None:
        state = torch.load(self.plan.out / "state.pt", map_location=self.plan.device, weights_only=True)
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.trained_s, self.tokens = state["counters"]
        self.log.write(event="resume", step=self.step, trained_s=self.trained_s)


def prepare(plan: Plan, tokenizer_path: Path, tokens_path: Path) -> Tokenizer:
    """Return the run's tokenizer; train it and tokenise the corpus unless an earlier part of the run did."""
    if tokenizer_path.exists() and tokens_path.exists():
        return Tokenizer.from_file(str(tokenizer_path))
    text = (plan.data / "train.txt").read_text()
    if tokenizer_path.exists():
        tokenizer = Tokenizer.from_file(str(tokenizer_path))
    else:
        tokenizer = train_tokenizer(text, plan.shape.vocab_size)
        longest = int(plan.shape.train_window_tokens * plan.shape.yarn_factor)
        write_tokenizer(tokenizer, tokenizer_path.parent, max_tokens=longest)
    np.save(tokens_path, tokenise(text, tokenizer, id_of(tokenizer, EOS)))
    return tokenizer


def smoke_data(folder: Path) -> Path:
    """Write a small corpus of this repository's own source, for the smoke mode; return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = [path.read_text() for path in sorted(Path(__file__).parent.glob("*.py"))]
    prose = "".join(
        f"Part {i} of the manual is short. It says what part {i} does. Nothing else is in it. " for i in range(4000)
    )
    (folder / "train.txt").write_text("\0".join([*texts, prose]))
    (folder / "held_out.txt").write_text(prose)
    return folder


def make_plan(args: argparse.Namespace) -> Plan:
    smoke = args.smoke
    if not smoke and args.data is None:
        raise SystemExit("--data is needed (the folder corpus.py wrote), or --smoke")
    device = "cpu" if smoke or not torch.cuda.is_available() else "cuda"
    return Plan(
        data=smoke_data(args.out / "data") if smoke else args.data,
        out=args.out,
        shape=SMOKE if smoke else TINY,
        stages=SMOKE_STAGES if smoke else TINY_STAGES,
        device=device,
        seconds=None if args.steps or smoke else args.seconds,
        steps=args.steps or (60 if smoke else None),
        stop_after_s=args.stop_after,
        peak_rate=args.peak_rate,
        workers=0 if smoke else args.workers,
        seed=args.seed,
        eval_every=30 if smoke else args.eval_every,
        log_every=5 if smoke else 20,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the embedded model; the same command resumes.")
    parser.add_argument("--data", type=Path, help="folder with train.txt and held_out.txt")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--seconds", type=float, default=1000.0, help="training time, evals and compilation not counted"
    )
    parser.add_argument("--steps", type=int, default=None, help="budget in steps instead of seconds")
    parser.add_argument("--stop-after", type=float, default=None, help="save and exit after this many seconds")
    parser.add_argument("--peak-rate", type=float, default=4e-3)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--eval-every", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="a minute on a CPU")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    Run(make_plan(args)).train()


if __name__ == "__main__":
    main()
