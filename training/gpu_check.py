# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""What can only be said on a GPU, in six minutes of one: speed, a loss that falls, a run that is killed and goes on.

    python -m training.gpu_check --out results/gpu
    python -m training.gpu_check --device cpu --seconds 20      the same steps at toy size, to see that all works

Three parts, one after the other: the speed benchmark at base size in bf16 (`training.benchmark pretrain`); two minutes
of pretraining a base model on docstrings; in their middle a SIGKILL, after which the same command goes on and repeats
the steps since the last checkpoint. `gpu_check.json` holds every number with hardware and date, `loss.png` the curve;
what was trained is removed, or left in `run/` where a part fails.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from training.console import console, help_text
from training.monitoring import hardware, read_log
from training.start import versions

RECIPES = Path(__file__).parent / "recipes"
START_SECONDS = 180  # for text, tokenizer and the first step
_ENDED_BY_KILL = -signal.SIGKILL


class CheckFailedError(RuntimeError):
    """A part did not do what it must; the message says which and why."""


class DeviceName(StrEnum):
    CUDA = "cuda"
    CPU = "cpu"


@dataclass(frozen=True)
class Setting:
    """What the parts run: a recipe with overrides, and the benchmark's options."""

    recipe: Path
    overrides: dict[str, Any]
    benchmark: list[str]


COMMON = {
    "corpus.source": "docstrings",
    "corpus.config": "null",
    "max_steps": 1_000_000,  # time ends it
    "optimizer.schedule": "wsd",
    "optimizer.decay_steps": 1,
}
SETTINGS = {
    DeviceName.CUDA: Setting(
        RECIPES / "base.yaml",
        COMMON
        | {
            "precision": "bf16",
            "tokenizer.training_bytes": 20_000_000,
            "data.batch_size": 256,
            "optimizer.warmup_steps": 200,
            "evaluate_every": 100,
            "evaluation_blocks": 512,
            "checkpoint_every": 100,
        },
        # As many tokens as leave room for all models of the comparison on 80 GB at once.
        [*("--size", "base", "--length", "512", "--dropout", "0.0"), *("--batch-tokens", "16384", "--device", "cuda")],
    ),
    DeviceName.CPU: Setting(
        RECIPES / "demo.yaml",
        COMMON
        | {
            "corpus.source": "docstrings:typer,yaml",
            "corpus.held_out_share": 0.1,
            "model.hidden_size": 32,
            "model.num_hidden_layers": 1,
            "model.num_attention_heads": 2,
            "model.intermediate_size": 64,
            "model.decoder_num_hidden_layers": 1,
            "precision": "fp32",
            "attention": "eager",
            "tokenizer.vocab_size": 300,
            "data.batch_size": 8,
            "data.max_length": 32,
            "optimizer.warmup_steps": 5,
            "evaluate_every": 20,
            "evaluation_blocks": 8,
            "checkpoint_every": 25,
        },
        [
            *("--size", "small", "--length", "128", "--dropout", "0.0", "--corpus", "docstrings:typer,yaml"),
            *("--batch-tokens", "512", "--batches", "1", "--rounds", "1", "--device", "cpu"),
        ],
    ),
}


