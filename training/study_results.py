# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""What `training.study_measure` left, as tables: ranks, scores, curves, and what is read off them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from maelm_hf.probing import RankReport, effective_rank

from .finetune_report import evaluation_entries, group_settings, load_results
from .monitoring import read_log
from .recipe import load_recipe

TAU = 0.9
TIMED_RATIO = 0.15
SETTING = ["task", "mode", "learning_rate"]  # what the twins' scores are compared at
TWINS = {"mlm": "MLM", "mae-lm": "MAE-LM"}  # the two long arms, and their objectives
POOLS = ("mean", "words")  # of the frozen encoders' probes, those that are shown where one must do
# Intervals are those of the first power, not centred.
_AS_REPORTED = {"effective_rank_low": "rank_power_1_low", "effective_rank_high": "rank_power_1_high"}
_AS_REPORTED |= {"deficiency_low": "deficiency_power_1_low", "deficiency_high": "deficiency_power_1_high"}
_AS_REPORTED |= {key: key for key in ("subspace_dim", "mask_energy_outside", "real_energy_outside")}


def rank_rows(
    reports: Path, names: Mapping[str, str], rates: Mapping[tuple[str, str], float] | None = None
) -> pd.DataFrame:
    """Every layer and population of every report: the effective rank by both powers, raw and centred.

    Args:
        reports: folder of reports, ARM/WHEN.
        names: arm -> objective.
        rates: (arm, when) -> learning rate of the fine-tuned model that was probed.
    """
    rows = []
    for arm, objective in names.items():
        for folder in sorted((reports / arm).glob("[!.]*")):  # with a dot: being written
            report, rate = RankReport.load(folder), (rates or {}).get((arm, folder.name), math.nan)
            for row in report.rows:
                found = {"arm": arm, "objective": objective, "when": folder.name, "learning_rate": rate}
                found |= {"layer": row["layer_index"]} | {key: row[key] for key in ("population", "tokens", "dim")}
                for centred in (False, True):
                    spectrum = report.spectrum(row["layer"], row["population"], centred=centred)
                    for power in (1, 2):
                        key = f"rank_power_{power}{'_centred' if centred else ''}"
                        found[key] = int(effective_rank(spectrum, TAU, power))
                rows.append(found | {key: row[reported] for reported, key in _AS_REPORTED.items()})
    return pd.DataFrame(rows)


def last_layer(ranks: pd.DataFrame, arm: str, when: str) -> pd.DataFrame:
    """The last layer's row of each population, of one arm at one time; empty where that was not measured."""
    part = ranks[(ranks["arm"] == arm) & (ranks["when"] == when)]
    return part[part["layer"] == part["layer"].max()].set_index("population")


def task_cells(folder: Path) -> dict[str, list[dict]]:
    """Task -> its finished cells, of the data that the folder's `results.json` is of."""
    tasks = load_results(folder)["tasks"]
    found = {}
    for name, about in tasks.items():
        cells = [json.loads(path.read_text()) for path in sorted((folder / name / "cells").glob("[!.]*.json"))]
        found[name] = [cell for cell in cells if cell["cell"]["data_digest"] == about["data_digest"]]
    return found


def score_rows(tasks: Path, names: Mapping[str, str]) -> pd.DataFrame:
    """Every cell's accuracy by mode: "finetune", or the pool of a frozen encoder's probe.

    ``learning_rate``: 0 of a probe, which has none. ``examples`` are those of the split: texts, or sentences where
    words are tagged.
    """
    rows = []
    for arm, objective in names.items():
        if not (tasks / arm / "results.json").is_file():
            continue
        about_tasks = load_results(tasks / arm)["tasks"]
        for task, cells in task_cells(tasks / arm).items():
            for cell in cells:
                fine_tuned = cell["cell"]["mode"] == "finetune"
                about = {"arm": arm, "objective": objective, "task": task, "seed": cell["cell"]["seed"]}
                about["learning_rate"] = cell["setting"].get("learning_rate", 0.0)
                about["precision"] = cell["cell"]["precision"]
                scores = {"finetune": cell["scores"]} if fine_tuned else cell["pooled"]
                for mode, splits in scores.items():
                    for split, metrics in splits.items():
                        sizes = about_tasks[task]["split_sizes"]
                        found = {"mode": mode, "split": split, "examples": sizes[split]}
                        rows.append(about | found | {"accuracy": metrics["accuracy"]})
    return pd.DataFrame(rows)


