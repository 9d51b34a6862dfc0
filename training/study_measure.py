# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""What the study measures of its arms: ranks at several steps and after fine-tuning, frozen scores along the way,
frozen and fine-tuned scores of the released weights, and the loss on a small text of our own.

Scores and ranks that are there are not measured again, as long as the weights are older; see `training/study.py` for
the commands.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer, pipeline

from maelm_hf import DataCollatorForMaeLm
from maelm_hf.probing import probe_rank

from .console import console
from .finetune_data import DataOptions
from .finetune_grid import Plan, run_task
from .finetune_report import write_json

HELD_OUT = Path("runs/corpus/heldout.jsonl")  # no run trains on it
SAMPLE = Path("model_cards/sample.txt")
PROBED_TOKENS = 65_536
CURVE_STEPS = (0, 250, 500, 1000, 1500, 2000, 2750, 3250)  # as far as the learning rate is constant
SEEDS = 5

# Task -> batch size and epochs of fine-tuning, by size.
TASKS = {
    "rotten_tomatoes": (32, 3.0),
    "sentences_amazon": (16, 10.0),
    "sentences_imdb": (16, 10.0),
    "sentences_yelp": (16, 10.0),
    "bbc": (32, 4.0),
    "spam": (32, 1.0),
    "brown_pos": (32, 0.5),
}
CURVE_TASKS = ("rotten_tomatoes", "sentences_amazon", "sentences_imdb", "sentences_yelp", "bbc")
# Of the words named, one at least should be among the five likeliest.
FILL_MASK = {
    "He lived in the city for many [MASK].": ("years", "days", "months", "weeks", "decades", "generations"),
    "She opened the door and went [MASK] the house.": ("into", "to", "through", "inside", "in", "around"),
    "The book was written [MASK] a famous author.": ("by",),
}
LEARNING_RATES = (1e-4, 3e-4)


def measure_ranks(model: Path, folder: Path) -> None:
    """The rank report of a model on held-out text, all four populations, both powers' spectra, raw and centred."""
    if not model.is_dir():
        raise FileNotFoundError(f"{model} is not there yet: python -m training.study pretrain, then release")
    report = folder / "report.json"
    if report.is_file():
        if report.stat().st_mtime >= (model / "model.safetensors").stat().st_mtime:
            return
        shutil.rmtree(folder)  # of other weights
    report = probe_rank(
        str(model), data=str(HELD_OUT), column="text", max_tokens=PROBED_TOKENS, max_length=128, progress=False
    )
    scratch = folder.with_name(f".{folder.name}.part")  # a report that was cut off counts for nothing
    report.save(scratch)
    scratch.rename(folder)
    console.print(f"ranks: {folder}")


def score_frozen(model: Path, folder: Path, tasks: tuple[str, ...], seeds: int) -> None:
    """Linear probes of the frozen encoder, mean-pooled and of the first token."""
    for task in tasks:
        plan = Plan(frozen=True, seeds=seeds, attention="sdpa", metrics="sklearn", quiet=True)
        _run(model, task, plan, folder)


def fine_tune(model: Path, folder: Path, tasks: tuple[str, ...]) -> None:
    """Every task with every seed and rate; the rate that counts is the best of the task's validation split."""
    for task in tasks:
        batch_size, epochs = TASKS[task]
        grid = {"learning_rates": LEARNING_RATES, "batch_sizes": (batch_size,), "epochs": (epochs,), "seeds": SEEDS}
        plan = Plan(**grid, attention="eager", precision="fp32", metrics="sklearn", quiet=True)
        _run(model, task, plan, folder)


def _run(model: Path, task: str, plan: Plan, folder: Path) -> None:
    if not run_task(str(model), DataOptions(task), plan, folder):
        raise RuntimeError(f"{task}: a cell of {folder} failed; see above, and start the same command again")


def sample_loss(model: str | Path, text: Path = SAMPLE, **loading: object) -> dict[str, float]:
    """Loss (nats) and accuracy on the hidden tokens of a text, one line a sequence; masks are a function of seed 0.

    Args:
        model: folder or Hub name.
        loading: for ``from_pretrained``, as ``trust_remote_code=True``.
    """
    return loss_on(model, text.read_text("utf-8").splitlines(), **loading)


def held_out_loss(model: Path, file: Path) -> None:
    """The loss of held-out documents at one mask ratio for all arms, whatever theirs was; their first 128 tokens."""
    with HELD_OUT.open(encoding="utf-8") as lines:
        documents = [json.loads(line)["text"] for line in lines]
    write_json(file, loss_on(model, documents))


def loss_on(model: str | Path, texts: list[str], **loading: object) -> dict[str, float]:
    tokenizer = AutoTokenizer.from_pretrained(model, **loading)
    network = AutoModelForMaskedLM.from_pretrained(model, dtype=torch.float32, **loading).eval()
    collate = DataCollatorForMaeLm(tokenizer, 0.15, seed=0)
    loss, correct, count = 0.0, 0, 0
    for start in range(0, len(texts), 64):
        batch = collate([tokenizer(text, truncation=True, max_length=128) for text in texts[start : start + 64]])
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "labels")}
        with torch.inference_mode():
            logits = network(**inputs).logits  # (texts, length, vocabulary)
        hidden = inputs["labels"] != -100
        logits, targets = logits[hidden], inputs["labels"][hidden]
        loss += torch.nn.functional.cross_entropy(logits, targets, reduction="sum").item()
        correct += (logits.argmax(-1) == targets).sum().item()
        count += len(targets)
    return {"loss": loss / count, "accuracy": correct / count, "hidden_tokens": count}


def fill_mask(model: str | Path, **loading: object) -> list[dict]:
    """The five likeliest words for the [MASK] of each sentence of ``FILL_MASK``, likeliest first."""
    tokenizer = AutoTokenizer.from_pretrained(model, **loading)
    network = AutoModelForMaskedLM.from_pretrained(model, dtype=torch.float32, **loading)
    fill = pipeline("fill-mask", model=network, tokenizer=tokenizer, device="cpu", top_k=5)
    found = []
    for text in FILL_MASK:
        words = [guess["token_str"].strip() for guess in fill(text.replace("[MASK]", tokenizer.mask_token))]
        found.append({"text": text, "words": words})
    return found


def kept_rates(tasks: Path) -> dict[tuple[str, str], float]:
    """(arm, "after-TASK") -> learning rate of the fine-tuned model that was kept, whose rank was measured."""
    found = {}
    for best in tasks.glob("*/*/best.json"):
        cell = json.loads(best.read_text())["cell"]
        setting = json.loads((best.parent / "cells" / f"{cell}.json").read_text())["setting"]
        found[best.parent.parent.name, f"after-{best.parent.name}"] = setting["learning_rate"]
    return found


def measure_end(model: Path, measured: Path, name: str) -> None:
    """What is asked of the last weights of every arm."""
    measure_ranks(model, measured / "ranks" / name / "final")
    held_out_loss(model, measured / "losses" / f"{name}.json")


def measure_released(model: Path, measured: Path, name: str) -> None:
    """Everything of the released weights; the ranks after fine-tuning are of the cell that is best on validation."""
    measure_end(model, measured, name)
    write_json(measured / "sample" / f"{name}.json", sample_loss(model))
    write_json(measured / "words" / f"{name}.json", fill_mask(model))
    scores = measured / "tasks" / name
    score_frozen(model, scores, tuple(TASKS), SEEDS)
    fine_tune(model, scores, tuple(TASKS))
    for task in TASKS:
        measure_ranks(scores / task / "model", measured / "ranks" / name / f"after-{task}")
