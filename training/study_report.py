# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""The tables inside `model_cards/STUDY.md`: they stand between `<!-- table: NAME -->` and `<!-- end -->`, and are
written anew from the measurements; the words between them are ours.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from .console import markdown
from .study_results import TIMED_RATIO, both_measured, difference, sampling_error, share_of_compute

LONG = ("mlm", "mae-lm")


def all_tables(
    ranks: pd.DataFrame, scores: pd.DataFrame, curves: pd.DataFrame, ends: Mapping[str, Mapping[str, float]]
) -> dict[str, str]:
    """Name -> table in Markdown. ``ends``: arm -> what was measured of its last weights, as :func:`arm_table` wants."""
    tables = {f"scores-{mode}": score_table(scores, mode) for mode in ("finetune", "mean", "first", "words")}
    tables |= {"ranks-1": rank_table(ranks, "rank_power_1"), "ranks-2": rank_table(ranks, "rank_power_2")}
    tables |= {"deficiency": deficiency_table(ranks), "arms": arm_table(curves, ends)}
    tables |= {"after": after_table(ranks), "share": share_table(curves)}
    return tables | {"equal-tokens": equal_tokens_table(curves, ranks)}


def equal_tokens_table(curves: pd.DataFrame, ranks: pd.DataFrame) -> str:
    """A step a row at which both long arms were scored before either cooled down: loss, score, rank (deficiency)."""
    stable = curves[(curves["phase"] == "stable") & curves["frozen_mean"].notna()]
    by_step = {arm: stable[stable["arm"] == arm].set_index("step") for arm in ("mlm", "mae-lm")}
    rows = []
    for step in by_step["mlm"].index.intersection(by_step["mae-lm"].index):
        both = [by_step[arm].loc[step] for arm in by_step]
        cells = [f"{step:,}", f"{both[0]['tokens'] / 1e6:.1f}"]
        cells += ["" if np.isnan(row["held_out_loss"]) else f"{row['held_out_loss']:.3f}" for row in both]
        cells += [f"{100 * row['frozen_mean']:.1f}" for row in both]
        cells += [_rank_of_last_layer(ranks, arm, f"step-{step:09d}", power) for power in (1, 2) for arm in by_step]
        rows.append(cells)
    measures = ("held-out loss", "frozen", "σ", "σ²")
    titles = [f"{arm}, {measure}" for measure in measures for arm in ("MLM", "MAE-LM")]
    return markdown(["step", "million tokens", *titles], rows)


def _rank_of_last_layer(ranks: pd.DataFrame, arm: str, when: str, power: int) -> str:
    part = ranks[(ranks["arm"] == arm) & (ranks["when"] == when)]
    last = part[part["layer"] == part["layer"].max()].set_index("population")[f"rank_power_{power}"]
    return f"{last['unmasked']} ({last['masked/all'] - last['unmasked']:+d})"


def after_table(ranks: pd.DataFrame) -> str:
    """A task a row: rank of the last layer on clean held-out text, before and after fine-tuning on it."""
    last = ranks[(ranks["layer"] == ranks["layer"].max()) & (ranks["population"] == "unmasked")]
    rows = []
    for when in ["final", *(when for when in dict.fromkeys(last["when"]) if when.startswith("after-"))]:
        part = last[last["when"] == when].set_index("arm")
        cells = [
            str(part.loc[arm, f"rank_power_{power}"]) if arm in part.index else ""
            for power in (1, 2)
            for arm in ("mlm", "mae-lm")
        ]
        rows.append(["before" if when == "final" else when.removeprefix("after-"), *cells])
    return markdown(["fine-tuned on", "MLM, σ", "MAE-LM, σ", "MLM, σ²", "MAE-LM, σ²"], rows)


def share_table(curves: pd.DataFrame) -> str:
    """A measure a row: at what share of MLM's processor time MAE-LM has its last value under a constant rate."""
    rows = []
    for measure, named in (("frozen_mean", "frozen accuracy, mean of 5 tasks"), ("held_out_loss", "held-out loss")):
        share = share_of_compute(curves, measure)
        reached = f"not by {share.observed:.0%}" if share.reached is None else f"at {share.reached:.0%}"
        rows.append([named, f"{share.goal:.3f} at {share.minutes:.0f} minutes", reached])
    return markdown(["measure", "MLM's last value at a constant rate", "MAE-LM has it, share of that time"], rows)


def score_table(scores: pd.DataFrame, mode: str) -> str:
    """A task a row: mean and spread of the seeds, their difference and its uncertainties; in percent, on test.

    A frozen encoder's features are the same for every seed, so an interval over seeds would say nothing of it.
    """
    part = both_measured(scores)
    part = part[part["mode"] == mode]
    rows, errors = [], []
    for task, of_task in part.groupby("task", sort=False):
        values = {arm: of_task[of_task["arm"] == arm].sort_values("seed")["accuracy"].to_numpy() for arm in LONG}
        examples = int(of_task["examples"].iloc[0])
        errors.append(sampling_error(values["mae-lm"].mean(), values["mlm"].mean(), examples))
        rows.append([task, *_compared(values, mode), f"± {100 * errors[-1]:.1f} ({examples:,})"])
    if len(rows) > 1:
        by_seed = part.groupby(["arm", "seed"])["accuracy"].mean()
        means = {arm: by_seed[arm].to_numpy() for arm in LONG}
        error = 100 * math.hypot(*errors) / len(rows)
        rows.append([f"mean of {len(rows)}", *_compared(means, mode), f"± {error:.1f}"])
    over = "difference [95 % over fine-tuning seeds]" if mode == "finetune" else "difference"
    return markdown(["task", "MLM", "MAE-LM", over, "95 % for the size of test (examples)"], rows)


