# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""What `training.study_measure` left, as tables: ranks, scores, curves, and what is read off them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

from maelm_hf.probing import RankReport, effective_rank

from .finetune_report import load_results
from .monitoring import read_log
from .recipe import load_recipe

TAU = 0.9
TIMED_RATIO = 0.15
# Intervals are those of the first power, not centred.
_AS_REPORTED = ("effective_rank_low", "effective_rank_high", "deficiency_low", "deficiency_high", "subspace_dim")
_AS_REPORTED += ("mask_energy_outside", "real_energy_outside")


def rank_rows(reports: Path, names: Mapping[str, str]) -> pd.DataFrame:
    """Every layer and population of every report: the effective rank by both powers, raw and centred.

    Args:
        reports: folder of reports, ARM/WHEN.
        names: arm -> objective.
    """
    rows = []
    for arm, objective in names.items():
        for folder in sorted((reports / arm).glob("*")):
            report = RankReport.load(folder)
            for row in report.rows:
                found = {"arm": arm, "objective": objective, "when": folder.name, "layer": row["layer_index"]}
                found |= {key: row[key] for key in ("population", "tokens", "dim")}
                for centred in (False, True):
                    spectrum = report.spectrum(row["layer"], row["population"], centred=centred)
                    for power in (1, 2):
                        key = f"rank_power_{power}{'_centred' if centred else ''}"
                        found[key] = int(effective_rank(spectrum, TAU, power))
                rows.append(found | {key: row[key] for key in _AS_REPORTED})
    return pd.DataFrame(rows)


def score_rows(tasks: Path, names: Mapping[str, str]) -> pd.DataFrame:
    """Every cell's accuracy: the setting that is best on validation among those with the most seeds.

    ``examples`` are those of the split: texts, or sentences where words are tagged.
    """
    rows = []
    for arm, objective in names.items():
        about_tasks = load_results(tasks / arm)["tasks"]
        for folder in sorted(path for path in (tasks / arm).glob("*") if (path / "cells").is_dir()):
            sizes, digest = (about_tasks[folder.name][key] for key in ("split_sizes", "data_digest"))
            cells = [json.loads(path.read_text()) for path in sorted((folder / "cells").glob("*.json"))]
            for cell in _best_setting([cell for cell in cells if cell["cell"]["data_digest"] == digest]):
                seed, about = cell["cell"]["seed"], {"arm": arm, "objective": objective, "task": folder.name}
                about["learning_rate"] = cell["setting"].get("learning_rate")  # none of a probe
                fine_tuned = cell["cell"]["mode"] == "finetune"
                scores = {"finetune": cell["scores"]} if fine_tuned else cell["pooled"]
                for mode, splits in scores.items():
                    for split, metrics in splits.items():
                        found = {"mode": mode, "seed": seed, "split": split, "examples": sizes[split]}
                        rows.append(about | found | {"accuracy": metrics["accuracy"]})
    return pd.DataFrame(rows)


def _best_setting(cells: list[dict]) -> list[dict]:
    """The frozen cells, and of the fine-tuned ones those of the best setting."""
    frozen = [cell for cell in cells if cell["cell"]["mode"] == "frozen"]
    groups: dict[str, list[dict]] = {}
    for cell in cells:
        if cell["cell"]["mode"] == "finetune":
            groups.setdefault(json.dumps(cell["setting"], sort_keys=True), []).append(cell)

    def quality(group: list[dict]) -> tuple[int, float]:
        return len(group), float(np.median([cell["scores"]["validation"]["accuracy"] for cell in group]))

    return frozen + (max(groups.values(), key=quality) if groups else [])


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
            results = frozen / f"{arm}-step-{step:09d}" / "results.json"
            if results.is_file() and (scores := frozen_scores(results, tasks)):
                about |= scores
            elif phase == "end" and arm in at_end:
                about["frozen_mean"] = at_end[arm]
            rows.append(about)
    return pd.DataFrame(rows)


def frozen_scores(results: Path, tasks: Sequence[str]) -> dict[str, float]:
    """Task -> test accuracy of the frozen encoder (median of its seeds), and their mean; empty until all are there."""
    found = {}
    for name in tasks:
        for entry in json.loads(results.read_text())["tasks"].get(name, {"settings": []})["settings"]:
            if entry["setting"]["mode"] == "frozen":
                found[f"frozen_{name}"] = entry["scores"]["test"]["accuracy"]["median"]
    if len(found) < len(tasks):
        return {}
    return found | {"frozen_mean": float(np.mean(list(found.values())))}


def final_frozen_scores(measured: Path, names: Iterable[str], tasks: Sequence[str]) -> dict[str, float]:
    """Arm -> mean test accuracy of the frozen encoder at the end of its run, of those that were scored on all tasks."""
    found = {}
    for arm in names:
        for results in (measured / "frozen" / arm / "results.json", measured / "tasks" / arm / "results.json"):
            if results.is_file() and (scores := frozen_scores(results, tasks)):
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


def both_measured(scores: pd.DataFrame) -> pd.DataFrame:
    """The scores on test of tasks and modes in which both arms have any."""
    part = scores[scores["split"] == "test"]
    return part[part.groupby(["task", "mode"])["arm"].transform("nunique") == 2]


def difference(first: np.ndarray, second: np.ndarray) -> tuple[float, float, float]:
    """Mean of the first less mean of the second, and its 95 % interval over seeds (Welch)."""
    if max(np.ptp(first), np.ptp(second)) < 1e-9:  # what no seed changes, but for rounding
        gap = float(first.mean() - second.mean())
        return gap, gap, gap
    test = stats.ttest_ind(first, second, equal_var=False)
    low, high = test.confidence_interval(0.95)
    return float(first.mean() - second.mean()), float(low), float(high)


def sampling_error(first: float, second: float, examples: int) -> float:
    """Half of the 95 % interval of a difference of two accuracies (fractions) that comes of the test set's size alone.

    As if each had been measured on examples of its own; on the same ones it is less by what their errors share.
    """
    return 1.96 * math.sqrt((first * (1 - first) + second * (1 - second)) / examples)


def last_layer(ranks: pd.DataFrame, arm: str, minutes: Mapping[int, float]) -> pd.DataFrame:
    """A row a probed step: minutes, and the ranks of the last layer on clean and on masked input."""
    part = ranks[(ranks["arm"] == arm) & ~ranks["when"].str.startswith("after")]
    part = part[part["layer"] == part["layer"].max()]
    rows = []
    for when, reports in part.groupby("when"):
        step = max(minutes) if when == "final" else int(when.rpartition("-")[2])
        by = reports.set_index("population")
        row = {"minutes": minutes[step]}
        for power in (1, 2):
            row[f"unmasked_{power}"] = by.loc["unmasked", f"rank_power_{power}"]
            row[f"masked_{power}"] = by.loc["masked/all", f"rank_power_{power}"]
        rows.append(row)
    return pd.DataFrame(rows).sort_values("minutes")
