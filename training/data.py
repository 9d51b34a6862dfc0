# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Blocks to batches.

Which blocks make which batch is a pure function of (seed, epoch), computed a window at a time, so that memory does not
grow with the corpus, a run resumes exactly at any step from three integers, and neither workers nor processes change
the batches.
"""

from __future__ import annotations

import hashlib
import json
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from maelm_hf import DataCollatorForMaeLm
from maelm_hf.masking import uniform_numbers

from .blocks import Blocks
from .mixture import MixedBlocks, MixedLengths
from .packing import best_fit
from .permutation import permuted
from .recipe import Recipe, RecipeError

EVALUATION_EPOCH = 2**62  # the masks of held-out text: fixed, and not those of any training epoch
_PACKING_WINDOW = 8192  # blocks packed together, at least: of 500 docstrings, a third more of the room stays empty


# The order of batches

Row = np.ndarray  # the indices of the blocks in a row of a batch: one, or several where they are packed


@dataclass(frozen=True)
class Cursor:
    """Where a run is in its data: the batch that comes next."""

    epoch: int = 0
    window: int = 0
    batch: int = 0


class BatchOrder:
    """Global batches, in an order fixed by (seed, epoch); every block comes once an epoch.

    The blocks, permuted, are cut into windows of ``length_window`` batches. Within one they are sorted by length and
    cut into batches of ``batch_size`` rows or ``batch_tokens`` tokens, which are then shuffled; or, with packing, they
    are packed into rows, and the shuffled rows cut into batches. (A window to be packed holds at least 8,192 blocks:
    more choice leaves less room empty.) The last window takes the remainder of the epoch, spread over its batches, so
    that no batch is a tiny one. Of a mixture, an epoch is what :class:`MixedBlocks` draws in it.
    """

    def __init__(self, recipe: Recipe, lengths: np.ndarray | MixedLengths, mixture: MixedBlocks | None = None):
        data = recipe.data
        self.mixture = mixture
        self.lengths, self.seed, self.max_length, self.packing = lengths, recipe.seed, data.max_length, data.packing
        self.batch_size, self.batch_tokens = data.batch_size, data.batch_tokens
        blocks_a_batch = data.batch_size
        if data.batch_tokens is not None or data.packing:
            tokens = data.batch_tokens or data.batch_size * data.max_length
            blocks_a_batch = max(1, int(tokens / lengths.mean()))
        self.window_size = blocks_a_batch * data.length_window
        if data.packing:
            self.window_size = max(self.window_size, _PACKING_WINDOW)
        self.windows = max(1, len(lengths) // self.window_size)

    def batches(self, start: Cursor) -> Iterator[tuple[Cursor, Cursor, list[Row]]]:
        """From ``start`` on, without end: a batch's own cursor, the next one's, and its rows."""
        epoch, window, first = start.epoch, start.window, start.batch
        while True:
            batches = self.window(epoch, window)
            following = Cursor(epoch, window + 1) if window + 1 < self.windows else Cursor(epoch + 1)
            for number in range(first, len(batches)):
                is_last = number + 1 == len(batches)
                here = Cursor(epoch, window, number)
                yield here, following if is_last else Cursor(epoch, window, number + 1), batches[number]
            epoch, window, first = following.epoch, following.window, 0

    def window(self, epoch: int, window: int) -> list[list[Row]]:
        """The batches of a window."""
        stop = len(self.lengths) if window + 1 == self.windows else (window + 1) * self.window_size
        places = np.arange(window * self.window_size, stop)
        blocks = permuted(places, len(self.lengths), seed=self.seed, epoch=epoch)
        if self.mixture is not None:
            blocks = self.mixture.draw(blocks, epoch)

        def shuffled(items: list, document: int) -> list:
            noise = uniform_numbers(len(items), seed=self.seed, epoch=epoch, sample_index=window, document=document)
            return [items[number] for number in np.argsort(noise, kind="stable")]

        lengths = self.lengths[blocks]
        if self.packing:
            rows = shuffled(best_fit(lengths, self.max_length), document=3)
        else:
            rows = np.argsort(-lengths, kind="stable")[:, None]
        tokens = np.array([lengths[row].sum() for row in rows])
        return shuffled(self._cut([blocks[row] for row in rows], tokens), document=2)

    def _cut(self, rows: list[Row], tokens: np.ndarray) -> list[list[Row]]:
        """Batches of as many rows, or of as many tokens, each as near to what is asked as the window allows."""
        if self.batch_tokens is None:
            count = max(1, round(len(rows) / self.batch_size))
            cuts = [len(part) for part in np.array_split(np.arange(len(rows)), count)]
            cuts = np.cumsum(cuts)[:-1].tolist()
        else:
            ends = np.cumsum(tokens)
            count = max(1, round(ends[-1] / self.batch_tokens))
            cuts = np.searchsorted(ends, ends[-1] * np.arange(1, count) / count).tolist()
        edges = [0, *cuts, len(rows)]
        return [rows[start:stop] for start, stop in pairwise(edges) if stop > start]


# Batches for the model


@dataclass(frozen=True)
class Step:
    """What one process needs for one optimizer step.

    Attributes:
        cursor, following: the places of this batch and of the next one in the data.
        sample_index: the block indices of the global batch (of a stream: of this process's part).
        tokens_by_source: of a mixture, the real tokens of the global batch from every source; else empty.
        micro_batches: the collator's output for this process, one forward pass each.
        hidden_tokens, tokens, positions: tokens to predict, real tokens, and these with padding, of this process.
        rows: of this process.
        stray_mask_tokens: [MASK] ids in its text, for which the collator put the unknown token.
    """

    cursor: Any
    following: Any
    sample_index: list[int]
    micro_batches: list[dict[str, torch.Tensor]]
    hidden_tokens: int
    tokens: int
    positions: int
    rows: int
    stray_mask_tokens: int
    tokens_by_source: tuple[int, ...] = ()

    def digest(self) -> str:
        """Of samples, tokens and masks: equal digests mean equal batches."""
        digest = hashlib.blake2b(json.dumps(self.sample_index).encode(), digest_size=8)
        for batch in self.micro_batches:
            for name in ("input_ids", "labels"):
                digest.update(batch[name].numpy().tobytes())
        return digest.hexdigest()

    def pin_memory(self) -> Step:
        pinned = [{name: tensor.pin_memory() for name, tensor in batch.items()} for batch in self.micro_batches]
        return replace(self, micro_batches=pinned)


def collate_step(
    cursor: Any, following: Any, sample_index: list[int], features: list[list[dict]], collator: DataCollatorForMaeLm
) -> Step:
    """A :class:`Step` of the features of its micro-batches."""
    micro_batches = [collator(micro_batch) for micro_batch in features]
    return Step(
        cursor,
        following,
        sample_index,
        micro_batches,
        hidden_tokens=sum(int((batch["labels"] != -100).sum()) for batch in micro_batches),
        tokens=sum(int(batch["attention_mask"].sum()) for batch in micro_batches),
        positions=sum(batch["input_ids"].numel() for batch in micro_batches),
        rows=sum(len(batch["input_ids"]) for batch in micro_batches),
        stray_mask_tokens=sum(
            int(np.count_nonzero(np.asarray(feature["input_ids"]) == collator.tokenizer.mask_token_id))
            for micro_batch in features
            for feature in micro_batch
        ),
    )


class StepDataset(torch.utils.data.Dataset):
    """Makes a :class:`Step` of a planned batch, in the main process or in a worker."""

    def __init__(
        self,
        blocks: Blocks | MixedBlocks,
        collator: DataCollatorForMaeLm,
        *,
        rank: int,
        world_size: int,
        micro_batch_tokens: int,
        packed: bool = False,
    ):
        self.blocks, self.collator, self.packed = blocks, collator, packed
        self.rank, self.world_size, self.micro_batch_tokens = rank, world_size, micro_batch_tokens

    def __getitem__(self, plan: tuple[Cursor, Cursor, list[Row]]) -> Step:
        cursor, following, rows = plan
        return self.step(cursor, following, rows, epoch=cursor.epoch)

    def step(self, cursor: Cursor, following: Cursor, rows: list[Row], epoch: int) -> Step:
        # Rows go round the processes: where they are sorted by length, all get as much.
        mine = rows[self.rank :: self.world_size]
        parts = np.array_split(np.arange(len(mine)), self._micro_batches(rows))
        features = [self._features([mine[number] for number in part], epoch) for part in parts]
        blocks = np.concatenate(rows)
        step = collate_step(cursor, following, blocks.tolist(), features, self.collator)
        return replace(step, tokens_by_source=self._tokens_by_source(blocks))

    def _tokens_by_source(self, blocks: np.ndarray) -> tuple[int, ...]:
        if not isinstance(self.blocks, MixedBlocks):
            return ()
        sources, lengths = self.blocks.source_of(blocks), self.blocks.lengths[blocks]
        return tuple(int(lengths[sources == number].sum()) for number in range(len(self.blocks.parts)))

    def _features(self, rows: list[Row], epoch: int) -> list[dict[str, Any]]:
        blocks = iter(self.blocks.input_ids(np.concatenate(rows)))
        features = []
        for row in rows:
            pieces = [next(blocks) for _ in row]
            feature = {"input_ids": np.concatenate(pieces), "sample_index": row, "epoch": epoch}
            if self.packed:
                lengths = [len(piece) for piece in pieces]
                feature["document_ids"] = np.repeat(np.arange(len(pieces)), lengths)
            features.append(feature)
        return features

    def _micro_batches(self, rows: list[Row]) -> int:
        """How many forward passes; the same on every process, none of them empty."""
        fewest_rows = len(rows) // self.world_size
        if fewest_rows == 0:
            raise RecipeError(
                f"a batch has {len(rows)} rows for {self.world_size} processes: "
                "give more text, raise data.batch_size or start fewer processes."
            )
        most_rows = -(-len(rows) // self.world_size)
        lengths = self.blocks.lengths[np.concatenate(rows)]
        longest_row = np.add.reduceat(lengths, np.cumsum([0, *map(len, rows[:-1])])).max()
        padded_tokens = most_rows * int(longest_row)
        return min(fewest_rows, -(-padded_tokens // self.micro_batch_tokens))


class _Plans:
    """An endless sampler; the DataLoader hands its items to ``dataset[item]``."""

    def __init__(self, order: BatchOrder, start: Cursor):
        self.order, self.start = order, start

    def __iter__(self) -> Iterator[Any]:
        return self.order.batches(self.start)


class IndexedSteps:
    """The training steps of blocks on disk."""

    start = Cursor()

    def __init__(self, recipe: Recipe, blocks: Blocks | MixedBlocks, collator: DataCollatorForMaeLm, **process: int):
        self.dataset = StepDataset(blocks, collator, packed=recipe.data.packing, **process)
        self.order = BatchOrder(recipe, blocks.lengths, blocks if isinstance(blocks, MixedBlocks) else None)

    def steps(self, start: Cursor, num_workers: int, pin: bool) -> Iterator[Step]:
        """Steps without end, from ``start`` on."""
        loader = DataLoader(
            self.dataset,
            batch_size=None,  # a plan is a batch already
            sampler=_Plans(self.order, start),
            num_workers=num_workers,
            pin_memory=pin,
            worker_init_fn=ignore_sigterm,
        )
        return iter(loader)


def ignore_sigterm(_: int) -> None:
    """In a worker: schedulers signal the whole process group, and the step under way still needs its batches."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def evaluation_step(dataset: StepDataset, count: int) -> Step:
    """``count`` blocks of held-out text: the same ones with the same masks each time, longest first."""
    size = len(dataset.blocks)
    indices = permuted(np.arange(min(count, size)), size, seed=0, epoch=EVALUATION_EPOCH)
    indices = indices[np.argsort(-dataset.blocks.lengths[indices], kind="stable")]
    at = Cursor()
    return dataset.step(at, at, list(indices[:, None]), epoch=EVALUATION_EPOCH)
