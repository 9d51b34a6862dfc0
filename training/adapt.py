# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Continued pretraining of an existing encoder, and what it changed: loss, rank by layer, scores on a labelled task.

    python -m training.pretrain --from-encoder NAME --data MY_TEXT
    python -m training.pretrain --from-encoder NAME --data MY_TEXT --twin mlm        the stock objective, the same path
    python -m training.pretrain --from-encoder NAME --data MY_TEXT --task rotten_tomatoes --seeds 3
    python -m training.pretrain --from-encoder NAME --data MY_TEXT --task text --train a.csv --validation b.csv

NAME is a folder or Hub name of any encoder of transformers that follows ``position_ids``; settings come from
`training/recipes/adapt.yaml` unless a recipe is named first, and any of its keys may follow. The output folder holds
what every run leaves, and: `encoder/`, the continued encoder in its own architecture with its tokenizer, which
``AutoModel`` loads with transformers alone; `probes/`, the rank reports before, during and after; `scores/`, the frozen
and fine-tuned scores; `adaptation.md`, `adaptation.json` and `adaptation.png`, the comparison.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.table import Table

from maelm_hf.modeling_maelm import brings_head, load_encoder_config
from maelm_hf.probing import RankReport

from .console import console, markdown
from .finetune_data import DataOptions, load_task
from .finetune_grid import Plan, run_task
from .finetune_report import deciding_metric, load_results
from .monitoring import read_log, try_to_write
from .recipe import LabelledSection, Recipe, RecipeError

RECIPE = Path(__file__).parent / "recipes" / "adapt.yaml"
POPULATION = "unmasked"  # the input of every later use
_OPTIONS = {"--from-encoder": "--from_encoder", "--data": "--corpus.source"}


def recipe_arguments(arguments: Sequence[str]) -> list[str]:
    """The command line as a recipe and its own keys; of ``--from-encoder`` without a recipe, ``recipes/adapt.yaml``."""
    result = []
    for argument in arguments:
        option, equals, value = argument.partition("=")
        result.append(_OPTIONS.get(option, option) + equals + value)
    encoder = _value_of(result, "--from_encoder")
    if encoder is None or any(argument.endswith((".yaml", ".yml")) for argument in result):
        return result
    if _value_of(result, "--output_dir") is None:
        name = short_name(encoder).replace("/", "-")
        twin = "mlm" if _value_of(result, "--twin") == "mlm" else "mae-lm"
        result += ["--output_dir", f"runs/adapt/{name}-{twin}"]
    return [str(RECIPE), *result]


def short_name(encoder: str) -> str:
    """The last two parts of a path or Hub name."""
    return "/".join([part for part in Path(encoder).parts if part != "/"][-2:])


def _value_of(arguments: Sequence[str], option: str) -> str | None:
    for argument, following in zip(arguments, [*arguments[1:], None], strict=True):
        if argument == option:
            return following
        if argument.startswith(f"{option}="):
            return argument.partition("=")[2]
    return None


@dataclass
class Adaptation:
    """What continued pretraining changed. ``ranks`` by layer; ``scores`` by mode, every seed, before and after."""

    encoder: str
    twin: str
    steps: int
    head: str  # new, or the encoder's
    held_out: dict[str, dict[str, float]]  # before, after -> loss in nats, accuracy
    rank_label: str | None = None
    layers: list[str] = field(default_factory=list)
    ranks: dict[str, list[int]] = field(default_factory=dict)  # before, after
    task: str | None = None
    metric: str | None = None
    split: str | None = None
    scores: dict[str, dict[str, list[float]]] = field(default_factory=dict)  # mode -> before, after -> a value a seed


def check_task(labelled: LabelledSection) -> None:
    """Reads the labelled task before hours of training, not after them.

    Raises:
        RecipeError: it cannot be used.
    """
    if labelled.task is None or os.environ.get("RANK", "0") != "0":
        return
    try:
        kind = load_task(data_options(labelled)).kind
    except (ValueError, RuntimeError, OSError) as error:
        raise RecipeError(f"labelled.task {labelled.task}: {' '.join(str(error).split())}") from None
    if kind == "squad":
        raise RecipeError(
            "labelled.task scores single labels and tags; question answering: python -m training.finetune."
        )


def data_options(labelled: LabelledSection) -> DataOptions:
    files = {split: getattr(labelled, split) for split in ("train", "validation", "test")}
    return DataOptions(
        labelled.task,
        files={split: path for split, path in files.items() if path is not None},
        text=labelled.text,
        pair=labelled.pair,
        label=labelled.label,
    )


