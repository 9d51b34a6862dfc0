# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Tokenised examples, and the order they are trained in.

Most of the padding of a small batch comes from one long example among short ones. `LengthGroupedBatches` puts
examples of like length together; evaluation goes from the longest to the shortest.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler
from transformers import PreTrainedTokenizerBase

from training.tabular import DataError, Split

IGNORED = -100
CHUNK = 1000


class Encoded(Dataset):
    """Examples as the model takes them: dicts of ids, masks and labels, unpadded. `lengths` (n) counts their tokens."""

    def __init__(self, examples: list[dict]) -> None:
        self.examples = examples
        self.lengths = np.array([len(example["input_ids"]) for example in examples])

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> dict:
        return self.examples[index]

    def longest_first(self) -> tuple["Encoded", np.ndarray]:
        """The same examples by falling length, and the (n) positions they came from."""
        order = np.argsort(-self.lengths, kind="stable")
        return Encoded([self.examples[i] for i in order]), order


def encode_texts(split: Split, tokenizer: PreTrainedTokenizerBase, max_length: int) -> Encoded:
    """Sentences or pairs, cut to `max_length` tokens (the longer of a pair is cut), with `labels` if there are any."""
    examples = []
    for start in range(0, len(split.texts), CHUNK):
        stop = start + CHUNK
        pairs = split.pairs[start:stop] if split.pairs is not None else None
        batch = tokenizer(split.texts[start:stop], pairs, truncation=True, max_length=max_length)
        for offset in range(len(batch["input_ids"])):
            example = {name: values[offset] for name, values in batch.items()}
            if split.labels is not None:
                example["labels"] = split.labels[start + offset]
            examples.append(example)
    return Encoded(examples)


def encode_words(split: Split, tokenizer: PreTrainedTokenizerBase, max_length: int) -> Encoded:
    """Words and their tags: the first piece of a word carries its tag, the other pieces and special tokens -100.

    A sentence longer than `max_length` goes on in a further window, so that every word is tagged once and scored once.
    """
    examples = []
    spaced = _words_need_spaces(tokenizer)
    for start in range(0, len(split.words), CHUNK):
        sentences = split.words[start : start + CHUNK]
        if spaced:
            sentences = [[*words[:1], *(f" {word}" for word in words[1:])] for words in sentences]
        windows = tokenizer(
            sentences,
            is_split_into_words=True,
            truncation=True,
            max_length=max_length,
            return_overflowing_tokens=True,
        )
        inputs = [name for name in windows if name in tokenizer.model_input_names]
        sentence, last_word = -1, None
        for number, sample in enumerate(windows["overflow_to_sample_mapping"]):
            if sample != sentence:
                sentence, last_word = sample, None
            labels = []
            for word in windows.word_ids(number):
                begins = word is not None and word != last_word
                last_word = word if begins else last_word
                tagged = begins and split.labels is not None
                labels.append(split.labels[start + sample][word] if tagged else IGNORED)
            example = {name: windows[name][number] for name in inputs}
            examples.append(example | ({"labels": labels} if split.labels is not None else {}))
    return Encoded(examples)


def _words_need_spaces(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a word of running text is the one of a list with a space before it, as in byte-level BPE.

    Without it the words of a list are glued together: text that no encoder saw.
    """

    def pieces(words: list[str]) -> list[int]:
        return tokenizer(words, is_split_into_words=True, add_special_tokens=False)["input_ids"]

    text = tokenizer("the cat", add_special_tokens=False)["input_ids"]
    return pieces(["the", "cat"]) != text == pieces(["the", " cat"])


class LengthGroupedBatches(Sampler[int]):
    """Indices in an order whose consecutive runs of `batch_size` have like lengths.

    Each epoch shuffles all examples, sorts within pools of `pool_batches` batches, and shuffles the batches of a
    pool, so the learning rate never meets lengths in a sorted order. A pure function of (seed, epoch); the last,
    short batch stays last.

    Args:
        lengths: (n) tokens of each example.
        batch_size: examples of one optimiser step on all devices together.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int, pool_batches: int = 50) -> None:
        self.lengths = np.asarray(lengths)
        self.batch_size, self.pool = batch_size, pool_batches * batch_size
        self.seed, self.epoch = seed, 0

    def __len__(self) -> int:
        return len(self.lengths)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        draw = np.random.default_rng([self.seed, self.epoch])
        order = draw.permutation(len(self.lengths))
        full = len(order) - len(order) % self.batch_size
        body, rest = order[:full], order[full:]
        for start in range(0, full, self.pool):
            pool = body[start : start + self.pool]
            batches = pool[np.argsort(self.lengths[pool], kind="stable")].reshape(-1, self.batch_size)
            yield from batches[draw.permutation(len(batches))].ravel().tolist()
        yield from rest.tolist()
        self.epoch += 1


class PadToLongest:
    """Pads a batch to its longest example, labels of tokens with -100. Returns tensors (batch, longest)."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, multiple: int = 1) -> None:
        if tokenizer.pad_token_id is None:
            raise DataError(
                f"{tokenizer.name_or_path}: the tokenizer has no pad token: set tokenizer.pad_token and save it"
            )
        self.fill = {
            "input_ids": tokenizer.pad_token_id,
            "token_type_ids": tokenizer.pad_token_type_id,
            "labels": IGNORED,
        }
        self.multiple = multiple

    def __call__(self, examples: list[dict]) -> dict[str, torch.Tensor]:
        width = max(len(example["input_ids"]) for example in examples)
        width += -width % self.multiple
        batch = {}
        for name, first in examples[0].items():
            values = [example[name] for example in examples]
            if not isinstance(first, list):
                batch[name] = torch.tensor(values, dtype=torch.float32 if isinstance(first, float) else torch.long)
                continue
            padded = np.full((len(values), width), self.fill.get(name, 0), dtype=np.int64)
            for row, value in enumerate(values):
                padded[row, : len(value)] = value
            batch[name] = torch.from_numpy(padded)
        return batch
