# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""How many tokens a second does pretraining take in, beside stock BERT and ModernBERT of the same encoder?

Original real tokens a second (padding does not count, masked tokens do), of forward, backward, clipping and AdamW, in
bf16 autocast, on the first batches of a run on real text. Every arm is a process of its own, because freed memory,
once kept, stays kept (all together need some 20 GB at the default batch). They take turns batch by batch, and the
medians over the rounds are added up. Every model runs with the attention kernel that is fastest for it, eager or sdpa,
measured on its first batch.
"""

from __future__ import annotations

import json
import os
import statistics
from datetime import UTC, datetime
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer
from tqdm.auto import tqdm

from .benchmark_arms import Arm, Setting, serve
from .choices import measure_peak
from .console import console, markdown
from .monitoring import hardware
from .start import versions
from .text import prepare_text

STOCK = "stock BERT"
KEPT = ", freed memory kept"
SMALL = (
    Arm(STOCK, "bert"),
    Arm(STOCK + KEPT, "bert", keeps_memory=True),
    Arm("stock BERT, stock collator", "bert", stock_collator=True),
    Arm("stock ModernBERT, sparse prediction", "modernbert"),
    Arm("stock ModernBERT, sparse prediction" + KEPT, "modernbert", keeps_memory=True),
    Arm("MAE-LM", "maelm"),
    Arm("MAE-LM" + KEPT, "maelm", keeps_memory=True),
    Arm("MAE-LM, relative-position bias" + KEPT, "maelm", keeps_memory=True, buckets=64),
)
BASE = (
    Arm(STOCK, "bert"),
    Arm(STOCK + KEPT, "bert", keeps_memory=True),
    Arm("MAE-LM, 4-layer decoder, mask .15" + KEPT, "maelm", keeps_memory=True, decoder_layers=4),
    Arm("MAE-LM, 2-layer decoder, mask .40" + KEPT, "maelm", keeps_memory=True, mask_ratio=0.4),
)
SIZES = {"small": (6, 256, SMALL), "base": (12, 768, BASE)}


def pretrain(
    size: Annotated[list[str], typer.Option(help="small (6 x 256) or base (12 x 768).")] = ["small", "base"],  # noqa: B006
    length: Annotated[list[int], typer.Option(help="Longest block, in tokens.")] = [512, 128],  # noqa: B006
    dropout: Annotated[list[float], typer.Option(help="Attention dropout of all models.")] = [0.0, 0.1],  # noqa: B006
    batch_tokens: Annotated[int, typer.Option(help="Real tokens of a step.")] = 3072,
    batches: Annotated[int, typer.Option(help="Batches, the first ones of a run.")] = 4,
    rounds: Annotated[int, typer.Option(help="How often every batch is run.")] = 3,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    corpus: Annotated[str, typer.Option(help="Source of the text, as in a recipe.")] = "docstrings",
    out: Annotated[Path, typer.Option(help="Folder for pretrain_SIZE.json, .csv and .md.")] = Path("benchmarks"),
) -> None:
    """Pretraining: tokens a second beside stock BERT and ModernBERT, share of the peak, and time by part."""
    for name in size:
        if name not in SIZES:
            raise typer.BadParameter(f"{name!r} is no size; choose from {', '.join(SIZES)}", param_hint="--size")
    for name, value in {"batches": batches, "rounds": rounds, "batch_tokens": batch_tokens}.items():
        if value < 1:
            raise typer.BadParameter(f"{value} must be at least 1", param_hint=f"--{name.replace('_', '-')}")
    target = torch.device(device)
    peak = measure_peak(target, "bf16").value
    console.print(f"bf16 peak of square matrix products: {peak / 1e12:.3f} TFLOP/s")
    for name in size:
        layers, hidden_size, arms = SIZES[name]
        rows: list[dict[str, Any]] = []
        for longest in length if name == "small" else [max(length)]:
            for probability in dropout:
                setting = Setting(layers, hidden_size, longest, probability, batch_tokens, batches, device, corpus)
                prepare_text(setting.recipe(0.15), say=lambda line: None)  # once, before any arm looks for it
                rows += measure(arms, setting, rounds, peak)
        document = {
            "command": f"python -m training.benchmark pretrain --size {name} --batch-tokens {batch_tokens} "
            f"--batches {batches} --rounds {rounds}",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "hardware": f"{hardware(target, 1)}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
            "dtype": "bf16 autocast, fp32 weights",
            "settings": {"batch_tokens": batch_tokens, "batches": batches, "rounds": rounds, "corpus": corpus},
            "versions": versions(),
            "bf16_peak": peak,
            "table": rows,
        }
        write(out / f"pretrain_{name}", rows, document)


def write(stem: Path, rows: list[dict[str, Any]], document: dict[str, Any]) -> None:
    """The measurements as JSON, CSV and Markdown."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    stem.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    pd.json_normalize(rows).drop(columns="seconds").to_csv(stem.with_suffix(".csv"), index=False)
    stem.with_suffix(".md").write_text(as_markdown(rows, document), encoding="utf-8")
    console.print(f"Written to {stem}.json, .csv and .md")


