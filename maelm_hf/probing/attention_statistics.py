# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""All numbers of one layer's attention maps in one pass, and their mean and spread over images."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch import Tensor

from ._metric import Metric
from .attention import (
    SMALLEST_PATCH_MASS,
    Grid,
    check_grid,
    entropy,
    grid_positions,
    grid_variance,
    max_entropy,
    mean_cosine_with_others,
    normalized_mutual_information,
)
from .attention_maps import AttentionMaps, ReadyMaps

NUMBERS = (
    "diversity",  # squared grid units
    "diversity_share",  # of the grid's own variance, so that grids of different sizes compare
    "pairwise_jensen_shannon",  # nats
    "pairwise_cosine_distance",
    "distance",  # grid units
    "entropy",  # nats
    "entropy_share",  # of ln(patches)
    "mutual_information",
    "head_redundancy",
    "prefix_mass",
)
# Floats of a map that are worked on at a time: 8 MB stay near the caches; less costs more in starting threads than it
# gains.
_BLOCK_ELEMENTS = 2**21


class MeanAndSpread(Metric):
    """Mean and standard deviation over images of several named numbers, each (heads,).

    Sums are float64 whatever `.to(dtype)` asks for (float32 on mps), are in `state_dict`, and are summed over
    processes by `compute`, so the result is that of one process over all images.
    """

    full_state_update = False
    is_differentiable = False
    higher_is_better = None

    total: Tensor
    squares: Tensor
    count: Tensor

    def __init__(self, names: tuple[str, ...], num_heads: int = 1, **kwargs: Any):
        super().__init__(**kwargs)
        self.names, self.num_heads = names, num_heads
        for state in ("total", "squares", "count"):
            zeros = torch.zeros(len(names), num_heads, dtype=torch.float64)
            self.add_state(state, zeros, dist_reduce_fx="sum", persistent=True)

    def update(self, values: Tensor, present: Tensor | None = None) -> None:
        """Values (images, heads, names), and which of them count: the same shape, 1.0 or 0.0; None counts all."""
        values = values.to(self.total)
        present = torch.ones_like(values) if present is None else present.to(self.total)
        self.total += (values * present).sum(dim=0).mT
        self.squares += (values.square() * present).sum(dim=0).mT
        self.count += present.sum(dim=0).mT

    def compute(self) -> dict[str, Tensor]:
        """`NAME` and `NAME_std` (over images), each (heads,) float64; the mean of no image is 0."""
        count = self.count.clamp(min=1)
        mean = self.total / count
        spread = (self.squares / count - mean.square()).clamp(min=0).sqrt()
        result = dict(zip(self.names, mean, strict=True))
        return result | {f"{name}_std": row for name, row in zip(self.names, spread, strict=True)}

    def merge(self, other: Self | dict[str, Tensor]) -> Self:
        """Add the sums of another accumulator, or of its `state_dict`; returns self.

        Raises:
            ValueError: sums of other shapes, or missing ones; nothing is added then.
        """
        state = other.metric_state if isinstance(other, Metric) else other
        for name in self._defaults:
            mine = getattr(self, name)
            if name not in state or state[name].shape != mine.shape:
                found = tuple(state[name].shape) if name in state else "nothing"
                raise ValueError(
                    f"{name} has shape {tuple(mine.shape)} here and {found} there: merge equal numbers and num_heads"
                )
        for name in self._defaults:
            getattr(self, name).add_(state[name].to(getattr(self, name)))
        self._changed()
        return self

    def _changed(self) -> None:
        """Tell torchmetrics that there are sums, and that what compute returned before is out of date."""
        self._update_count += 1
        self._computed = None

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._changed()

    def _apply(self, fn: Any, exclude_state: Any = "") -> Self:
        """Move the sums with `.to(device)`, and keep them float64 whatever `.to(dtype)`, `half()` ... ask for."""
        device = fn(torch.zeros(())).device
        dtype = torch.float32 if device.type == "mps" else torch.float64
        return super()._apply(lambda tensor: tensor.to(device=device, dtype=dtype), exclude_state)