def report(recipe: Recipe) -> Adaptation:
    """Scores the encoder before and after, and writes the table and the figure of a finished run."""
    run = Path(recipe.output_dir)
    adaptation = read_run(recipe)
    if recipe.labelled.task is not None:
        add_scores(adaptation, recipe.labelled, {"before": recipe.from_encoder, "after": str(run / "encoder")}, run)
    try_to_write(run / "adaptation.json", lambda path: path.write_text(json.dumps(asdict(adaptation), indent=1)), print)
    try_to_write(run / "adaptation.md", lambda path: path.write_text(describe(adaptation)), print)
    try_to_write(run / "adaptation.png", lambda path: draw(adaptation, run, path), print)
    show(adaptation)
    console.print(f"encoder: {run / 'encoder'}; table and figure: {run / 'adaptation.md'}, adaptation.png")
    return adaptation


def read_run(recipe: Recipe) -> Adaptation:
    """Held-out loss and rank by layer before and after, as the run logged them."""
    run = Path(recipe.output_dir)
    rows = read_log(run / "evaluations.jsonl")
    held_out = {
        when: {"loss": row["loss"], "accuracy": row["accuracy"]}
        for when, row in (("before", rows[0]), ("after", rows[-1]))
    }
    twin = "MLM" if recipe.twin == "mlm" else "MAE-LM"
    own = brings_head(load_encoder_config(recipe.from_encoder, recipe.trust_remote_code))
    adaptation = Adaptation(recipe.from_encoder, twin, rows[-1]["step"], "the encoder's" if own else "new", held_out)
    probes = sorted((run / "probes").glob("step-*"))
    if len(probes) > 1:
        for when, folder in (("before", probes[0]), ("after", probes[-1])):
            found = RankReport.load(folder)
            by_layer = [row for row in found.rows if row["population"] == POPULATION]
            adaptation.layers = ["embeddings", *(f"layer {number}" for number in range(1, len(by_layer)))]
            adaptation.ranks[when] = [row["effective_rank"] for row in by_layer]
            adaptation.rank_label = f"{found.rank_label} of {by_layer[0]['dim']}"
    return adaptation


def add_scores(adaptation: Adaptation, labelled: LabelledSection, models: dict[str, str], run: Path) -> None:
    """Frozen and fine-tuned scores; finished cells of an earlier start are kept."""
    adaptation.task = labelled.task
    for when, model in models.items():
        console.rule(f"{labelled.task}: {when}")
        for mode, found in score(model, labelled, run / "scores" / when).items():
            adaptation.metric, adaptation.split = found.metric, found.split
            adaptation.scores.setdefault(mode, {})[when] = found.values


@dataclass(frozen=True)
class Score:
    metric: str
    split: str  # test where it has labels, else validation
    values: list[float]  # one a seed


def score(model: str, labelled: LabelledSection, out: Path) -> dict[str, Score]:
    """``frozen`` and, where asked for, ``finetune`` -> score of a saved encoder.

    Raises:
        RecipeError: a cell failed; the reason is printed.
    """
    epochs = None if labelled.epochs is None else (labelled.epochs,)
    plans = [Plan(frozen=True, seeds=labelled.seeds, metrics="sklearn")]
    if labelled.fine_tune:
        plans.append(Plan(seeds=labelled.seeds, epochs=epochs, metrics="sklearn"))
    try:
        done = [run_task(model, data_options(labelled), plan, out) for plan in plans]
    except (ValueError, RuntimeError) as error:
        raise RecipeError(f"labelled.task {labelled.task}: {' '.join(str(error).split())}") from None
    if not all(done):
        raise RecipeError(f"labelled.task {labelled.task}: a score failed, see above; the same command goes on.")
    task = load_results(out)["tasks"][labelled.task]
    found = {}
    for entry in task["settings"]:  # the best setting of a mode comes first
        split = "test" if "test" in entry["scores"] else "validation"
        metric = deciding_metric(entry, task["metric"])
        found.setdefault(entry["setting"]["mode"], Score(metric, split, entry["scores"][split][metric]["values"]))
    return found


# --- what people look at ----------------------------------------------------------------------------------------------

_MODES = {"frozen": "frozen encoder", "finetune": "fine-tuned"}


def rows_of(adaptation: Adaptation) -> list[list[str]]:
    """Number, before, after, change."""
    loss, accuracy = (
        [adaptation.held_out[when][name] for when in ("before", "after")] for name in ("loss", "accuracy")
    )
    rows = [_row("held-out loss (nats)", *loss, 3), _row("held-out accuracy", *accuracy, 3)]
    for mode, values in adaptation.scores.items():
        name = f"{adaptation.task}, {_MODES[mode]}, {adaptation.metric} ({adaptation.split})"
        rows.append(_row(name, *(statistics.median(values[when]) for when in ("before", "after")), 4))
    for number, layer in enumerate(adaptation.layers):
        rows.append(
            _row(f"effective rank, {layer}", *(adaptation.ranks[when][number] for when in ("before", "after")), 0)
        )
    return rows


def _row(name: str, before: float, after: float, digits: int) -> list[str]:
    return [name, f"{before:.{digits}f}", f"{after:.{digits}f}", f"{after - before:+.{digits}f}"]