def both_measured(scores: pd.DataFrame) -> pd.DataFrame:
    """The scores at those settings (task, mode, learning rate) that both twins have with the same seeds, all of them.

    What one twin has not finished would else be compared by other rates or seeds than the other's.
    """
    seeds = scores.groupby(["task", "mode"])["seed"].nunique()

    def finished(part: pd.DataFrame) -> bool:
        found = part[part["split"] == "test"].groupby("arm")["seed"].nunique()
        return len(found) == len(TWINS) and (found == seeds[part["task"].iloc[0], part["mode"].iloc[0]]).all()

    return scores.groupby([*SETTING], sort=False).filter(finished)


def left_out(scores: pd.DataFrame) -> list[str]:
    """What :func:`both_measured` drops, as "TASK, MODE" or "TASK, MODE at RATE"."""
    settings = [set(part[SETTING].itertuples(index=False, name=None)) for part in (scores, both_measured(scores))]
    return sorted(
        f"{task}, {mode} at {rate:g}" if rate else f"{task}, {mode}" for task, mode, rate in settings[0] - settings[1]
    )


def chosen(scores: pd.DataFrame, measure: str = "median") -> pd.DataFrame:
    """The scores of each task at the learning rate that validation prefers, for each twin by itself; all frozen ones.

    Args:
        measure: of the seeds' accuracies on validation, "median" or "mean"; equal ones by the mean.
    """
    validation = scores[scores["split"] == "validation"]
    keys = ["arm", "task", "mode"]
    by_rate = validation.groupby([*keys, "learning_rate"])["accuracy"].agg(["median", "mean"])
    order = by_rate.sort_values([measure, "mean"]).reset_index("learning_rate")
    return scores.merge(order.groupby(keys)["learning_rate"].last().reset_index(), on=[*keys, "learning_rate"])


def card_results(scores: pd.DataFrame, arm: str, results: Mapping[str, Any]) -> dict[str, Any]:
    """What a card shows of an arm's scores: every task's best setting by validation, fine-tuned and frozen.

    Args:
        scores: the table of :func:`score_rows`.
        results: a `results.json` of the arm, for what is known of the tasks, and where and when it was measured.
    """
    tasks = {}
    for task, about in results["tasks"].items():
        part = scores[(scores["arm"] == arm) & (scores["task"] == task) & scores["mode"].isin(("finetune", *POOLS))]
        cells = []
        for (mode, rate, seed), of_cell in part.groupby(["mode", "learning_rate", "seed"]):
            setting = {"mode": mode, "learning_rate": rate} if mode == "finetune" else {"mode": "frozen"}
            splits = of_cell.set_index("split")["accuracy"]
            values = {split: {"accuracy": float(splits[split])} for split in ("validation", "test")}
            cells.append({"setting": setting, "cell": {"seed": int(seed)}, "scores": values})
        tasks[task] = {**about, "settings": group_settings(cells, "accuracy")}
    return {"evaluation": evaluation_entries(tasks), "environment": results["environment"]}


def curve_rows(
    runs: Path,
    frozen: Path,
    names: Mapping[str, str],
    seconds: Mapping[str, float],
    tasks: Sequence[str],
    at_end: Mapping[str, float],
) -> pd.DataFrame:
    """Every evaluation of every run, with the frozen scores where the checkpoint was scored.

    ``phase``: "stable" while the learning rate is constant (and before), "decay" until it is 0, "end".

    Args:
        names: arm -> objective.
        seconds: objective -> processor seconds of a step at a mask ratio of .15; a step at another is not timed.
        tasks: a checkpoint's scores count once it has all of them.
        at_end: arm -> mean frozen score of its final weights.
    """
    rows = []
    for arm, objective in names.items():
        recipe = load_recipe(runs / arm / "recipe.yaml")
        tokens = {0: 0}
        for row in read_log(runs / arm / "log.jsonl"):
            tokens[row["step"]] = tokens[row["step"] - 1] + row["tokens"]
        evaluated = {row["step"]: row for row in read_log(runs / arm / "evaluations.jsonl")}
        for step in sorted({0, *evaluated}):
            stable = step <= recipe.max_steps - recipe.optimizer.decay_steps
            phase = "end" if step == recipe.max_steps else "stable" if stable else "decay"
            about = {"arm": arm, "objective": objective, "step": step, "phase": phase, "tokens": tokens[step]}
            timed = recipe.data.mask_ratio == TIMED_RATIO
            about |= {"cpu_minutes": step * seconds[objective] / 60 if timed else math.nan}
            about |= {f"held_out_{key}": evaluated.get(step, {}).get(key, math.nan) for key in ("loss", "accuracy")}
            scores = frozen_scores(frozen / f"{arm}-step-{step:09d}", tasks)
            if scores:
                about |= scores
            elif phase == "end" and arm in at_end:
                about["frozen_mean"] = at_end[arm]
            rows.append(about)
    return pd.DataFrame(rows)


