# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""A probe's forward passes: in eval mode, whole and in order, and everything as before afterwards."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .images import pixels_of


@contextmanager
def as_it_is_probed(module: nn.Module) -> Iterator[None]:
    """Eval mode, a fixed random state, and ViT-MAE without hiding anything (in eval mode it does).

    Every module's mode, the config and the random state are as before afterwards, also after an exception.
    """
    modes = {part: part.training for part in module.modules()}
    configs = [part.config for part in module.modules() if _hides_patches(part)]
    ratios = [config.mask_ratio for config in configs]
    cuda = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=cuda):
        torch.manual_seed(0)
        try:
            module.eval()
            for config in configs:
                config.mask_ratio = 0.0
            yield
        finally:
            for part, mode in modes.items():
                part.training = mode
            for config, ratio in zip(configs, ratios, strict=True):
                config.mask_ratio = ratio


def _hides_patches(module: nn.Module) -> bool:
    return getattr(getattr(module, "config", None), "model_type", None) == "vit_mae"


def run(module: nn.Module, inputs: Mapping[str, Any] | Tensor) -> None:
    """One forward pass, with what some vision models need beside the pixels."""
    extra: dict[str, Any] = {}
    pixels = pixels_of(inputs)
    config = getattr(module, "config", None)
    if pixels is not None and config is not None:
        accepted = inspect.signature(module.forward).parameters
        size = getattr(config, "image_size", None)
        built_for = tuple(size) if isinstance(size, (tuple, list)) else (size, size)
        if "interpolate_pos_encoding" in accepted and tuple(pixels.shape[-2:]) != built_for:
            extra["interpolate_pos_encoding"] = True
        if _hides_patches(module):
            # ViT-MAE shuffles its patches by this noise even when it hides none: ascending noise keeps their order.
            patch = config.patch_size
            patch = (patch, patch) if isinstance(patch, int) else patch
            patches = (pixels.shape[-2] // patch[0]) * (pixels.shape[-1] // patch[1])
            extra["noise"] = torch.arange(patches, device=pixels.device).float().expand(len(pixels), -1)
    if isinstance(inputs, Mapping):
        module(**{**inputs, **extra})
    else:
        module(inputs, **extra)
