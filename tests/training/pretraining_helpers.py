"""A run small enough for tests: a real text, a tiny model, real processes."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

ROOT = Path(__file__).resolve().parents[2]

# Dropout is on, so that its noise must be resumed too.
TINY = {
    "max_steps": 24,
    "seed": 3,
    "precision": "fp32",
    "attention": "eager",
    "evaluate_every": 12,
    "evaluation_blocks": 16,
    "checkpoint_every": 5,
    "model": {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "relative_position_buckets": 8,
        "relative_position_max_distance": 16,
        "decoder_num_hidden_layers": 1,
    },
    "corpus": {"held_out_share": 0.15},
    "tokenizer": {"vocab_size": 300},
    "data": {"max_length": 32, "batch_size": 8, "micro_batch_size": 4, "length_window": 3},
    "optimizer": {"name": "muon", "learning_rate": 0.002, "warmup_steps": 4},
}


def write_corpus(path: Path, sentences: int = 60) -> Path:
    """One document a line, of lengths from a few to a few dozen tokens."""
    words = "the encoder sees real tokens while a shallow decoder predicts those hidden behind masks".split()  # noqa: SIM905
    lines = []
    for number in range(sentences):
        length = 2 + (number * 7) % 23
        lines.append(f"{number} " + " ".join(words[(number * 5 + at * at) % len(words)] for at in range(length)))
    path.write_text("\n".join(lines) + "\n")
    return path


def tiny_recipe(folder: Path, name: str = "run", **changes: Any) -> dict[str, Any]:
    """TINY with its text under ``folder``; ``changes`` by key or by ``section__key``."""
    recipe = copy.deepcopy(TINY)
    corpus = folder / "corpus.txt"
    if not corpus.exists():
        write_corpus(corpus)
    recipe["output_dir"], recipe["cache_dir"] = str(folder / name), str(folder / "cache")
    recipe["corpus"]["source"] = str(corpus)
    for key, value in changes.items():
        section, _, leaf = key.rpartition("__")
        (recipe.setdefault(section, {}) if section else recipe)[leaf] = value
    return recipe


def start(recipe: dict[str, Any], *, before: str = "", launcher: tuple[str, ...] = ()) -> subprocess.Popen:
    """A process that pretrains; ``before`` is Python run first in it (``pretrain`` is the module)."""
    folder = Path(recipe["output_dir"]).parent
    script = folder / f"script-{len(list(folder.glob('script-*')))}.py"
    script.write_text(
        "import json, os, signal, sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from training import checkpoint, monitoring, pretrain\n"
        "from training.recipe import recipe_from_dict\n"
        f"{before}\n"
        "try:\n"
        f"    summary = pretrain.run(recipe_from_dict(json.loads({json.dumps(recipe)!r})))\n"
        "except pretrain.TrainingDivergedError as error:\n"
        "    sys.exit(f'error: {error}')\n"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        [*(launcher or (sys.executable,)), str(script)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def log_of(run: Path) -> list[dict[str, Any]]:
    """The log without the times, which differ from run to run."""
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    timed = {"tokens_per_second", "share_of_peak"}
    return [{key: value for key, value in row.items() if key not in timed} for row in rows]


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(run / "final" / "model.safetensors")
