# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Results of fine-tuning: what is written, how it is summed up, and models side by side.

`OUT/TASK/cells/ID.json` is one finished cell. `OUT/results.json`, rewritten after every cell, is what a model card
reads:

    {"schema": 1, "model": NAME, "model_digest": SHA256, "command": ..., "environment": {...},
     "tasks": {TASK: {
        "kind", "dataset": {"type", "name", "config"}, "data_digest", "split_sizes": {SPLIT: n},
        "metric": the deciding one, "max_length", "attention", "precision" (each with its "..._reason"), "metrics_by",
        "settings": [{"setting": {"mode", "learning_rate", "batch_size", "epochs", ...}, "seeds": [...],
                      "scores": {SPLIT: {METRIC: {"values": [one a seed], "median", "min", "max", "std"}}}}],
        "best": the first of settings, "test_unlabelled": true where the test split has no labels}},
     "evaluation": [{"task_type", "task_name", "dataset_type", "dataset_name", "dataset_config", "dataset_split",
                     "metric_type", "value", "seeds", "std", "setting"}]}

`evaluation` has one entry for each metric and split of each task's best fine-tuned setting, and of its best frozen
one. Settings are ordered by the median of the deciding metric on validation, equal ones by its mean; test plays no
part in the choice. SQuAD's metrics are percent, all others fractions, as their benchmarks report them; `std` is the
sample standard deviation, null for one seed.
"""

import csv
import json
import os
import platform
import statistics
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from training.console import markdown

SCHEMA = 1
MODES = ("finetune", "frozen")
TASK_TYPES = {
    "classification": "text-classification",
    "regression": "text-classification",
    "tokens": "token-classification",
    "squad": "question-answering",
}


def write_json(path: Path, content: dict | list) -> None:
    """Writes the file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(path.name + f".{os.getpid()}.part")
    scratch.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8")
    os.replace(scratch, path)


def environment() -> dict:
    import torch
    import transformers

    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "hardware": torch.cuda.get_device_name() if torch.cuda.is_available() else _processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")  # on Linux platform.processor() is empty
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def summarise(values: list[float]) -> dict:
    """Every value, median, range and sample standard deviation (None for one value)."""
    return {
        "values": values,
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "std": statistics.stdev(values) if len(values) > 1 else None,
    }


def group_settings(cells: list[dict], metric: str) -> list[dict]:
    """Cells (as written) gathered by setting across seeds, the best median on validation first, equal ones by the mean.

    Settings with fewer seeds than others are unfinished, or were only tried, and come last.
    """
    groups: dict[str, list[dict]] = {}
    for cell in cells:
        groups.setdefault(json.dumps(cell["setting"], sort_keys=True), []).append(cell)
    settings = []
    for group in groups.values():
        group.sort(key=lambda cell: cell["cell"]["seed"])
        scores = {
            split: {name: summarise([cell["scores"][split][name] for cell in group]) for name in values}
            for split, values in group[0]["scores"].items()
        }
        seeds = [cell["cell"]["seed"] for cell in group]
        settings.append({"setting": group[0]["setting"], "seeds": seeds, "scores": scores})

    def quality(entry: dict) -> tuple[int, float, float]:
        validation = entry["scores"]["validation"][deciding_metric(entry, metric)]
        return len(entry["seeds"]), validation["median"], statistics.mean(validation["values"])

    return sorted(settings, key=quality, reverse=True)


def deciding_metric(entry: dict, metric: str) -> str:
    """The task's metric, but of a linear probe of tags, which knows no spans, the accuracy."""
    scores = next(iter(entry["scores"].values()))  # every split has the same
    return metric if metric in scores else "accuracy"


def evaluation_entries(tasks: dict) -> list[dict]:
    """One flat entry for each metric of each task's best setting of either mode, in a model card's terms."""
    return [
        {
            "task_type": TASK_TYPES[task["kind"]],
            "task_name": name,
            "dataset_type": task["dataset"].get("type", "local"),
            "dataset_name": task["dataset"].get("name", name),
            "dataset_config": task["dataset"].get("config", name),
            "dataset_split": split,
            "metric_type": metric,
            "value": summary["median"],
            "seeds": len(summary["values"]),
            "std": summary["std"],
            "setting": best["setting"],
        }
        for name, task in tasks.items()
        for best in best_of_each_mode(task["settings"])
        for split, metrics in best["scores"].items()
        for metric, summary in metrics.items()
    ]


