# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Set-up that has to happen before any test module is imported."""

from maelm_hf._torchvision import make_torchvision_importable

make_torchvision_importable()
