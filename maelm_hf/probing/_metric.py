# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""torchmetrics' Metric: torchmetrics imports torchvision where it is installed, so that has to be importable first."""

from .._torchvision import make_torchvision_importable

make_torchvision_importable()

from torchmetrics import Metric  # noqa: E402

__all__ = ["Metric"]
