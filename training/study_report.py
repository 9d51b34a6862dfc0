# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""The tables inside `model_cards/STUDY.md`: they stand between `<!-- table: NAME -->` and `<!-- end -->`, and are
written anew from the measurements; the words between them are ours.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from .console import markdown
from .study_results import TIMED_RATIO, TWINS, both_measured, chosen, difference, last_layer, share_of_compute

# The CSV files that everything on the page is made of, and what is measured at once in each: rows that agree in these.
TABLES = {
    "ranks": ("arm", "when"),
    "scores": ("arm", "task", "mode", "learning_rate"),
    "pairs": ("task", "mode"),
    "curves": ("arm",),
    "ends": ("arm",),
}


def read_tables(folder: Path) -> dict[str, pd.DataFrame]:
    """The CSV files of :data:`TABLES`, by name."""
    return {name: pd.read_csv(folder / f"{name}.csv") for name in TABLES}


def keep_unmeasured(measured: pd.DataFrame, file: Path, keys: Sequence[str]) -> tuple[pd.DataFrame, list[str]]:
    """The measured rows, and those of the file that were not measured anew; then the keys of the latter, by name.

    A clone has the tables but none of the runs: what it measures takes the place of what the tables held of it.
    """
    if not file.is_file():
        return measured, []
    known = pd.read_csv(file)
    if measured.empty:
        kept = known
    else:
        again = set(measured[list(keys)].itertuples(index=False, name=None))
        kept = known[[key not in again for key in known[list(keys)].itertuples(index=False, name=None)]]
    names = [" ".join(map(str, key)) for key in dict.fromkeys(kept[list(keys)].itertuples(index=False, name=None))]
    both = [part for part in (kept, measured) if not part.empty]
    return pd.concat(both, ignore_index=True) if both else measured, names


def all_tables(
    ranks: pd.DataFrame, scores: pd.DataFrame, pairs: pd.DataFrame, curves: pd.DataFrame, ends: pd.DataFrame
) -> dict[str, str]:
    """Name -> table in Markdown; that of learning rates if any task was fine-tuned with several."""
    tables = {f"scores-{mode}": score_table(scores, pairs, mode) for mode in ("finetune", "mean", "first", "words")}
    tables |= {"ranks-1": rank_table(ranks, "rank_power_1"), "ranks-2": rank_table(ranks, "rank_power_2")}
    tables |= {"deficiency": deficiency_table(ranks), "arms": arm_table(curves, ends)}
    tables |= {"after": after_table(ranks), "share": share_table(curves)}
    if rates := rate_table(scores):
        tables["rates"] = rates
    return tables | {"equal-tokens": equal_tokens_table(curves, ranks)}


def equal_tokens_table(curves: pd.DataFrame, ranks: pd.DataFrame) -> str:
    """A step a row at which both long arms were scored before either cooled down: loss, score, rank (deficiency)."""
    stable = curves[(curves["phase"] == "stable") & curves["frozen_mean"].notna()]
    by_step = {arm: stable[stable["arm"] == arm].set_index("step") for arm in TWINS}
    rows = []
    for step in by_step["mlm"].index.intersection(by_step["mae-lm"].index):
        both = [by_step[arm].loc[step] for arm in by_step]
        cells = [f"{step:,}", f"{both[0]['tokens'] / 1e6:.1f}"]
        cells += ["" if np.isnan(row["held_out_loss"]) else f"{row['held_out_loss']:.3f}" for row in both]
        cells += [f"{100 * row['frozen_mean']:.1f}" for row in both]
        for power in (1, 2):
            cells += [_with_deficiency(last_layer(ranks, arm, f"step-{step:09d}"), power) for arm in TWINS]
        rows.append(cells)
    measures = ("held-out loss", "frozen", "σ", "σ²")
    titles = [f"{arm}, {measure}" for measure in measures for arm in TWINS.values()]
    return markdown(["step", "million tokens", *titles], rows)


def _with_deficiency(last: pd.DataFrame, power: int, centred: str = "") -> str:
    """Rank of clean input, and in brackets by how much that of masked input exceeds it."""
    ranks = last[f"rank_power_{power}{centred}"]
    return f"{ranks['unmasked']:.0f} ({ranks['masked/all'] - ranks['unmasked']:+.0f})"


