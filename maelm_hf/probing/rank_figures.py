# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Figures of the rank probe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from .rank_table import MASK, MASKED, POPULATIONS, REAL, UNMASKED

# Okabe and Ito's palette: told apart with any colour vision, and by their markers in print.
COLOURS = {UNMASKED: "#0072B2", MASKED: "#D55E00", REAL: "#009E73", MASK: "#CC79A7"}
MARKERS = {UNMASKED: "o", MASKED: "s", REAL: "^", MASK: "D"}
STYLES = {UNMASKED: "-", MASKED: "--", REAL: ":", MASK: "-."}
MODEL_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
_MOST_SPECTRA = 4


def rank_by_layer(frame: pd.DataFrame, title: str, rank_label: str) -> Figure:
    """Effective rank by layer, a line a population, with its interval; hollow where it has not settled."""
    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.subplots()
    for population in _present(frame):
        rows = frame[frame["population"] == population]
        colour, marker = COLOURS[population], MARKERS[population]
        _line(axes, rows, rows["effective_rank"], colour, marker, population, STYLES[population])
        if rows["effective_rank_low"].notna().any():
            low, high = rows["effective_rank_low"].astype(float), rows["effective_rank_high"].astype(float)
            axes.fill_between(rows["layer_index"], low, high, color=colour, alpha=0.15, linewidth=0)
    _layer_axis(axes, frame)
    _tidy(axes)
    _at_least(axes, 0.1 * frame["dim"].max())
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(ylabel=rank_label)
    handles, labels = axes.get_legend_handles_labels()
    if not frame["effective_rank_settled"].all():
        handles.append(Line2D([], [], linestyle="", marker="o", markerfacecolor="white", color="#555555"))
        labels.append("not settled: more tokens needed")
    axes.legend(handles, labels, frameon=False, fontsize=9, handlelength=3.2)
    figure.suptitle(title, fontsize=11)
    return figure


def spectra_by_layer(frame: pd.DataFrame, spectra: Mapping[str, Tensor], title: str, centred: bool) -> Figure | None:
    """Singular values over the largest, for a few layers from first to last; None without saved spectra."""
    layers = frame.drop_duplicates("layer_index")[["layer_index", "layer"]].to_numpy().tolist()
    kind = "centred" if centred else "raw"
    if not any(name.startswith(f"{kind}/") for name in spectra):
        return None
    chosen = [layers[i] for i in sorted(set(np.linspace(0, len(layers) - 1, _MOST_SPECTRA).round().astype(int)))]
    figure = Figure(figsize=(3.1 * len(chosen) + 0.6, 3.6), layout="constrained")
    panels = np.atleast_1d(figure.subplots(1, len(chosen), sharey=True))
    for axes, (_, layer) in zip(panels, chosen, strict=True):
        for population in _present(frame):
            values = spectra.get(f"{kind}/{layer}/{population}")
            if values is not None and values[0] > 0:
                share = (values[values > 0] / values[0]).numpy()
                axes.plot(
                    np.arange(1, len(share) + 1), share, STYLES[population], color=COLOURS[population], label=population
                )
        axes.set(yscale="log", xscale="log", xlabel="Index", title=layer)
        axes.set_title(layer, fontsize=9)
        axes.set_ylim(bottom=max(axes.get_ylim()[0], 1e-5))
        _tidy(axes)
    panels[0].set_ylabel(f"Singular value / largest ({kind})")
    panels[0].legend(frameon=False, fontsize=8, loc="lower left")
    figure.suptitle(title, fontsize=11)
    return figure


