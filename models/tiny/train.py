"""Trains the tiny model in pieces of less than 9 minutes by default; each continues where the one before stopped.

    python -m models.tiny.train --out DIR [--max-minutes 8.2] [--num-steps N] [--seed 0]

DIR then holds ``checkpoint/`` (the model), ``log.json`` (for ``models.tiny.curves``) and ``state.pt``, to continue.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from models.tiny.architecture import llava_config
from models.tiny.batches import BatchMaker, BatchShape
from models.tiny.conversation import Skill
from models.tiny.learner import Learner, to_tensors, write_checkpoint
from models.tiny.optimizer import Optimizer, Schedule
from models.tiny.tokenizer import train_tokenizer

NUM_STEPS = 20_000
_LOG_STEPS = 25
#: The auxiliary loss teaches the vision tower first, then fades.
_PATCH_WEIGHT, _PATCH_WEIGHT_AT_END = 1.0, 0.1


class Training:
    """One training run, or a piece of it."""

    def __init__(self, directory: Path, *, shape: BatchShape, num_steps: int, seed: int, device: torch.device) -> None:
        """Start a new run, or continue from ``directory``'s state."""
        self._directory, self._num_steps, self._device = directory, num_steps, device
        torch.manual_seed(seed)
        self._tokenizer = train_tokenizer()
        self._learner = Learner(llava_config(), self._tokenizer).to(device)
        self._optimizer = Optimizer(self._learner, Schedule(num_steps=num_steps))
        self._batches = _Batches(self._tokenizer, shape, seed)
        self._log: list[dict[str, Any]] = []
        self._step, self._trained_s = 0, 0.0
        # All in one file: a kill during the write never leaves weights of one step with an optimizer of another.
        self._state_path = directory / "state.pt"
        if self._state_path.exists():
            self._load()

    @property
    def is_done(self) -> bool:
        """Whether all steps are taken."""
        return self._step >= self._num_steps

    def run(self, *, max_s: float, num_workers: int) -> None:
        """Take steps until all are done or the time is up; then save."""
        started, trained_before = time.monotonic(), self._trained_s
        loss_of = torch.compile(self._learner) if self._device.type == "cuda" else self._learner
        sums = torch.zeros(len(Skill) + 1, 3, device=self._device)
        for batch in self._to_device(num_workers):
            # Processors without matrix units take far longer in bfloat16.
            with torch.autocast(self._device.type, torch.bfloat16, enabled=self._device.type == "cuda"):
                loss, log = loss_of(batch, self._patch_weight())
            loss.backward()
            self._optimizer.step(self._step)
            sums += log
            self._step += 1
            if self._step % _LOG_STEPS == 0 or self.is_done:
                self._trained_s = trained_before + time.monotonic() - started
                self._record(sums)
                sums.zero_()
                if time.monotonic() - started > max_s:
                    break
        self._save()

    def _patch_weight(self) -> Tensor:
        progress = self._step / self._num_steps
        weight = _PATCH_WEIGHT + (_PATCH_WEIGHT_AT_END - _PATCH_WEIGHT) * progress
        return torch.tensor(weight, device=self._device)

    def _to_device(self, num_workers: int) -> Iterator[dict[str, Tensor]]:
        is_cuda = self._device.type == "cuda"
        loader: DataLoader[dict[str, Tensor]] = DataLoader(
            self._batches, batch_size=None, sampler=range(self._step, self._num_steps), num_workers=num_workers,
            pin_memory=is_cuda, prefetch_factor=4 if num_workers else None,
        )  # fmt: skip
        for batch in loader:
            yield {name: array.to(self._device, non_blocking=True) for name, array in batch.items()}

    def _record(self, sums: Tensor) -> None:
        *skills, patches = sums.tolist()
        by_skill = {
            skill.value: {"loss": round(loss / num, 4), "accuracy": round(right / num, 4)}
            for skill, (loss, right, num) in zip(Skill, skills, strict=True)
            if num
        }
        num_steps = self._step - (self._log[-1]["step"] if self._log else 0)
        entry = {"step": self._step, "seconds": round(self._trained_s, 1), "patch_loss": patches[0] / num_steps}
        self._log.append(entry | {"skills": by_skill})
        if self._step % (4 * _LOG_STEPS) == 0:
            accuracies = "  ".join(f"{name} {one['accuracy']:.3f}" for name, one in by_skill.items())
            print(f"{self._step} {self._trained_s:.0f} s  patches {entry['patch_loss']:.3f}  {accuracies}", flush=True)

    def _save(self) -> None:
        """Write the state whole or not at all; if this piece is killed after that, the next one writes the rest."""
        state = {
            "step": self._step,
            "seconds": self._trained_s,
            "entries": self._log,
            "weights": dict(_weights(self._learner)),
            "optimizer": self._optimizer.state(),
        }
        with _replacing(self._state_path) as path:
            torch.save(state, path)
        log = {"step": self._step, "seconds": self._trained_s, "entries": self._log}
        with _replacing(self._directory / "log.json") as path:
            path.write_text(json.dumps(log) + "\n", encoding="utf-8")
        write_checkpoint(self._learner, self._tokenizer, self._directory / "checkpoint")

    def _load(self) -> None:
        state = torch.load(self._state_path, map_location=self._device)
        with torch.no_grad():
            for name, weight in _weights(self._learner):
                weight.copy_(state["weights"][name])
        self._optimizer.load_state(state["optimizer"])
        self._step, self._trained_s, self._log = state["step"], state["seconds"], state["entries"]


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A path to write to; it replaces ``path`` afterwards."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name(f"{path.name}.part")
    yield written
    os.replace(written, path)


class _Batches(Dataset[dict[str, Tensor]]):
    """Batches by number, for a ``DataLoader``."""

    def __init__(self, tokenizer: Tokenizer, shape: BatchShape, seed: int) -> None:
        self._maker = BatchMaker(tokenizer, shape, seed)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return to_tensors(self._maker.make(number))


def _weights(learner: Learner) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight once; tied weights are one weight."""
    return ((name, weight.detach()) for name, weight in learner.named_parameters())


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Train the tiny model, or go on training it.")
    parser.add_argument(
        "--out", type=Path, default=Path(".run/models/tiny"), help="directory to write, and to go on from"
    )
    parser.add_argument("--max-minutes", type=float, default=8.2, help="stop after so many, ready to go on")
    parser.add_argument("--num-steps", type=int, default=NUM_STEPS, help="of the whole training")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data")
    parser.add_argument("--num-tokens", type=int, default=BatchShape.num_tokens, help="in a batch")
    parser.add_argument("--num-images", type=int, default=BatchShape.num_images, help="in a batch")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = True
    shape = BatchShape(num_tokens=arguments.num_tokens, num_images=arguments.num_images)
    device = torch.device(arguments.device)
    training = Training(arguments.out, shape=shape, num_steps=arguments.num_steps, seed=arguments.seed, device=device)
    num_workers = max(0, (os.cpu_count() or 1) - 2)
    training.run(max_s=60 * arguments.max_minutes, num_workers=num_workers)
    print("done" if training.is_done else "stopped: the same command goes on", flush=True)


if __name__ == "__main__":
    main()
