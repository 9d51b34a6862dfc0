# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""What a run leaves to look at: a log with one line a step, a loss figure, and a summary."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .recipe import Recipe, RecipeError


@dataclass
class Progress:
    """How far a run has come."""

    step: int = 0
    epoch: int = 0
    tokens: int = 0
    hidden_tokens: int = 0
    skipped_steps: int = 0  # whose gradient norm was not finite
    stray_mask_tokens: int = 0  # [MASK] ids in the text trained on
    seconds: float = 0.0  # in training steps


@dataclass(frozen=True)
class Summary:
    """The outcome of a run; ``summary.json`` in its folder.

    ``finished`` is False where SIGTERM stopped it (the same command continues). ``tokens`` are real tokens trained on,
    special tokens included, ``seconds`` the time in training steps; losses are in nats a hidden token.
    ``stray_mask_tokens`` are [MASK] ids in that text, for which the unknown token was put. ``hardware`` is that of the
    process that wrote the summary.
    """

    finished: bool
    steps: int
    epochs: int
    training_loss: float | None  # mean of the last 50 steps
    held_out_loss: float | None
    held_out_accuracy: float | None
    tokens: int
    hidden_tokens: int
    skipped_steps: int
    stray_mask_tokens: int
    seconds: float
    tokens_per_second: float
    parameters: int
    corpus: str
    corpus_digest: str | None
    tokenizer_digest: str
    choices: dict[str, dict]
    hardware: str
    versions: dict[str, str]
    model: str | None  # the folder that AutoModel loads


def hardware(device: torch.device, processes: int) -> str:
    """The name of the GPU or processor, and how many processes trained."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        cpuinfo = Path("/proc/cpuinfo")  # on Linux platform.processor() is empty
        lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        name = names[0] if names else platform.processor() or platform.machine()
        if device.type != "cpu":
            name = f"{name} ({device.type})"
    return f"{name}, {processes} process{'es' if processes > 1 else ''}"


def tracker_of(recipe: Recipe) -> str | None:
    """The tracker's name, if its package is there."""
    if recipe.tracker == "none":
        return None
    packages = {"tensorboard": ("tensorboard", "tensorboardX")}.get(recipe.tracker, (recipe.tracker,))
    if not any(importlib.util.find_spec(package) for package in packages):
        raise RecipeError(f"tracker {recipe.tracker} needs its package: pip install {packages[0]}, or --tracker none.")
    return recipe.tracker


class RunLog:
    """JSON lines by step. Each is handed to the operating system at once, so that a kill loses none."""

    def __init__(self, path: Path, after: int):
        """Opens the log for steps later than ``after``: lines a killed run wrote past its checkpoint are dropped."""
        self.path = path
        kept = [row for row in read_log(path) if row["step"] <= after]
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text("".join(json.dumps(row) + "\n" for row in kept))
        os.replace(unfinished, path)
        self._stream = path.open("a", buffering=1)

    def write(self, row: dict[str, Any]) -> None:
        self._stream.write(json.dumps(row) + "\n")

    def close(self) -> None:
        self._stream.close()


def read_log(path: Path) -> list[dict[str, Any]]:
    """The rows of a log; a last line cut short by a kill is left out."""
    if not path.is_file():
        return []
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def plot_loss(run: Path, path: Path) -> None:
    """Training loss of every step and its running mean, held-out loss and accuracy, and the learning rate."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps = read_log(run / "log.jsonl")
    evaluations = read_log(run / "evaluations.jsonl")
    if not steps:
        return
    figure, (loss_axis, rate_axis) = plt.subplots(
        2, 1, figsize=(7, 5.2), sharex=True, height_ratios=[2, 1], constrained_layout=True
    )
    x, loss = np.array([row["step"] for row in steps]), np.array([row["loss"] for row in steps])
    window = max(1, len(loss) // 50)
    loss_axis.plot(x, loss, color="0.75", linewidth=0.7, label="training, a step")
    if window > 1:
        smooth = np.convolve(loss, np.ones(window) / window, mode="valid")
        loss_axis.plot(x[window - 1 :], smooth, color="tab:blue", linewidth=1.4, label=f"training, {window}-step mean")
    at = [row["step"] for row in evaluations]
    held_out = [row["loss"] for row in evaluations]
    loss_axis.plot(at, held_out, "o-", color="tab:orange", markersize=4, linewidth=1.2, label="held-out documents")
    loss_axis.set_ylabel("cross-entropy of hidden tokens (nats)")
    loss_axis.set_title(f"Pretraining loss: {run.name}")
    loss_axis.legend(frameon=False)
    loss_axis.grid(alpha=0.25)

    rate_axis.plot(at, [row["accuracy"] for row in evaluations], "o-", color="tab:orange", markersize=3, linewidth=1.2)
    rate_axis.set_ylabel("held-out\naccuracy", color="tab:orange")
    rate_axis.set_xlabel("optimizer step")
    rate_axis.grid(alpha=0.25)
    schedule_axis = rate_axis.twinx()
    schedule_axis.plot(x, [row["learning_rate"] for row in steps], color="tab:green", linewidth=1)
    schedule_axis.set_ylabel("learning rate", color="tab:green")
    schedule_axis.set_ylim(bottom=0)
    rate_axis.set_ylim(bottom=0)
    figure.savefig(path, dpi=160)
    plt.close(figure)
