# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""The whole way in one command: pretrain an MLM and its MAE-LM twin, probe both, reload both, fill a mask, draw.

    python -m training.demo          about ten minutes on two CPU cores
    python -m training.demo --fast   the same path in under two minutes; too short a run to learn from

Everything lands in `runs/demo/` (or `runs/demo-fast/`): the two models, their rank reports, `rank_by_layer.png` and
`summary.md`. Interrupted, the same command goes on where it was.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Annotated

import matplotlib.pyplot as plt
import pandas as pd
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer, logging, pipeline

from maelm_hf.probing import RankReport, effective_rank, probe_rank

from .corpus import is_held_out, load_corpus
from .monitoring import Summary
from .pretrain import run
from .recipe import Recipe, load_recipe

RECIPE = Path(__file__).parent / "recipes" / "demo.yaml"
FAST = [
    *("--max_steps", "30", "--evaluate_every", "30", "--checkpoint_every", "30", "--evaluation_blocks", "256"),
    *("--optimizer.warmup_steps", "5", "--corpus.source", "docstrings:stdlib,numpy,scipy"),
]
TWINS = {"MLM": "mlm", "MAE-LM": "none"}
SENTENCES = ("Return the <mask> of the array.", "If <mask> is None, the default <mask> is used.")
TAU = 0.9

console = Console()


def main(fast: Annotated[bool, typer.Option("--fast", help="Stop after a few steps: to see that all works.")] = False):
    """Pretrain an MLM and its MAE-LM twin on docstrings, probe, reload and compare them."""
    started = time.perf_counter()
    folder = Path("runs/demo-fast" if fast else "runs/demo")
    reports: dict[str, RankReport] = {}
    summaries: dict[str, Summary] = {}
    for name, twin in TWINS.items():
        console.rule(f"{name}: pretrain")
        recipe = load_recipe(
            RECIPE, ["--output_dir", str(folder / name.lower()), "--twin", twin, *(FAST if fast else [])]
        )
        summaries[name] = run(recipe)
        if not summaries[name].finished:
            console.print("Stopped; the same command goes on from here.")
            raise typer.Exit(1)
        console.rule(f"{name}: probe")
        reports[name] = probe(folder / name.lower() / "final", recipe, max_tokens=20_000 if fast else 200_000)
        reports[name].save(folder / name.lower() / "rank")
    figure = folder / "rank_by_layer.png"
    draw(reports, figure)
    (folder / "summary.md").write_text(describe(reports, summaries))
    show(reports, summaries)
    for name in TWINS:
        fill_masks(name, folder / name.lower() / "final")
    minutes = (time.perf_counter() - started) / 60
    console.print(
        f"\n{minutes:.1f} minutes. Figure: {figure}; table: {folder / 'summary.md'}; models: {folder}/*/final"
    )


def probe(model: Path, recipe: Recipe, max_tokens: int) -> RankReport:
    """The rank of a saved model's representations of held-out documents, reloaded through `AutoModel`."""
    corpus = load_corpus(recipe.corpus, Path(recipe.cache_dir).expanduser())
    texts = [text for text in corpus.documents["text"] if is_held_out(text, recipe.corpus.held_out_share)]
    report = probe_rank(
        AutoModel.from_pretrained(model),
        AutoTokenizer.from_pretrained(model),
        texts,
        mask_ratio=recipe.data.mask_ratio,
        max_tokens=max_tokens,
        tau=TAU,
        power=2,
    )
    report.settings["model"] = "MLM" if recipe.twin == "mlm" else "MAE-LM"
    return report


def ranks(report: RankReport, population: str, power: int) -> list[float]:
    """The effective rank by layer, NaN where the report has no such population."""
    values = []
    for layer in report.positions():
        try:
            values.append(float(effective_rank(report.spectrum(layer, population), TAU, power)))
        except ValueError:
            values.append(math.nan)
    return values


def curves(reports: dict[str, RankReport], power: int) -> pd.DataFrame:
    """Effective rank by layer: a column for each model and population that the comparison needs."""
    columns = {
        "MLM, input without [MASK]": ranks(reports["MLM"], "unmasked", power),
        "MLM, input with [MASK]": ranks(reports["MLM"], "masked/all", power),
        "MLM, its [MASK] tokens": ranks(reports["MLM"], "masked/[MASK]", power),
        "MAE-LM, input without [MASK]": ranks(reports["MAE-LM"], "unmasked", power),
    }
    return pd.DataFrame(columns, index=pd.RangeIndex(len(reports["MLM"].positions()), name="layer"))


