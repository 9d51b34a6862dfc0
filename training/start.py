# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""How a run starts: from a checkpoint that is really its own, or from a new model."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, DistributedType, broadcast_object_list
from transformers import PreTrainedTokenizerBase

from maelm_hf import MaeLmConfig, MaeLmForMaskedLM
from maelm_hf.modeling_maelm import load_encoder_config

from . import zero2
from .checkpoint import find_checkpoint, newest_name
from .recipe import Recipe, RecipeError
from .text import Text


def check_distribution(recipe: Recipe, kind: DistributedType, deepspeed: DeepSpeedPlugin | None = None) -> None:
    """Refuses what cannot be run in this way of sharing a model among processes.

    Raises:
        RecipeError: rank probes of a sharded model, what DeepSpeed would do in its own way, or sharding that Accelerate
            was asked for and, for want of GPUs or of a second process, leaves out in silence.
    """
    for name in ("DEEPSPEED", "FSDP"):
        asked = os.environ.get(f"ACCELERATE_USE_{name}", "false").lower() in ("true", "1")
        if asked and kind != DistributedType[name]:
            raise RecipeError(
                f"accelerate launch asks for {name}, which needs several processes on GPUs: use "
                "training/accelerate/ddp.yaml, or cpu.yaml for one process."
            )
    if deepspeed is not None:
        zero2.check(deepspeed, recipe)
    if kind == DistributedType.FSDP and recipe.probe_every:
        raise RecipeError(
            "probe_every reads whole weights, and FSDP shards them: set probe_every 0, and give a checkpoint to "
            "`maelm probe rank`."
        )


def find_resumable(recipe: Recipe, text: Text, accelerator: Accelerator) -> tuple[Path | None, dict[str, Any]]:
    """The newest whole checkpoint and its state; refuses one of another recipe, corpus or tokenizer.

    Raises:
        RecipeError: the run cannot be continued; also where it has checkpoints, and all of them are damaged.
    """
    folder = Path(recipe.output_dir, "checkpoints")
    found: list[Any] = [None, None]
    if accelerator.is_main_process:
        found = [find_checkpoint(folder, refused=accelerator.print), newest_name(folder)]
    checkpoint, newest = broadcast_object_list(found)
    if checkpoint is None and newest is not None:
        raise RecipeError(
            f"every checkpoint in {folder} is damaged: restore one, use another output_dir, or delete that folder to "
            "begin again (which also begins the logs again)."
        )
    if checkpoint is None:
        return None, {}
    state = json.loads((checkpoint / "state.json").read_text())
    now, then = recipe.course(), state["course"]
    free = _free_to_change(now, then, state["progress"]["step"])
    changed = [
        f"{key} (was {then.get(key)!r}, is {now[key]!r})"
        for key in now
        if now[key] != then.get(key) and key not in free
    ]
    if changed:
        raise RecipeError(
            f"{recipe.output_dir} holds a run of another recipe: {', '.join(changed)}; use another output_dir."
        )
    digests = text.digests
    if recipe.corpus.streaming:  # of files' times too, which differ between the copies of several nodes
        digests = broadcast_object_list([digests])[0]
    for name, digest in digests.items():
        if digest != state["digests"][name]:
            raise RecipeError(
                f"the {name} is not the one that {recipe.output_dir} was begun with (digest {digest}, checkpoint "
                f"{state['digests'][name]}): restore it, or use another output_dir."
            )
    if recipe.corpus.streaming and state["num_processes"] != accelerator.num_processes:
        raise RecipeError(
            f"a streamed corpus is shared out among processes: continue with {state['num_processes']}, not "
            f"{accelerator.num_processes}."
        )
    accelerator.print(f"continuing from {checkpoint}")
    return checkpoint, state


def _free_to_change(now: dict[str, Any], then: dict[str, Any], step: int) -> set[str]:
    """Before its final decay a "wsd" run does not depend on where it ends: it may be prolonged or cut short."""
    for course in (now, then):
        stable_until = course["max_steps"] - course["optimizer.decay_steps"]
        if course["optimizer.schedule"] != "wsd" or step > stable_until:
            return set()
    return {"max_steps", "optimizer.decay_steps"}


def build_model(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, checkpoint: Path | None) -> MaeLmForMaskedLM:
    """The model, in fp32: from a checkpoint, on an existing encoder, or new.

    Raises:
        RecipeError: the recipe's encoder cannot be continued, or its settings contradict each other.
    """
    if checkpoint is not None:
        return MaeLmForMaskedLM.from_pretrained(checkpoint, dtype=torch.float32)
    if recipe.from_encoder is not None:
        return model_from_encoder(recipe, tokenizer)
    ids = {f"{role}_token_id": getattr(tokenizer, f"{role}_token_id") for role in ("mask", "pad", "bos", "eos")}
    return MaeLmForMaskedLM(model_config(recipe, len(tokenizer), ids))


def model_from_encoder(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> MaeLmForMaskedLM:
    """A new decoder, of two layers where the recipe does not say, on the encoder that the recipe names."""
    settings = {"decoder_num_hidden_layers": 2} | recipe.model
    try:
        model = MaeLmForMaskedLM.from_encoder(
            recipe.from_encoder,
            tokenizer=tokenizer,
            add_mask_token=recipe.tokenizer.add_mask_token,
            trust_remote_code=recipe.trust_remote_code,
            **settings,
        )
    except (ValueError, TypeError, OSError) as error:
        raise RecipeError(f"from_encoder {recipe.from_encoder}: {' '.join(str(error).split())}") from None
    if model.config.max_position_embeddings < recipe.data.max_length:
        raise RecipeError(
            f"data.max_length {recipe.data.max_length} is more than {recipe.from_encoder} takes: at most "
            f"{model.config.max_position_embeddings}."
        )
    return model


def model_config(recipe: Recipe, vocab_size: int, token_ids: dict[str, int | None]) -> MaeLmConfig:
    """The configuration of the recipe's model for a tokenizer of that size and with those special tokens.

    Raises:
        RecipeError: the settings contradict each other.
    """
    if recipe.from_encoder is not None:
        return _config_on_encoder(recipe, token_ids["mask_token_id"])
    settings = {"max_position_embeddings": recipe.data.max_length} | recipe.model
    if settings["max_position_embeddings"] < recipe.data.max_length:
        raise RecipeError("model.max_position_embeddings is below data.max_length: raise it, or shorten the blocks.")
    try:
        return MaeLmConfig(vocab_size=vocab_size, **token_ids, **settings)
    except (ValueError, TypeError) as error:
        raise RecipeError(f"model: {error}") from None


def _config_on_encoder(recipe: Recipe, mask_token_id: int | None) -> MaeLmConfig:
    settings = {"decoder_num_hidden_layers": 2} | recipe.model
    try:
        backbone = load_encoder_config(recipe.from_encoder, recipe.trust_remote_code)
        return MaeLmConfig(backbone_config=backbone, mask_token_id=mask_token_id, **settings)
    except (ValueError, TypeError, OSError) as error:
        raise RecipeError(f"from_encoder {recipe.from_encoder}: {' '.join(str(error).split())}") from None


def versions() -> dict[str, str]:
    return {"python": sys.version.split()[0], "torch": torch.__version__, "transformers": transformers.__version__}
