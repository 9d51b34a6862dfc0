# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Batches for the probes: the clean input, and for the rank probe the same input with tokens masked."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..masking import choose_hidden
from .data import ProbeData
from .loading import ProbedModel

_SORTED_BATCHES = 16  # batches of texts of like length are cut from this many at a time, so that little is padding


@dataclass
class ProbeBatch:
    """One batch.

    Attributes:
        inputs: the model's keyword arguments, or a single tensor for a module that takes one.
        counted: (batch, tokens) the real tokens; None where every token counts.
        index: (batch,) each sequence's number in the data, the same whatever the batches and processes.
        masked_ids: (batch, tokens) the input ids with masked tokens; None where nothing is masked.
        is_mask: (batch, tokens) where they are masked.
    """

    inputs: Mapping[str, Any] | Tensor
    counted: Tensor | None
    index: Tensor
    masked_ids: Tensor | None = None
    is_mask: Tensor | None = None

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> ProbeBatch:
        """On the model's device, floating-point inputs (pixels, features) in its dtype."""

        def move(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return value.to(device, dtype if value.is_floating_point() else None, non_blocking=True)

        inputs = (
            {key: move(value) for key, value in self.inputs.items()}
            if isinstance(self.inputs, Mapping)
            else move(self.inputs)
        )
        return ProbeBatch(inputs, move(self.counted), self.index, move(self.masked_ids), move(self.is_mask))

    @property
    def tokens(self) -> int:
        """The real tokens, where they are known before the model runs; else the sequences."""
        return int(self.counted.sum()) if self.counted is not None else len(self.index)


@dataclass
class Masking:
    """How many and which tokens of a sequence are replaced by the mask token.

    Those that :func:`maelm_hf.masking.choose_hidden` names among the tokens that are not special, at least one; every
    one becomes the mask token, none stays or is replaced by another (no 80/10/10). A function of the seed and the
    sequence's number alone.
    """

    mask_ratio: float
    mask_token_id: int
    special_ids: Sequence[int]
    seed: int

    def positions(self, ids: np.ndarray, real: np.ndarray, index: int) -> np.ndarray:
        """Boolean (tokens,): which tokens of one sequence are masked."""
        eligible = real & ~np.isin(ids, self.special_ids)
        chosen = np.zeros(len(ids), dtype=bool)
        chosen[choose_hidden(eligible, self.mask_ratio, seed=self.seed, epoch=0, sample_index=index)] = True
        return chosen

    def apply(self, ids: Tensor, counted: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        rows = zip(ids.cpu().numpy(), counted.cpu().numpy().astype(bool), index.tolist(), strict=True)
        is_mask = torch.from_numpy(np.stack([self.positions(*row) for row in rows])).to(ids.device)
        return ids.masked_fill(is_mask, self.mask_token_id), is_mask


@dataclass
class Budget:
    """How much of the data is read, and which share of it by this process.

    Attributes:
        max_tokens: stop after the sequence that reaches it, over all processes; None reads everything.
        rank, world: this process, of how many; batches are dealt out in turn unless every process has data of its own.
    """

    max_tokens: int | None = None
    rank: int = 0
    world: int = 1


def text_batches(
    data: ProbeData,
    tokenizer: Any,
    model: ProbedModel,
    *,
    batch_size: int,
    max_length: int | None,
    masking: Masking | None,
    budget: Budget,
    told: Callable[[int], None],
) -> Iterator[ProbeBatch]:
    """Tokenise, cut to what the model takes (``told`` gets the number cut), mask and pad, in order of the data."""
    longest = longest_input(model, tokenizer, max_length)
    embeddings = number_of_embeddings(model)
    windows = _windows(_encoded(data, tokenizer, longest, budget, told), batch_size * _SORTED_BATCHES)
    number = 0
    for window in windows:
        window.sort(key=lambda sample: (len(sample[1]["input_ids"]), sample[0]))
        for start in range(0, len(window), batch_size):
            mine = data.already_sharded or number % budget.world == budget.rank
            number += 1
            if mine:
                yield _padded(window[start : start + batch_size], tokenizer, embeddings, masking)


def image_batches(
    data: ProbeData, prepare: Callable[[list[Any]], Any], *, batch_size: int, budget: Budget
) -> Iterator[ProbeBatch]:
    """Batches of images, each made by ``prepare``, dealt out between processes in turn."""
    for number, images in enumerate(_windows(enumerate(data.items), batch_size)):
        if data.already_sharded or number % budget.world == budget.rank:
            index = torch.tensor([position for position, _ in images])
            yield ProbeBatch(prepare([image for _, image in images]), None, _global_index(index, data, budget))


def ready_batches(data: ProbeData, masking: Masking | None, budget: Budget) -> Iterator[ProbeBatch]:
    """Batches as they come: mappings of tensors, tensors, or tuples whose first entry is the input."""
    seen = tokens = 0
    limit = budget.max_tokens
    if limit is not None and data.already_sharded:
        limit = -(-limit // budget.world)
    for number, item in enumerate(data.items):
        if limit is not None and tokens >= limit:
            return
        inputs: Any = item[0] if isinstance(item, (tuple, list)) else item
        if isinstance(inputs, Mapping):
            inputs = {key: value for key, value in inputs.items() if key != "labels"}
            main = inputs.get("input_ids", next(iter(inputs.values())))
        else:
            main = inputs
        index = torch.arange(seen, seen + len(main))
        seen += len(main)
        counted = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
        if counted is not None:
            counted = counted.bool()
        is_text = isinstance(inputs, Mapping) and "input_ids" in inputs
        if is_text and counted is None:
            counted = torch.ones_like(main, dtype=torch.bool)
        batch = ProbeBatch(inputs, counted, _global_index(index, data, budget))
        if is_text and masking is not None:
            batch.masked_ids, batch.is_mask = masking.apply(main, counted, batch.index)
        tokens += batch.tokens
        if data.already_sharded or number % budget.world == budget.rank:
            yield batch


def longest_input(model: ProbedModel, tokenizer: Any, max_length: int | None) -> int | None:
    """The number of tokens the model takes: the position table, the config and the tokenizer say so; None: no limit.

    Raises:
        ValueError: ``max_length`` leaves no room for text (tokenizers then ignore it).
    """
    if max_length is not None and max_length <= (special := len(tokenizer("")["input_ids"])):
        raise ValueError(
            f"max_length={max_length} leaves no room beside {special} special tokens: pass at least {special + 1}"
        )
    limits = [max_length, getattr(model.config, "max_position_embeddings", None)]
    for name, module in model.module.named_modules():
        if isinstance(module, nn.Embedding) and name.endswith("position_embeddings"):
            # RoBERTa and its kin count positions from padding_idx + 1.
            limits.append(module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1))
    limits.append(getattr(tokenizer, "model_max_length", None))
    known = [int(limit) for limit in limits if limit is not None and 0 < limit < 10**9]
    return min(known, default=None)


def number_of_embeddings(model: ProbedModel) -> int | None:
    """How many token ids the model knows."""
    get = getattr(model.module, "get_input_embeddings", None)
    try:
        embedding = get() if get else None
    except NotImplementedError:
        embedding = None
    return getattr(embedding, "num_embeddings", None)


def _encoded(
    data: ProbeData, tokenizer: Any, longest: int | None, budget: Budget, told: Callable[[int], None]
) -> Iterator[tuple[int, dict[str, list[int]]]]:
    """(number in the data, encoding) of each text, until the token budget is used up."""
    limit = budget.max_tokens
    if limit is not None and data.already_sharded:
        limit = -(-limit // budget.world)
    tokens = 0
    for texts in _windows(enumerate(data.items), 256):
        options = {"truncation": True, "max_length": longest} if longest else {}
        encoded = tokenizer([text for _, text in texts], return_attention_mask=False, verbose=False, **options)
        full = [i for i, ids in enumerate(encoded["input_ids"]) if longest and len(ids) == longest]
        if full:
            uncut = tokenizer([texts[i][1] for i in full], return_attention_mask=False, verbose=False)["input_ids"]
            told(sum(len(ids) > longest for ids in uncut))
        for i, (number, _) in enumerate(texts):
            if limit is not None and tokens >= limit:
                return
            sample = {key: values[i] for key, values in encoded.items()}
            tokens += len(sample["input_ids"])
            if data.already_sharded:
                number = number * budget.world + budget.rank
            if sample["input_ids"]:
                yield number, sample


def _padded(
    samples: list[tuple[int, dict[str, list[int]]]], tokenizer: Any, embeddings: int | None, masking: Masking | None
) -> ProbeBatch:
    lengths = [len(sample["input_ids"]) for _, sample in samples]
    counted = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    inputs = {}
    for key in samples[0][1]:
        fill = (tokenizer.pad_token_id or 0) if key == "input_ids" else 0
        inputs[key] = torch.full(counted.shape, fill)
        inputs[key][counted] = torch.tensor([value for _, sample in samples for value in sample[key]])
    largest = int(inputs["input_ids"].max())
    if embeddings is not None and largest >= embeddings:
        raise ValueError(
            f"tokenizer gives id {largest}, the model embeds {embeddings} ids: pass the model's own tokenizer"
        )
    index = torch.tensor([number for number, _ in samples])
    batch = ProbeBatch({**inputs, "attention_mask": counted.long()}, counted, index)
    if masking is not None:
        batch.masked_ids, batch.is_mask = masking.apply(inputs["input_ids"], counted, index)
    return batch


def _global_index(index: Tensor, data: ProbeData, budget: Budget) -> Tensor:
    return index * budget.world + budget.rank if data.already_sharded else index


def _windows(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    iterator = iter(items)
    while window := list(itertools.islice(iterator, size)):
        yield window
