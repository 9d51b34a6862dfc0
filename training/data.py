# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Text to tokens to blocks to batches.

Documents are tokenized once into memory-mapped Arrow and cut into blocks that never cross documents. Which blocks make
which batch is a pure function of (seed, epoch), computed a window at a time, so that memory does not grow with the
corpus, a run resumes exactly at any step from three integers, and neither workers nor processes change the batches.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from maelm_hf import DataCollatorForMaeLm
from maelm_hf.masking import uniform_numbers

from .corpus import Corpus, is_held_out
from .recipe import Recipe, RecipeError
from .tokenizer import special_tokens_around, tokenizer_digest

EVALUATION_EPOCH = 2**62  # the masks of held-out text: fixed, and not those of any training epoch
_FEISTEL_ROUNDS = 6


# Tokens and blocks


@dataclass(frozen=True)
class Blocks:
    """Tokenized blocks on disk: ``input_ids`` with special tokens, and their lengths, both memory-mapped."""

    rows: datasets.Dataset
    lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)

    def input_ids(self, indices: np.ndarray) -> list[np.ndarray]:
        return self.rows[indices.tolist()]["input_ids"]


def load_blocks(
    recipe: Recipe, corpus: Corpus, tokenizer: PreTrainedTokenizerBase, cache_dir: Path, *, held_out: bool
) -> Blocks:
    """The blocks of the training or of the held-out documents, through the cache.

    Every document is cut into pieces of at most ``max_length`` tokens, special tokens included; nothing is dropped.
    Text that spells a special token (``<mask>`` in a docstring) is tokenized as text. `datasets.map` keeps the finished
    shards of an interrupted preparation.

    Raises:
        RecipeError: there are no such documents.
    """
    facts = {
        "corpus": corpus.digest,
        "tokenizer": tokenizer_digest(tokenizer),
        "max_length": recipe.data.max_length,
        "held_out_share": recipe.corpus.held_out_share,
        "held_out": held_out,
    }
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    folder = cache_dir / f"blocks-{key}"
    note = folder / "files.json"
    if not note.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        workers = recipe.data.preprocessing_workers
        rows = corpus.documents.map(
            BlockCutter(tokenizer, recipe.data.max_length, recipe.corpus.held_out_share, held_out),
            batched=True,
            remove_columns=["text"],
            features=datasets.Features({"input_ids": datasets.List(datasets.Value("int32"))}),
            num_proc=workers if workers > 1 else None,
            new_fingerprint=key,
            cache_file_name=str(folder / "blocks.arrow"),
            desc=f"tokenizing {'held-out' if held_out else 'training'} documents",
        )
        if len(rows) == 0:
            shutil.rmtree(folder)
            kind = "held-out" if held_out else "training"
            raise RecipeError(f"there are no {kind} documents: change corpus.held_out_share or give more text.")
        _write_lengths(rows, folder / "lengths.npy")
        files = [Path(file["filename"]).name for file in rows.cache_files]
        unfinished = folder / f"files.json.{os.getpid()}.unfinished"
        unfinished.write_text(json.dumps(files))
        os.replace(unfinished, note)
    parts = [datasets.Dataset.from_file(str(folder / name)) for name in json.loads(note.read_text())]
    rows = datasets.concatenate_datasets(parts).with_format("numpy")
    return Blocks(rows, np.load(folder / "lengths.npy", mmap_mode="r"))