class AttentionStatistics(MeanAndSpread):
    """Mean and spread over images of every number of :data:`NUMBERS`, per head, of one layer.

    The numbers are those of the functions in :mod:`maelm_hf.probing.attention`, computed together: in blocks of
    queries that stay in the cache, so that a layer's maps never have to exist as a whole. Two of them are got by a
    shorter way. The mean cosine over all pairs of queries follows exactly from the sum of the normalised rows. The
    mean Jensen-Shannon divergence is estimated from patches / 2 disjoint pairs, drawn with `seed`: unbiased, and
    within about 0.01 nats on a DINOv2-small's maps of four photographs.

    Args:
        num_heads: heads of the layer.
        grid: (rows, columns) of the patches; None for sequences, whose length may change from one update to the next.
        prefix_tokens: tokens before the patches.
        seed: of the pairs of queries.

    Example:
        >>> statistics = AttentionStatistics(num_heads=12, grid=(14, 14), prefix_tokens=1)
        >>> statistics.update(maps)  # (images, 12, 197, 197)
        >>> statistics.compute()["diversity"]  # (12,)
    """

    queries_left_out: Tensor

    def __init__(
        self, num_heads: int, grid: Grid | None = None, prefix_tokens: int = 0, *, seed: int = 0, **kwargs: Any
    ):
        super().__init__(NUMBERS, num_heads, **kwargs)
        self.grid, self.prefix_tokens, self.seed = grid, prefix_tokens, seed
        zeros = torch.zeros(1, num_heads, dtype=torch.float64)
        self.add_state("queries_left_out", zeros, dist_reduce_fx="sum", persistent=True)

    def update(
        self,
        maps: Tensor | AttentionMaps,
        windows: int = 1,
        on_rows: Callable[[slice, Tensor, Tensor], None] | None = None,
    ) -> None:
        """Add the maps of some images.

        Args:
            maps: (images x windows, heads, tokens, tokens), post-softmax; a tensor, or what
                :func:`~maelm_hf.probing.attention_capture.capture_attention_calls` hands over.
            windows: windows an image is cut into (Swin); an image's number is the mean over its windows.
            on_rows: sees the rows as they pass, see :func:`map_numbers`.

        Raises:
            ValueError: shapes or a grid that do not fit (both numbers named), or NaN; nothing is added then.
        """
        if isinstance(maps, Tensor):
            if maps.ndim != 4 or not maps.is_floating_point():
                raise ValueError(
                    f"maps has shape {tuple(maps.shape)}: expected floats, (images, heads, tokens, tokens)"
                )
            maps = ReadyMaps(maps, None)
        if maps.shape[1] != self.num_heads or maps.shape[2] != maps.shape[3] or maps.shape[0] % windows:
            raise ValueError(
                f"maps has shape {maps.shape}: expected (images x {windows}, {self.num_heads} heads, tokens, tokens)"
            )
        check_grid(self.grid, maps.shape[2], self.prefix_tokens)
        grid = self.grid or (1, maps.shape[2] - self.prefix_tokens)
        numbers, kept = map_numbers(maps, grid, self.prefix_tokens, self.seed, on_rows)
        if not numbers.isfinite().all():
            raise ValueError("the maps hold NaN or inf: check the model's inputs and weights")
        self.add(numbers, kept, windows)

    def add(self, numbers: Tensor, kept: Tensor, windows: int = 1) -> None:
        """Add numbers that :func:`map_numbers` returned."""
        numbers, kept = numbers.to(self.total), kept.to(self.total)
        # A head that gives the patches nothing has a prefix mass but no patch-level number.
        present = (kept > 0).unsqueeze(-1).repeat(1, 1, len(NUMBERS))
        present[..., NUMBERS.index("prefix_mass")] = True
        present = present.unflatten(0, (-1, windows)).to(self.total)
        seen = present.sum(dim=1)  # (images, heads, numbers): windows that count
        super().update((numbers.unflatten(0, (-1, windows)) * present).sum(dim=1) / seen.clamp(min=1), seen > 0)
        self.queries_left_out += (1 - kept).unflatten(0, (-1, windows)).mean(dim=1).sum(dim=0)

    def compute(self) -> dict[str, Tensor]:
        """`NAME` and `NAME_std` (over images) of all :data:`NUMBERS`, each (heads,) float64; the mean of no image is 0.

        Beside them `images`, how many were added, and `queries_left_out`, the share of queries that no patch-level
        number counts because they look at the prefix alone.
        """
        images = self.count[NUMBERS.index("prefix_mass")]
        left_out = self.queries_left_out[0] / images.clamp(min=1)
        return super().compute() | {"images": images, "queries_left_out": left_out}


