# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""One attention call as it passes by: its maps, or some rows of them, in float32, from what the call was given."""

from __future__ import annotations

import contextlib
import math

import torch
from torch import Tensor


class AttentionMaps:
    """The maps of one attention call, (batch, heads, queries, keys), of which any block of rows can be computed alone.

    Attributes:
        shape: (batch, heads, queries, keys).
        device: where they are computed.
    """

    shape: tuple[int, int, int, int]
    device: torch.device

    def rows(self, images: slice, queries: Tensor | None = None) -> Tensor:
        """Maps of some images and queries: (images, heads, queries, keys), float32 (float64 for a float64 model)."""
        raise NotImplementedError

    def full(self) -> Tensor:
        """All maps: (batch, heads, queries, keys)."""
        return self.rows(slice(None))


class ReadyMaps(AttentionMaps):
    """Maps that the model itself computed by a softmax.

    Args:
        maps: (..., queries, keys), post-softmax, before any dropout.
        batch: images of the running forward pass: three dimensions may be (batch x heads, queries, keys).
        logits: what went into the softmax, where that ran in half precision; the maps are then computed again from it.
    """

    def __init__(self, maps: Tensor, batch: int | None, logits: Tensor | None = None):
        if logits is not None:
            maps = logits  # one float32 softmax over the block that is asked for, below
        self._again = logits is not None
        self._maps = four_dimensional(maps.detach(), batch)
        self.shape, self.device = tuple(self._maps.shape), maps.device

    def rows(self, images: slice, queries: Tensor | None = None) -> Tensor:
        block = self._maps[images]
        if queries is not None:
            block = block.index_select(-2, queries)
        block = _full_precision(block)
        return safe_softmax(block) if self._again else block


class ProductMaps(AttentionMaps):
    """Maps computed from queries and keys: what `scaled_dot_product_attention` never returns.

    Args are those of :func:`torch.nn.functional.scaled_dot_product_attention`, without the values and the dropout. A
    bool mask says True = keep, a float mask is added to the logits.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        batch: int | None = None,
    ):
        query, key = query.detach(), key.detach()
        if query.ndim >= 4 and query.shape[-3] != key.shape[-3]:  # grouped queries
            key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
        logits_shape = (*query.shape[:-1], key.shape[-2])
        self._scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        self._query, self._key = four_dimensional(query, batch), four_dimensional(key, batch)
        self.shape = (*self._query.shape[:3], self._key.shape[2])
        self.device = query.device
        self._causal = is_causal
        self._mask = None
        if attn_mask is not None:
            # expand() costs nothing; a reshape copies only where leading dimensions are merged
            self._mask = four_dimensional(attn_mask.detach().expand(logits_shape), batch)

    def rows(self, images: slice, queries: Tensor | None = None) -> Tensor:
        query, key = self._query[images], _full_precision(self._key[images])
        if queries is not None:
            query = query.index_select(-2, queries)
        with _without_autocast(query.device):
            logits = (_full_precision(query) * self._scale) @ key.mT  # (images, heads, queries, keys)
        if self._causal:
            position = torch.arange(self.shape[2], device=query.device) if queries is None else queries
            later = torch.arange(self.shape[3], device=query.device) > position.unsqueeze(-1)
            logits.masked_fill_(later, -math.inf)
        if self._mask is not None:
            mask = self._mask[images]
            mask = mask if queries is None else mask.index_select(-2, queries)
            if mask.dtype == torch.bool:
                logits.masked_fill_(~mask, -math.inf)
            else:
                logits += mask
        return logits.softmax(dim=-1) if self._mask is None else safe_softmax(logits)


def safe_softmax(logits: Tensor) -> Tensor:
    """Softmax whose rows without a single key (all -inf) are 0, as in torch's own attention, instead of NaN."""
    nothing = logits.amax(dim=-1, keepdim=True) == -math.inf
    maps = logits.softmax(dim=-1)
    return maps.masked_fill_(nothing, 0.0) if nothing.any() else maps


def four_dimensional(tensor: Tensor, batch: int | None) -> Tensor:
    """(..., a, b) as (batch, heads, a, b).

    Three dimensions are (batch x heads, a, b) where the batch of the forward pass is known and divides them, as
    hand-written multi-head code folds them; two are one head of one image. Of more than four, the third from last
    counts as heads.
    """
    if tensor.ndim == 2:
        return tensor[None, None]
    if tensor.ndim == 3:
        if batch and tensor.shape[0] % batch == 0:
            return tensor.unflatten(0, (batch, tensor.shape[0] // batch))
        return tensor.unsqueeze(1)
    return tensor if tensor.ndim == 4 else tensor.flatten(0, -4)


def _full_precision(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


@contextlib.contextmanager
def _without_autocast(device: torch.device):
    """Under the caller's autocast a product of float32 tensors would run in half precision after all."""
    with torch.autocast(device.type, enabled=False):
        yield
