# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""The rank probe inside a training run: fixed texts, fixed masks, every N steps, to the tracker and a CSV file."""

from __future__ import annotations

import csv
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .data import open_data
from .inputs import Budget, text_batches
from .loading import load_model
from .probe import accumulate, check_rank_arguments, masking_for
from .rank_table import POPULATIONS, with_masked_all
from .settings import check_counts
from .spectrum import effective_rank, entropy_effective_rank

logger = logging.getLogger(__name__)

DEFAULT_EVERY = 1000
CSV_FIELDS = ("step", "layer", "population", "effective_rank", "entropy_effective_rank", "tokens", "dim", "seconds")

Log = Callable[[dict[str, float]], None]


class TrainingProbe:
    """Measures the effective rank of a model in training, always on the same tokens with the same masks.

    It leaves the run as it was: train mode, gradients and random state are untouched, so that the run with it and the
    run without it are the same, bit for bit. Under several processes every one has a whole copy of the model and
    measures the same; the first one writes. A model whose parameters are sharded (FSDP2, tensor parallelism) is
    refused: probe its saved checkpoints.

    Args:
        tokenizer: of the model.
        texts: fixed; as many as ``max_tokens`` needs are used.
        mask_ratio, tau, power, centred, seed: as in :func:`maelm_hf.probing.probe_rank`.
        max_tokens: of clean input; a multiple of the model's width, or the number says more about the sample.
        batch_size: sequences in a forward pass.
        csv_path: where rows are appended, a row a layer and population; ``None`` writes none.
    """

    def __init__(
        self,
        tokenizer: Any,
        texts: Sequence[str],
        *,
        mask_ratio: float = 0.15,
        max_tokens: int = 16_384,
        batch_size: int = 32,
        tau: float = 0.9,
        power: float = 1,
        centred: bool = False,
        seed: int = 0,
        csv_path: str | Path | None = None,
    ) -> None:
        check_rank_arguments(mask_ratio, tau, power)
        check_counts(max_tokens=max_tokens, batch_size=batch_size, seed=seed)
        self.tokenizer, self.texts = tokenizer, list(texts)
        self.mask_ratio, self.max_tokens, self.batch_size, self.seed = mask_ratio, max_tokens, batch_size, seed
        self.tau, self.power, self.centred = tau, power, centred
        self.csv_path = Path(csv_path) if csv_path is not None else None
        self._batches: list[Any] | None = None

    def measure(self, model: nn.Module, step: int, *, write: bool = True) -> dict[str, float]:
        """Probe now; returns ``rank/<population>/<layer>`` to the effective rank, and appends to the CSV file."""
        started = time.perf_counter()
        probed = load_model(model)
        if self._batches is None:
            data = open_data(self.texts)
            masking = masking_for(probed, self.tokenizer, data.kind, self.mask_ratio, self.seed, [])
            options = {"batch_size": self.batch_size, "max_length": None, "masking": masking}
            budget, told = Budget(self.max_tokens), lambda count: None
            self._batches = list(text_batches(data, self.tokenizer, probed, budget=budget, told=told, **options))
        moments, positions = accumulate(probed.module, self._batches, blocks=1)
        rows = []
        for layer in positions:
            of_layer = {
                population: moments[layer, population] for population in POPULATIONS if (layer, population) in moments
            }
            for population, sums in with_masked_all(of_layer).items():
                values = sums.singular_values(centred=self.centred)
                rank = effective_rank(values, self.tau, self.power)
                rows.append([step, layer, population, rank, entropy_effective_rank(values), sums.tokens, sums.dim])
        seconds = round(time.perf_counter() - started, 3)
        if write and self.csv_path is not None:
            self._append([[*row, seconds] for row in rows])
        return {f"rank/{population}/{layer}": rank for _, layer, population, rank, *_ in rows}

    def _append(self, rows: list[list[Any]]) -> None:
        self.csv_path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not self.csv_path.exists()
        with self.csv_path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            if is_new:
                writer.writerow(CSV_FIELDS)
            writer.writerows(rows)

    def forget_later(self, step: int) -> None:
        """Drop the CSV file's rows of steps after ``step``: a run that resumes there measures them again.

        Raises:
            ValueError: the file has other columns than this probe writes.
        """
        if self.csv_path is None or not self.csv_path.exists():
            return
        with self.csv_path.open(newline="", encoding="utf-8") as file:
            header, *rows = list(csv.reader(file)) or [[]]
        if tuple(header) != CSV_FIELDS:
            raise ValueError(f"csv_path={str(self.csv_path)!r} has the columns {header}: name another file")
        kept = [row for row in rows if int(row[0]) <= step]
        if len(kept) == len(rows):
            return
        logger.info("%s: %d rows of steps after %d are dropped", self.csv_path, len(rows) - len(kept), step)
        fresh = self.csv_path.with_name(f"{self.csv_path.name}.new")
        with fresh.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([header, *kept])
        os.replace(fresh, self.csv_path)  # an interruption leaves the old file or the new one, whole


class RankProbeCallback(TrainerCallback):
    """:class:`TrainingProbe` for ``transformers.Trainer``.

    Example::

        RankProbeCallback.attach(trainer, texts)  # to trainer's trackers and <output_dir>/rank_probe.csv

    Args:
        probe: what to measure.
        every: steps between two measurements; the first is at step 0, the last at the end.
        log: receives the numbers, such as ``trainer.log``; ``None``: they go to the CSV file and the log history only.
    """

    def __init__(self, probe: TrainingProbe, every: int = DEFAULT_EVERY, log: Log | None = None) -> None:
        if every < 1:
            raise ValueError(f"every={every!r} must be at least 1: the number of steps between two measurements")
        self.probe, self.every, self.log = probe, every, log
        self._last_step: int | None = None

    @classmethod
    def attach(
        cls,
        trainer: Trainer,
        texts: Sequence[str],
        *,
        every: int = DEFAULT_EVERY,
        tokenizer: Any = None,
        **options: Any,
    ) -> Self:
        """Add the callback to a trainer; ``options`` are those of :class:`TrainingProbe`."""
        tokenizer = tokenizer or trainer.processing_class
        if tokenizer is None:
            raise ValueError("tokenizer is missing: the trainer has no processing_class, so pass tokenizer=")
        options.setdefault("csv_path", Path(trainer.args.output_dir) / "rank_probe.csv")
        callback = cls(TrainingProbe(tokenizer, texts, **options), every, trainer.log)
        trainer.add_callback(callback)
        return callback

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero:
            # The step that a run resumes from was measured before; step 0 is measured now.
            self.probe.forget_later(state.global_step or -1)
        if state.global_step == 0:
            self._measure(state, kwargs["model"])

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step % self.every == 0:
            self._measure(state, kwargs["model"])

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._last_step != state.global_step:
            self._measure(state, kwargs["model"])

    def _measure(self, state: TrainerState, model: nn.Module) -> None:
        self._last_step = state.global_step
        numbers = self.probe.measure(model, state.global_step, write=state.is_world_process_zero)
        if self.log is not None:
            self.log(numbers)
        else:
            state.log_history.append({**numbers, "step": state.global_step})