def main(
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("results/gpu"),
    device: Annotated[DeviceName, typer.Option(help="cpu: the same steps at toy size.")] = DeviceName.CUDA,
    seconds: Annotated[float, typer.Option(min=5, help="Of training, the kill within them.")] = 120.0,
    benchmark_seconds: Annotated[float, typer.Option(min=0, help="At most; 0 leaves it out.")] = 150.0,
) -> None:
    """Runs the three parts and writes the report; the exit status is 1 where one fails."""
    if device is DeviceName.CUDA and not torch.cuda.is_available():
        raise typer.BadParameter("torch sees no GPU here: --device cpu tries the steps out.", param_hint="--device")
    setting, torch_device = SETTINGS[device], torch.device(device.value)
    out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {
        "date": date.today().isoformat(),
        "hardware": hardware(torch_device, 1),
        "versions": versions(),
        "recipe": setting.recipe.name,
        "overrides": setting.overrides,
    }
    failures = []
    for name, part in {
        "benchmark": lambda: run_benchmark(setting, out, device, benchmark_seconds),
        "training": lambda: train_kill_and_resume(setting, out, device, seconds),
    }.items():
        try:
            report[name] = part()
        except CheckFailedError as error:
            report[name] = {"failed": str(error)}
            failures.append(f"{name}: {error}")
        # After each part: should the machine be taken away, what was measured is there.
        (out / "gpu_check.json").write_text(json.dumps(report, indent=1) + "\n")
    show(report)
    console.print(f"written to {out}")
    for failure in failures:
        print(f"error: {failure}", file=sys.stderr)
    raise typer.Exit(1 if failures else 0)