def _compared(values: Mapping[str, np.ndarray], mode: str) -> list[str]:
    """Both arms' mean and standard deviation over seeds (seeds,), and MAE-LM's less MLM's."""
    means = [f"{100 * values[arm].mean():.1f} ± {100 * values[arm].std(ddof=1):.1f}" for arm in LONG]
    gap, low, high = (100 * value for value in difference(values["mae-lm"], values["mlm"]))
    return [*means, f"{gap:+.1f}" + (f" [{low:+.1f}, {high:+.1f}]" if mode == "finetune" else "")]


def rank_table(ranks: pd.DataFrame, key: str, when: str = "final") -> str:
    """A layer a row: MLM's four populations, and MAE-LM's two that it has."""
    part = ranks[ranks["when"] == when]
    columns = [(arm, population) for arm in ("mlm", "mae-lm") for population in _populations(part, arm)]
    rows = []
    for layer in sorted(part["layer"].unique()):
        cells = []
        for arm, population in columns:
            chosen = part[(part["arm"] == arm) & (part["layer"] == layer) & (part["population"] == population)]
            cells.append(str(chosen[key].iloc[0]) if len(chosen) else "")
        rows.append([str(layer) if layer else "embeddings", *cells])
    titles = {"mlm": "MLM", "mae-lm": "MAE-LM"}
    return markdown(["layer", *(f"{titles[arm]}, {population}" for arm, population in columns)], rows)


def _populations(part: pd.DataFrame, arm: str) -> list[str]:
    return list(dict.fromkeys(part[part["arm"] == arm]["population"]))


def deficiency_table(ranks: pd.DataFrame) -> str:
    """An arm a row, of the last layer at the end: rank of clean input (and deficiency) by four definitions, energy."""
    rows = []
    for arm in dict.fromkeys(ranks["arm"]):
        part = ranks[(ranks["arm"] == arm) & (ranks["when"] == "final")]
        if part.empty:
            continue
        last = part[part["layer"] == part["layer"].max()].set_index("population")
        cells = []
        for key in ("rank_power_1", "rank_power_2", "rank_power_1_centred", "rank_power_2_centred"):
            clean, masked = last.loc["unmasked", key], last.loc["masked/all", key]
            cells.append(f"{clean} ({masked - clean:+d})")
        low, high = (last.loc["masked/all", f"deficiency_{bound}"] for bound in ("low", "high"))
        cells[0] += f" [{low:+.1f}, {high:+.1f}]"
        outside = "–"
        if "masked/[MASK]" in last.index:
            of_mask = last.loc["masked/[MASK]"]
            outside = f"{of_mask['mask_energy_outside']:.1%}, {of_mask['real_energy_outside']:.1%}"
        rows.append([arm, last["objective"].iloc[0], *cells, outside])
    header = [
        "arm",
        "objective",
        "σ [95 % of the deficiency, before ranks are rounded up]",
        "σ²",
        "σ, centred",
        "σ², centred",
    ]
    return markdown([*header, "energy outside the subspace of real tokens: [MASK], real"], rows)


def arm_table(curves: pd.DataFrame, ends: Mapping[str, Mapping[str, float]]) -> str:
    """An arm a row: what it saw, and what it reached.

    Args:
        ends: arm -> its mask "ratio", and where measured its "loss" and "accuracy" at one ratio for all, and its
            "frozen" score.
    """
    rows = []
    for arm, part in curves.groupby("arm", sort=False):
        last, end = part.iloc[-1], ends[arm]
        cells = [str(arm), last["objective"], f"{end['ratio']:.2f}", f"{last['step']:,}", f"{last['tokens'] / 1e6:.1f}"]
        cells.append("" if np.isnan(last["cpu_minutes"]) else f"{last['cpu_minutes']:.0f}")
        cells += [f"{last['held_out_loss']:.3f}", f"{last['held_out_accuracy']:.3f}"]
        cells += [f"{end[key]:.3f}" if key in end else "not measured" for key in ("loss", "accuracy")]
        rows.append([*cells, f"{100 * end['frozen']:.1f}" if "frozen" in end else "not measured"])
    header = ["arm", "objective", "mask ratio", "steps", "million tokens", "CPU minutes"]
    header += ["held-out loss at its own ratio", "accuracy", f"loss at {TIMED_RATIO}", "accuracy"]
    return markdown([*header, "frozen, mean of 5 tasks"], rows)


def fill_tables(page: Path, tables: Mapping[str, str]) -> None:
    """Puts each table where the page has its marks.

    Raises:
        ValueError: the page asks for a table that there is not, or has no place for one.
    """

    def replace(match: re.Match) -> str:
        if match[1] not in tables:
            raise ValueError(f"{page} asks for the table {match[1]!r}; there are {', '.join(tables)}")
        return f"<!-- table: {match[1]} -->\n\n{tables[match[1]].strip()}\n\n<!-- end -->"

    text = page.read_text("utf-8")
    if unplaced := [name for name in tables if f"<!-- table: {name} -->" not in text]:
        raise ValueError(f"{page} has no mark <!-- table: {unplaced[0]} -->")
    page.write_text(re.sub(r"<!-- table: ([\w-]+) -->.*?<!-- end -->", replace, text, flags=re.DOTALL), "utf-8")
