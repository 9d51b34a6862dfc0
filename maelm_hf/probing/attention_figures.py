# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Figures of the attention probe: numbers by layer, heads by layer, and maps and centres drawn on the image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

COLORS = ("#0b5fa5", "#d1495b", "#66a182", "#edae49", "#7b5ea7", "#5c6b73")
_PANELS = (
    ("diversity", "Attention diversity", "squared patches"),
    ("pairwise_jensen_shannon", "Divergence between queries", "Jensen-Shannon, nats"),
    ("distance", "Attention distance", "patches"),
    ("entropy_share", "Entropy", "share of ln(patches)"),
    ("mutual_information", "Mutual information", "normalised"),
    ("head_redundancy", "Head redundancy", "cosine between heads"),
    ("prefix_mass", "Attention to prefix tokens", "share"),
    ("fourier_log_amplitude", "High frequencies of the tokens", "log-amplitude against zero"),
)
_HEAD_PANELS = (
    ("diversity_share", "Diversity", "share of the grid's variance"),
    ("distance", "Distance", "patches"),
    ("entropy_share", "Entropy", "share of ln(patches)"),
    ("mutual_information", "Mutual information", "normalised"),
)


def by_layer_figure(frames: Sequence[pd.DataFrame], labels: Sequence[str], grid_variance: float | None) -> Figure:
    """One panel a number: a line a model (mean over heads) in a band from its lowest to its highest head."""
    panels = [panel for panel in _PANELS if any(frame[panel[0]].notna().any() for frame in frames)]
    columns = 4
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(12.5, 2.9 * rows + 0.7), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes, (name, title, unit) in zip(grid.flat, panels, strict=False):
        for frame, color in zip(frames, _colors(len(frames)), strict=True):
            _line_and_band(axes, frame, name, color)
        if name == "diversity" and grid_variance is not None:
            axes.axhline(grid_variance, color="0.5", linewidth=0.9, linestyle=(0, (4, 3)))
            axes.annotate(
                "each patch at itself",
                (0.02, grid_variance),
                xycoords=("axes fraction", "data"),
                va="bottom",
                fontsize=7.5,
            )
        axes.set_title(title, fontsize=10)
        axes.set_ylabel(unit, fontsize=8.5)
        axes.set_xlabel("layer", fontsize=8.5)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        _plain(axes)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    handles = [figure.axes[0].plot([], [], color=color, marker="o", markersize=4)[0] for color in _colors(len(frames))]
    figure.legend(handles, labels, loc="outside upper center", ncols=min(4, len(labels)), frameon=False)
    figure.supxlabel("line: mean over heads; band: lowest to highest head", fontsize=8, color="0.35")
    return figure


def heads_figure(frame: pd.DataFrame, model: str) -> Figure:
    """Heat maps of layers by heads, one a number; the column is the head's index."""
    figure = Figure(figsize=(12.5, 1.7 + 0.22 * frame["layer_index"].nunique()), layout="constrained")
    grid = figure.subplots(1, len(_HEAD_PANELS))
    for axes, (name, title, unit) in zip(grid, _HEAD_PANELS, strict=True):
        table = frame.pivot_table(index="layer_index", columns="head", values=name)
        image = axes.imshow(table, aspect="auto", cmap="viridis", interpolation="nearest")
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("head", fontsize=8.5)
        axes.set_ylabel("layer", fontsize=8.5)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.tick_params(labelsize=8)
        bar = figure.colorbar(image, ax=axes, shrink=0.95, pad=0.02)
        bar.set_label(unit, fontsize=8)
        bar.ax.tick_params(labelsize=7.5)
    figure.suptitle(model, fontsize=11)
    return figure


