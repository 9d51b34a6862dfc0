# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""The tables inside `model_cards/STUDY.md`: they stand between `<!-- table: NAME -->` and `<!-- end -->`, and are
written anew from the measurements; the words between them are ours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from .console import markdown
from .study_results import difference, sampling_error, share_of_compute


def all_tables(
    ranks: pd.DataFrame,
    scores: pd.DataFrame,
    curves: pd.DataFrame,
    frozen: Mapping[str, float],
    ratios: Mapping[str, float],
) -> dict[str, str]:
    """Name -> table in Markdown. ``frozen``: arm -> score at its end; ``ratios``: arm -> mask ratio."""
    tables = {f"scores-{mode}": score_table(scores, mode) for mode in ("finetune", "mean", "first", "words")}
    tables |= {"ranks-1": rank_table(ranks, "rank_power_1"), "ranks-2": rank_table(ranks, "rank_power_2")}
    tables |= {"deficiency": deficiency_table(ranks), "arms": arm_table(curves, frozen, ratios)}
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
    for measure in ("held_out_loss", *(column for column in curves.columns if column.startswith("frozen_"))):
        share = share_of_compute(curves, measure)
        named = "held-out loss" if measure == "held_out_loss" else f"frozen, {measure.removeprefix('frozen_')}"
        rows.append([named, "not reached" if share is None else f"{share:.0%}"])
    return markdown(["measure", "share of MLM's time"], rows)


def score_table(scores: pd.DataFrame, mode: str) -> str:
    """A task a row: mean and spread of the seeds, their difference and its two uncertainties; in percent, on test."""
    rows, gaps = [], []
    part = scores[(scores["mode"] == mode) & (scores["split"] == "test")]
    for task, of_task in part.groupby("task", sort=False):
        values = {arm: of_task[of_task["arm"] == arm]["accuracy"].to_numpy() for arm in ("mlm", "mae-lm")}
        gap, low, high = (100 * value for value in difference(values["mae-lm"], values["mlm"]))
        examples = int(of_task["examples"].iloc[0])
        error = 100 * sampling_error(values["mae-lm"].mean(), values["mlm"].mean(), examples)
        means = [f"{100 * values[arm].mean():.1f} ± {100 * values[arm].std(ddof=1):.1f}" for arm in ("mlm", "mae-lm")]
        rows.append([task, *means, f"{gap:+.1f} [{low:+.1f}, {high:+.1f}]", f"± {error:.1f} ({examples:,})"])
        gaps.append(gap)
    if len(rows) > 1:
        rows.append([f"mean of {len(rows)}", *_column_means(part), f"{np.mean(gaps):+.1f}", ""])
    header = ["task", "MLM", "MAE-LM", "difference [95 % over seeds]", "95 % for the size of test (examples)"]
    return markdown(header, rows)


def _column_means(part: pd.DataFrame) -> list[str]:
    by_task = part.groupby(["arm", "task"])["accuracy"].mean()
    return [f"{100 * by_task[arm].mean():.1f}" for arm in ("mlm", "mae-lm")]


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
        energy = last["mask_energy_outside"].get("masked/[MASK]", np.nan)
        rows.append([arm, last["objective"].iloc[0], *cells, "–" if np.isnan(energy) else f"{energy:.1%}"])
    header = ["arm", "objective", "σ", "σ²", "σ, centred", "σ², centred", "[MASK] energy outside the real subspace"]
    return markdown(header, rows)


def arm_table(curves: pd.DataFrame, frozen: Mapping[str, float], ratios: Mapping[str, float]) -> str:
    """An arm a row: what it saw, and what it reached."""
    rows = []
    for arm, part in curves.groupby("arm", sort=False):
        last = part.iloc[-1]
        score = f"{100 * frozen[arm]:.1f}" if arm in frozen else "not measured"
        rows.append(
            [
                str(arm),
                last["objective"],
                f"{ratios[arm]:.2f}",
                f"{last['step']:,}",
                f"{last['tokens'] / 1e6:.1f}",
                f"{last['cpu_minutes']:.0f}",
                f"{last['held_out_loss']:.3f}",
                f"{last['held_out_accuracy']:.3f}",
                score,
            ]
        )
    header = ["arm", "objective", "mask ratio", "steps", "million tokens", "CPU minutes", "held-out loss"]
    return markdown([*header, "held-out accuracy", "frozen, mean of 6 tasks"], rows)


def fill_tables(page: Path, tables: Mapping[str, str]) -> None:
    """Puts each table where the page has its marks.

    Raises:
        ValueError: the page asks for a table that there is not.
    """

    def replace(match: re.Match) -> str:
        if match[1] not in tables:
            raise ValueError(f"{page} asks for the table {match[1]!r}; there are {', '.join(tables)}")
        return f"<!-- table: {match[1]} -->\n\n{tables[match[1]].strip()}\n\n<!-- end -->"

    text = page.read_text("utf-8")
    page.write_text(re.sub(r"<!-- table: ([\w-]+) -->.*?<!-- end -->", replace, text, flags=re.DOTALL), "utf-8")