def notes_of(adaptation: Adaptation) -> list[str]:
    notes = []
    new = "decoder" if adaptation.twin == "MAE-LM" else "head" if adaptation.head == "new" else None
    if new is not None:
        notes.append(f"The loss before is that of a {new} that is still new; it says nothing about the encoder.")
    if adaptation.ranks:
        notes.append(f"{adaptation.rank_label}, tokens of input without [MASK], held-out documents.")
    seeds = {len(values["after"]) for values in adaptation.scores.values()}
    if seeds:
        notes.append(f"Scores are medians of {max(seeds)} seed{'s' if max(seeds) > 1 else ''}.")
    return notes


def describe(adaptation: Adaptation) -> str:
    title = f"# {short_name(adaptation.encoder)}, continued by {adaptation.twin} for {adaptation.steps:,} steps\n\n"
    table = markdown(["", "before", "after", "change"], rows_of(adaptation))
    return title + table + "".join(f"\n- {note}" for note in notes_of(adaptation)) + "\n"


def show(adaptation: Adaptation) -> None:
    table = Table("", title=f"{short_name(adaptation.encoder)}, {adaptation.twin}, {adaptation.steps:,} steps")
    for name in ("before", "after", "change"):
        table.add_column(name, justify="right")
    for row in rows_of(adaptation):
        table.add_row(*row)
    console.print(table)
    for note in notes_of(adaptation):
        console.print(note, markup=False)


def draw(adaptation: Adaptation, run: Path, path: Path) -> None:
    """Held-out loss by step, rank by layer, and the scores."""
    from matplotlib.figure import Figure

    panels = 1 + bool(adaptation.ranks) + bool(adaptation.scores)
    figure = Figure(figsize=(4.2 * panels, 3.8), layout="constrained")
    axes = list(figure.subplots(1, panels, squeeze=False)[0])
    _draw_loss(axes.pop(0), run)
    if adaptation.ranks:
        _draw_ranks(axes.pop(0), adaptation, run)
    if adaptation.scores:
        _draw_scores(axes.pop(0), adaptation)
    figure.suptitle(f"{short_name(adaptation.encoder)}, continued by {adaptation.twin}", fontsize=11)
    figure.savefig(path, dpi=160)


BEFORE, AFTER, DURING = "#0072B2", "#D55E00", "0.7"


def _draw_loss(axes, run: Path) -> None:
    rows = read_log(run / "evaluations.jsonl")
    axes.plot([row["step"] for row in rows], [row["loss"] for row in rows], "o-", color=AFTER, markersize=4)
    axes.set(title="Held-out loss", xlabel="optimizer step", ylabel="cross-entropy of hidden tokens (nats)")
    axes.grid(alpha=0.25)


def _draw_ranks(axes, adaptation: Adaptation, run: Path) -> None:
    layers = range(len(adaptation.layers))
    for row in read_log(run / "ranks.jsonl")[1:-1]:
        ranks = [value for name, value in row.items() if name.endswith(f"/{POPULATION}")]
        axes.plot(layers, ranks, color=DURING, linewidth=0.8, label="during")
    axes.plot(layers, adaptation.ranks["before"], "o-", color=BEFORE, markersize=4, label="before")
    axes.plot(layers, adaptation.ranks["after"], "s-", color=AFTER, markersize=4, label="after")
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))  # "during" once
    axes.legend(handles.values(), handles.keys(), frameon=False, fontsize=9)
    axes.set(title="Effective rank by layer", xlabel="layer (0: embeddings)", ylabel=adaptation.rank_label)
    axes.yaxis.label.set_fontsize(8)
    axes.set_xticks(list(layers)[:: max(1, len(layers) // 12)])
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)


def _draw_scores(axes, adaptation: Adaptation) -> None:
    for place, values in enumerate(adaptation.scores.values()):
        medians = [statistics.median(values[when]) for when in ("before", "after")]
        axes.plot([place - 0.15, place + 0.15], medians, color="0.5", linewidth=1)
        for shift, when, colour, marker in ((-0.15, "before", BEFORE, "o"), (0.15, "after", AFTER, "s")):
            at = [place + shift] * len(values[when])
            axes.plot(at, values[when], marker, color=colour, markersize=5, label=when if place == 0 else None)
    axes.set_xticks(range(len(adaptation.scores)), [_MODES[mode] for mode in adaptation.scores])
    axes.set_xlim(-0.5, len(adaptation.scores) - 0.5)
    middle, half = sum(axes.get_ylim()) / 2, 0.5 * (axes.get_ylim()[1] - axes.get_ylim()[0])
    axes.set_ylim(middle - max(half, 0.02), middle + max(half, 0.02))  # a small change is to look small
    axes.set(title=f"{adaptation.task}, each seed", ylabel=f"{adaptation.metric} ({adaptation.split})")
    axes.legend(frameon=False, fontsize=9)
    axes.grid(axis="y", alpha=0.25)