def frozen_scores(folder: Path, tasks: Sequence[str]) -> dict[str, float]:
    """Task -> test accuracy of the frozen encoder, mean of the tokens, probe of seed 0; and their mean.

    Empty until all tasks are there: a mean of others says nothing beside it.
    """
    if not (folder / "results.json").is_file():
        return {}
    cells = task_cells(folder)
    found = {}
    for task in tasks:
        for cell in cells.get(task, ()):
            if (cell["cell"]["mode"], cell["cell"]["seed"]) == ("frozen", 0):
                found[f"frozen_{task}"] = cell["pooled"]["mean"]["test"]["accuracy"]
    return found | {"frozen_mean": float(np.mean(list(found.values())))} if len(found) == len(tasks) else {}


def final_frozen_scores(measured: Path, names: Iterable[str], tasks: Sequence[str]) -> dict[str, float]:
    """Arm -> mean test accuracy of the frozen encoder at the end of its run, of those that were scored on all tasks."""
    found = {}
    for arm in names:
        for folder in (measured / "frozen" / arm, measured / "tasks" / arm):
            if scores := frozen_scores(folder, tasks):
                found[arm] = scores["frozen_mean"]
    return found


@dataclass(frozen=True)
class Share:
    """At what share of MLM's processor time MAE-LM has MLM's last value under a constant learning rate, for good.

    Attributes:
        reached: that share, between evaluations linear; None where it never does.
        observed: the share up to which MAE-LM was seen under a constant rate.
        goal, minutes: MLM's last value, and when it had it.
    """

    reached: float | None
    observed: float
    goal: float
    minutes: float


def share_of_compute(curves: pd.DataFrame, measure: str) -> Share:
    stable = curves[(curves["phase"] == "stable") & curves[measure].notna()]
    mlm, mae = (stable[stable["arm"] == arm].sort_values("cpu_minutes") for arm in ("mlm", "mae-lm"))
    sign = -1 if measure.endswith("loss") else 1
    goal, whole = mlm[measure].iloc[-1], mlm["cpu_minutes"].iloc[-1]
    x, y = mae["cpu_minutes"].to_numpy(), sign * mae[measure].to_numpy()
    short = np.flatnonzero(y < sign * goal)
    at = short[-1] + 1 if len(short) else 0  # the first of those from which on none falls short
    reached = None
    if at < len(y):
        when = x[0] if at == 0 else np.interp(sign * goal, [y[at - 1], y[at]], [x[at - 1], x[at]])
        reached = float(when / whole)
    return Share(reached, float(x[-1] / whole), float(goal), float(whole))


def difference(first: np.ndarray, second: np.ndarray) -> tuple[float, float, float]:
    """Mean of the first less mean of the second, and its 95 % interval over seeds (Welch).

    Raises:
        ValueError: one seed has no spread.
    """
    if min(len(first), len(second)) < 2:
        raise ValueError(f"an interval over seeds needs two of each at least: there are {len(first)} and {len(second)}")
    gap = float(first.mean() - second.mean())
    if max(np.ptp(first), np.ptp(second)) < 1e-9:  # no seed changes anything, but for rounding
        return gap, gap, gap
    low, high = stats.ttest_ind(first, second, equal_var=False).confidence_interval(0.95)
    return gap, float(low), float(high)


def paired_error(first: np.ndarray, second: np.ndarray, items: np.ndarray) -> float:
    """Half of the 95 % interval that a difference of two accuracies on the same examples has for their number alone.

    The examples are drawn anew, their items together: the ratio estimator of a sample of clusters (Cochran, "Sampling
    Techniques", 1977, section 2.11). With one item each it is the paired t interval.

    Args:
        first, second: (examples,) right items of each example.
        items: (examples,) their number: 1 of a text, of a sentence its words.
    """
    gap = (first.sum() - second.sum()) / items.sum()
    residuals = first - second - gap * items
    examples = len(items)
    error = math.sqrt(examples / (examples - 1) * (residuals**2).sum()) / items.sum()
    return float(stats.t.ppf(0.975, examples - 1) * error)


def rank_over_time(ranks: pd.DataFrame, arm: str, minutes: Mapping[int, float]) -> pd.DataFrame:
    """A row a probed step: minutes, and the ranks of the last layer on clean and on masked input."""
    rows = []
    for when in dict.fromkeys(ranks[ranks["arm"] == arm]["when"]):
        if when.startswith("after"):
            continue
        step = max(minutes) if when == "final" else int(when.rpartition("-")[2])
        by, row = last_layer(ranks, arm, when), {"minutes": minutes[step]}
        for power in (1, 2):
            row[f"unmasked_{power}"] = by.loc["unmasked", f"rank_power_{power}"]
            row[f"masked_{power}"] = by.loc["masked/all", f"rank_power_{power}"]
        rows.append(row)
    return pd.DataFrame(rows).sort_values("minutes")
