# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""The benchmark compares like with like: its NumPy numbers are the probe's."""

import numpy as np
import torch

from maelm_hf.probing import AttentionStatistics
from training.benchmark_attention import numpy_hidden, numpy_numbers


def test_numpy_numbers_are_those_of_the_probe():
    generator = torch.Generator().manual_seed(0)
    maps = (2 * torch.randn(3, 4, 26, 26, generator=generator)).softmax(-1)
    statistics = AttentionStatistics(4, (5, 5), 1)
    statistics.update(maps)
    found = statistics.compute()
    numbers = numpy_numbers(maps.numpy(), 5).mean(0)
    names = [
        "diversity",
        "distance",
        "entropy",
        "mutual_information",
        None,
        "pairwise_cosine_distance",
        "head_redundancy",
    ]
    for column, name in enumerate([*names, "prefix_mass"]):
        if name is not None:  # the divergence is of another draw of pairs
            np.testing.assert_allclose(numbers[:, column], found[name].numpy(), rtol=1e-4, atol=1e-5, err_msg=name)


def test_numpy_hidden_numbers_are_those_of_the_probe():
    from maelm_hf.probing.attention import fourier_log_amplitude, token_norm_quantiles

    hidden = torch.randn(3, 26, 8, generator=torch.Generator().manual_seed(0))
    found = numpy_hidden(hidden.numpy(), 5)
    np.testing.assert_allclose(found[:, :4], token_norm_quantiles(hidden, 1).numpy(), rtol=1e-5)
    np.testing.assert_allclose(found[:, 4], fourier_log_amplitude(hidden, (5, 5), 1).numpy(), rtol=1e-3)