def measure(arms: tuple[Arm, ...], setting: Setting, rounds: int, peak: float) -> list[dict[str, Any]]:
    """A table: the arms in turns, batch by batch."""
    context, processes, connections, started = get_context("spawn"), [], [], []
    try:
        for arm in tqdm(arms, desc="preparing", unit="arm"):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, arm, setting), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            connections.append(ours)
            started.append(ask(ours, arm))  # one after the other: each measures its kernels alone
        seconds: list[list[list[float]]] = [[[] for _ in range(setting.batches)] for _ in arms]
        title = f"{setting.layers} x {setting.hidden_size}, length {setting.length}"
        bar = tqdm(total=(rounds + 1) * setting.batches * len(arms), desc=title, unit="step")
        for round_number in range(rounds + 1):  # the first to warm up
            for number in range(setting.batches):
                for arm_number, connection in enumerate(connections):
                    elapsed = ask(connection, arms[arm_number], ("step", number))
                    bar.update()
                    if round_number:
                        seconds[arm_number][number].append(elapsed)
        parts: list[dict[str, float]] = []
        for arm, connection in zip(arms, connections, strict=True):
            found: list[dict[str, float]] = []
            for _ in range(rounds + 1 if arm.model == "maelm" else 0):
                found.append(ask(connection, arm, ("parts", 0)))
            names = found[0] if found else ()
            parts.append({part: statistics.median(times[part] for times in found[1:]) for part in names})
        bar.close()
        for connection in connections:
            connection.send(None)
    finally:
        for process in processes:
            process.join(timeout=5)
            process.terminate()
    return table(arms, setting, started, seconds, parts, peak)


def ask(connection: Connection, arm: Arm, request: tuple | None = None) -> Any:
    """The answer of an arm's process."""
    try:
        if request is not None:
            connection.send(request)
        return connection.recv()
    except (EOFError, BrokenPipeError):
        raise RuntimeError(f"the process of {arm.name!r} ended, out of memory perhaps; its error is above") from None


def table(arms, setting: Setting, started, seconds, parts, peak: float) -> list[dict[str, Any]]:
    """One row an arm, with its speed against stock BERT's, as people run it and with freed memory kept too."""
    rows: list[dict[str, Any]] = []
    for arm, (kernel, _, facts), times, by_part in zip(arms, started, seconds, parts, strict=True):
        total = sum(statistics.median(of_batch) for of_batch in times)
        operations = sum(batch_operations for _, batch_operations, _ in facts)
        rows.append(
            {
                "size": f"{setting.layers} x {setting.hidden_size}",
                "length": setting.length,
                "attention dropout": setting.attention_dropout,
                "arm": arm.name,
                "attention": kernel,
                "tokens/s": sum(tokens for tokens, _, _ in facts) / total,
                "padding": 1 - sum(tokens for tokens, _, _ in facts) / sum(positions for _, _, positions in facts),
                "share of peak": operations / total / peak if operations else None,
                "seconds": times,
                "parts": by_part,
            }
        )
    speed = {row["arm"]: row["tokens/s"] for row in rows}
    for row in rows:
        row["against stock BERT"] = row["tokens/s"] / speed[STOCK]
        row["against stock BERT" + KEPT] = row["tokens/s"] / speed[STOCK + KEPT]
    console.print(as_markdown(rows), markup=False)
    return rows


def as_markdown(rows: list[dict[str, Any]], document: dict[str, Any] | None = None) -> str:
    """The tables, one a size, length and dropout; the time by part below."""
    text = ""
    if document is not None:
        text = (
            f"# Pretraining speed\n\n`{document['command']}`, {document['date'][:10]}, {document['hardware']}, "
            f"{document['dtype']}, torch {document['versions']['torch']}, transformers "
            f"{document['versions']['transformers']}; peak of square bf16 products "
            f"{document['bf16_peak'] / 1e12:.2f} TFLOP/s; {document['settings']}\n\n"
        )
    keys = ("size", "length", "attention dropout")
    for key in dict.fromkeys(tuple(row[name] for name in keys) for row in rows):
        mine = [row for row in rows if tuple(row[name] for name in keys) == key]
        text += "**{} , length {}, attention dropout {}**\n\n".format(*key).replace(" ,", ",")
        text += markdown(
            ["", "attention", "tokens/s", "padding", "share of peak", "against stock BERT", "and against it" + KEPT],
            [
                [
                    row["arm"],
                    row["attention"],
                    f"{row['tokens/s']:,.0f}",
                    f"{row['padding']:.1%}",
                    "" if row["share of peak"] is None else f"{row['share of peak']:.0%}",
                    f"{row['against stock BERT']:.2f}",
                    f"{row['against stock BERT' + KEPT]:.2f}",
                ]
                for row in mine
            ],
        )
        for row in mine:
            if row["parts"]:
                total = sum(row["parts"].values())
                shares = ", ".join(f"{part} {value / total:.0%}" for part, value in row["parts"].items())
                text += f"\nTime of {row['arm']}: {shares}.\n"
        text += "\n"
    return text