def overlay_figure(
    tensors: dict[str, torch.Tensor],
    settings: dict[str, Any],
    what: str,
    image: int,
    layers: Sequence[int] | None,
    heads: Sequence[int] | None,
    query: int | None,
) -> Figure:
    """Rows are layers and columns heads, each with one image under a map or under the centres of attention."""
    if what not in ("maps", "centers"):
        raise ValueError(f"what={what!r} must be 'maps' or 'centers'")
    if "pictures" not in tensors:
        raise ValueError(
            "the report keeps no image: probe a model that attends over a whole grid (windows are not drawn) with "
            "overlay_images=1 or more"
        )
    pictures = tensors["pictures"]
    found = sorted(int(name.partition(".")[2]) for name in tensors if name.startswith("centers."))
    total = tensors[f"centers.{found[0]}"].shape[1]
    layers = _evenly(found, 4) if layers is None else list(layers)
    heads = list(range(min(6, total))) if heads is None else list(heads)
    for name, chosen, existing in (("layers", layers, found), ("heads", heads, range(total))):
        if not set(chosen) <= set(existing):
            raise ValueError(f"{name}={chosen} must be among {list(existing)}")
    if not 0 <= image < len(pictures):
        raise ValueError(f"image={image} must be below {len(pictures)}, the images kept")
    picture = pictures[image].numpy()
    source, subject = _map_source(tensors, query)
    figure = Figure(figsize=(1.75 * (len(heads) + 1), 1.75 * len(layers) + 0.75), layout="constrained")
    cells = figure.subplots(len(layers), len(heads) + 1, squeeze=False)
    for row, layer in enumerate(layers):
        grid = tensors[f"grid.{layer}"].tolist() if f"grid.{layer}" in tensors else settings["grid"]  # older reports
        _picture(cells[row][0], picture, None)
        cells[row][0].set_ylabel(f"layer {layer}", fontsize=9)
        for column, head in enumerate(heads, start=1):
            axes = cells[row][column]
            if what == "maps":
                weights = tensors[f"{source}.{layer}"][image, head]
                weights = weights if query is None else weights[query]
                _picture(axes, picture, _on_grid(weights, grid))
            else:
                _centers(axes, picture, tensors[f"centers.{layer}"][image, head].float().numpy(), grid)
            if row == 0:
                axes.set_title(f"head {head}", fontsize=9)
    cells[0][0].set_title("input", fontsize=9)
    note = subject if what == "maps" else "centre of attention of each patch, coloured by where the patch itself lies"
    figure.suptitle(f"{settings.get('model', 'model')}: {note}", fontsize=10)
    return figure


def _line_and_band(axes: Axes, frame: pd.DataFrame, name: str, color: str) -> None:
    by_layer = frame.groupby("layer_index")[name]
    mean, low, high = by_layer.mean(), by_layer.min(), by_layer.max()
    axes.plot(mean.index, mean, color=color, marker="o", markersize=3.5, linewidth=1.6)
    if (high - low).max() > 0:
        axes.fill_between(mean.index, low, high, color=color, alpha=0.15, linewidth=0)


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.92", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8)


def _picture(axes: Axes, picture: np.ndarray, weights: np.ndarray | None) -> None:
    height, width = picture.shape[:2]
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    if weights is None:
        axes.imshow(picture, extent=(0, width, height, 0))
        return
    axes.imshow(picture.mean(axis=-1), cmap="gray", vmin=-60, vmax=320, extent=(0, width, height, 0))
    # The 99th percentile is the top of the scale: one very strong patch would hide all others.
    top = max(float(np.quantile(weights, 0.99)), 1e-6)
    axes.imshow(
        weights,
        cmap="inferno",
        vmin=0,
        vmax=top,
        alpha=np.clip(0.25 + 0.65 * weights / top, 0, 0.9),
        extent=(0, width, height, 0),
        interpolation="bilinear",
    )
    axes.set(xlim=(0, width), ylim=(height, 0))


def _centers(axes: Axes, picture: np.ndarray, centers: np.ndarray, grid: Sequence[int]) -> None:
    height, width = picture.shape[:2]
    rows, columns = np.divmod(np.arange(grid[0] * grid[1]), grid[1])
    axes.imshow(picture.mean(axis=-1), cmap="gray", vmin=-350, vmax=255, extent=(0, width, height, 0))
    y = (centers[:, 0] + 0.5) * height / grid[0]
    x = (centers[:, 1] + 0.5) * width / grid[1]
    across, down = columns / max(1, grid[1] - 1), rows / max(1, grid[0] - 1)
    color = np.stack([across, 0.35 + 0.3 * (1 - np.abs(across - down)), down], axis=-1).clip(0, 1)
    axes.scatter(x, y, s=5, c=color, linewidths=0)
    axes.set(xticks=[], yticks=[], xlim=(0, width), ylim=(height, 0))
    axes.spines[:].set_visible(False)


def _map_source(tensors: dict[str, torch.Tensor], query: int | None) -> tuple[str, str]:
    if query is not None:
        count = next(value.shape[2] for name, value in tensors.items() if name.startswith("query."))
        if not 0 <= query < count:
            raise ValueError(f"query={query} must be below {count}, the patches whose rows are kept")
        return "query", f"where patch {query + 1} of {count} looks"
    if any(name.startswith("prefix.") for name in tensors):
        return "prefix", "where the first prefix token (CLS) looks"
    return "received", "attention that each patch gets"


def _on_grid(weights: torch.Tensor, grid: Sequence[int]) -> np.ndarray:
    return weights.float().reshape(grid[0], grid[1]).numpy()


def _evenly(values: Sequence[int], count: int) -> list[int]:
    positions = np.linspace(0, len(values) - 1, min(count, len(values))).round().astype(int)
    return [values[position] for position in positions]


def _colors(count: int) -> list[str]:
    return [COLORS[number % len(COLORS)] for number in range(count)]
