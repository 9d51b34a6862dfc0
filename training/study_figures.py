# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""The study's figures."""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .study_results import TAU, TWINS, both_measured, chosen, difference, rank_over_time

COLOURS = {"MAE-LM": "#D55E00", "MLM": "#0072B2"}
MARKERS = {"MAE-LM": "s", "MLM": "^"}
# Mode of scoring -> its name, colour and marker; of tags there is one kind of frozen score.
MODES = {
    "finetune": ("fine-tuned", "#000000", "o"),
    "mean": ("frozen, mean of tokens", "#CC79A7", "s"),
    "words": ("frozen, each word", "#009E73", "D"),
    "first": ("frozen, first token", "#E69F00", "^"),
}


def draw_ranks(ranks: pd.DataFrame, path: Path) -> None:
    """Rank by layer at the end of both twins: clean input, masked input (MAE-LM's is the same), [MASK] tokens."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    axes = figure.subplots(1, 2)
    part = ranks[ranks["when"] == "final"]
    dashes = {"unmasked": "-", "masked/all": "--", "masked/[MASK]": ":"}
    for axis, power, of in zip(axes, (1, 2), ("singular values", "squared singular values"), strict=True):
        for arm, objective in TWINS.items():
            for population, style in dashes.items():
                line = part[(part["arm"] == arm) & (part["population"] == population)].sort_values("layer")
                if len(line):
                    label = f"{objective}, {population}"
                    _line(axis, line["layer"], line[f"rank_power_{power}"], objective, linestyle=style, label=label)
        axis.set(xlabel="layer (0: embeddings)", ylabel=f"effective rank (of {part['dim'].iloc[0]})")
        axis.set_title(f"{TAU:.0%} of the sum of {of}", fontsize=10)
        axis.set_xticks(sorted(part["layer"].unique()))
        axis.set_ylim(bottom=0)
    axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=160)


def draw_curves(curves: pd.DataFrame, ranks: pd.DataFrame, path: Path) -> None:
    """Against processor time: held-out loss, frozen accuracy, rank of clean input and deficiency of the last layer."""
    figure = Figure(figsize=(12, 7), layout="constrained")
    (loss, frozen), (rank, deficiency) = figure.subplots(2, 2)
    for arm, objective in TWINS.items():
        line = curves[curves["arm"] == arm]
        _line(loss, line["cpu_minutes"], line["held_out_loss"], objective, label=objective)
        scored = line[line["frozen_mean"].notna()]
        _line(frozen, scored["cpu_minutes"], 100 * scored["frozen_mean"], objective, label=objective)
        minutes = dict(zip(line["step"], line["cpu_minutes"], strict=True))
        over_time = rank_over_time(ranks, arm, minutes)
        for power, style in ((1, "-"), (2, "--")):
            of = "σ" if power == 1 else "σ²"
            y = over_time[f"unmasked_{power}"]
            _line(rank, over_time["minutes"], y, objective, linestyle=style, label=f"{objective}, {of}")
            gap = over_time[f"masked_{power}"] - y
            _line(deficiency, over_time["minutes"], gap, objective, linestyle=style, label=f"{objective}, {of}")
    loss.set(ylabel="loss on hidden tokens (nats)", title="Held-out loss")
    frozen.set(ylabel="test accuracy (%), mean of 5 tasks", title="Frozen encoder, linear probe")
    rank.set(ylabel="effective rank, last layer", title="Rank of clean input")
    deficiency.set(ylabel="dimensions", title="Deficiency: rank of masked less rank of clean input")
    deficiency.axhline(0, color="black", linewidth=0.8)
    for axis in (loss, frozen, rank, deficiency):
        axis.set_xlabel("CPU minutes of pretraining (one thread)")
        axis.title.set_fontsize(10)
        axis.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=160)


def draw_scores(scores: pd.DataFrame, pairs: pd.DataFrame, path: Path) -> None:
    """The difference of the twins by task and mode: thin bars over fine-tuning seeds, pale ones over test examples."""
    part = chosen(both_measured(scores))
    part = part[part["split"] == "test"]
    half_width = pairs.set_index(["task", "mode"])["half_width"]
    tasks = list(dict.fromkeys(part["task"]))
    figure = Figure(figsize=(9, 0.75 * len(tasks) + 1.2), layout="constrained")
    axis = figure.subplots()
    for row, task in enumerate(tasks):
        of_task = part[part["task"] == task]
        modes = [mode for mode in MODES if mode in set(of_task["mode"])]
        for place, mode in enumerate(modes):
            of_mode = of_task[of_task["mode"] == mode]
            mae, mlm = (of_mode[of_mode["arm"] == arm]["accuracy"].to_numpy() for arm in ("mae-lm", "mlm"))
            gap, over_seeds = 100 * (mae.mean() - mlm.mean()), None
            if mode == "finetune":
                _, low, high = (100 * value for value in difference(mae, mlm))
                over_seeds = [[gap - low], [high - gap]]
            error = 100 * half_width.get((task, mode), math.nan)  # not drawn where it was not measured
            name, colour, marker = MODES[mode]
            y = row + 0.22 * (place - (len(modes) - 1) / 2)
            axis.errorbar(gap, y, xerr=error, color=colour, alpha=0.25, linewidth=5, zorder=1)
            style = {"fmt": marker, "color": colour, "markersize": 5, "capsize": 3, "zorder": 2}
            known = axis.get_legend_handles_labels()[1]
            axis.errorbar(gap, y, xerr=over_seeds, label=None if name in known else name, **style)
    axis.axvline(0, color="black", linewidth=0.8)
    axis.set_yticks(range(len(tasks)), tasks)
    axis.invert_yaxis()
    axis.grid(axis="x", alpha=0.25)
    axis.set_xlabel(
        "MAE-LM less MLM, points of test accuracy (thin: 95 % over fine-tuning seeds; pale: over test examples)"
    )
    axis.legend(frameon=False, fontsize=8, loc="best")
    figure.savefig(path, dpi=160)


def _line(axis: Axes, x: pd.Series, y: pd.Series, objective: str, **style: object) -> None:
    fixed = {"color": COLOURS[objective], "marker": MARKERS[objective], "markersize": 4, "linewidth": 1.2}
    axis.plot(x, y, **fixed | style)
    axis.grid(alpha=0.25)
