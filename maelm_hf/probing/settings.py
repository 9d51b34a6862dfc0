# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""What a number depends on: checks of the probes' arguments, and what goes into a report's settings besides them."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from importlib import metadata
from numbers import Integral
from typing import Any

import torch

from .loading import ProbedModel

_PACKAGES = ("maelm-hf", "torch", "transformers", "timm", "datasets", "tokenizers")


# The least that an argument may be, and the way out of less.
_LEAST = {
    "batch_size": (1, "1 runs the inputs one by one"),
    "blocks": (1, "8 gives intervals, 1 none"),
    "max_tokens": (1, "None reads everything"),
    "max_length": (1, "None takes what the model takes"),
    "max_images": (1, "None reads everything"),
    "overlay_images": (0, "0 keeps none"),
    "prefix_tokens": (0, "None finds it"),
    "seed": (0, "any other integer will do"),
}


def check_counts(**arguments: Any) -> None:
    """Refuse counts that are no integers or too small, by name; ``None`` stands for no limit."""
    for name, value in arguments.items():
        least, way_out = _LEAST[name]
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise TypeError(f"{name} must be an integer, got {value!r}: {way_out}")
        if value < least:
            raise ValueError(f"{name}={value} must be at least {least}: {way_out}")


def environment(model: ProbedModel) -> dict[str, Any]:
    """Date, device, dtype and versions, as plain JSON values."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device_name(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "versions": versions(),
    }


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return device.type


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