def best_of_each_mode(settings: list[dict]) -> list[dict]:
    """The best fine-tuned setting and the best frozen one, as far as there are any, of settings in their order."""
    found = (next((entry for entry in settings if entry["setting"]["mode"] == mode), None) for mode in MODES)
    return [entry for entry in found if entry is not None]


def setting_name(setting: dict) -> str:
    if setting["mode"] == "frozen":
        return "frozen, linear probe"
    return f"lr {setting['learning_rate']:g}, batch {setting['batch_size']}, {setting['epochs']:g} epochs"


def results_table(results: dict) -> Table:
    """Every task and setting of one model: each seed, median and spread."""
    table = Table("task", "setting", "split", "metric", "median", "min to max", "each seed", title=results["model"])
    for name, task in results["tasks"].items():
        for rank, entry in enumerate(task["settings"]):
            for split, metrics in entry["scores"].items():
                for metric, summary in metrics.items():
                    if metric != deciding_metric(entry, task["metric"]) and rank > 0:
                        continue
                    seeds = " ".join(f"{value:.4g}" for value in summary["values"])
                    spread = f"{summary['min']:.4g} to {summary['max']:.4g}"
                    table.add_row(
                        name, setting_name(entry["setting"]), split, metric, f"{summary['median']:.4g}", spread, seeds
                    )
    return table


# ---- models side by side ---------------------------------------------


def load_results(path: Path) -> dict:
    """`results.json` of a run; ValueError where the folder has none or it is of another schema."""
    file = path / "results.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"{path}: no results.json here; give the --out folder of a fine-tuning run")
    results = json.loads(file.read_text("utf-8"))
    if results.get("schema") != SCHEMA:
        raise ValueError(f"{file}: schema {results.get('schema')!r}, this version reads {SCHEMA}")
    return results


def comparison_rows(runs: list[dict], names: list[str], split: str) -> tuple[list[str], list[list[str]]]:
    """Header and rows: a task and mode a row, a model a column, `median ± std (seeds)` of the best setting.

    The last rows average the tasks that every model has, by mode. Where two runs of a row used other data, the row
    says so.
    """
    tables = [_best_by_mode(run, split) for run in runs]
    rows: list[list[str]] = []
    shared: dict[str, list[list[float]]] = {}  # by mode: the medians of all models, of the tasks that each of them has
    for key in dict.fromkeys(key for table in tables for key in table):
        task, mode, metric = key
        found = [table.get(key) for table in tables]
        digests = {run["tasks"][task]["data_digest"] for run in runs if task in run["tasks"]}
        other = " (other data!)" if len(digests) > 1 else ""
        rows.append([task + other, mode, metric, *map(_median_and_spread, found)])
        if all(found):
            shared.setdefault(mode, []).append([summary["median"] for summary in found])
    for mode, medians in shared.items():
        if len(medians) > 1:
            means = [f"{statistics.mean(column):.2f}" for column in zip(*medians, strict=True)]
            rows.append([f"mean of {len(medians)} tasks", mode, "", *means])
    return ["task", "mode", "metric", *names], rows


def _best_by_mode(run: dict, split: str) -> dict[tuple[str, str, str], dict]:
    """The best setting's summary of the deciding metric, in percent, by (task, mode, metric)."""
    best: dict[tuple[str, str, str], dict] = {}
    for name, task in run["tasks"].items():
        scale = 1 if task["kind"] == "squad" else 100
        for entry in task["settings"]:
            if split in entry["scores"]:
                metric = deciding_metric(entry, task["metric"])
                values = [scale * value for value in entry["scores"][split][metric]["values"]]
                best.setdefault((name, entry["setting"]["mode"], metric), summarise(values))
    return best


def _median_and_spread(summary: dict | None) -> str:
    if summary is None:
        return "–"
    spread = f" ± {summary['std']:.2f}" if summary["std"] is not None else ""
    return f"{summary['median']:.2f}{spread} ({len(summary['values'])})"


def print_comparison(header: list[str], rows: list[list[str]], split: str, console: Console) -> None:
    table = Table(
        *header, title=f"best setting by validation, on {split}: median ± standard deviation (seeds), in percent"
    )
    for row in rows:
        table.add_row(*row)
    console.print(table)


def write_table(path: Path, header: list[str], rows: list[list[str]]) -> None:
    """The table as Markdown (.md) or CSV (.csv), by the ending."""
    if path.suffix not in (".md", ".csv"):
        raise ValueError(f"{path}: the table is written as .md or .csv")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".md":
        path.write_text(markdown(header, rows), "utf-8")
        return
    with open(path, "w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([header, *rows])
