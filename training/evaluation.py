# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Loss and accuracy on hidden tokens of held-out documents: the same documents and the same masks each time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from maelm_hf import DataCollatorForMaeLm

from .data import Step, StepDataset, evaluation_step
from .recipe import Recipe, RecipeError
from .text import Text


class HeldOut:
    """The held-out blocks that a run evaluates on; ``evaluation_blocks`` in all, as many of every source.

    Every process evaluates its part of them (``process``: see :class:`StepDataset`).

    Raises:
        RecipeError: a source has fewer of them than there are processes.
    """

    def __init__(self, recipe: Recipe, text: Text, collator: DataCollatorForMaeLm, **process: int):
        self.tokenizer, self.sources = text.tokenizer, text.sources
        self.blocks_a_source = -(-recipe.evaluation_blocks // len(text.sources))
        for source in text.sources:
            if (count := min(self.blocks_a_source, len(source.held_out))) < process["world_size"]:
                raise RecipeError(
                    f"{source.name} gives {count} held-out blocks to {process['world_size']} processes: raise "
                    "corpus.held_out_share or evaluation_blocks, or start fewer."
                )
        self.datasets = [StepDataset(source.held_out, collator, **process) for source in text.sources]

    def steps(self) -> list[Step]:
        """The batches of this process, one step a source."""
        return [evaluation_step(dataset, self.blocks_a_source) for dataset in self.datasets]

    def texts(self) -> list[str]:
        """The same blocks as text."""
        texts = []
        for source, step in zip(self.sources, self.steps(), strict=True):
            blocks = source.held_out.input_ids(np.array(step.sample_index))
            texts += self.tokenizer.batch_decode(blocks, skip_special_tokens=True)
        return texts

    @torch.no_grad()
    def evaluate(
        self, model: torch.nn.Module, accelerator: Accelerator, autocast: Callable[[], AbstractContextManager]
    ) -> dict[str, Any]:
        """Means over hidden tokens: loss in nats, and the share predicted right.

        Of a mixture, every source's are under ``sources``, and the whole's are their means, weighted by the shares of
        the sources: an estimate for text drawn as the training text is.
        """
        model.eval()
        mine = [_sums(model, accelerator.device, step, autocast) for step in self.steps()]
        sums = np.array(gather_object([mine])).sum(0)  # (sources, 3), float64, which not every device has
        rows = {
            source.name: {"loss": loss / tokens, "accuracy": right / tokens, "hidden_tokens": int(tokens)}
            for source, (loss, right, tokens) in zip(self.sources, sums.tolist(), strict=True)
        }
        whole = {
            name: sum(source.share * rows[source.name][name] for source in self.sources)
            for name in ("loss", "accuracy")
        }
        whole["hidden_tokens"] = sum(row["hidden_tokens"] for row in rows.values())
        return whole | ({"sources": rows} if len(rows) > 1 else {})


def _sums(
    model: torch.nn.Module, device: torch.device, step: Step, autocast: Callable[[], AbstractContextManager]
) -> list[float]:
    """Loss, right answers and hidden tokens of a process's batches."""
    losses, counts = [], []  # of micro-batches; the counts are right answers and tokens
    for batch in step.micro_batches:
        batch = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
        with autocast():
            output = model(**batch, sparse_logits=True, num_items_in_batch=1)
        losses.append(output.loss.float())
        counts.append(torch.stack([right_answers(output.logits, batch), (batch["labels"] != -100).sum()]))
    return [sum(torch.stack(losses).tolist()), *torch.stack(counts).sum(0).tolist()]


def right_answers(logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """How many hidden tokens have the largest of their logits (hidden tokens or slots for them, vocabulary)."""
    targets = batch["labels"].gather(1, batch["hidden_index"].clamp(min=0))
    targets = targets.masked_fill(batch["hidden_index"] < 0, -100).flatten()
    if len(targets) != len(logits):  # on a CPU the model predicts no unused slots
        targets = targets[targets != -100]
    return (logits.argmax(-1) == targets).sum()