def after_table(ranks: pd.DataFrame) -> str:
    """A task a row: rank of the last layer on clean held-out text, before and after fine-tuning on it."""
    rows = []
    for when in ["final", *(when for when in dict.fromkeys(ranks["when"]) if when.startswith("after-"))]:
        last = {arm: last_layer(ranks, arm, when) for arm in TWINS}
        cells = [
            f"{last[arm].loc['unmasked', f'rank_power_{power}']:.0f}" if len(last[arm]) else ""
            for power in (1, 2)
            for arm in TWINS
        ]
        rates = [
            "–" if when == "final" or last[arm].empty else f"{last[arm]['learning_rate'].iloc[0]:g}" for arm in TWINS
        ]
        rows.append(["before" if when == "final" else when.removeprefix("after-"), *rates, *cells])
    titles = [f"{arm}, {what}" for what in ("learning rate", "σ", "σ²") for arm in TWINS.values()]
    return markdown(["fine-tuned on", *titles], rows)


def share_table(curves: pd.DataFrame) -> str:
    """A measure a row: at what share of MLM's processor time MAE-LM has its last value under a constant rate."""
    rows = []
    for measure, named in (("frozen_mean", "frozen accuracy, mean of 5 tasks"), ("held_out_loss", "held-out loss")):
        share = share_of_compute(curves, measure)
        reached = f"not by {share.observed:.0%}" if share.reached is None else f"at {share.reached:.0%}"
        rows.append([named, f"{share.goal:.3f} at {share.minutes:.0f} minutes", reached])
    return markdown(["measure", "MLM's last value at a constant rate", "MAE-LM has it, share of that time"], rows)


def score_table(scores: pd.DataFrame, pairs: pd.DataFrame, mode: str) -> str:
    """A task a row: mean and spread of the seeds, their difference and its uncertainties; in percent, on test.

    A frozen encoder's features are the same for every seed, so an interval over seeds would say nothing of it. A task
    whose answers were not compared example by example has no uncertainty of that kind, and then the mean has none.
    """
    part = chosen(both_measured(scores))
    part = part[(part["mode"] == mode) & (part["split"] == "test")]
    about = pairs[pairs["mode"] == mode].set_index("task")
    rows, errors = [], []
    for task, of_task in part.groupby("task", sort=False):
        values = {arm: of_task[of_task["arm"] == arm].sort_values("seed")["accuracy"].to_numpy() for arm in TWINS}
        errors.append(about["half_width"].get(task, math.nan))
        over_examples = f"± {100 * errors[-1]:.1f} ({about.loc[task, 'examples']:,})" if task in about.index else "–"
        cells = [task, *_compared(values, mode), over_examples]
        if mode == "finetune":
            rates = of_task.groupby("arm")["learning_rate"].first()
            cells.insert(1, ", ".join(f"{rates[arm]:g}" for arm in TWINS))
        rows.append(cells)
    if len(rows) > 1:
        by_seed = part.groupby(["arm", "seed"])["accuracy"].mean()
        means = {arm: by_seed[arm].to_numpy() for arm in TWINS}
        error = 100 * math.hypot(*errors) / len(rows)
        of_all = [""] if mode == "finetune" else []
        over_examples = "–" if math.isnan(error) else f"± {error:.1f}"
        rows.append([f"mean of {len(rows)}", *of_all, *_compared(means, mode), over_examples])
    header = ["task", "MLM", "MAE-LM", "difference", "95 % over test examples (their number)"]
    if mode == "finetune":
        header = ["task", "learning rates", *header[1:3], "difference [95 % over fine-tuning seeds]", header[-1]]
    return markdown(header, rows)


def _compared(values: Mapping[str, np.ndarray], mode: str) -> list[str]:
    """Both arms' mean and standard deviation over seeds (seeds,), and MAE-LM's less MLM's."""
    means = [f"{100 * values[arm].mean():.1f} ± {100 * values[arm].std(ddof=1):.1f}" for arm in TWINS]
    gap = 100 * (values["mae-lm"].mean() - values["mlm"].mean())
    if mode != "finetune":
        return [*means, f"{gap:+.1f}"]
    _, low, high = difference(values["mae-lm"], values["mlm"])
    return [*means, f"{gap:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"]


