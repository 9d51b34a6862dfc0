# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Fine-tune an encoder on a task over a grid of settings and seeds, or probe it frozen, and compare models.

    python -m training.finetune MODEL --task sst2 --seeds 5 --out runs/finetune/mine
    python -m training.finetune MODEL --task cola,rte,mrpc --grid paper --seeds 5 --out runs/finetune/mine
    python -m training.finetune MODEL --task rotten_tomatoes --frozen --seeds 3 --out runs/finetune/mine
    python -m training.finetune MODEL --task text --train a.csv --validation b.csv --label stars --out runs/mine
    python -m training.finetune compare runs/finetune/mine runs/finetune/other

MODEL is a folder of `save_pretrained` or a Hub name: any transformers encoder. A finished cell (one setting, one
seed) is never run again: start the same command once more after a stop, or with more seeds. The best model of each
task is in `OUT/TASK/model`, every number in `OUT/results.json` (its form: training/finetune_report.py).
"""

import json
from pathlib import Path

import typer
from typer.core import TyperGroup

import maelm_hf  # noqa: F401 registers the Auto classes of MAE-LM
from training import finetune_report as report
from training.console import console, help_text
from training.finetune_data import DataOptions, known_tasks
from training.finetune_grid import Plan, run_cell_of, run_task
from training.metrics import offline_if_unreachable

# The grid nearest to the paper's: AMOS and COCO-LM (see finetune_data.EPOCHS).
PAPER_LEARNING_RATES = (1e-5, 2e-5, 3e-5, 4e-5)
PAPER_BATCH_SIZES = (16, 32)


class RunByDefault(TyperGroup):
    """`MODEL --task ...` means `run MODEL --task ...`."""

    def parse_args(self, ctx, args):
        if args and args[0] not in self.commands and args[0] not in ("--help", "-h"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=RunByDefault, add_completion=False, no_args_is_help=True, help=help_text(__doc__), rich_markup_mode=None
)


def comma_list(value: str | None, kind: type = str) -> tuple | None:
    try:
        return tuple(kind(part) for part in value.split(",")) if value is not None else None
    except ValueError:
        raise typer.BadParameter(f"{value!r} is not a comma-separated list of {kind.__name__}s") from None


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise typer.BadParameter(f"--{name} must be one of {', '.join(allowed)}, got {value!r}")
    return value


@app.command()
def run(
    model: str = typer.Argument(..., help="Folder of a saved model, or a Hub name."),
    task: str = typer.Option(..., help="One or more, with commas: " + ", ".join(known_tasks()) + "."),
    out: Path = typer.Option(..., help="Where results and models go; resumes what is there."),  # noqa: B008
    seeds: int = typer.Option(1, min=1, help="Seeds 0 to N-1 for every setting."),
    frozen: bool = typer.Option(False, "--frozen", help="Keep the encoder as it is: a linear probe on its features."),
    data: str = typer.Option(
        None, help="Folder: GLUE's TSV layout, SQuAD's JSON files, or saved `datasets`. Default: the Hub."
    ),
    train: str = typer.Option(None, help="Own file (csv, tsv, json, jsonl, parquet; CoNLL columns; SQuAD JSON)."),
    validation: str = typer.Option(None, help="Own file for validation."),
    test: str = typer.Option(None, help="Own file for test; without labels it is predicted, not scored."),
    text: str = typer.Option("text", help="Column of the text."),
    pair: str = typer.Option(None, help="Column of the second text of a pair."),
    label: str = typer.Option("label", help="Column of the label or number."),
    labels: str = typer.Option(None, help="Class names in order, with commas. Default: those of train, sorted."),
    token_column: int = typer.Option(0, help="CoNLL column of the token, from 0."),
    tag_column: int = typer.Option(-1, help="CoNLL column of the tag; -1 is the last."),
    grid: str = typer.Option("single", help="single, or paper: learning rates 1e-5 to 4e-5 by batch sizes 16 and 32."),
    lr: str = typer.Option(None, help="Learning rates, with commas. Default 2e-5."),
    batch_size: str = typer.Option(None, help="Batch sizes, with commas. Default 32."),
    epochs: str = typer.Option(None, help="Epochs, with commas. Default: the published number of the task, else 3."),
    early_stop: int = typer.Option(0, min=0, help="Stop after N epochs without a better validation score; 0 never."),
    max_length: int = typer.Option(
        None, min=8, help="Tokens. Default: holds 99 % of the training texts, at most 256; SQuAD 384."
    ),
    attention: str = typer.Option("auto", help="sdpa, eager, or auto: the faster one, measured on the task's batches."),
    precision: str = typer.Option("auto", help="fp32, bf16, or auto: bf16 where a GPU has it."),
    metrics: str = typer.Option(
        "auto", help="evaluate (runs the Hub's metric scripts), sklearn, or auto: evaluate if the Hub answers."
    ),
    jobs: int = typer.Option(None, min=1, help="Cells at a time. Default: one for each GPU, one on a CPU."),
    quiet: bool = typer.Option(False, help="No progress bars."),
) -> None:
    """Runs the grid of a model on one or more tasks."""
    files = {n: f for n, f in (("train", train), ("validation", validation), ("test", test)) if f is not None}
    try:
        paper = one_of("grid", grid, ("single", "paper")) == "paper"
        plan = Plan(
            learning_rates=comma_list(lr, float) or (PAPER_LEARNING_RATES if paper else (2e-5,)),
            batch_sizes=comma_list(batch_size, int) or (PAPER_BATCH_SIZES if paper else (32,)),
            epochs=comma_list(epochs, float),
            seeds=seeds,
            frozen=frozen,
            early_stop=early_stop,
            max_length=max_length,
            attention=one_of("attention", attention, ("auto", "sdpa", "eager")),
            precision=one_of("precision", precision, ("auto", "fp32", "bf16")),
            metrics=one_of("metrics", metrics, ("auto", "evaluate", "sklearn")),
            jobs=jobs,
            quiet=quiet,
        )
        options = {
            "folder": data,
            "files": files,
            "text": text,
            "pair": pair,
            "label": label,
            "labels": comma_list(labels),
            "token_column": token_column,
            "tag_column": tag_column,
        }
        with offline_if_unreachable() as reason:
            if reason:
                console.print(f"working offline: {reason}")
            done = [run_task(model, DataOptions(name, **options), plan, out) for name in task.split(",")]
    except (ValueError, RuntimeError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    if (out / "results.json").is_file():
        console.print(report.results_table(report.load_results(out)))
    if not all(done):
        raise typer.Exit(1)


@app.command()
def compare(
    runs: list[Path] = typer.Argument(..., help="Two or more --out folders."),  # noqa: B008
    split: str = typer.Option(
        "validation", help="Split whose scores are shown; settings are chosen on validation always."
    ),
    names: str = typer.Option(None, help="Column names, with commas. Default: the folders' names."),
    write: Path = typer.Option(None, help="Also write the table: a .md or .csv file."),  # noqa: B008
) -> None:
    """One table of several models: median ± standard deviation over seeds of each task's deciding metric."""
    try:
        loaded = [report.load_results(path) for path in runs]
        titles = list(comma_list(names) or (path.resolve().name for path in runs))
        if len(titles) != len(runs):
            raise ValueError(f"--names has {len(titles)} names for {len(runs)} runs")
        header, rows = report.comparison_rows(loaded, titles, split)
        if not rows:
            raise ValueError(f"no run has scores on the split {split!r}")
        report.print_comparison(header, rows, split, console)
        if write is not None:
            report.write_table(write, header, rows)
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None


@app.command(hidden=True)
def cell(specification: Path) -> None:
    """Runs one cell in a process of its own; the result goes beside the specification."""
    spec = json.loads(specification.read_text("utf-8"))
    result = run_cell_of(spec, quiet=True)
    report.write_json(specification.with_name("result.json"), result)


if __name__ == "__main__":
    app()