def draw(reports: dict[str, RankReport], path: Path) -> None:
    styles = {
        "MLM, input without [MASK]": {"color": "tab:blue", "marker": "o"},
        "MLM, input with [MASK]": {"color": "tab:blue", "marker": "s", "linestyle": "--"},
        "MLM, its [MASK] tokens": {"color": "tab:gray", "marker": "^", "linestyle": ":"},
        "MAE-LM, input without [MASK]": {"color": "tab:orange", "marker": "o"},
    }
    width = reports["MLM"].rows[0]["dim"]
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained", sharex=True)
    for axis, power, of in zip(axes, (1, 2), ("singular values", "squared singular values"), strict=True):
        table = curves(reports, power)
        for name in table:
            axis.plot(table.index, table[name], label=name, **styles[name])
        axis.set_title(f"{TAU:.0%} of the sum of {of}", fontsize=10)
        axis.set_xlabel("layer (0: embeddings)")
        axis.set_xticks(table.index)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.25)
    axes[0].set_ylabel(f"effective rank (of {width})")
    figure.legend(*axes[0].get_legend_handles_labels(), frameon=False, fontsize=9, loc="outside lower center", ncols=4)
    figure.suptitle("Effective rank of token representations by layer, held-out docstrings")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def findings(reports: dict[str, RankReport]) -> list[str]:
    """What the figure shows at the last layer, in numbers, whatever they are."""
    lines = []
    for power, of in ((1, "singular values"), (2, "squared singular values")):
        last = curves(reports, power).iloc[-1]
        clean, masked, mae = (
            last[name]
            for name in ("MLM, input without [MASK]", "MLM, input with [MASK]", "MAE-LM, input without [MASK]")
        )
        lines.append(
            f"Last layer, {TAU:.0%} of the sum of {of}: the MLM's input with [MASK] has rank {masked:.0f}, "
            f"without [MASK] {clean:.0f} (deficiency {masked - clean:+.0f}); MAE-LM has {mae:.0f}."
        )
    return lines


def results(summaries: dict[str, Summary]) -> pd.DataFrame:
    return pd.DataFrame(
        {
            name: {
                "held-out loss (nats)": f"{summary.held_out_loss:.3f}",
                "held-out accuracy": f"{summary.held_out_accuracy:.3f}",
                "parameters": f"{summary.parameters:,}",
                "steps": f"{summary.steps:,}",
                "tokens/s": f"{summary.tokens_per_second:,.0f}",
            }
            for name, summary in summaries.items()
        }
    ).T


def describe(reports: dict[str, RankReport], summaries: dict[str, Summary]) -> str:
    tables = [results(summaries), *(curves(reports, power).round(0) for power in (1, 2))]
    titles = [
        "Training",
        "Effective rank by layer, singular values",
        "Effective rank by layer, squared singular values",
    ]
    parts = ["# MLM and its MAE-LM twin", *(f"- {line}" for line in findings(reports))]
    for title, table in zip(titles, tables, strict=True):
        rows = [[table.index.name or "", *table.columns], ["---"] * (len(table.columns) + 1)]
        rows += [
            [str(index), *(f"{value:.0f}" if isinstance(value, float) else value for value in row)]
            for index, row in zip(table.index, table.to_numpy().tolist(), strict=True)
        ]
        parts += [f"\n## {title}\n", *("| " + " | ".join(row) + " |" for row in rows)]
    return "\n".join(parts) + "\n"


def show(reports: dict[str, RankReport], summaries: dict[str, Summary]) -> None:
    for title, frame in (
        ("Training", results(summaries)),
        (f"Effective rank by layer ({TAU:.0%} of the squared singular values)", curves(reports, 2)),
    ):
        table = Table(title=title)
        table.add_column(frame.index.name or "")
        for column in frame:
            table.add_column(column, justify="right")
        for index, row in zip(frame.index, frame.to_numpy().tolist(), strict=True):
            table.add_row(str(index), *(f"{value:.0f}" if isinstance(value, float) else value for value in row))
        console.print(table)
    for line in findings(reports):
        console.print(line)


def fill_masks(name: str, model: Path) -> None:
    """The saved model, reloaded with its head, in transformers' own pipeline."""
    fill = pipeline("fill-mask", model=AutoModelForMaskedLM.from_pretrained(model), tokenizer=str(model), device="cpu")
    for sentence in SENTENCES:
        answers = fill(sentence, top_k=3)
        answers = answers if isinstance(answers[0], list) else [answers]
        words = " / ".join(
            ", ".join(candidate["token_str"].strip() or "(space)" for candidate in mask) for mask in answers
        )
        console.print(f"{name}: {sentence} -> {words}", markup=False)


if __name__ == "__main__":
    logging.set_verbosity_error()
    typer.run(main)
