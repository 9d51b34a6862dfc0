# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""How far the difference of the twins' scores would lie elsewhere on another test set of the same size.

Both answer the same examples, so their answers are compared example by example: the fine-tuned models that were kept
(the best on validation), and the frozen encoders' probes of seed 0.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from .console import console
from .encoding import IGNORED, Encoded, PadToLongest
from .finetune_cell import Cell, encode, load_model, load_tokenizer
from .finetune_data import DataOptions, load_task
from .finetune_report import write_json
from .linear_probe import BATCH, fit_probe
from .study_results import TWINS, paired_error, task_cells
from .tabular import TaskData


def compare_twins(tasks: Path, options: DataOptions, folder: Path) -> None:
    """One file a mode, `FOLDER/TASK-MODE.json`, as far as both twins have it; nothing is done twice for the same cells.

    Args:
        tasks: folder of the fine-tuning results, ARM/TASK.
    """
    data, task = load_task(options), options.task
    cells = {arm: task_cells(tasks / arm)[task] for arm in TWINS}
    kept = {arm: _kept(tasks / arm / task, cells[arm]) for arm in TWINS}
    if all(kept.values()):
        _compare(
            "finetune", kept, folder / f"{task}-finetune.json", lambda arm: _hits_of_kept(tasks / arm / task, data)
        )
    frozen = {arm: _frozen(cells[arm]) for arm in TWINS}
    for pool in frozen["mlm"]["pooled"]:

        def hits(arm: str, pool: str = pool) -> tuple[np.ndarray, np.ndarray]:
            return _hits_of_probe(tasks / arm / task, Cell(**frozen[arm]["cell"]), data, pool)

        _compare(pool, frozen, folder / f"{task}-{pool}.json", hits)


def _kept(folder: Path, cells: list[dict]) -> dict | None:
    """The cell whose model the folder keeps."""
    if not (folder / "best.json").is_file():
        return None
    best = json.loads((folder / "best.json").read_text())["cell"]
    return next((cell for cell in cells if Cell(**cell["cell"]).id == best), None)


def _frozen(cells: list[dict]) -> dict:
    return next(cell for cell in cells if (cell["cell"]["mode"], cell["cell"]["seed"]) == ("frozen", 0))


def _compare(mode: str, cells: dict[str, dict], file: Path, hits_of) -> None:
    compared = {arm: Cell(**cell["cell"]).id for arm, cell in cells.items()}
    if file.is_file() and json.loads(file.read_text())["cells"] == compared:
        return
    (mlm, items), (mae, _) = (hits_of(arm) for arm in TWINS)
    found = {"examples": len(items), "items": int(items.sum()), "half_width": paired_error(mae, mlm, items)}
    found |= {f"accuracy_{arm}": float(hits.sum() / items.sum()) for arm, hits in (("mlm", mlm), ("mae-lm", mae))}
    write_json(file, {"mode": mode, "cells": compared} | found)
    console.print(f"{file.stem}: +- {100 * found['half_width']:.1f} points over {len(items):,} examples")


def _hits_of_kept(folder: Path, data: TaskData) -> tuple[np.ndarray, np.ndarray]:
    """Right answers and questions of every test example (longest first) of the fine-tuned model that was kept."""
    cell = _kept(folder, task_cells(folder.parent)[folder.name])["cell"]
    model = load_model(str(folder / "model"), data, cell["attention"]).eval()
    tokenizer = load_tokenizer(str(folder / "model"))
    right, items = [], []
    for batch in _batches(_encoded(data, cell["max_length"], tokenizer), PadToLongest(tokenizer)):
        labels = batch.pop("labels")
        with torch.inference_mode():
            guesses = model(**batch).logits.argmax(-1)
        asked = (labels != IGNORED).reshape(len(labels), -1)
        right.append(((guesses == labels).reshape(len(labels), -1) & asked).sum(1).numpy())
        items.append(asked.sum(1).numpy())
    return np.concatenate(right), np.concatenate(items)


def _encoded(data: TaskData, max_length: int, tokenizer) -> Encoded:
    return encode(data, "test", tokenizer, max_length).longest_first()[0]


def _batches(encoded: Encoded, collate: PadToLongest) -> Iterator[dict[str, torch.Tensor]]:
    for start in range(0, len(encoded), BATCH):
        yield collate(encoded.examples[start : start + BATCH])


def _hits_of_probe(folder: Path, cell: Cell, data: TaskData, pool: str) -> tuple[np.ndarray, np.ndarray]:
    """The same of a linear probe, from the features that were kept."""
    with np.load(folder / f"features_{cell.features_id}.npz") as saved:
        features = dict(saved)
    guesses = fit_probe(cell, data, features, pool)[0].predict(features[f"test/{pool}"])
    if data.kind != "tokens":
        return (guesses == np.asarray(data.splits["test"].labels)).astype(int), np.ones(len(guesses), int)
    encoded = _encoded(data, cell.max_length, load_tokenizer(cell.model))  # the order of the features
    items = np.array([sum(label != IGNORED for label in example["labels"]) for example in encoded.examples])
    items = items[items > 0]
    starts = np.concatenate([[0], np.cumsum(items)[:-1]])
    return np.add.reduceat((guesses == features["test/tags"]).astype(int), starts), items


def pair_rows(folder: Path) -> pd.DataFrame:
    """What :func:`compare_twins` wrote: task, mode, examples, items, half_width (a fraction), each twin's accuracy."""
    rows = []
    for file in sorted(folder.glob("[!.]*.json")):
        found = json.loads(file.read_text())
        found.pop("cells")
        rows.append({"task": file.stem.removesuffix(f"-{found['mode']}")} | found)
    return pd.DataFrame(rows)
