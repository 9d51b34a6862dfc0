# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Which tokens are hidden: a pure function of (seed, epoch, sample index), and the data collator that applies it.

The number hidden in a text of ``n`` eligible tokens is ``floor(mask_ratio * n + u)``, ``u`` uniform in [0, 1), drawn
without replacement, and every chosen token is hidden (no 80/10/10), as in the released code of Meng et al.,
"Representation Deficiency in Masked Language Modeling" (ICLR 2024). That code counts special tokens into ``n`` and may
hide them; here they are not eligible unless ``mask_special_tokens=True``, which restores its count.

Random numbers come from a counter-based generator (Philox) keyed by (seed, epoch) whose counter holds the sample index,
so neither the order of samples, nor the number of workers or processes, nor the other rows of a batch change a mask.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info
from transformers import PreTrainedTokenizerBase, TrainerCallback

IGNORE_INDEX = -100  # the label torch's cross-entropy skips
NO_INDEX = -1  # fills kept_index and hidden_index rows that are shorter than the widest
_KEPT_MULTIPLE, _HIDDEN_MULTIPLE = 8, 4  # index widths are rounded up, so that compiled code meets few shapes
_WORKER_SLOTS = 1024


def uniform_numbers(count: int, *, seed: int, epoch: int, sample_index: int, document: int = 0) -> np.ndarray:
    """``count`` float64 numbers in [0, 1) that depend on the named arguments alone.

    Built on Philox's raw 64-bit output, which NumPy keeps fixed between releases (unlike ``Generator``'s methods).
    """
    key = np.array([seed, epoch], dtype=np.uint64)
    # The two low words are left to the generator: it counts the blocks it has drawn there.
    counter = np.array([0, 0, document, sample_index], dtype=np.uint64)
    raw = np.random.Philox(key=key, counter=counter).random_raw(count)
    return (raw >> np.uint64(11)) * 2.0**-53


def choose_hidden(
    eligible: np.ndarray,
    mask_ratio: float,
    *,
    seed: int,
    epoch: int,
    sample_index: int,
    document: int = 0,
    words: np.ndarray | None = None,
) -> np.ndarray:
    """Positions to hide in one text, ascending.

    Args:
        eligible: (length,) bool, the tokens that may be hidden.
        mask_ratio: share of the eligible tokens to hide, in [0, 1].
        seed, epoch, sample_index, document: the key of the draw; non-negative integers.
        words: (length,) integer id of each token's word. With it whole words are hidden, in random order, as long as
            they fit into the number of tokens to hide (the rule of google-research/bert's whole-word masking); where
            not even one fits, one word is hidden all the same.

    Returns:
        (hidden,) int64: ``floor(mask_ratio * n + u)`` of the ``n`` eligible positions, at least one where the ratio is
        above 0 and a token is eligible.
    """
    positions = np.flatnonzero(eligible)
    if mask_ratio == 0 or len(positions) == 0:
        return positions[:0]
    noise = uniform_numbers(len(positions) + 1, seed=seed, epoch=epoch, sample_index=sample_index, document=document)
    count = max(1, math.floor(mask_ratio * len(positions) + noise[0]))
    if words is None:
        order = np.argsort(noise[1:], kind="stable")
        return np.sort(positions[order[:count]])

    _, first, word_of = np.unique(words[positions], return_index=True, return_inverse=True)
    sizes = np.bincount(word_of)
    order = np.argsort(noise[1:][first], kind="stable")
    chosen, total = [], 0
    for word in order:
        if total + sizes[word] <= count:
            chosen.append(word)
            total += sizes[word]
    if not chosen:  # every word is longer than the count: one must go all the same
        chosen = [order[0]]
    return positions[np.isin(word_of, chosen)]


def _is_word_character(character: str) -> bool:
    # Byte-level vocabularies write the bytes of non-ASCII letters as characters from U+00A1 on.
    return character.isalnum() or ord(character) >= 0xA1