class BlockCutter:
    """Maps a batch of documents to their blocks; picklable, for the processes of `datasets.map`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_length: int, held_out_share: float, held_out: bool):
        self.tokenizer = tokenizer
        self.held_out_share, self.held_out = held_out_share, held_out
        self.prefix, self.suffix = special_tokens_around(tokenizer)
        self.size = max_length - len(self.prefix) - len(self.suffix)

    def __call__(self, batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        texts = [text for text in batch["text"] if is_held_out(text, self.held_out_share) == self.held_out]
        return {"input_ids": [block for text_blocks in self.cut(texts) for block in text_blocks]}

    def cut(self, texts: list[str]) -> list[list[list[int]]]:
        """The blocks of every text."""
        if not texts:
            return []
        encoding = self.tokenizer(
            texts,
            add_special_tokens=False,
            split_special_tokens=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,  # about texts longer than the model takes: they are cut here
        )
        return [
            [self.prefix + ids[at : at + self.size] + self.suffix for at in range(0, len(ids), self.size)]
            for ids in encoding["input_ids"]
        ]


def _write_lengths(rows: datasets.Dataset, path: Path) -> None:
    lengths = np.lib.format.open_memmap(path, mode="w+", dtype=np.int32, shape=(len(rows),))
    at = 0
    for table in rows.with_format("arrow").iter(batch_size=10_000):
        measured = table["input_ids"].combine_chunks().value_lengths().to_numpy()
        lengths[at : at + len(measured)] = measured
        at += len(measured)
    lengths.flush()


# The order of batches


def permuted(indices: np.ndarray, size: int, *, seed: int, epoch: int) -> np.ndarray:
    """Where a pseudo-random permutation of range(size) sends the indices; it is never held in memory.

    A Feistel network over the next power of four, walked again where it leaves the range (Black & Rogaway, "Ciphers
    with arbitrary finite domains", 2002).
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    low = (np.uint64(1) << half) - np.uint64(1)
    numbers = uniform_numbers(_FEISTEL_ROUNDS, seed=seed, epoch=epoch, sample_index=0, document=1)
    keys = (numbers * 2.0**53).astype(np.uint64)

    def network(values: np.ndarray) -> np.ndarray:
        left, right = values >> half, values & low
        for key in keys:
            left, right = right, left ^ (_mixed(right + key) & low)
        return (left << half) | right

    values = network(np.asarray(indices, dtype=np.uint64))
    while (outside := values >= np.uint64(size)).any():
        values[outside] = network(values[outside])
    return values.astype(np.int64)


def _mixed(values: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64 (Steele, Lea & Flood 2014)."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


@dataclass(frozen=True)
class Cursor:
    """Where a run is in its data: the batch that comes next."""

    epoch: int = 0
    window: int = 0
    batch: int = 0


class BatchOrder:
    """Global batches of blocks of like lengths, in an order fixed by (seed, epoch).

    The blocks, permuted, are cut into windows of ``length_window`` batches. Within one they are sorted by length and
    cut into batches of ``batch_size`` blocks or ``batch_tokens`` tokens, which are then shuffled. Every block comes
    once an epoch; the last window takes the remainder, spread over its batches, so that no batch is a tiny one.
    """

    def __init__(self, recipe: Recipe, lengths: np.ndarray):
        data = recipe.data
        self.lengths, self.seed = lengths, recipe.seed
        self.batch_size, self.batch_tokens = data.batch_size, data.batch_tokens
        blocks_a_batch = data.batch_size or max(1, int(data.batch_tokens / lengths.mean()))
        self.window_size = blocks_a_batch * data.length_window
        self.windows = max(1, len(lengths) // self.window_size)

    def batches(self, start: Cursor) -> Iterator[tuple[Cursor, Cursor, np.ndarray]]:
        """From ``start`` on, without end: a batch's own cursor, the next one's, and the batch's block indices."""
        epoch, window, first = start.epoch, start.window, start.batch
        while True:
            batches = self.window(epoch, window)
            following = Cursor(epoch, window + 1) if window + 1 < self.windows else Cursor(epoch + 1)
            for number in range(first, len(batches)):
                is_last = number + 1 == len(batches)
                here = Cursor(epoch, window, number)
                yield here, following if is_last else Cursor(epoch, window, number + 1), batches[number]
            epoch, window, first = following.epoch, following.window, 0

    def window(self, epoch: int, window: int) -> list[np.ndarray]:
        """The batches of a window."""
        stop = len(self.lengths) if window + 1 == self.windows else (window + 1) * self.window_size
        places = np.arange(window * self.window_size, stop)
        blocks = permuted(places, len(self.lengths), seed=self.seed, epoch=epoch)
        lengths = self.lengths[blocks]
        order = np.argsort(-lengths, kind="stable")  # longest first: what does not fit into memory fails early
        blocks, lengths = blocks[order], lengths[order]
        if self.batch_tokens is None:
            count = max(1, round(len(blocks) / self.batch_size))
            batches = np.array_split(blocks, count)
        else:
            ends = np.cumsum(lengths)
            count = max(1, round(ends[-1] / self.batch_tokens))
            cuts = np.searchsorted(ends, ends[-1] * np.arange(1, count) / count)
            batches = [batch for batch in np.split(blocks, cuts) if len(batch)]
        noise = uniform_numbers(len(batches), seed=self.seed, epoch=epoch, sample_index=window, document=2)
        return [batches[number] for number in np.argsort(noise, kind="stable")]


# Batches for the model


@dataclass(frozen=True)
class Step:
    """What one process needs for one optimizer step.

    Attributes:
        cursor, following: the places of this batch and of the next one in the data.
        sample_index: the block indices of the global batch.
        micro_batches: the collator's output for this process, one forward pass each.
        hidden_tokens, tokens: tokens to predict, and real tokens, of this process.
    """

    cursor: Cursor
    following: Cursor
    sample_index: list[int]
    micro_batches: list[dict[str, torch.Tensor]]
    hidden_tokens: int
    tokens: int

    def pin_memory(self) -> Step:
        pinned = [{name: tensor.pin_memory() for name, tensor in batch.items()} for batch in self.micro_batches]
        return Step(self.cursor, self.following, self.sample_index, pinned, self.hidden_tokens, self.tokens)


class StepDataset(torch.utils.data.Dataset):
    """Makes a :class:`Step` of a planned batch, in the main process or in a worker."""

    def __init__(
        self, blocks: Blocks, collator: DataCollatorForMaeLm, *, rank: int, world_size: int, micro_batch_tokens: int
    ):
        self.blocks, self.collator = blocks, collator
        self.rank, self.world_size, self.micro_batch_tokens = rank, world_size, micro_batch_tokens

    def __getitem__(self, plan: tuple[Cursor, Cursor, np.ndarray]) -> Step:
        cursor, following, indices = plan
        return self.step(cursor, following, indices, epoch=cursor.epoch)

    def step(self, cursor: Cursor, following: Cursor, indices: np.ndarray, epoch: int) -> Step:
        # Rows go round the processes: the batch is sorted by length, so all get as much.
        mine = indices[self.rank :: self.world_size]
        micro_batches = [
            self.collator(
                [
                    {"input_ids": ids, "sample_index": index, "epoch": epoch}
                    for ids, index in zip(self.blocks.input_ids(part), part.tolist(), strict=True)
                ]
            )
            for part in np.array_split(mine, self._micro_batches(indices))
        ]
        return Step(
            cursor,
            following,
            indices.tolist(),
            micro_batches,
            hidden_tokens=sum(int((batch["labels"] != -100).sum()) for batch in micro_batches),
            tokens=sum(int(batch["attention_mask"].sum()) for batch in micro_batches),
        )

    def _micro_batches(self, indices: np.ndarray) -> int:
        """How many forward passes; the same on every process, none of them empty."""
        rows = -(-len(indices) // self.world_size)
        padded_tokens = rows * int(self.blocks.lengths[indices[0]])  # the first is the longest
        fewest_rows = len(indices) // self.world_size
        if fewest_rows == 0:
            raise RecipeError(
                f"a batch has {len(indices)} blocks for {self.world_size} processes: "
                "give more text, raise data.batch_size or start fewer processes."
            )
        return min(fewest_rows, -(-padded_tokens // self.micro_batch_tokens))


def training_steps(
    dataset: StepDataset, order: BatchOrder, start: Cursor, num_workers: int, pin: bool
) -> Iterator[Step]:
    """Steps without end, from ``start`` on."""
    loader = DataLoader(
        dataset,
        batch_size=None,  # a plan is a batch already
        sampler=_Plans(order, start),
        num_workers=num_workers,
        pin_memory=pin,
    )
    return iter(loader)


class _Plans:
    """An endless sampler; the DataLoader hands its items to ``dataset[item]``."""

    def __init__(self, order: BatchOrder, start: Cursor):
        self.order, self.start = order, start

    def __iter__(self) -> Iterator[Any]:
        return self.order.batches(self.start)


def evaluation_step(dataset: StepDataset, count: int) -> Step:
    """``count`` blocks of held-out text: the same ones with the same masks each time, longest first."""
    size = len(dataset.blocks)
    indices = permuted(np.arange(min(count, size)), size, seed=0, epoch=EVALUATION_EPOCH)
    indices = indices[np.argsort(-dataset.blocks.lengths[indices], kind="stable")]
    at = Cursor()
    return dataset.step(at, at, indices, epoch=EVALUATION_EPOCH)
