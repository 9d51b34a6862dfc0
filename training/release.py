# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""From a finished run to a folder in `model_cards/` that is ready for the Hub: bf16 weights, code, tokenizer, card."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from maelm_hf.hub import publish
from maelm_hf.hub.publish import check_loads_elsewhere

from .finetune_report import write_json

WEIGHTS, CONFIG = "model.safetensors", "config.json"


def round_to_bf16(source: Path, folder: Path) -> Path:
    """A copy of a model's folder with weights in bf16; its config still says float32, in which it then loads.

    Training in bf16 weights loses small updates, and `from_pretrained` takes the type of the config.
    """
    scratch = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(source, scratch)
    _round_weights(scratch / WEIGHTS)
    config = json.loads((scratch / CONFIG).read_text())
    write_json(scratch / CONFIG, config | {"dtype": "float32"})
    shutil.rmtree(folder, ignore_errors=True)
    scratch.rename(folder)
    return folder / WEIGHTS


def _round_weights(path: Path) -> None:
    rounded = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(path).items()}
    save_file(rounded, path, metadata={"format": "pt"})


def publish_into(model_cards: Path, name: str, rounded: Path, **measured: object) -> Path:
    """`model_cards/NAME`, written anew: what `maelm publish` would push, with the weights left in bf16.

    Args:
        rounded: what :func:`round_to_bf16` wrote.
        measured: arguments of :func:`maelm_hf.hub.publish` that fill the card.
    """
    target = model_cards / name
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / name
        publish(str(rounded), f"{model_cards.name}/{name}", dry_run=folder, **measured)
        _round_weights(folder / WEIGHTS)  # read in float32, and written so; nothing is lost
        check_loads_elsewhere(folder)
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(folder, target)
    return target