def rate_table(scores: pd.DataFrame) -> str:
    """What the choice of the learning rate does: mean test accuracy by every way to choose it, of the tasks where both
    twins have a choice; nothing if there is no such task."""
    tuned = both_measured(scores)
    tuned = tuned[tuned["mode"] == "finetune"]
    tuned = tuned[tuned.groupby("task")["learning_rate"].transform("nunique") > 1]
    tasks = tuned["task"].nunique()
    if not tasks:
        return ""
    header = ["learning rate of fine-tuning", f"MLM, mean of {tasks} tasks", "MAE-LM", "difference"]
    ways = {f"{rate:g} for every task": of for rate, of in tuned.groupby("learning_rate")}
    ways |= {"the best median on validation, as above": chosen(tuned)}
    ways |= {"the best mean on validation": chosen(tuned, "mean")}
    rows = []
    for way, found in ways.items():
        means = 100 * found[found["split"] == "test"].groupby(["arm", "task"])["accuracy"].mean().groupby("arm").mean()
        rows.append([way, *(f"{means[arm]:.1f}" for arm in TWINS), f"{means['mae-lm'] - means['mlm']:+.1f}"])
    return markdown(header, rows)


def rank_table(ranks: pd.DataFrame, key: str, when: str = "final") -> str:
    """A layer a row: every population of MLM and of MAE-LM, which has no [MASK] tokens."""
    part = ranks[ranks["when"] == when]
    populations = {arm: dict.fromkeys(part[part["arm"] == arm]["population"]) for arm in TWINS}
    columns = [(arm, population) for arm in TWINS for population in populations[arm]]
    by = part.set_index(["arm", "population", "layer"])[key]
    rows = [
        [str(layer) if layer else "embeddings", *(f"{by[arm, population, layer]:.0f}" for arm, population in columns)]
        for layer in sorted(part["layer"].unique())
    ]
    return markdown(["layer", *(f"{TWINS[arm]}, {population}" for arm, population in columns)], rows)


def deficiency_table(ranks: pd.DataFrame) -> str:
    """An arm a row, of the last layer at the end: rank of clean input (and deficiency) by four definitions, energy."""
    rows = []
    for arm in dict.fromkeys(ranks["arm"]):
        last = last_layer(ranks, arm, "final")
        if last.empty:
            continue
        cells = [_with_deficiency(last, power, centred) for centred in ("", "_centred") for power in (1, 2)]
        low, high = (last.loc["masked/all", f"deficiency_power_1_{bound}"] for bound in ("low", "high"))
        outside = "–"
        if "masked/[MASK]" in last.index:
            of_mask = last.loc["masked/[MASK]"]
            outside = f"{of_mask['mask_energy_outside']:.1%}, {of_mask['real_energy_outside']:.1%}"
        rows.append([arm, last["objective"].iloc[0], cells[0], f"{low:+.1f} to {high:+.1f}", *cells[1:], outside])
    header = ["arm", "objective", "σ", "deficiency by σ: 95 %", "σ²", "σ, centred", "σ², centred"]
    return markdown([*header, "energy outside the subspace of real tokens: [MASK], real"], rows)


def arm_table(curves: pd.DataFrame, ends: pd.DataFrame) -> str:
    """An arm a row: what it saw, and what it reached.

    Args:
        ends: arm, its mask "ratio", and as far as measured its "loss" and "accuracy" at one ratio for all, and its
            "frozen" score.
    """
    rows, ends = [], ends.set_index("arm")
    for arm, part in curves.groupby("arm", sort=False):
        last, end = part.iloc[-1], ends.loc[arm]
        cells = [str(arm), last["objective"], f"{end['ratio']:.2f}", f"{last['step']:,}", f"{last['tokens'] / 1e6:.1f}"]
        cells.append("" if np.isnan(last["cpu_minutes"]) else f"{last['cpu_minutes']:.0f}")
        cells += [f"{last['held_out_loss']:.3f} ({last['held_out_accuracy']:.3f})"]
        cells += ["not measured" if np.isnan(end["loss"]) else f"{end['loss']:.3f} ({end['accuracy']:.3f})"]
        rows.append([*cells, "not measured" if np.isnan(end["frozen"]) else f"{100 * end['frozen']:.1f}"])
    header = ["arm", "objective", "mask ratio", "steps", "million tokens", "CPU minutes"]
    header += ["loss (accuracy) at its own ratio", f"loss (accuracy) at {TIMED_RATIO}"]
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
