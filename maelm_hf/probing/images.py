# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Images for the probes: prepared by the model's own processor, or by the usual steps where it has none."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .data import ProbeData
from .loading import ProbedModel, load_processor

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def image_preparation(
    model: ProbedModel,
    processor: Any,
    data: ProbeData,
    *,
    trust_remote_code: bool,
    revision: str | None,
    notes: list[str],
) -> Callable[[list[Any]], Mapping[str, Any] | Tensor]:
    """What makes a batch of a list of images: the processor given, the model's own, or the usual steps (and a note)."""
    if processor is None and model.source is not None:
        # Weights alone, without a preprocessor_config.json, get the usual steps below, and a note that says so.
        with contextlib.suppress(FileNotFoundError):
            processor = load_processor(model, revision=revision, trust_remote_code=trust_remote_code)
    if processor is None:
        size = _default_size(model)
        told = (
            f"No image processor: images are resized to {size[0]} x {size[1]} (shorter side, then the centre) and "
            "normalised with ImageNet's mean and deviation; float tensors are taken as they are. Pass processor= for "
            "other steps."
        )
        return lambda images: _stack([_usual_steps(image, size, notes, told) for image in images])
    if hasattr(processor, "model_input_names") or hasattr(processor, "image_processor"):
        return lambda images: dict(processor(images=[_as_picture(image) for image in images], return_tensors="pt"))
    if not callable(processor):
        raise TypeError(f"processor must be an image processor or a transform, got {type(processor).__name__}")
    return lambda images: _stack([processor(_as_picture(image)) for image in images])


def pixels_of(inputs: Mapping[str, Any] | Tensor) -> Tensor | None:
    """The pixel tensor (batch, channels, height, width) among a model's inputs."""
    values = inputs.values() if isinstance(inputs, Mapping) else [inputs]
    return next((v for v in values if isinstance(v, Tensor) and v.ndim == 4 and v.is_floating_point()), None)


def displayable(pixels: Tensor) -> Tensor:
    """Prepared pixels (channels, height, width) as (height, width, 3) uint8: each image stretched to its own range."""
    pixels = pixels.detach().float().cpu()
    pixels = pixels[:3] if pixels.shape[0] >= 3 else pixels[:1].expand(3, -1, -1)
    # One range for all channels keeps the colours near enough, whatever the normalisation was.
    low, high = pixels.amin(), pixels.amax()
    return ((pixels - low) / (high - low).clamp(min=1e-6) * 255).round().byte().permute(1, 2, 0).contiguous()


def _default_size(model: ProbedModel) -> tuple[int, int]:
    """The size that the model was built for where that is 224 or so, else 224: in whole patches."""
    config = model.config
    size = getattr(config, "image_size", None) or 224
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    patch = getattr(config, "patch_size", None) or 1
    patch = patch if isinstance(patch, int) else patch[0]
    if max(height, width) > 384:  # DINOv2 says 518, its processor takes 224
        height = width = 224
    return max(patch, height - height % patch), max(patch, width - width % patch)


def _usual_steps(image: Any, size: tuple[int, int], notes: list[str], told: str) -> Tensor:
    """A picture as a normalised (3, height, width) tensor; a float tensor is ready already."""
    if isinstance(image, Tensor) and image.is_floating_point():
        return image
    if told not in notes:
        notes.append(told)
    picture = np.asarray(_as_picture(image))
    pixels = torch.from_numpy(picture.copy()).permute(2, 0, 1)[None].float() / 255
    height, width = pixels.shape[-2:]
    scale = max(size[0] / height, size[1] / width)
    scaled = (max(size[0], round(height * scale)), max(size[1], round(width * scale)))
    pixels = F.interpolate(pixels, size=scaled, mode="bicubic", antialias=True, align_corners=False).clamp(0, 1)
    top, left = ((extent - wanted) // 2 for extent, wanted in zip(scaled, size, strict=True))
    pixels = pixels[0, :, top : top + size[0], left : left + size[1]]
    mean, std = (torch.tensor(values)[:, None, None] for values in (IMAGENET_MEAN, IMAGENET_STD))
    return (pixels - mean) / std


def _as_picture(image: Any) -> Any:
    """Arrays and uint8 tensors as RGB PIL images; PIL images in RGB."""
    from PIL import Image

    if isinstance(image, Tensor):
        image = image.permute(1, 2, 0).numpy() if image.shape[0] in (1, 3) else image.numpy()
    if isinstance(image, np.ndarray):
        array = image[..., 0] if image.ndim == 3 and image.shape[-1] == 1 else image
        if np.issubdtype(array.dtype, np.floating):
            if array.min() < 0 or array.max() > 1:
                raise ValueError(
                    f"images holds a float array with values in [{array.min():.3g}, {array.max():.3g}]: "
                    "pass uint8, floats in [0, 1], or normalised torch tensors with processor=None"
                )
            array = (array * 255).round()
        image = Image.fromarray(array.astype(np.uint8))
    return image.convert("RGB")


def _stack(images: list[Tensor]) -> Tensor:
    sizes = {tuple(image.shape) for image in images}
    if len(sizes) > 1:
        raise ValueError(
            f"images have different sizes, {' and '.join(str(size) for size in sorted(sizes)[:2])}: "
            "resize them, or pass a processor that does"
        )
    return torch.stack(images)