def run_benchmark(setting: Setting, out: Path, device: DeviceName, limit: float) -> dict[str, Any]:
    """The speed benchmark, as a process of its own so that its memory is free afterwards."""
    if limit == 0:
        return {"left out": "--benchmark-seconds 0"}
    command = [sys.executable, "-m", "training.benchmark", "pretrain", *setting.benchmark, "--out", str(out)]
    # In a session of its own: its models are processes too, and none may stay on the device.
    process = subprocess.Popen(command, env=environment(device), start_new_session=True)
    try:
        status = process.wait(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise CheckFailedError(f"not finished within {limit:.0f} s") from None
    if status:
        raise CheckFailedError(f"exit status {status}")
    size = setting.benchmark[setting.benchmark.index("--size") + 1]
    return json.loads((out / f"pretrain_{size}.json").read_text())


def train_kill_and_resume(setting: Setting, out: Path, device: DeviceName, seconds: float) -> dict[str, Any]:
    """Trains for half the time, kills, goes on with the same command for the other half, and compares."""
    run = out / "run"
    shutil.rmtree(run, ignore_errors=True)
    options = setting.overrides | {"output_dir": run}
    command = [sys.executable, "-m", "training.pretrain", str(setting.recipe)]
    command += [word for key, value in options.items() for word in (f"--{key}", str(value))]
    every = setting.overrides["checkpoint_every"]

    def between_checkpoints(step: int) -> bool:  # so that some steps are done again
        return step > every and every // 4 <= step % every <= every // 2

    first = subprocess.Popen(command, env=environment(device))
    train_for(first, run, seconds / 2, until=between_checkpoints)
    first.kill()
    if first.wait() != _ENDED_BY_KILL:
        raise CheckFailedError(f"training ended by itself, with status {first.returncode}")
    before = read_log(run / "log.jsonl")
    saved = max(int(path.name.rpartition("-")[2]) for path in (run / "checkpoints").glob("step-*"))

    second = subprocess.Popen(command, env=environment(device))
    train_for(second, run, seconds / 2, until=lambda step: step > before[-1]["step"])
    second.terminate()  # as a scheduler does: it saves and ends with 0
    if second.wait(timeout=120):
        raise CheckFailedError(f"after SIGTERM training ended with status {second.returncode}")
    rows, evaluations = read_log(run / "log.jsonl"), read_log(run / "evaluations.jsonl")
    summary = json.loads((run / "summary.json").read_text())
    shutil.copy(run / "loss.png", out / "loss.png")

    again = {row["step"]: row for row in rows}
    repeated = [(row, again[row["step"]]) for row in before if row["step"] > saved]
    few = max(1, min(10, len(rows) // 4))
    losses = [row["loss"] for row in rows]
    result = {
        "steps": len(rows),
        "tokens": summary["tokens"],
        "tokens_per_second": summary["tokens_per_second"],
        "share_of_peak": statistics.median(row["share_of_peak"] for row in rows),
        "choices": summary["choices"],
        "training_loss": {"first steps": sum(losses[:few]) / few, "last steps": sum(losses[-few:]) / few},
        "held_out_loss": {str(row["step"]): row["loss"] for row in evaluations},
        "killed_at_step": before[-1]["step"],
        "resumed_from_step": saved,
        "repeated_steps": len(repeated),
        "same_batches": all(old["batch"] == new["batch"] for old, new in repeated),
        "largest_difference_of_loss": max((abs(old["loss"] - new["loss"]) for old, new in repeated), default=0.0),
    }
    if [row["step"] for row in rows] != list(range(1, len(rows) + 1)):
        raise CheckFailedError("the log of the resumed run lacks steps or has some twice")
    if not result["same_batches"]:
        raise CheckFailedError("after the kill the run went on with other batches")
    if result["training_loss"]["last steps"] >= result["training_loss"]["first steps"]:
        raise CheckFailedError(f"the loss does not fall: {result['training_loss']}")
    shutil.rmtree(run)
    return result


def train_for(process: subprocess.Popen, run: Path, seconds: float, until: Callable[[int], bool]) -> None:
    """Waits until a run has trained for so long, from its first new step on, and come to such a step."""
    started, begun, log = time.monotonic(), None, run / "log.jsonl"
    known = len(read_log(log))
    while True:
        time.sleep(0.1)
        rows = read_log(log)
        if process.poll() is not None:
            raise CheckFailedError(f"training ended by itself, with status {process.returncode}")
        if begun is None and rows and len(rows) != known:
            begun = time.monotonic()
        if begun is None and time.monotonic() - started > START_SECONDS:
            process.kill()
            raise CheckFailedError(f"no step within {START_SECONDS} s")
        if begun is not None and time.monotonic() - begun >= seconds and rows and until(rows[-1]["step"]):
            return


def environment(device: DeviceName) -> dict[str, str]:
    hidden = {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"} if device is DeviceName.CPU else {}
    return os.environ | {"TOKENIZERS_PARALLELISM": "false"} | hidden


def show(report: dict[str, Any]) -> None:
    table = Table(title=f"{report['hardware']}, {report['date']}", show_header=False)
    training = report["training"]
    if "failed" in report["benchmark"]:
        table.add_row("benchmark", f"failed: {report['benchmark']['failed']}")
    for row in report["benchmark"].get("table", []):
        share = "" if row["share of peak"] is None else f", {row['share of peak']:.1%} of the measured peak"
        against = f"{row['against stock BERT']:.2f} x stock BERT"
        table.add_row(f"{row['arm']} ({row['attention']})", f"{row['tokens/s']:,.0f} tokens/s, {against}{share}")
    table.add_section()
    if "failed" in training:
        table.add_row("training", f"failed: {training['failed']}")
    else:
        loss, held_out = training["training_loss"], list(training["held_out_loss"].items())
        table.add_row("training: steps, tokens", f"{training['steps']:,}, {training['tokens']:,}")
        speed = f"{training['tokens_per_second']:,.0f}, {training['share_of_peak']:.1%} of the measured peak"
        table.add_row("tokens a second", speed)
        table.add_row("training loss, first and last steps", f"{loss['first steps']:.3f}, {loss['last steps']:.3f}")
        if held_out:
            ends = [held_out[0], held_out[-1]]
            table.add_row("held-out loss", ", ".join(f"step {step}: {value:.3f}" for step, value in ends))
        table.add_row("killed at, resumed from step", f"{training['killed_at_step']}, {training['resumed_from_step']}")
        table.add_row(
            "steps done again, largest difference of loss",
            f"{training['repeated_steps']}, {training['largest_difference_of_loss']:.2g}",
        )
    console.print(table)


app = typer.Typer(add_completion=False)
app.command(help=help_text(__doc__))(main)

if __name__ == "__main__":
    app()
