# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""What is kept of the first few images' maps, to be drawn on the image: rows and centres, not whole maps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .attention import grid_positions
from .attention_layout import LayerLayout
from .attention_maps import AttentionMaps
from .images import displayable


class Overlays:
    """Keeps, per layer of `layouts` whose maps span the whole grid (those of windows do not), under its number there,
    for the first `images` images:

    - ``centers.LAYER`` (images, heads, patches, 2): where each patch looks on average, in grid units;
    - ``received.LAYER`` (images, heads, patches): attention that a patch gets, mean over patches that look;
    - ``prefix.LAYER`` (images, heads, patches): the first prefix token's (CLS) row, renormalised over the patches;
    - ``query.LAYER`` (images, heads, queries, patches): rows of the patches in ``queries``, spread over the grid;
    - ``rollout.LAYER`` (images, patches): rollout down to this layer from CLS, or the mean over patches without one;
    - ``grid.LAYER`` (2,): rows and columns of its patches; the stages of a hierarchical model differ.

    ``pictures`` (images, height, width, 3) are the inputs as the model saw them, where there is anything to draw on
    them.
    """

    def __init__(self, images: int, layouts: Sequence[LayerLayout]):
        self._wanted = images if any(_spans_grid(layout) for layout in layouts) else 0
        self._kept = 0  # images of earlier batches
        self._now = 0  # images of the running batch
        self._layouts = layouts
        self._numbers = {layout.name: number for number, layout in enumerate(layouts)}
        self._tensors: dict[str, list[Tensor]] = {}

    def start(self, pixels: Tensor | None) -> None:
        """A batch begins: its first images are kept as long as some are wanted."""
        self._kept += self._now
        self._now = 0 if pixels is None else min(len(pixels), self._wanted - self._kept)
        for image in pixels[: self._now] if self._now else ():
            self._keep("pictures", displayable(image))

    def of_layer(self, layout: LayerLayout, maps: AttentionMaps) -> _LayerOverlay:
        wanted = self._now if _spans_grid(layout) else 0
        return _LayerOverlay(self, layout, maps, wanted)

    def add_rollout(self, layout: LayerLayout, rolled: Tensor) -> None:
        prefix = layout.prefix_tokens
        for image in rolled[: self._now if layout.grid is not None else 0, :, prefix:]:  # (tokens, patches)
            row = image[0] if prefix else image.mean(dim=0)
            self._keep(self._key("rollout", layout), (row / row.sum()).half())

    def tensors(self) -> dict[str, Tensor]:
        sizes = {image.shape for image in self._tensors.get("pictures", ())}
        if len(sizes) != 1:
            return {}
        grids = {self._key("grid", one): torch.tensor(one.grid) for one in self._layouts if _spans_grid(one)}
        return grids | {name: torch.stack(parts) for name, parts in self._tensors.items()}

    def _key(self, kind: str, layout: LayerLayout) -> str:
        return f"{kind}.{self._numbers[layout.name]}"

    def _keep(self, name: str, tensor: Tensor) -> None:
        self._tensors.setdefault(name, []).append(tensor.cpu())


class _LayerOverlay:
    """Collects the rows of one layer and batch as they pass."""

    def __init__(self, overlays: Overlays, layout: LayerLayout, maps: AttentionMaps, wanted: int):
        self._overlays, self._layout, self._wanted = overlays, layout, wanted
        if not wanted:
            return
        heads, tokens = maps.shape[1], maps.shape[2]
        self._patches = tokens - layout.prefix_tokens
        self._queries = spread_queries(layout.grid)
        self._rows = torch.zeros(wanted, heads, len(self._queries), self._patches)
        self._centers = torch.zeros(wanted, heads, self._patches, 2)
        self._received = torch.zeros(wanted, heads, self._patches)
        self._seen = torch.zeros(wanted, dtype=torch.long)
        if layout.prefix_tokens:
            first = maps.rows(slice(0, wanted), torch.zeros(1, dtype=torch.long, device=maps.device))[:, :, 0]
            for image in _renormalised(first[..., layout.prefix_tokens :]):
                overlays._keep(overlays._key("prefix", layout), image.half())

    def add(self, which: slice, queries: Tensor, rows: Tensor) -> None:
        """Rows (images, heads, queries, tokens) of the images `which` of the batch."""
        for number in range(which.start, min(which.stop, self._wanted)):
            self._add_image(number, (queries - self._layout.prefix_tokens).cpu(), rows[number - which.start])

    def _add_image(self, number: int, queries: Tensor, rows: Tensor) -> None:
        weights = _renormalised(rows[..., self._layout.prefix_tokens :]).float().cpu()  # (heads, queries, patches)
        self._centers[number][:, queries] = weights @ grid_positions(self._layout.grid)
        self._received[number] += weights.sum(dim=-2) / self._patches
        for position, query in enumerate(self._queries):
            found = (queries == query).nonzero()
            if len(found):
                self._rows[number][:, position] = weights[:, int(found[0])]
        self._seen[number] += len(queries)
        if self._seen[number] == self._patches:
            keep, key = self._overlays._keep, self._overlays._key
            keep(key("centers", self._layout), self._centers[number].half())
            keep(key("received", self._layout), self._received[number].half())
            keep(key("query", self._layout), self._rows[number].half())


def spread_queries(grid: tuple[int, int]) -> list[int]:
    """Patches whose rows are kept: the centre of the grid and of its four quarters."""
    height, width = grid
    places = [(2, 2), (1, 1), (1, 3), (3, 1), (3, 3)]
    return sorted({(row * height // 4) * width + column * width // 4 for row, column in places})


def _spans_grid(layout: LayerLayout) -> bool:
    return layout.grid is not None and not layout.windowed


def _renormalised(weights: Tensor) -> Tensor:
    return weights / weights.sum(dim=-1, keepdim=True).clamp(min=1e-12)
