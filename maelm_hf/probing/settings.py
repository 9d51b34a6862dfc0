# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""What a number depends on besides its arguments: goes into every report's settings."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

import torch

from .loading import ProbedModel

_PACKAGES = ("maelm-hf", "torch", "transformers", "timm", "datasets", "tokenizers")


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
