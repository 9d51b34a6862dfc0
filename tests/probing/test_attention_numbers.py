# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""The formulas, against NumPy written for this test, and against values that can be worked out by hand."""

import itertools
import math

import numpy as np
import pytest
import torch

from maelm_hf.probing.attention import (
    attention_centers,
    attention_distance,
    attention_diversity,
    attention_entropy,
    attention_head_redundancy,
    attention_mutual_information,
    attention_pairwise_diversity,
    attention_prefix_mass,
    attention_rollout,
    fourier_log_amplitude,
    token_norm_quantiles,
)

GRID, PREFIX = (3, 5), 2
PATCHES = 15


@pytest.fixture(scope="module")
def maps() -> torch.Tensor:
    """(2 images, 3 heads, 17, 17), a sharp softmax."""
    generator = torch.Generator().manual_seed(0)
    return (3 * torch.randn(2, 3, PREFIX + PATCHES, PREFIX + PATCHES, generator=generator)).softmax(dim=-1)


def patch_rows(maps: torch.Tensor) -> np.ndarray:
    array = maps.double().numpy()[..., PREFIX:, PREFIX:]
    return array / array.sum(-1, keepdims=True)


def places(grid=GRID) -> np.ndarray:
    return np.array(list(itertools.product(range(grid[0]), range(grid[1]))), dtype=float)


def each_map(function, array: np.ndarray) -> np.ndarray:
    """Apply a function of one (queries, keys) map to (images, heads, queries, keys)."""
    return np.array([[function(single) for single in heads] for heads in array])


def numpy_entropy(row: np.ndarray) -> float:
    row = row[row > 0]
    return float(-(row * np.log(row)).sum())


def numpy_diversity(single: np.ndarray) -> float:
    centers = single @ places()
    return float(np.mean([np.sum((c - centers.mean(0)) ** 2) for c in centers]))


def numpy_distance(single: np.ndarray) -> float:
    total = 0.0
    for q, row in enumerate(single):
        for k, weight in enumerate(row):
            total += weight * np.linalg.norm(places()[q] - places()[k])
    return total / len(single)


def numpy_mutual_information(single: np.ndarray) -> float:
    joint = single / len(single)
    keys, queries = joint.sum(0), joint.sum(1)
    information = sum(joint[q, k] * np.log(joint[q, k] / (queries[q] * keys[k])) for q, k in np.argwhere(joint > 0))
    return information / math.sqrt(numpy_entropy(queries) * numpy_entropy(keys))


def test_numbers_agree_with_numpy(maps):
    rows = patch_rows(maps)
    arguments = {"grid": GRID, "prefix_tokens": PREFIX}
    expected = {
        attention_diversity: each_map(numpy_diversity, rows),
        attention_distance: each_map(numpy_distance, rows),
        attention_entropy: each_map(lambda m: np.mean([numpy_entropy(row) for row in m]), rows),
        attention_mutual_information: each_map(numpy_mutual_information, rows),
    }
    for function, reference in expected.items():
        np.testing.assert_allclose(function(maps, **arguments).numpy(), reference, rtol=2e-5, err_msg=function.__name__)


def test_pairwise_diversity_agrees_with_scipy(maps):
    from scipy.spatial.distance import cosine, jensenshannon

    rows = patch_rows(maps)
    pairs = list(itertools.combinations(range(PATCHES), 2))
    divergence = each_map(lambda m: np.mean([jensenshannon(m[a], m[b]) ** 2 for a, b in pairs]), rows)
    distance = each_map(lambda m: np.mean([cosine(m[a], m[b]) for a, b in pairs]), rows)
    found = attention_pairwise_diversity(maps, GRID, PREFIX)
    np.testing.assert_allclose(found[0].numpy(), divergence, rtol=1e-5)
    np.testing.assert_allclose(found[1].numpy(), distance, rtol=1e-5)


def test_head_redundancy_and_prefix_mass_agree_with_numpy(maps):
    rows = patch_rows(maps)
    flat = rows.reshape(2, 3, -1)
    unit = flat / np.linalg.norm(flat, axis=-1, keepdims=True)
    cosines = unit @ unit.transpose(0, 2, 1)
    expected = (cosines.sum(-1) - 1) / 2
    np.testing.assert_allclose(attention_head_redundancy(maps, GRID, PREFIX).numpy(), expected, rtol=1e-5)
    mass = maps.double().numpy()[..., PREFIX:, :PREFIX].sum(-1).mean(-1)
    np.testing.assert_allclose(attention_prefix_mass(maps, GRID, PREFIX).numpy(), mass, rtol=1e-5)


def test_rollout_agrees_with_numpy():
    layers = [torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(s)).softmax(-1) for s in range(3)]
    expected = np.eye(4)[None].repeat(2, axis=0)
    for maps in layers:
        expected = ((maps.double().numpy().mean(1) + np.eye(4)) / 2) @ expected
    found = attention_rollout(layers)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5)
    np.testing.assert_allclose(found.sum(-1).numpy(), 1, rtol=1e-5)


