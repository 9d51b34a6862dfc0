# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Text to tokens to blocks: tokenized once, into memory-mapped Arrow, and never across documents."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import datasets
import numpy as np
from transformers import PreTrainedTokenizerBase

from .corpus import Corpus, is_held_out
from .recipe import Recipe, RecipeError
from .tokenizer import special_tokens_around, tokenizer_digest


@dataclass(frozen=True)
class Blocks:
    """Tokenized blocks on disk: ``input_ids`` with special tokens, and their lengths, both memory-mapped.

    ``tokens`` is the sum of the lengths.
    """

    rows: datasets.Dataset
    lengths: np.ndarray
    tokens: int

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
    note = folder / "blocks.json"
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
            raise RecipeError(
                f"there are no {kind} documents ({corpus.description}): change corpus.held_out_share or give more text."
            )
        lengths = folder / f"lengths.npy.{os.getpid()}.unfinished"
        tokens = _write_lengths(rows, lengths)
        os.replace(lengths, folder / "lengths.npy")  # another run may have the file mapped
        facts = {"files": [Path(file["filename"]).name for file in rows.cache_files], "tokens": tokens}
        unfinished = folder / f"blocks.json.{os.getpid()}.unfinished"
        unfinished.write_text(json.dumps(facts))
        os.replace(unfinished, note)
    facts = json.loads(note.read_text())
    parts = [datasets.Dataset.from_file(str(folder / name)) for name in facts["files"]]
    rows = datasets.concatenate_datasets(parts).with_format("numpy")
    return Blocks(rows, np.load(folder / "lengths.npy", mmap_mode="r"), facts["tokens"])


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


def _write_lengths(rows: datasets.Dataset, path: Path) -> int:
    """Writes the lengths as an array file, piece by piece; returns their sum."""
    tokens = 0
    with path.open("wb") as stream:
        header = {"descr": np.lib.format.dtype_to_descr(np.dtype(np.int32)), "fortran_order": False}
        np.lib.format.write_array_header_1_0(stream, header | {"shape": (len(rows),)})
        for table in rows.with_format("arrow").iter(batch_size=10_000):
            lengths = table["input_ids"].combine_chunks().value_lengths().to_numpy().astype(np.int32)
            stream.write(lengths.tobytes())
            tokens += int(lengths.sum(dtype=np.int64))
    return tokens