def map_numbers(
    maps: AttentionMaps,
    grid: Grid,
    prefix_tokens: int,
    seed: int = 0,
    on_rows: Callable[[slice, Tensor, Tensor], None] | None = None,
) -> tuple[Tensor, Tensor]:
    """Every number of every map, block by block; `on_rows(images, queries, rows)` sees each block of the patches' rows.

    Returns:
        Numbers (batch, heads, len(NUMBERS)), and the share of queries (batch, heads) that look at the patches at all.
    """
    batch, heads, tokens, _ = maps.shape
    patches = tokens - prefix_tokens
    order = _query_order(patches, seed).to(maps.device)
    numbers, kept = [], []
    for images, blocks in _blocks(batch, heads, patches, tokens):
        sums = _Sums(heads, grid, prefix_tokens)
        for block in blocks:
            queries = order[block]
            rows = maps.rows(images, queries + prefix_tokens)
            sums.add(rows, queries)
            if on_rows is not None:
                on_rows(images, queries + prefix_tokens, rows)
        block_numbers, block_kept = sums.numbers()
        numbers.append(block_numbers)
        kept.append(block_kept)
    return torch.cat(numbers), torch.cat(kept)


class _Sums:
    """What has to be remembered of the rows of some images' maps: one small tensor a number."""

    def __init__(self, heads: int, grid: Grid, prefix_tokens: int):
        self.heads, self.grid, self.prefix = heads, grid, prefix_tokens
        self.centers: list[Tensor] = []  # (images, heads, queries, 2)
        self.kept: list[Tensor] = []  # (images, heads, queries), 1.0 or 0.0
        self.rest: list[Tensor] = []

    def add(self, rows: Tensor, queries: Tensor) -> None:
        """Rows (images, heads, queries, tokens) of the patches `queries`."""
        positions, distances = (constant.to(rows) for constant in _geometry(self.grid))
        patches = rows[..., self.prefix :]
        mass, whole = patches.sum(dim=-1), rows.sum(dim=-1)
        kept = (mass > SMALLEST_PATCH_MASS * whole).to(rows.dtype)
        kept = torch.where(mass.isnan(), mass, kept)  # NaN must reach the numbers, where it is refused
        weights = patches * (kept / torch.where(kept > 0, mass, torch.ones_like(mass))).unsqueeze(-1)
        tiny = torch.finfo(rows.dtype).tiny
        unit = (kept / torch.linalg.vector_norm(weights, dim=-1).clamp(min=tiny)).unsqueeze(-2)
        row_entropy = entropy(weights)

        half = weights.shape[-2] // 2  # the order is random, so one half against the other is a draw of pairs
        first, second = (slice(0, half), slice(half, 2 * half))
        both = kept[..., first] * kept[..., second]
        mixture = entropy((weights[..., first, :] + weights[..., second, :]) / 2)
        divergence = (mixture - (row_entropy[..., first] + row_entropy[..., second]) / 2).clamp(min=0) * both
        flat = weights.flatten(-2)

        self.centers.append(weights @ positions)
        self.kept.append(kept)
        self.rest.append(
            torch.cat(
                [
                    (1 - mass / whole.clamp(min=tiny)).sum(dim=-1, keepdim=True),
                    (flat @ distances[queries.to(distances.device)].flatten()).unsqueeze(-1),
                    row_entropy.sum(dim=-1, keepdim=True),
                    divergence.sum(dim=-1, keepdim=True),
                    both.sum(dim=-1, keepdim=True),
                    weights.sum(dim=-2),  # (images, heads, patches): how much each key gets
                    (unit @ weights).squeeze(-2),  # (images, heads, patches): sum of the normalised rows
                    flat @ flat.mT,  # (images, heads, heads)
                ],
                dim=-1,
            )
        )

    def numbers(self) -> tuple[Tensor, Tensor]:
        centers, kept = torch.cat(self.centers, dim=-2), torch.cat(self.kept, dim=-1)
        patches = kept.shape[-1]
        prefix_mass, distance, entropies, divergence, pairs, received, units, gram = sum(self.rest).split(
            [1, 1, 1, 1, 1, patches, patches, self.heads], dim=-1
        )
        count = kept.sum(dim=-1)  # (images, heads)
        at_least_one = count.clamp(min=1)
        mean_center = centers.sum(dim=-2) / at_least_one.unsqueeze(-1)
        spread = (centers - mean_center.unsqueeze(-2)).square().sum(dim=-1)
        diversity = (spread * kept).sum(dim=-1) / at_least_one
        mean_entropy = entropies.squeeze(-1) / at_least_one
        key_entropy = entropy(received / at_least_one.unsqueeze(-1))
        cosine = (units.square().sum(dim=-1) - count) / (count * (count - 1)).clamp(min=1)
        by_name = {
            "diversity": diversity,
            "diversity_share": diversity / max(grid_variance(self.grid), torch.finfo(torch.float32).tiny),
            "pairwise_jensen_shannon": divergence.squeeze(-1) / pairs.squeeze(-1).clamp(min=1),
            "pairwise_cosine_distance": torch.where(count > 1, (1 - cosine).clamp(0, 1), torch.zeros_like(cosine)),
            "distance": distance.squeeze(-1) / at_least_one,
            "entropy": mean_entropy,
            "entropy_share": mean_entropy / max_entropy(patches),
            "mutual_information": normalized_mutual_information(key_entropy, mean_entropy, count),
            "head_redundancy": mean_cosine_with_others(gram),
            "prefix_mass": prefix_mass.squeeze(-1).clamp(min=0) / patches,
        }
        return torch.stack([by_name[name] for name in NUMBERS], dim=-1), count / patches


def _blocks(batch: int, heads: int, patches: int, tokens: int) -> Iterator[tuple[slice, list[slice]]]:
    """Images, and blocks of their queries, of about `_BLOCK_ELEMENTS` floats: small images together, large in parts."""
    an_image = heads * patches * tokens
    images = max(1, _BLOCK_ELEMENTS // an_image)
    pieces = math.ceil(an_image / _BLOCK_ELEMENTS)
    size = math.ceil(patches / pieces)
    size += size % 2  # an odd row has no partner
    blocks = [slice(start, min(start + size, patches)) for start in range(0, patches, size)]
    for start in range(0, batch, images):
        yield slice(start, min(start + images, batch)), blocks


@functools.lru_cache(maxsize=8)
def _geometry(grid: Grid) -> tuple[Tensor, Tensor]:
    positions = grid_positions(grid)
    return positions, torch.cdist(positions, positions, compute_mode="donot_use_mm_for_euclid_dist")


@functools.lru_cache(maxsize=32)
def _query_order(patches: int, seed: int) -> Tensor:
    return torch.randperm(patches, generator=torch.Generator().manual_seed(seed))
