# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Batches from a streamed corpus: nothing is written to disk, and every process reads its own share.

Documents come in the order of the stream. There is no shuffle buffer, because all it holds would be lost on resume:
shuffle the documents beforehand. A run resumes exactly, with the same number of processes, from the position that
`datasets` keeps in the stream.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader, IterableDataset
from transformers import PreTrainedTokenizerBase

from maelm_hf import DataCollatorForMaeLm

from .blocks import BlockCutter, Blocks
from .data import Step, collate_step, ignore_sigterm
from .recipe import Recipe, RecipeError


@dataclass(frozen=True)
class StreamCursor:
    """Where one process is in its share of the stream.

    Attributes:
        epoch: passes over the stream so far.
        documents: the stream's own state before the document that comes next; None at its beginning.
        used: blocks of that document that were used already.
        count: blocks used so far, in all epochs; masks are drawn by it.
    """

    epoch: int = 0
    documents: dict[str, Any] | None = None
    used: int = 0
    count: int = 0


class StreamedSteps(IterableDataset):
    """The training steps of a stream: ``batch_size`` blocks over all processes, without end."""

    start = StreamCursor()

    def __init__(
        self,
        recipe: Recipe,
        documents: datasets.IterableDataset,
        tokenizer: PreTrainedTokenizerBase,
        collator: DataCollatorForMaeLm,
        *,
        rank: int,
        world_size: int,
        micro_batch_tokens: int,
    ):
        if recipe.data.batch_size is None or recipe.data.packing:
            raise RecipeError(
                "a streamed corpus needs data.batch_size, and cannot be packed: set corpus.streaming false."
            )
        self.rows, left = divmod(recipe.data.batch_size, world_size)
        if left or not self.rows:
            raise RecipeError(
                f"data.batch_size {recipe.data.batch_size} of a streamed corpus must be a multiple of the {world_size} "
                f"processes: set {max(1, self.rows) * world_size}, or start fewer."
            )
        self.micro_batches = -(-self.rows * recipe.data.max_length // micro_batch_tokens)
        self.documents = split_dataset_by_node(documents, rank=rank, world_size=world_size)
        self.cutter = BlockCutter(tokenizer, recipe.data.max_length, recipe.corpus.held_out_share, held_out=False)
        self.collator, self.rank, self.world_size = collator, rank, world_size
        self._from = self.start

    def steps(self, start: StreamCursor, num_workers: int, pin: bool) -> Iterator[Step]:
        """Steps from ``start`` on. More than one worker would read the stream more than once."""
        self._from = start
        return iter(
            DataLoader(
                self,
                batch_size=None,
                num_workers=min(1, num_workers),
                pin_memory=pin,
                worker_init_fn=ignore_sigterm,
            )
        )

    def __iter__(self) -> Iterator[Step]:
        cursor, features = self._from, []
        for block, following in self._blocks(self._from):
            number = cursor.count + len(features)
            features.append({"input_ids": block, "sample_index": number * self.world_size + self.rank, "epoch": 0})
            if len(features) < self.rows:
                continue
            by_length = sorted(features, key=lambda feature: -len(feature["input_ids"]))
            parts = np.array_split(np.arange(self.rows), min(self.rows, self.micro_batches))
            yield collate_step(
                cursor,
                following,
                [feature["sample_index"] for feature in features],
                [[by_length[number] for number in part] for part in parts],
                self.collator,
            )
            cursor, features = following, []

    def _blocks(self, cursor: StreamCursor) -> Iterator[tuple[list[int], StreamCursor]]:
        """Blocks without end, each with the cursor of the one after it."""
        epoch, before, used, count = cursor.epoch, cursor.documents, cursor.used, cursor.count
        while True:
            stream = copy.deepcopy(self.documents)  # one that was iterated would begin where it was loaded
            if before is not None:
                stream.load_state_dict(before)
            empty = before is None
            for document in stream:
                after = stream.state_dict()
                blocks = self.cutter({"text": [document["text"]]})["input_ids"]
                for number in range(used, len(blocks)):
                    empty, count = False, count + 1
                    more = number + 1 < len(blocks)
                    next_document, next_block = (before, number + 1) if more else (after, 0)
                    yield blocks[number], StreamCursor(epoch, next_document, next_block, count)
                before, used = after, 0
            if empty:
                raise RecipeError("the stream has no text for this process: give more shards, or use fewer processes.")
            epoch, before, used = epoch + 1, None, 0


def held_out_blocks(recipe: Recipe, documents: datasets.IterableDataset, tokenizer: PreTrainedTokenizerBase) -> Blocks:
    """The first ``evaluation_blocks`` blocks of held-out documents, in memory.

    Raises:
        RecipeError: the stream has no held-out document.
    """
    cutter = BlockCutter(tokenizer, recipe.data.max_length, recipe.corpus.held_out_share, held_out=True)
    found: list[list[int]] = []
    for document in documents:
        found += cutter({"text": [document["text"]]})["input_ids"]
        if len(found) >= recipe.evaluation_blocks:
            break
    if not found:
        raise RecipeError("the stream has no held-out document: raise corpus.held_out_share.")
    rows = datasets.Dataset.from_dict({"input_ids": found}).with_format("numpy")
    lengths = np.array([len(block) for block in found], dtype=np.int32)
    return Blocks(rows, lengths, int(lengths.sum()))