def compare_ranks(frames: Sequence[pd.DataFrame], labels: Sequence[str], rank_label: str) -> Figure:
    """Several models on one axis, unmasked (solid) and masked/all (dashed); beside it the deficiency, where it exists.

    Models of different width are shown as a share of it, and of different depth over relative depth.
    """
    widths = {int(dim) for frame in frames for dim in frame["dim"].unique()}
    depths = {int(frame["layer_index"].max()) for frame in frames}
    with_deficiency = any((frame["population"] == MASKED).any() for frame in frames)
    figure = Figure(figsize=(11.5 if with_deficiency else 7, 4.6), layout="constrained")
    panels = np.atleast_1d(figure.subplots(1, 2 if with_deficiency else 1))
    for number, (frame, label) in enumerate(zip(frames, labels, strict=True)):
        colour = MODEL_COLOURS[number % len(MODEL_COLOURS)]
        marker = list(MARKERS.values())[number % len(MARKERS)]
        for population, style in ((UNMASKED, "-"), (MASKED, "--")):
            rows = frame[frame["population"] == population]
            depth = max(1, int(frame["layer_index"].max())) if len(depths) > 1 else 1
            scale = rows["dim"] if len(widths) > 1 else 1
            name = label if population == UNMASKED else None
            _line(panels[0], rows, rows["effective_rank"] / scale, colour, marker, name, style, depth)
            if population == MASKED and len(rows):
                _line(panels[1], rows, rows["deficiency"] / scale, colour, marker, label, "-", depth)
    unit = "share of the model's width" if len(widths) > 1 else "dimensions"
    panels[0].set_ylabel(f"{rank_label.partition(' (')[0]} ({unit})")
    handles, names = panels[0].get_legend_handles_labels()
    if with_deficiency:
        handles += [Line2D([], [], color="#555555", ls="-"), Line2D([], [], color="#555555", ls="--")]
        names += ["unmasked input", "masked input, all tokens"]
        panels[1].axhline(0, color="#999999", lw=0.8)
        panels[1].set_ylabel(f"rank(masked/all) - rank(unmasked) ({unit})")
        panels[1].set_title("Rank deficiency", fontsize=10)
    panels[0].legend(handles, names, frameon=False, fontsize=9, handlelength=3.2)
    panels[0].set_title(rank_label, fontsize=10)
    for axes in panels:
        if len(depths) > 1:
            axes.set_xlabel("Relative depth (0: embeddings, 1: last)")
        else:
            _layer_axis(axes, frames[0])
        _tidy(axes)
        _at_least(axes, 0.05 if len(widths) > 1 else 0.05 * max(widths))
        if len(widths) == 1:
            axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def _line(
    axes: Axes,
    rows: pd.DataFrame,
    values: pd.Series,
    colour: str,
    marker: str,
    label: str | None,
    style: str = "-",
    depth: int = 1,
) -> None:
    x = rows["layer_index"] / depth
    axes.plot(x, values, style, color=colour, lw=1.6, label=None)
    settled = rows["effective_rank_settled"].astype(bool)
    axes.plot(x[settled], values[settled], marker, color=colour, ms=5.5)
    axes.plot(x[~settled], values[~settled], marker, color=colour, ms=5.5, markerfacecolor="white")
    if label is not None:
        axes.plot([], [], style + marker, color=colour, lw=1.6, ms=5.5, label=label)


def _layer_axis(axes: Axes, frame: pd.DataFrame) -> None:
    """0 is the embeddings, k the k-th block, and the final norm is named."""
    layers = frame.drop_duplicates("layer_index")
    ticks, names = [], []
    step = max(1, len(layers) // 16)
    for index, position in zip(layers["layer_index"], layers["position"], strict=True):
        if position in ("embeddings", "final norm"):
            ticks.append(index)
            names.append({"embeddings": "emb.", "final norm": "norm"}[position])
        elif index % step == 0:
            ticks.append(index)
            names.append(str(index))
    axes.set_xticks(ticks, names)
    axes.set_xlabel("Layer")


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e4e7eb", lw=0.8)
    axes.set_axisbelow(True)


def _at_least(axes: Axes, span: float) -> None:
    """Widen the y axis to this span, so that a step of one dimension does not fill the figure."""
    low, high = axes.get_ylim()
    missing = max(0.0, span - (high - low)) / 2
    axes.set_ylim(low - missing, high + missing)


def _present(frame: pd.DataFrame) -> list[str]:
    return [population for population in POPULATIONS if (frame["population"] == population).any()]
