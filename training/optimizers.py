# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Optimizers, learning-rate schedules, and optimizer state as named tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .recipe import OptimizerSection, RecipeError


def build_optimizers(model: nn.Module, section: OptimizerSection) -> list[torch.optim.Optimizer]:
    """AdamW for all parameters, or Muon for the hidden matrices and AdamW for the rest.

    Hidden matrices are the weights of linear layers other than the output layer: embeddings, the relative-position
    table, norms and biases are AdamW's. Norms and biases are not decayed. What is not the encoder's has the learning
    rate ``decoder_learning_rate`` where the section gives one.
    """
    matrices, decayed, not_decayed = _split_parameters(model)
    fused = all(parameter.device.type in ("cpu", "cuda") for parameter in model.parameters())
    adamw_settings = {"lr": section.learning_rate, "betas": section.betas, "eps": section.eps, "fused": fused}
    if section.name == "adamw":
        decayed = matrices + decayed
    groups = [
        {"params": decayed, "weight_decay": section.weight_decay},
        {"params": not_decayed, "weight_decay": 0.0},
    ]
    if section.decoder_learning_rate is not None:
        groups = _apart(groups, set(model.encoder.parameters()), section.decoder_learning_rate)
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, **adamw_settings)]
    if section.name == "muon":
        if not hasattr(torch.optim, "Muon"):
            raise RecipeError("optimizer.name 'muon' needs torch.optim.Muon (torch >= 2.9): upgrade, or use 'adamw'.")
        optimizers.append(torch.optim.Muon(matrices, lr=section.muon_learning_rate, weight_decay=section.weight_decay))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def _apart(groups: list[dict], encoder: set[nn.Parameter], learning_rate: float) -> list[dict]:
    """Every group twice: the encoder's parameters, and the others with a learning rate of their own."""
    divided = []
    for group in groups:
        own = [parameter for parameter in group["params"] if parameter in encoder]
        others = [parameter for parameter in group["params"] if parameter not in encoder]
        divided += [group | {"params": own}, group | {"params": others, "lr": learning_rate}]
    return divided


def _split_parameters(model: nn.Module) -> tuple[list, list, list]:
    """Matrices inside the model; other matrices; vectors. In the order of ``model.named_parameters()``."""
    output = model.get_output_embeddings()
    hidden = {module.weight for module in model.modules() if isinstance(module, nn.Linear) and module is not output}
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    matrices, decayed, not_decayed = [], [], []
    for parameter in model.parameters():
        if parameter in hidden and parameter not in embeddings:
            matrices.append(parameter)
        else:
            (decayed if parameter.ndim >= 2 else not_decayed).append(parameter)
    return matrices, decayed, not_decayed


def learning_rate_factor(step: int, max_steps: int, section: OptimizerSection) -> float:
    """The share of the peak learning rate at optimizer step ``step`` (the first is 1).

    Linear warm-up, then ``linear``: linear to 0 one step after the last; ``wsd``: constant, and linear to 0 over the
    last ``decay_steps`` (warm-up, stable, decay; Hu et al., MiniCPM, 2024).
    """
    if step <= section.warmup_steps:
        return step / section.warmup_steps
    decay_steps = max_steps - section.warmup_steps if section.schedule == "linear" else section.decay_steps
    return min(1.0, (max_steps + 1 - step) / (decay_steps + 1))


def set_learning_rate(optimizers: list[torch.optim.Optimizer], factor: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor


def optimizer_tensors(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    """The optimizers' state as ``{parameter name}:{state name}`` -> tensor on the CPU, gathered from all processes."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    tensors = {}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                value = torch.as_tensor(value)
                if hasattr(value, "full_tensor"):  # sharded by FSDP2: every process takes part
                    value = value.full_tensor()
                tensors[f"{names[parameter]}:{key}"] = value.detach().to("cpu", copy=True).contiguous()
    return tensors


def load_optimizer_tensors(
    model: nn.Module, optimizers: list[torch.optim.Optimizer], tensors: dict[str, torch.Tensor]
) -> None:
    """Puts back what :func:`optimizer_tensors` gave.

    Raises:
        ValueError: a tensor belongs to no parameter of the model.
    """
    states: dict[str, dict[str, Any]] = {}
    for key, value in tensors.items():
        name, _, state_name = key.rpartition(":")
        states.setdefault(name, {})[state_name] = value
    names = {parameter: name for name, parameter in model.named_parameters()}
    unknown = sorted(set(states) - set(names.values()))
    if unknown:
        raise ValueError(f"the optimizer state names parameters that the model lacks: {', '.join(unknown[:3])}.")
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                for key, value in states.get(names[parameter], {}).items():
                    optimizer.state[parameter][key] = _placed_like(value, parameter)


def _placed_like(value: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    if value.ndim == 0:
        # AdamW's step count: on the CPU unless the fused kernel wants it beside its parameter.
        return value.to(parameter.device, copy=True)
    if hasattr(parameter, "device_mesh"):
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(value, parameter.device_mesh, parameter.placements)
    return value.to(parameter.device, copy=True)
