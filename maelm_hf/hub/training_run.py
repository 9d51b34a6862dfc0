# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""The folders that training/pretrain.py writes, as a publisher meets them.

RUN/summary.json recipe.yaml evaluations.jsonl
RUN/final/                         the finished model
RUN/checkpoints/step-000010000/    a model, and the state to continue from it
"""

import json
import re
from pathlib import Path
from typing import Any

import yaml

# What a checkpoint holds beside the model; none of it is published.
TRAINING_STATE = ("optimizer.safetensors", "state.json", "manifest.json", "recipe.yaml")


def finished_model(folder: Path) -> Path:
    """`folder/final` where `folder` is a run, else `folder` itself."""
    final = folder / "final"
    return final if not (folder / "config.json").is_file() and (final / "config.json").is_file() else folder


def summary_of(folder: Path) -> Path | None:
    """The `summary.json` of the run whose finished model `folder` is."""
    summary = folder.parent / "summary.json"
    return summary if folder.name == "final" and summary.is_file() else None


def step_of(folder: Path) -> int | None:
    """The step of a training checkpoint; `None` for any other folder."""
    named = re.fullmatch(r"step-(\d+)", folder.name)
    return int(named.group(1)) if named and (folder / "state.json").is_file() else None


def step_checkpoints(run: Path) -> dict[int, Path]:
    """The checkpoints of a run by step, step 0 included.

    Raises:
        FileNotFoundError: There is none.
    """
    folders = [path for path in (run / "checkpoints").glob("step-*") if step_of(path) is not None]
    if not folders:
        raise FileNotFoundError(f"{run} has no checkpoints: give the output_dir of a pretraining run")
    return {step_of(path): path for path in sorted(folders)}


def measured_at(checkpoint: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the run knew at a checkpoint, in the terms of `summary.json`, and its recipe."""
    state = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
    progress = state.get("progress", {})
    measured = {"steps": progress.get("step")} | {
        name: progress.get(name) for name in ("tokens", "hidden_tokens", "seconds")
    }
    if progress.get("seconds"):
        measured["tokens_per_second"] = progress["tokens"] / progress["seconds"]
    run = checkpoint.parent.parent
    if (run / "summary.json").is_file():
        summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
        measured |= {name: summary.get(name) for name in ("corpus", "parameters", "hardware")}
    evaluations = run / "evaluations.jsonl"
    for line in evaluations.read_text(encoding="utf-8").splitlines() if evaluations.is_file() else []:
        row = json.loads(line)
        if row.get("step") == progress.get("step"):
            measured |= {"held_out_loss": row.get("loss"), "held_out_accuracy": row.get("accuracy")}
    recipe = checkpoint / "recipe.yaml"
    return measured, (yaml.safe_load(recipe.read_text(encoding="utf-8")) or {}) if recipe.is_file() else {}
