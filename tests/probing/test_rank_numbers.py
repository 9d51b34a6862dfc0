# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Numbers read off a spectrum, against NumPy, SciPy and values known by hand."""

import math

import numpy as np
import pytest
import scipy.stats
import torch

from maelm_hf.probing import effective_rank, entropy_effective_rank, participation_ratio, stable_rank
from maelm_hf.probing.resampling import (
    block_bootstrap_interval,
    is_settled,
    pseudo_values,
    student_t_quantile,
)
from maelm_hf.probing.spectrum import alpha_req, condition_number, interpolated_effective_rank, rankme

SPECTRUM = np.sort(np.random.default_rng(0).gamma(1.0, size=50))[::-1].copy()


def reference_rank(values, tau, power):
    """By the definition: add one value after another until the share is reached."""
    total, held = sum(values**power), 0.0
    for k, value in enumerate(values, start=1):
        held += value**power
        if held >= tau * total * (1 - 1e-12):
            return k
    raise AssertionError


@pytest.mark.parametrize("tau", [0.8, 0.9, 0.95, 0.99, 1.0])
@pytest.mark.parametrize("power", [1, 2])
def test_effective_rank_is_the_smallest_that_holds_the_share(tau, power):
    assert effective_rank(torch.from_numpy(SPECTRUM), tau, power) == reference_rank(SPECTRUM, tau, power)


@pytest.mark.parametrize("dim", [10, 20, 30, 100, 1000])
def test_effective_rank_of_equal_values_is_not_moved_by_rounding(dim):
    assert effective_rank(torch.full((dim,), 0.1), tau=0.9) == round(0.9 * dim)


def test_interpolated_rank_is_the_rank_without_its_steps():
    for tau in np.linspace(0.05, 1, 40):
        exact = effective_rank(SPECTRUM, tau)
        smooth = interpolated_effective_rank(SPECTRUM, tau)
        assert exact - 1 < smooth <= exact + 1e-9
    assert interpolated_effective_rank(torch.ones(100), 0.905) == pytest.approx(90.5)


def test_entropy_rankme_stable_participation_condition_against_numpy():
    shares = SPECTRUM / SPECTRUM.sum()
    assert entropy_effective_rank(SPECTRUM) == pytest.approx(math.exp(scipy.stats.entropy(shares)), rel=1e-12)
    padded = (shares + 1e-7) / (shares + 1e-7).sum()
    assert rankme(SPECTRUM) == pytest.approx(math.exp(scipy.stats.entropy(padded)), rel=1e-12)
    assert stable_rank(SPECTRUM) == pytest.approx((SPECTRUM**2).sum() / SPECTRUM[0] ** 2)
    assert participation_ratio(SPECTRUM) == pytest.approx((SPECTRUM**2).sum() ** 2 / (SPECTRUM**4).sum())
    assert condition_number(SPECTRUM) == pytest.approx(np.linalg.cond(np.diag(SPECTRUM)))


def test_alpha_req_finds_the_exponent_of_a_power_law():
    eigenvalues = np.arange(1, 301) ** -1.7
    assert alpha_req(np.sqrt(eigenvalues)) == pytest.approx(1.7, rel=1e-9)
    noisy = np.sort(eigenvalues * np.random.default_rng(1).uniform(0.5, 2, 300))[::-1]
    ranks = np.arange(11, 101)
    slope = scipy.stats.linregress(np.log(ranks), np.log(noisy[10:100])).slope
    assert alpha_req(np.sqrt(noisy), fit_range=(11, 100)) == pytest.approx(-slope, rel=1e-9)


def test_numbers_take_leading_dimensions():
    stack = torch.from_numpy(np.stack([SPECTRUM, np.linspace(5, 1, 50)]))
    for function in (effective_rank, entropy_effective_rank, stable_rank, participation_ratio, rankme):
        assert function(stack).tolist() == pytest.approx([function(row) for row in stack])


def test_a_spectrum_of_zeros_has_rank_zero():
    assert effective_rank(torch.zeros(4)) == 0
    assert math.isnan(entropy_effective_rank(torch.zeros(4)))


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        ([1.0, 2.0], {}, "largest first"),
        ([1.0, -1.0], {}, "not negative"),
        ([float("nan"), 1.0], {}, "finite"),
        ([], {}, "expected"),
        ([2.0, 1.0], {"tau": 0.0}, "tau=0.0"),
        ([2.0, 1.0], {"tau": 1.1}, "tau=1.1"),
        ([2.0, 1.0], {"power": 0}, "power=0"),
    ],
)
def test_what_is_no_spectrum_is_refused(values, options, message):
    with pytest.raises(ValueError, match=message):
        effective_rank(torch.tensor(values), **options)


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 7, 8, 15, 30])
def test_student_t_quantiles_are_scipys(degrees):
    for probability in (0.2, 0.9, 0.975):
        expected = scipy.stats.t.ppf(probability, degrees)
        assert student_t_quantile(probability, degrees) == pytest.approx(expected, rel=1e-8)


def test_pseudo_values_of_a_mean_are_the_block_means():
    values, counts = np.array([1.0, 4.0, 2.5]), np.array([10.0, 20.0, 30.0])
    mean = (values * counts).sum() / 60
    left_out = [np.average(np.delete(values, b), weights=np.delete(counts, b)) for b in range(3)]
    found = pseudo_values(mean, torch.tensor(left_out), torch.from_numpy(counts))
    assert found.tolist() == pytest.approx(values.tolist())


def test_interval_of_a_mean_is_near_the_t_interval_and_the_seed_repeats_it():
    values = torch.from_numpy(np.random.default_rng(0).normal(3, 2, 8))
    low, high = block_bootstrap_interval(values, torch.ones(8, dtype=torch.float64), seed=0)
    assert (low, high) == block_bootstrap_interval(values, torch.ones(8, dtype=torch.float64), seed=0)
    expected = scipy.stats.t.interval(0.95, 7, values.mean(), scipy.stats.sem(values))
    width = expected[1] - expected[0]
    assert low == pytest.approx(expected[0], abs=0.2 * width)
    assert high == pytest.approx(expected[1], abs=0.2 * width)


def test_too_few_or_empty_blocks_give_no_interval():
    ones = torch.ones(8, dtype=torch.float64)
    assert all(math.isnan(bound) for bound in block_bootstrap_interval(ones[:3], ones[:3], seed=0))
    counts = ones.clone()
    counts[3] = 0
    assert all(math.isnan(bound) for bound in block_bootstrap_interval(ones, counts, seed=0))


def test_settled_needs_agreement_and_twice_as_many_tokens_as_dimensions():
    assert is_settled(100.0, 99.0, tokens=1000, dim=100)
    assert not is_settled(100.0, 97.0, tokens=1000, dim=100)
    assert is_settled(10, 9, tokens=1000, dim=100)
    assert not is_settled(100.0, 100.0, tokens=199, dim=100)
    assert not is_settled(math.nan, math.nan, tokens=1000, dim=100)
