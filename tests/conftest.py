# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Set-up that has to happen before any test module is imported."""

import pytest
import torch

from maelm_hf._torchvision import make_torchvision_importable

make_torchvision_importable()


@pytest.fixture
def one_thread():
    """Results to the last bit: with several threads sums are cut elsewhere, and rounding differs."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
