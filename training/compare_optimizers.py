# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""AdamW or Muon: which reaches the loss that AdamW ends with first, in tokens and in time?

    python -m training.compare_optimizers --out results/optimizers

Trains the `mini` recipe's model on its text from the same seeds with either optimizer, on the same batches and masks.
AdamW's learning rate is the best of a grid, on the first seed. Writes `curves.csv`, `comparison.csv`, `comparison.png`
and `README.md`. Runs are kept in `runs/optimizers`: the same command continues them.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
import typer

from .console import console, markdown
from .monitoring import read_log
from .pretrain import run
from .recipe import Recipe, load_recipe

RECIPE = Path(__file__).parent / "recipes" / "mini.yaml"
COLORS = {"adamw": "tab:gray", "muon": "tab:blue"}


def compare(
    out: Annotated[Path, typer.Option(help="Folder for the tables and the figure.")],
    runs: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs/optimizers"),
    steps: Annotated[int, typer.Option(help="Optimizer steps of a run.")] = 800,
    batch_tokens: Annotated[int, typer.Option(help="Real tokens of a step.")] = 3072,
    seeds: Annotated[int, typer.Option(help="Seeds of each optimizer.")] = 3,
    adamw_rates: Annotated[str, typer.Option(help="AdamW's learning rates to choose from.")] = "1e-3,3e-3",
    extra: Annotated[list[str] | None, typer.Argument(help="Further overrides of the recipe: --key value ...")] = None,
) -> None:
    """AdamW against Muon on the mini recipe."""
    overrides = ["--max_steps", str(steps), "--data.batch_tokens", str(batch_tokens)]
    overrides += ["--evaluate_every", str(max(1, steps // 40)), "--evaluation_blocks", "256"]
    # Short blocks and few words: with the recipe's own a run this short never leaves the unigram plateau.
    overrides += ["--data.max_length", "64", "--tokenizer.vocab_size", "4096", "--model.initializer_range", "0.06"]
    overrides += ["--optimizer.warmup_steps", str(max(1, steps // 20)), *(extra or [])]

    def train(name: str, rate: float, seed: int) -> Path:
        own = ["--optimizer.name", name, "--seed", str(seed)]
        own += ["--optimizer.learning_rate", repr(rate)] if name == "adamw" else []
        recipe = load_recipe(RECIPE, overrides + own)
        folder = runs / (f"{name}-{rate:g}-seed{seed}" if name == "adamw" else f"{name}-seed{seed}")
        return trained(replace(recipe, output_dir=str(folder)))

    rates = [float(rate) for rate in adamw_rates.split(",")]
    tried = {rate: final_loss(train("adamw", rate, 0)) for rate in rates}
    rate = min(tried, key=tried.__getitem__)
    folders = {("adamw", seed): train("adamw", rate, seed) for seed in range(seeds)}
    folders |= {("muon", seed): train("muon", rate, seed) for seed in range(seeds)}
    report(out, folders, tried, rate)


def trained(recipe: Recipe) -> Path:
    """The folder of the finished run, trained now where it is not finished yet."""
    folder = Path(recipe.output_dir)
    summary = folder / "summary.json"
    if not (summary.is_file() and json.loads(summary.read_text())["finished"]):
        console.print(f"training {folder}")
        if not run(recipe).finished:
            raise SystemExit("stopped by SIGTERM; the same command continues")
    return folder


def final_loss(folder: Path) -> float:
    return read_log(folder / "evaluations.jsonl")[-1]["loss"]


def curve(folder: Path) -> pd.DataFrame:
    """Held-out loss by tokens and by seconds of training, a step taken for its median: a pause does not count."""
    steps = pd.DataFrame(read_log(folder / "log.jsonl"))
    seconds = statistics.median(steps["tokens"] / steps["tokens_per_second"])
    evaluations = pd.DataFrame(read_log(folder / "evaluations.jsonl"))[["step", "loss", "accuracy"]]
    tokens = steps["tokens"].cumsum().to_numpy()[evaluations["step"] - 1]
    return evaluations.assign(tokens=tokens, seconds=seconds * evaluations["step"], step_seconds=seconds)


def reached(points: pd.DataFrame, column: str, loss: float) -> float:
    """Where the curve first falls to ``loss``, between evaluations by a straight line; NaN where it never does."""
    below = np.flatnonzero(points["loss"] <= loss)
    if not len(below):
        return float("nan")
    last = below[0]
    if last == 0:
        return float(points[column].iloc[0])
    pair = points.iloc[last - 1 : last + 1]
    return float(np.interp(-loss, -pair["loss"], pair[column]))


def report(out: Path, folders: dict[tuple[str, int], Path], tried: dict[float, float], rate: float) -> None:
    """Tables, figure and text."""
    out.mkdir(parents=True, exist_ok=True)
    curves = {key: curve(folder) for key, folder in folders.items()}
    everything = [points.assign(optimizer=name, seed=seed) for (name, seed), points in curves.items()]
    pd.concat(everything).round(5).to_csv(out / "curves.csv", index=False)
    rows = []
    for (name, seed), points in curves.items():
        if name == "adamw":
            continue
        adamw = curves["adamw", seed]
        goal = adamw["loss"].iloc[-1]
        rows.append(
            {
                "seed": seed,
                "AdamW, final loss": goal,
                "Muon, final loss": points["loss"].iloc[-1],
                "share of tokens": reached(points, "tokens", goal) / adamw["tokens"].iloc[-1],
                "share of time": reached(points, "seconds", goal) / adamw["seconds"].iloc[-1],
                "step, Muon / AdamW": points["step_seconds"].iloc[0] / adamw["step_seconds"].iloc[0],
            }
        )
    table = pd.DataFrame(rows)
    table.round(4).to_csv(out / "comparison.csv", index=False)
    plot(out / "comparison.png", curves)
    summary = json.loads((folders["adamw", 0] / "summary.json").read_text())
    body = [[f"{row['seed']}", *(f"{value:.3f}" for name, value in row.items() if name != "seed")] for row in rows]
    learning_rates = ", ".join(f"{key:g}: {value:.3f}" for key, value in tried.items())
    (out / "README.md").write_text(
        "# AdamW or Muon\n\n`python -m training.compare_optimizers --out results/optimizers`\n\n"
        f"{summary['parameters']:,} parameters, {summary['steps']:,} steps, {summary['tokens']:,} tokens a run, "
        f"linear schedule, {summary['choices']['precision']['value']}, {summary['hardware']}. Held-out loss of AdamW "
        f"on the first seed by learning rate: {learning_rates}; {rate:g} was taken. The shares say how much of AdamW's "
        "tokens and of its time Muon needs to reach the loss that AdamW ends with, same seed.\n\n"
        + markdown(list(table.columns), body)
        + "\n![held-out loss by tokens and by time](comparison.png)\n"
    )
    console.print(markdown(list(table.columns), body), markup=False)


def plot(path: Path, curves: dict[tuple[str, int], pd.DataFrame]) -> None:
    """Held-out loss by tokens and by time, a line a seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, constrained_layout=True)
    names = {"adamw": "AdamW", "muon": "Muon"}
    for axis, column, scale in zip(axes, ("tokens", "seconds"), (1e6, 60), strict=True):
        for (name, seed), points in curves.items():
            label = names[name] if seed == 0 else None
            axis.plot(points[column] / scale, points["loss"], color=COLORS[name], linewidth=1.3, label=label)
        axis.grid(alpha=0.25)
    axes[0].set_xlabel("tokens (millions)")
    axes[1].set_xlabel("time in training steps (minutes)")
    axes[0].set_ylabel("held-out cross-entropy (nats)")
    axes[0].legend(frameon=False)
    figure.suptitle("Pretraining with AdamW and with Muon, a line a seed")
    figure.savefig(path, dpi=160)
    plt.close(figure)


if __name__ == "__main__":
    typer.run(compare)