class WordBoundaries:
    """Word ids from a vocabulary's own markers, for tokens without ``word_ids``.

    WordPiece marks continuations (``##``); byte-level BPE (``Ġ``) and SentencePiece (``▁``) mark the space before a
    word. In the latter two a token without the marker continues a word only if letters or digits meet at the seam, so
    that ``(`` and ``foo`` are two words.

    Raises:
        ValueError: if the vocabulary carries none of the three markers.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
        tokens = ["" if token is None else token for token in tokens]
        marker = max(("##", "Ġ", "▁"), key=lambda mark: sum(token.startswith(mark) for token in tokens))
        marked = np.array([token.startswith(marker) and token != marker for token in tokens])
        if not marked.any():
            raise ValueError(
                "whole_word=True needs a vocabulary with '##', 'Ġ' or '▁' markers, and this tokenizer's has none: "
                "give every feature its 'word_ids' (tokenizer(...).word_ids()), or set whole_word=False."
            )
        if marker == "##":
            self._continues = marked
            self._opens = self._closes = np.ones_like(marked)
        else:
            self._continues = ~np.array([token.startswith(marker) for token in tokens])
            self._opens = np.array([token != "" and _is_word_character(token[0]) for token in tokens])
            # A lone marker is the space of the next token: "▁" + "word" are one word.
            self._closes = np.array([token != "" and _is_word_character(token[-1]) for token in tokens])
        special = [token_id for token_id in tokenizer.all_special_ids if token_id < len(tokens)]
        self._continues[special] = False
        self._closes[special] = False

    def __call__(self, input_ids: np.ndarray) -> np.ndarray:
        """Word ids (length,) of the token ids (length,)."""
        follows = self._continues[input_ids]
        follows[0:1] = False
        follows[1:] &= self._opens[input_ids[1:]] & self._closes[input_ids[:-1]]
        return np.cumsum(~follows)


class DataCollatorForMaeLm:
    """Pads a batch, hides tokens behind [MASK], and says where they are, so that the model needs no host sync.

    A feature is a mapping with ``input_ids`` and optionally

    - ``sample_index``: what the mask is keyed on, besides seed and epoch (with ``document_ids`` also one per document);
      without it, a 64-bit digest of the token ids: equal texts then get equal masks within an epoch;
    - ``epoch``: overrides the collator's epoch (see below), e.g. a constant for evaluation with fixed masks;
    - ``attention_mask``: zeros are padding and are dropped before the batch is padded anew, on the right;
    - ``special_tokens_mask``: ones are not eligible, in addition to the tokenizer's special ids;
    - ``word_ids``: for ``whole_word``; without it words follow the vocabulary's markers (:class:`WordBoundaries`);
    - ``document_ids``: number of each token's document in a packed row. Every document is masked by itself (so at least
      one token of each is hidden) and position ids restart in it.

    Other keys, ``labels`` included, are ignored. The result, all int64:

    - ``input_ids``, ``attention_mask``, ``labels`` (-100 where nothing is hidden): (batch, sequence);
    - ``kept_index``: (batch, kept) positions the encoder sees, ascending, and ``hidden_index``: (batch, hidden)
      positions behind [MASK], ascending; -1 where a row has fewer. Widths are rounded up to multiples of 8 and 4;
    - ``position_ids`` and ``document_ids`` (-1 at padding) if the features are packed.

    **With the plain Trainer**, which removes columns that ``forward`` does not name and tells the collator no epoch,
    add ``collator.epoch_callback()`` to its callbacks: the epoch lives in shared memory, where worker processes see it.
    Without the callback (or :meth:`set_epoch`) every epoch repeats the masks of the first.

    A [MASK] id in the text itself would ask for a token that is not known: it is replaced by the unknown token, or,
    where the tokenizer has none, refused. ``stray_mask_tokens`` counts them over all workers.

    Args:
        tokenizer: gives the ids of [MASK], padding and special tokens.
        mask_ratio: share of the eligible tokens to hide, in [0, 1].
        seed: non-negative.
        whole_word: hide whole words only.
        mask_special_tokens: let special tokens be hidden too, as the authors' code does. Padding never is.
        pad_to_multiple_of: round the sequence length up to a multiple of it.

    Raises:
        ValueError, TypeError: for a tokenizer without [MASK] or padding token, and for arguments out of range.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        mask_ratio: float = 0.15,
        *,
        seed: int = 0,
        whole_word: bool = False,
        mask_special_tokens: bool = False,
        pad_to_multiple_of: int | None = None,
    ):
        if isinstance(mask_ratio, bool) or not isinstance(mask_ratio, int | float):
            raise TypeError(f"mask_ratio must be a number in [0, 1], got {mask_ratio!r}.")
        if not 0 <= mask_ratio <= 1:
            raise ValueError(f"mask_ratio must be in [0, 1], got {mask_ratio}.")
        if pad_to_multiple_of is not None and pad_to_multiple_of < 1:
            raise ValueError(f"pad_to_multiple_of must be a positive integer or None, got {pad_to_multiple_of}.")
        for role in ("mask_token_id", "pad_token_id"):
            if getattr(tokenizer, role) is None:
                raise ValueError(f"the tokenizer has no {role}: add one with tokenizer.add_special_tokens(...).")
        self.tokenizer = tokenizer
        self.mask_ratio = float(mask_ratio)
        self.seed = _non_negative("seed", seed)
        self.whole_word = whole_word
        self.mask_special_tokens = mask_special_tokens
        self.pad_to_multiple_of = pad_to_multiple_of
        self._mask_id = tokenizer.mask_token_id
        self._special_ids = np.array(sorted(set(tokenizer.all_special_ids)), dtype=np.int64)
        self._words: WordBoundaries | None = None
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()
        self._stray = torch.zeros(_WORKER_SLOTS, dtype=torch.int64).share_memory_()  # a slot a worker: no lock needed

    @property
    def epoch(self) -> int:
        """The epoch of features that name none."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, in running worker processes too (for batches they have not made yet)."""
        self._epoch.fill_(_non_negative("epoch", epoch))

    def epoch_callback(self) -> TrainerCallback:
        """The Trainer callback that calls :meth:`set_epoch` at the beginning of every epoch."""
        return MaskEpochCallback(self)

    @property
    def stray_mask_tokens(self) -> int:
        """How many [MASK] ids were met in the text so far, and replaced by the unknown token."""
        return int(self._stray.sum())

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        if not features:
            raise ValueError("features is empty: a batch needs at least one.")
        rows = [self._hide(feature) for feature in features]
        length = _round_up(max(len(row["input_ids"]) for row in rows), self.pad_to_multiple_of or 1)
        kept = _round_up(max(len(row["kept_index"]) for row in rows), _KEPT_MULTIPLE)
        hidden = _round_up(max(len(row["hidden_index"]) for row in rows), _HIDDEN_MULTIPLE)
        widths_and_fills = {
            "input_ids": (length, self.tokenizer.pad_token_id),
            "attention_mask": (length, 0),
            "labels": (length, IGNORE_INDEX),
            "kept_index": (kept, NO_INDEX),
            "hidden_index": (hidden, NO_INDEX),
        }
        packed = ["document_ids" in row for row in rows]
        if any(packed):
            if not all(packed):
                raise ValueError(
                    "some features have document_ids and some have not: pack all rows of a batch, or none."
                )
            widths_and_fills |= {"position_ids": (length, 0), "document_ids": (length, NO_INDEX)}
        batch = {}
        for name, (width, fill) in widths_and_fills.items():
            table = np.full((len(rows), width), fill, dtype=np.int64)
            for line, row in zip(table, rows, strict=True):
                line[: len(row[name])] = row[name]
            batch[name] = torch.from_numpy(table)
        return batch

    def _hide(self, feature: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """One unpadded row: every array is 1-D."""
        if not isinstance(feature, Mapping) or "input_ids" not in feature:
            raise TypeError(f"each feature must be a mapping with 'input_ids', got {type(feature).__name__}.")
        columns = {"input_ids": _integers(feature["input_ids"])}
        for name in ("special_tokens_mask", "word_ids", "document_ids"):
            if feature.get(name) is not None:
                columns[name] = _integers(feature[name])
        if feature.get("attention_mask") is not None:
            attended = _integers(feature["attention_mask"]) != 0
            columns = {name: column[attended] for name, column in columns.items()}
        input_ids = self._without_stray_masks(columns["input_ids"])

        special = np.isin(input_ids, self._special_ids)
        if "special_tokens_mask" in columns:
            special |= columns["special_tokens_mask"] != 0
        eligible = input_ids != self.tokenizer.pad_token_id if self.mask_special_tokens else ~special
        words = self._word_ids(input_ids, columns.get("word_ids")) if self.whole_word else None
        hidden = self._choose(feature, input_ids, eligible, words, columns.get("document_ids"))

        labels = np.full_like(input_ids, IGNORE_INDEX)
        labels[hidden] = input_ids[hidden]
        masked = input_ids.copy()
        masked[hidden] = self._mask_id
        row = {
            "input_ids": masked,
            "attention_mask": np.ones_like(input_ids),
            "labels": labels,
            "kept_index": np.flatnonzero(labels == IGNORE_INDEX),
            "hidden_index": hidden,
        }
        if "document_ids" in columns:
            row["document_ids"] = columns["document_ids"]
            row["position_ids"] = _positions_in_document(columns["document_ids"])
        return row

    def _choose(
        self,
        feature: Mapping[str, Any],
        input_ids: np.ndarray,
        eligible: np.ndarray,
        words: np.ndarray | None,
        document_ids: np.ndarray | None,
    ) -> np.ndarray:
        epoch = _non_negative("epoch", feature["epoch"]) if feature.get("epoch") is not None else self.epoch
        key = {"seed": self.seed, "epoch": epoch}
        if feature.get("sample_index") is None:
            # As bytes of one fixed integer type: the digest must not depend on the machine's.
            digest = hashlib.blake2b(input_ids.astype("<i8").tobytes(), digest_size=8).digest()
            sample_index = [int.from_bytes(digest, "little")]
        else:
            sample_index = [_non_negative("sample_index", i) for i in np.atleast_1d(feature["sample_index"]).tolist()]
        if document_ids is None:
            if len(sample_index) != 1:
                raise ValueError(
                    f"sample_index has {len(sample_index)} entries; without document_ids a feature has one."
                )
            return choose_hidden(eligible, self.mask_ratio, words=words, sample_index=sample_index[0], **key)

        documents = np.unique(document_ids)
        by_document = len(sample_index) == len(documents) > 1
        if not by_document and len(sample_index) != 1:
            raise ValueError(f"sample_index has {len(sample_index)} entries for {len(documents)} documents.")
        hidden = [
            choose_hidden(
                eligible & (document_ids == document),
                self.mask_ratio,
                words=words,
                sample_index=sample_index[number if by_document else 0],
                document=0 if by_document else number,
                **key,
            )
            for number, document in enumerate(documents)
        ]
        return np.sort(np.concatenate(hidden)) if hidden else np.empty(0, dtype=np.int64)

    def _without_stray_masks(self, input_ids: np.ndarray) -> np.ndarray:
        stray = input_ids == self._mask_id
        count = int(stray.sum())
        if count == 0:
            return input_ids
        unknown = self.tokenizer.unk_token_id
        if unknown is None or unknown == self._mask_id:
            raise ValueError(
                f"the text holds the mask token (id {self._mask_id}) {count} times and the tokenizer has no unk_token "
                "to put there: tokenize with split_special_tokens=True, or give the tokenizer an unk_token."
            )
        worker = get_worker_info()
        self._stray[0 if worker is None else 1 + worker.id % (_WORKER_SLOTS - 1)] += count
        return np.where(stray, unknown, input_ids)

    def _word_ids(self, input_ids: np.ndarray, word_ids: np.ndarray | None) -> np.ndarray:
        if word_ids is None:
            if self._words is None:
                self._words = WordBoundaries(self.tokenizer)
            return self._words(input_ids)
        # Tokens outside any word (None, here -1) are words of their own.
        outside = word_ids < 0
        return np.where(outside, word_ids.max(initial=0) + 1 + np.cumsum(outside), word_ids)


class MaskEpochCallback(TrainerCallback):
    """Tells a :class:`DataCollatorForMaeLm` the Trainer's epoch, so that masks differ from epoch to epoch."""

    def __init__(self, collator: DataCollatorForMaeLm):
        self.collator = collator

    def on_epoch_begin(self, args, state, control, **kwargs):
        # state.epoch is a share of steps: just below a whole number where the division was not exact.
        self.collator.set_epoch(math.floor((state.epoch or 0) + 1e-6))


def _positions_in_document(document_ids: np.ndarray) -> np.ndarray:
    starts = np.flatnonzero(np.diff(document_ids, prepend=document_ids[:1] - 1))
    lengths = np.diff(starts, append=len(document_ids))
    return np.arange(len(document_ids)) - np.repeat(starts, lengths)


def _round_up(number: int, multiple: int) -> int:
    return max(1, -(-number // multiple)) * multiple


def _integers(column: Any) -> np.ndarray:
    """A 1-D int64 array; None (tokenizers' word id outside any word) becomes -1."""
    if isinstance(column, list | tuple) and None in column:
        column = [-1 if item is None else item for item in column]
    return np.asarray(column, dtype=np.int64)


def _non_negative(name: str, value: Any) -> int:
    integer = int(value)
    if integer != value or not 0 <= integer < 2**63:
        raise ValueError(f"{name} must be an integer from 0 to 2**63 - 1, got {value!r}.")
    return integer
