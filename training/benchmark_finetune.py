# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning speed beside the stock script, in one run: same model, examples, batch size, optimiser, dropout and
precision.

    python -m training.benchmark finetune MODEL --task rotten_tomatoes --out results/finetune/speed.json

The stock arm is what `run_glue.py` does with padding to the longest: `datasets` rows, `DataCollatorWithPadding`,
Trainer, random order, the default attention kernel; further stock arms take the other kernel, or our setting of the C
library's memory. Ours groups by length, takes the kernel it measured and keeps freed memory. The arms take turns, each
in a process of its own, each round starts from the same weights, and the best round of an arm counts. Samples a CPU
second are given beside samples a second: they say less about the wait, and stay fair while other programs share the
cores.
"""

import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch
import typer
from rich.table import Table
from transformers import (
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
    set_seed,
)

from maelm_hf.memory import keep_freed_memory
from training.attention_choice import CANDIDATES, choose_attention
from training.console import console
from training.encoding import Encoded, PadToLongest
from training.finetune_cell import GroupedTrainer, encode, load_model, load_tokenizer, no_bars, quiet_loading
from training.finetune_data import DataOptions, load_task
from training.finetune_report import environment, write_json
from training.tabular import TaskData


def arguments(folder: Path, batch_size: int) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=batch_size,
        num_train_epochs=1,
        learning_rate=2e-5,
        seed=0,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        logging_strategy="no",
    )


def stock_trainer(model: str, data: TaskData, rows: int, max_length: int, args: TrainingArguments, kernel: str | None):
    """run_glue.py with `pad_to_max_length=False`. `kernel` None leaves the default."""
    import datasets

    tokenizer, split = load_tokenizer(model), data.splits["train"]
    columns = {"sentence": split.texts[:rows], "label": split.labels[:rows]}
    if split.pairs is not None:
        columns["sentence2"] = split.pairs[:rows]

    def preprocess(examples):
        texts = (examples["sentence"], examples["sentence2"]) if split.pairs is not None else (examples["sentence"],)
        return tokenizer(*texts, padding=False, max_length=max_length, truncation=True)

    datasets.disable_progress_bars()
    dataset = datasets.Dataset.from_dict(columns).map(preprocess, batched=True)
    options = {"num_labels": len(data.label_names), "dtype": torch.float32}
    if kernel is not None:
        options["attn_implementation"] = kernel
    set_seed(0)
    with quiet_loading():
        network = AutoModelForSequenceClassification.from_pretrained(model, **options)
    return Trainer(
        model=network,
        args=args,
        train_dataset=dataset,
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
    )


def our_trainer(model: str, data: TaskData, rows: int, max_length: int, args: TrainingArguments, kernel: str):
    tokenizer = load_tokenizer(model)
    encoded = Encoded(encode(data, "train", tokenizer, max_length).examples[:rows])
    set_seed(0)
    network = load_model(model, data, kernel)
    return GroupedTrainer(
        model=network,
        args=args,
        train_dataset=encoded,
        processing_class=tokenizer,
        data_collator=PadToLongest(tokenizer),
    )


@dataclass(frozen=True)
class Arm:
    """One way of training; `kernel` None leaves the stock model's default."""

    name: str
    stock: bool
    kernel: str | None
    keeps_memory: bool = False


def timed(arm: Arm, model: str, options: DataOptions, rows: int, max_length: int, batch_size: int) -> tuple[float, ...]:
    """Training samples a second, and a CPU second. Runs in a process of its own: memory is kept for good."""
    if arm.keeps_memory:
        keep_freed_memory()
    args, make = arguments(Path("runs/benchmark_finetune"), batch_size), stock_trainer if arm.stock else our_trainer
    trainer = make(model, load_task(options), rows, max_length, args, arm.kernel)
    with no_bars():
        start = time.process_time()
        speed = trainer.train().metrics["train_samples_per_second"]
    return float(speed), len(trainer.train_dataset) / (time.process_time() - start)


def finetune(
    model: str = typer.Argument(..., help="Folder of a saved model, or a Hub name."),
    task: str = typer.Option("rotten_tomatoes", help="A sentence or pair task: GLUE's names, or an offline task."),
    data: str = typer.Option(None, help="Folder of GLUE's TSV files or a saved dataset."),
    rows: int = typer.Option(1024, help="Training examples of a round."),
    rounds: int = typer.Option(3, help="Rounds of every arm; the best counts."),
    batch_size: int = typer.Option(32),
    max_length: int = typer.Option(128),
    out: Path = typer.Option(None, help="Write the measurements here, as JSON."),  # noqa: B008
) -> None:
    """Fine-tuning: training samples a second beside the stock Trainer script with padding to the longest."""
    options = DataOptions(task, folder=data)
    loaded = load_task(options)
    args = arguments(Path("runs/benchmark_finetune"), batch_size)
    probe = our_trainer(model, loaded, rows, max_length, args, "sdpa")
    by_length = probe.train_dataset.lengths.argsort(kind="stable")
    starts = [max(0, int(share * len(by_length)) - batch_size // 2) for share in (0.25, 0.5, 0.9)]
    batches = [
        PadToLongest(probe.processing_class)([probe.train_dataset[i] for i in by_length[start : start + batch_size]])
        for start in starts
    ]
    kernel, reason = choose_attention(probe.model, batches)
    console.print(reason)
    others = [other for other in CANDIDATES if other != "sdpa"]
    arms = [
        Arm("stock Trainer, padding to the longest", True, None),
        *(Arm(f"stock Trainer, {other}", True, other) for other in others),
        Arm("stock Trainer, freed memory kept", True, None, keeps_memory=True),
        Arm("length groups, default kernel", False, "sdpa"),
        Arm(f"length groups, {kernel}", False, kernel),
        Arm(f"ours: length groups, {kernel}, freed memory kept", False, kernel, keeps_memory=True),
    ]
    best = dict.fromkeys((arm.name for arm in arms), (0.0, 0.0))
    spawn = get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as processes:
        for arm in arms * rounds:
            speeds = processes.submit(timed, arm, model, options, rows, max_length, batch_size).result()
            best[arm.name] = tuple(max(pair) for pair in zip(best[arm.name], speeds, strict=True))
            console.print(f"{arm.name}: {speeds[0]:.1f} samples/s")
    stock, *_, ours = best.values()
    fastest_stock = max(best[arm.name][0] for arm in arms if arm.stock)
    table = Table("", "samples/s", "samples/CPU s", "against stock", title=f"{rows} examples, batch {batch_size}, fp32")
    for name, (wall, cpu) in best.items():
        table.add_row(name, f"{wall:.1f}", f"{cpu:.1f}", f"{wall / stock[0]:.2f}x ({cpu / stock[1]:.2f}x by CPU time)")
    console.print(table)
    console.print(f"against the faster stock arm: {ours[0] / fastest_stock:.2f}x")
    if out is not None:
        report = {
            "model": Path(model).name,
            "task": task,
            "rows": rows,
            "rounds": rounds,
            "batch_size": batch_size,
            "max_length": max_length,
            "precision": "fp32",
            "attention_reason": reason,
            "samples_per_second": {name: speeds[0] for name, speeds in best.items()},
            "samples_per_cpu_second": {name: speeds[1] for name, speeds in best.items()},
            "ratio": ours[0] / stock[0],
            "ratio_to_fastest_stock": ours[0] / fastest_stock,
            "environment": environment(),
        }
        write_json(out, report)
