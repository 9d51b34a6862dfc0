# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""ZeRO-2 by DeepSpeed: weights whole on every process, gradients and optimizer state shared out among them.

DeepSpeed wraps model and optimizer into an engine that does backward, clipping and step by itself. What it knows of the
optimizer goes into the same named tensors as elsewhere, so that its checkpoints are ours: safetensors that any other
way of training continues, and no pickles.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from accelerate.utils import DeepSpeedPlugin

from .recipe import Recipe, RecipeError

_MOMENTS = ("exp_avg", "exp_avg_sq")  # of AdamW


def check(plugin: DeepSpeedPlugin, recipe: Recipe) -> None:
    """Refuses what DeepSpeed would do otherwise than the recipe says.

    Raises:
        RecipeError: another stage, offloading, Muon or fp16.
    """
    if plugin.zero_stage not in (1, 2):
        raise RecipeError(
            f"DeepSpeed's ZeRO stage {plugin.zero_stage} is not supported: set zero_stage 2, or use FSDP2, "
            "training/accelerate/fsdp2.yaml."
        )
    if plugin.offload_optimizer_device != "none":
        raise RecipeError("DeepSpeed would offload to an optimizer of its own: set offload_optimizer_device none.")
    if recipe.optimizer.name != "adamw":
        raise RecipeError(
            f"optimizer.name {recipe.optimizer.name} is two optimizers, and DeepSpeed steps one: use adamw, or DDP or "
            "FSDP2 (training/accelerate)."
        )
    if recipe.precision == "fp16":
        raise RecipeError("precision fp16 is not supported with DeepSpeed: use bf16, or DDP (training/accelerate).")


def configure(plugin: DeepSpeedPlugin, recipe: Recipe) -> None:
    """Gives the engine the recipe's clipping, and leaves micro-batches and their weights to the loop."""
    config = plugin.deepspeed_config
    config["train_micro_batch_size_per_gpu"] = 1  # for its log alone; micro-batches are of the recipe
    config["gradient_accumulation_steps"] = 1  # it would divide the loss, which counts tokens already
    config["gradient_clipping"] = recipe.optimizer.max_grad_norm


def autocast_inside(model: torch.nn.Module, autocast: Callable[[], AbstractContextManager]) -> None:
    """Enters autocast in the model's own forward pass: the engine leaves one that was entered around it."""
    forward = model.forward

    def with_autocast(*args: Any, **kwargs: Any) -> Any:
        with autocast():
            return forward(*args, **kwargs)

    model.forward = with_autocast


def backward(engine: Any, loss: torch.Tensor, is_last: bool) -> None:
    engine.set_gradient_accumulation_boundary(is_last)
    engine.backward(loss)


def clip_and_step(engine: Any) -> torch.Tensor:
    """The gradient norm before clipping; where it is not finite the engine leaves everything as it is."""
    engine.step()
    return torch.as_tensor(engine.get_global_grad_norm(), device=engine.device)


def optimizer_tensors(engine: Any) -> dict[str, torch.Tensor]:
    """As :func:`training.optimizers.optimizer_tensors`; every process takes part."""
    from deepspeed.utils import safe_get_full_optimizer_state

    sharing = engine.optimizer
    states = [sharing.optimizer.state.get(partition) for partition in sharing.single_partition_of_fp32_groups]
    if not all(states):  # before the first step
        return {}
    _link_states(sharing)
    tensors = {}
    for name, parameter in engine.module.named_parameters():
        for moment in _MOMENTS:
            tensors[f"{name}:{moment}"] = safe_get_full_optimizer_state(parameter, moment).cpu()
        tensors[f"{name}:step"] = torch.as_tensor(states[0]["step"]).to("cpu", copy=True)
    return tensors


def load_optimizer_tensors(engine: Any, tensors: dict[str, torch.Tensor]) -> None:
    """Puts back what :func:`optimizer_tensors` gave, here or elsewhere."""
    from deepspeed.utils import safe_set_full_optimizer_state

    if not tensors:
        return
    sharing = engine.optimizer
    step = next(value for name, value in tensors.items() if name.endswith(":step"))
    for partition in sharing.single_partition_of_fp32_groups:
        moments = {moment: torch.zeros_like(partition) for moment in _MOMENTS}
        sharing.optimizer.state[partition] = {"step": step.to(engine.device, copy=True)} | moments
    _link_states(sharing)
    for name, parameter in engine.module.named_parameters():
        for moment in _MOMENTS:
            safe_set_full_optimizer_state(parameter, tensors[f"{name}:{moment}"].to(engine.device), moment)


def _link_states(sharing: Any) -> None:
    """Tells parameters where their state is. DeepSpeed (0.19) does so too early for all groups but the first."""
    from deepspeed.utils import lazy_init_hp_params_optimizer_state

    for parameters, partition in zip(sharing.bit16_groups, sharing.single_partition_of_fp32_groups, strict=True):
        lazy_init_hp_params_optimizer_state(parameters, partition, sharing.optimizer.state)