@pytest.mark.parametrize("grid", [(4, 6), (5, 4), (3, 3)])
def test_fourier_number_agrees_with_the_whole_transform(grid):
    hidden = torch.randn(2, 1 + grid[0] * grid[1], 7, generator=torch.Generator().manual_seed(0))
    tokens = hidden[:, 1:].double().numpy().reshape(2, *grid, 7)
    log_amplitude = np.log(np.abs(np.fft.fft2(tokens, axes=(1, 2))))
    expected = (log_amplitude[:, grid[0] // 2, grid[1] // 2] - log_amplitude[:, 0, 0]).mean(-1)
    np.testing.assert_allclose(fourier_log_amplitude(hidden, grid, 1).numpy(), expected, rtol=1e-3, atol=1e-4)


def test_token_norm_quantiles_agree_with_numpy():
    hidden = torch.randn(3, 9, 5, generator=torch.Generator().manual_seed(0))
    norms = np.linalg.norm(hidden.numpy()[:, 1:], axis=-1)
    expected = np.quantile(norms, (0.05, 0.5, 0.95, 1.0), axis=-1).T
    np.testing.assert_allclose(token_norm_quantiles(hidden, 1).numpy(), expected, rtol=1e-5)


# The reference values: a 14 x 14 grid of 16-pixel patches


def uniform(tokens: int = 196) -> torch.Tensor:
    return torch.full((tokens, tokens), 1 / tokens)


def collapsed(tokens: int = 196) -> torch.Tensor:
    maps = torch.zeros(tokens, tokens)
    maps[:, 17] = 1
    return maps


FULL = {"grid": (14, 14)}


def test_uniform_map():
    assert attention_diversity(uniform(), **FULL).item() == pytest.approx(0, abs=1e-9)
    assert attention_distance(uniform(), **FULL, patch_size=16).item() == pytest.approx(116.49, abs=0.005)
    assert attention_entropy(uniform(), **FULL).item() == pytest.approx(math.log(196), rel=1e-6)
    assert attention_entropy(uniform(), **FULL, normalized=True).item() == pytest.approx(1, rel=1e-6)
    assert attention_mutual_information(uniform(), **FULL).item() == pytest.approx(0, abs=1e-4)
    assert attention_pairwise_diversity(uniform(), **FULL)[0].item() == pytest.approx(0, abs=1e-6)


def test_identity_map():
    identity = torch.eye(196)
    variance = 2 * (14**2 - 1) / 12
    assert attention_diversity(identity, **FULL).item() == pytest.approx(variance, rel=1e-6)
    assert attention_diversity(identity, **FULL, patch_size=16).item() == pytest.approx(256 * variance, rel=1e-6)
    assert attention_distance(identity, **FULL).item() == 0
    assert attention_entropy(identity, **FULL).item() == 0
    assert attention_mutual_information(identity, **FULL).item() == pytest.approx(1, abs=1e-5)
    divergence, cosine = attention_pairwise_diversity(identity, **FULL)
    assert divergence.item() == pytest.approx(math.log(2), rel=1e-5)
    assert cosine.item() == pytest.approx(1, rel=1e-6)


def test_collapsed_map_is_zero_and_never_nan():
    assert attention_diversity(collapsed(), **FULL).item() == 0
    assert attention_entropy(collapsed(), **FULL).item() == 0
    assert attention_mutual_information(collapsed(), **FULL).item() == 0
    assert [value.item() for value in attention_pairwise_diversity(collapsed(), **FULL)] == pytest.approx(
        [0, 0], abs=1e-6
    )


def test_attention_on_the_prefix_alone_gives_zeros_and_a_prefix_mass_of_one():
    maps = torch.zeros(17, 17)
    maps[:, 0] = 1
    for function in (attention_diversity, attention_distance, attention_entropy, attention_mutual_information):
        assert function(maps, GRID, PREFIX).item() == 0
    assert attention_prefix_mass(maps, GRID, PREFIX).item() == 1


def test_a_query_without_patch_mass_is_left_out_of_the_mean():
    identity = torch.eye(5)
    identity[2] = torch.tensor([1.0, 0, 0, 0, 0])  # this patch looks at CLS alone
    kept = places((2, 2))[[0, 2, 3]]
    expected = ((kept - kept.mean(0)) ** 2).sum(-1).mean()
    assert attention_diversity(identity, (2, 2), 1).item() == pytest.approx(expected)


def test_centers_are_row_then_column():
    maps = torch.zeros(15, 15)
    maps[:, 7] = 1  # second row, third column of a 3 x 5 grid
    assert attention_centers(maps, GRID)[4].tolist() == [1, 2]
    assert attention_centers(maps, GRID, patch_size=(16, 8))[4].tolist() == [16, 16]


def test_a_sequence_is_measured_in_tokens():
    shifted = torch.zeros(6, 6)
    for query in range(6):
        shifted[query, max(0, query - 2)] = 1
    assert attention_distance(shifted).item() == pytest.approx((0 + 1 + 2 * 4) / 6)


def test_half_precision_maps_are_measured_in_float32(maps):
    for dtype, tolerance in ((torch.bfloat16, 2e-2), (torch.float16, 2e-3)):
        for function in (attention_diversity, attention_entropy, attention_mutual_information):
            found = function(maps.to(dtype), GRID, PREFIX)
            assert found.dtype == torch.float32
            torch.testing.assert_close(found, function(maps, GRID, PREFIX), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("function", [attention_diversity, attention_distance, attention_entropy])
def test_what_is_no_map_is_refused(function):
    maps = uniform(16)
    with pytest.raises(ValueError, match="grid 3 x 5 with 1 prefix tokens makes 16 tokens, the maps have 17"):
        function(uniform(17), (3, 5), 1)
    with pytest.raises(ValueError, match="two positive ints"):
        function(maps, (4, 0), 0)
    with pytest.raises(ValueError, match="NaN"):
        function(maps * torch.nan, (4, 4))
    with pytest.raises(ValueError, match="never negative"):
        function(maps - 1, (4, 4))
    with pytest.raises(ValueError, match=r"\(4, 5\)"):
        function(torch.rand(4, 5))
    with pytest.raises(TypeError, match="floating-point"):
        function(torch.ones(4, 4, dtype=torch.long))
    with pytest.raises(ValueError, match="prefix_tokens=16"):
        function(maps, None, 16)
