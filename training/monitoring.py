# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""What a run leaves to look at: a log with one line a step, a loss figure, and a summary."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .checkpoint import WRITE_ERRORS, CheckpointError, reason
from .recipe import Recipe, RecipeError
from .text import Text


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
    positions: int = 0  # tokens and padding
    flops: float = 0.0  # of forward and backward passes
    tokens_by_source: dict[str, int] = field(default_factory=dict)  # of a mixture


@dataclass(frozen=True)
class Summary:
    """The outcome of a run; ``summary.json`` in its folder.

    ``finished`` is False where SIGTERM stopped it (the same command continues). ``tokens`` are real tokens trained on,
    special tokens included, ``seconds`` the time in training steps; losses are in nats a hidden token.
    ``share_of_peak`` are the operations of forward and backward passes (:mod:`training.flops`) in that time, over those
    that matrix products alone reach in the run's precision (``choices["matmul_peak"]``, on every process).
    ``padding`` is the share of all positions computed that held none of them. ``stray_mask_tokens`` are [MASK] ids in
    that text, for which the unknown token was put. ``sources`` of a mixture: each one's ``share`` of the tokens as
    asked, its ``tokens`` and their share, and its held-out loss and accuracy. ``hardware`` is that of the process that
    wrote the summary.
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
    share_of_peak: float | None
    padding: float | None
    parameters: int
    sources: dict[str, dict]
    corpus: str
    corpus_digest: str | None
    tokenizer_digest: str
    choices: dict[str, dict]
    hardware: str
    versions: dict[str, str]
    model: str | None  # the folder that AutoModel loads


def summarise(recipe: Recipe, text: Text, progress: Progress, peak: float, **facts: Any) -> Summary:
    """The summary of a run as it stands; its losses are read from the logs in its folder.

    Args:
        peak: operations a second of matrix products, on all processes.
        facts: the fields of the summary that only the run itself knows.
    """
    folder, finished = Path(recipe.output_dir), progress.step >= recipe.max_steps
    losses = [row["loss"] for row in read_log(folder / "log.jsonl")[-50:]]
    evaluations = read_log(folder / "evaluations.jsonl")
    last = evaluations[-1] if evaluations else {}
    return Summary(
        finished=finished,
        steps=progress.step,
        epochs=progress.epoch + 1,
        training_loss=sum(losses) / len(losses) if losses else None,
        held_out_loss=last.get("loss"),
        held_out_accuracy=last.get("accuracy"),
        tokens=progress.tokens,
        hidden_tokens=progress.hidden_tokens,
        skipped_steps=progress.skipped_steps,
        stray_mask_tokens=progress.stray_mask_tokens,
        seconds=progress.seconds,
        tokens_per_second=progress.tokens / progress.seconds if progress.seconds else 0.0,
        share_of_peak=progress.flops / progress.seconds / peak if progress.seconds else None,
        padding=1 - progress.tokens / progress.positions if progress.positions else None,
        sources=_sources(text, progress, last.get("sources", {})) if recipe.corpus.mixture else {},
        corpus=text.description,
        corpus_digest=text.digests["corpus"],
        tokenizer_digest=text.digests["tokenizer"],
        model=str(folder / "final") if finished else None,
        **facts,
    )


def _sources(text: Text, progress: Progress, evaluated: dict[str, dict]) -> dict[str, dict]:
    """Of every source: its share of the tokens, as asked and as trained on, and its held-out numbers."""
    drawn = progress.tokens_by_source
    return {
        source.name: {
            "share": source.share,
            "tokens": drawn.get(source.name, 0),
            "share_of_tokens": drawn.get(source.name, 0) / progress.tokens if progress.tokens else None,
            "held_out_loss": evaluated.get(source.name, {}).get("loss"),
            "held_out_accuracy": evaluated.get(source.name, {}).get("accuracy"),
        }
        for source in text.sources
    }


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


def tracker_settings(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """By tracker: the run is called as its folder, and goes on there when it is continued."""
    folder = Path(recipe.output_dir)
    run_id = hashlib.blake2b(str(folder.resolve()).encode(), digest_size=8).hexdigest()
    return {
        "wandb": {"name": folder.name, "id": run_id, "resume": "allow", "dir": recipe.output_dir},
        "trackio": {"name": folder.name, "resume": "allow"},
    }


def try_to_write(path: Path, write: Callable[[Path], object], say: Callable[[str], None]) -> None:
    """Writes a file or folder beside and renames it; where that fails, says so and leaves what was there before."""
    unfinished = path.with_name(f"{path.stem}.unfinished{path.suffix}")
    try:
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        write(unfinished)
        if path.is_dir():
            shutil.rmtree(path)
        if unfinished.exists():
            os.replace(unfinished, path)
    except WRITE_ERRORS as error:
        if unfinished.is_dir():
            shutil.rmtree(unfinished, ignore_errors=True)
        else:
            unfinished.unlink(missing_ok=True)
        say(f"warning: {path} could not be written ({reason(error)}). The run goes on.")


class RunLog:
    """JSON lines by step. Each is handed to the operating system at once, so that a kill loses none.

    Where a line cannot be written, that is said once; it is kept, and written with the next one that can be.
    """

    def __init__(self, path: Path, after: int, say: Callable[[str], None] = print):
        """Opens the log for steps later than ``after``: lines a killed run wrote past its checkpoint are dropped."""
        self.path, self._say = path, say
        self._waiting = b""
        kept = "".join(json.dumps(row) + "\n" for row in read_log(path) if row["step"] <= after)
        try:
            if not path.is_file() or path.read_text() != kept:
                unfinished = path.with_suffix(".unfinished")
                unfinished.write_text(kept)
                os.replace(unfinished, path)
            self._stream = path.open("ab", buffering=0)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be written ({reason(error)}): make room and start again.") from error

    def write(self, row: dict[str, Any]) -> None:
        failed_before = bool(self._waiting)
        self._waiting += json.dumps(row).encode() + b"\n"
        error = self._write_waiting()
        if error is not None and not failed_before:
            self._say(
                f"warning: {self.path} could not be written ({reason(error)}). Training goes on; the lines are kept "
                "until there is room."
            )

    def _write_waiting(self) -> OSError | None:
        whole = self._stream.seek(0, os.SEEK_END)
        try:
            written = 0
            while written < len(self._waiting):  # a disk that is filling up takes a part
                written += self._stream.write(self._waiting[written:])
        except OSError as error:
            self._stream.truncate(whole)  # half a line would end the log for its readers
            return error
        self._waiting = b""
        return None

    def close(self) -> None:
        if self._waiting and self._write_waiting() is not None:
            lost = self._waiting.count(b"\n")
            self._say(f"warning: {self.path} lacks its last {lost} lines: there was no room.")
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
    """Training loss of every step and its running mean, held-out loss (of every source) and accuracy, learning rate."""
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
    for number, name in enumerate(evaluations[-1].get("sources", {}) if evaluations else {}):
        of_source = [row["sources"][name]["loss"] for row in evaluations]
        style, shade = ["--", ":", "-."][number % 3], plt.get_cmap("tab10")(4 + number % 6)
        label = f"held out of {Path(name).name}"  # of a path its end
        loss_axis.plot(at, of_source, style, color=shade, linewidth=1, label=label)
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
