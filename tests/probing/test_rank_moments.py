# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""RepresentationMoments against NumPy on the stacked tokens."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from maelm_hf.probing import RepresentationMoments, effective_rank, entropy_effective_rank
from maelm_hf.probing.rank_table import POPULATIONS, rank_table
from maelm_hf.probing.spectrum import condition_number, rankme

SETTINGS = {"tau": 0.9, "power": 1, "centred": False, "seed": 0}


def tokens_of(hidden, mask):
    return hidden[mask].double().numpy()


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(24, 9, 20, generator=generator) * torch.linspace(3, 0.2, 20) + 0.5
    mask = torch.rand(24, 9, generator=generator) > 0.3
    mask[5] = False  # a row without any token
    mask[6] = torch.arange(9) == 2  # and one with a single token
    return hidden, mask


def test_spectra_are_those_of_the_stacked_tokens(batch):
    hidden, mask = batch
    moments = RepresentationMoments(20)
    moments.update(hidden[:7], mask[:7])
    moments.update(hidden[7:], mask[7:])
    tokens = tokens_of(hidden, mask)
    assert moments.tokens == len(tokens)
    np.testing.assert_allclose(moments.singular_values(), np.linalg.svd(tokens, compute_uv=False), rtol=1e-10)
    centred = np.linalg.svd(tokens - tokens.mean(0), compute_uv=False)
    np.testing.assert_allclose(moments.singular_values(centred=True), centred, rtol=1e-10)


def test_width_beyond_one_strip():
    hidden = torch.randn(40, 10, 300, generator=torch.Generator().manual_seed(1))
    moments = RepresentationMoments(300)
    moments.update(hidden)
    tokens = hidden.reshape(-1, 300).double().numpy()
    np.testing.assert_allclose(moments.second_moment(), tokens.T @ tokens, rtol=1e-9, atol=1e-9)


def test_cosines_residual_and_norm_quantiles(batch):
    hidden, mask = batch
    moments = RepresentationMoments(20)
    moments.update(hidden, mask)
    numbers = moments.compute()

    def mean_cosine(tokens):
        unit = tokens / np.linalg.norm(tokens, axis=1, keepdims=True)
        products = unit @ unit.T
        return products[~np.eye(len(tokens), dtype=bool)].mean()

    sequences = [tokens_of(rows, kept) for rows, kept in zip(hidden, mask, strict=True) if kept.sum() >= 2]
    residual = np.mean([np.linalg.norm(rows - rows.mean(0)) / np.linalg.norm(rows) for rows in sequences])
    assert numbers["oversmoothing_residual"] == pytest.approx(residual, rel=1e-9)
    assert numbers["mean_cosine_in_sequence"] == pytest.approx(np.mean([mean_cosine(r) for r in sequences]), rel=1e-9)
    tokens = tokens_of(hidden, mask)
    assert numbers["mean_cosine"] == pytest.approx(mean_cosine(tokens), rel=1e-9)
    norms = np.linalg.norm(tokens, axis=1)
    for quantile in (1, 25, 50, 75, 99):
        expected = np.quantile(norms, quantile / 100, method="inverted_cdf")
        assert numbers[f"token_norm_q{quantile:02d}"] == pytest.approx(expected, rel=0.01)


def test_same_tokens_have_no_residual_and_full_cosine():
    moments = RepresentationMoments(4)
    moments.update(torch.tensor([1.0, -2.0, 0.5, 3.0]).expand(6, 5, 4))
    numbers = moments.compute()
    assert numbers["oversmoothing_residual"] == pytest.approx(0, abs=1e-7)
    assert numbers["mean_cosine"] == pytest.approx(1)
    assert numbers["stable_rank"] == pytest.approx(1)


def test_ill_conditioned_matrix_agrees_with_an_all_float64_reference():
    """Singular values over 6 decades, in a random basis: every number that a report shows, to 1e-3 relative.

    The reference never forms the second moment: it is NumPy's SVD of the float64 tokens themselves.
    """
    rng = np.random.default_rng(0)
    dim, count = 192, 6144
    left, _ = np.linalg.qr(rng.standard_normal((count, dim)))
    right, _ = np.linalg.qr(rng.standard_normal((dim, dim)))
    tokens = (left * np.logspace(3, -3, dim)) @ right.T  # float64
    moments = RepresentationMoments(dim)
    for part in np.split(tokens, 12):
        moments.update(torch.from_numpy(part).view(16, 32, dim))
    for is_centred in (False, True):
        reference = np.linalg.svd(tokens - is_centred * tokens.mean(0), compute_uv=False)
        assert reference[0] / reference[-1] > 0.9e6
        found = moments.singular_values(centred=is_centred)
        np.testing.assert_allclose(found, reference, rtol=1e-3)
        for function in (entropy_effective_rank, rankme, condition_number):
            assert function(found) == pytest.approx(function(reference), rel=1e-3)
        for tau in (0.8, 0.9, 0.95, 0.99):
            for power in (1, 2):
                assert effective_rank(found, tau, power) == effective_rank(reference, tau, power)


def test_a_direction_that_no_token_has_is_zero_and_not_rounding():
    rng = np.random.default_rng(0)
    basis, _ = np.linalg.qr(rng.standard_normal((24, 24)))
    tokens = rng.standard_normal((500, 23)) @ basis[:23]
    moments = RepresentationMoments(24)
    moments.update(torch.from_numpy(tokens)[:, None])
    values = moments.singular_values()
    assert values[-1] == 0
    assert values[-2] > 1
    assert moments.numbers()["condition_number_raw"] == float("inf")


def test_half_precision_tokens_are_summed_in_float64():
    hidden = torch.randn(64, 32, 16, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    moments = RepresentationMoments(16)
    moments.update(hidden)
    tokens = hidden.double().reshape(-1, 16).numpy()
    np.testing.assert_allclose(moments.singular_values(), np.linalg.svd(tokens, compute_uv=False), rtol=1e-12)


@pytest.mark.parametrize("cast", ["half", "bfloat16", "float", "double"])
def test_sums_stay_float64_whatever_cast(batch, cast):
    moments = RepresentationMoments(20)
    moments.update(*batch)
    before = copy.deepcopy(moments.metric_state)
    holder = nn.Module()
    holder.moments = moments
    getattr(holder, cast)()
    holder.to(torch.bfloat16)
    holder.to("cpu", torch.float16)
    assert all(value.dtype == torch.float64 for value in moments.metric_state.values())
    assert all(torch.equal(before[name], value) for name, value in moments.metric_state.items())
    moments.reset()
    moments.update(*batch)
    assert all(torch.equal(before[name], value) for name, value in moments.metric_state.items())


def test_state_dict_restores_everything(batch):
    moments = RepresentationMoments(20)
    moments.update(*batch)
    restored = RepresentationMoments(20)
    restored.load_state_dict(moments.state_dict())
    assert restored.compute() == moments.compute()
    restored.merge(moments)  # what was computed before is not handed out again
    assert restored.compute()["mean_cosine"] != moments.compute()["mean_cosine"]
    assert restored.tokens == 2 * moments.tokens


def test_merge_joins_objects_and_saved_states(batch):
    hidden, mask = batch
    whole, *parts = (RepresentationMoments(20) for _ in range(4))
    whole.update(hidden, mask)
    for number, part in enumerate(parts):
        rows = slice(8 * number, 8 * (number + 1))
        part.update(hidden[rows], mask[rows], index=torch.arange(24)[rows])
    joined = parts[0].merge(parts[1], parts[2].state_dict())
    for name, value in whole.metric_state.items():
        torch.testing.assert_close(joined.metric_state[name], value, rtol=1e-12, atol=1e-9)
    parts[1].merge_state(parts[2])  # torchmetrics' own way
    assert parts[1].tokens == mask[8:].sum()
    with pytest.raises(ValueError, match="equal dim and blocks"):
        RepresentationMoments(20).merge(RepresentationMoments(21))


def test_blocks_do_not_depend_on_batches_or_order(batch):
    hidden, mask = batch
    index = torch.arange(24) + 100
    whole, shuffled = RepresentationMoments(20), RepresentationMoments(20)
    whole.update(hidden, mask, index)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    for rows in order.split(5):
        shuffled.update(hidden[rows], mask[rows], index[rows])
    torch.testing.assert_close(whole.second, shuffled.second, rtol=1e-12, atol=1e-9)
    assert torch.equal(whole.count, shuffled.count)


def test_nan_and_infinity_are_named_and_add_nothing(batch):
    hidden, mask = batch
    moments = RepresentationMoments(20, name="layer encoder.layer.3")
    moments.update(hidden, mask)
    before = moments.second.clone()
    poisoned = hidden.clone()
    poisoned[~mask] = float("nan")  # padding may hold anything
    moments.update(poisoned, mask)
    torch.testing.assert_close(moments.second, 2 * before)
    for value, word in ((float("nan"), "NaN"), (float("inf"), "infinity")):
        poisoned = hidden.clone()
        poisoned[0, mask[0].nonzero()[0], 3] = value
        with pytest.raises(ValueError, match=f"encoder.layer.3: {word}"):
            moments.update(poisoned, mask)
    torch.testing.assert_close(moments.second, 2 * before)


def test_wrong_shapes_and_no_tokens_are_refused(batch):
    hidden, mask = batch
    moments = RepresentationMoments(20)
    with pytest.raises(ValueError, match="no token"):
        moments.numbers()
    with pytest.raises(ValueError, match="expected"):
        moments.update(hidden[..., :19])
    with pytest.raises(ValueError, match="agree"):
        moments.update(hidden, mask[:, :-1])
    with pytest.raises(ValueError, match="one number a sequence"):
        moments.update(hidden, mask, index=torch.arange(3))
    with pytest.raises(ValueError, match="at least 1"):
        RepresentationMoments(0)


def gaussian_moments(rng, scales, sequences, length, shared=0.2):
    """Tokens of known spectrum; those of one sequence share a part of their variance."""
    own = rng.standard_normal((sequences, length, len(scales)))
    common = rng.standard_normal((sequences, 1, len(scales)))
    hidden = torch.from_numpy((np.sqrt(1 - shared) * own + np.sqrt(shared) * common) * scales)
    moments = RepresentationMoments(len(scales))
    moments.update(hidden)
    return moments


def table_of(moments):
    (row,), _ = rank_table({("layer", POPULATIONS[0]): moments}, {"layer": "named layer"}, SETTINGS)
    return row


@pytest.mark.parametrize(("decay", "sequences"), [(0.5, 160), (1.0, 400)])
def test_intervals_cover_the_truth_once_settled(decay, sequences):
    """Power-law spectra, tokens of a sequence correlated: of 100 settled draws, 90 to 99 intervals hold the truth."""
    scales = np.arange(1, 25) ** -decay
    true_entropy, true_rank = entropy_effective_rank(scales), effective_rank(scales, 0.9, 1)
    rng = np.random.default_rng(0)
    covered = rank_covered = settled = draws = 0
    while settled < 100:
        row = table_of(gaussian_moments(rng, scales, sequences, length=10))
        draws += 1
        assert draws < 200
        if not (row["entropy_effective_rank_settled"] and row["effective_rank_settled"]):
            continue
        settled += 1
        covered += row["entropy_effective_rank_low"] <= true_entropy <= row["entropy_effective_rank_high"]
        rank_covered += row["effective_rank_low"] <= true_rank <= row["effective_rank_high"]
    assert 90 <= covered <= 99
    assert rank_covered >= 90  # a rank is a whole number, which an interval of two may hold in every draw


def test_known_rank_is_found_and_settles_and_n_equal_d_does_not():
    rng = np.random.default_rng(1)
    scales = np.r_[np.ones(8), np.zeros(24)]
    row = table_of(gaussian_moments(rng, scales, sequences=400, length=10))
    assert row["effective_rank_0.99_power2_raw"] == 8
    assert row["entropy_effective_rank"] == pytest.approx(8, rel=0.01)
    assert row["entropy_effective_rank_settled"]
    isotropic = table_of(gaussian_moments(rng, np.ones(32), sequences=8, length=4, shared=0))
    assert isotropic["tokens"] == isotropic["dim"]
    assert not any(value for name, value in isotropic.items() if name.endswith("_settled"))
    assert isotropic["entropy_effective_rank"] < 0.85 * 32


def test_finite_sample_bias_is_that_of_the_literature():
    """An isotropic Gaussian of 256 dimensions reads 61.8 at n = 64, 206.3 at 256 and 247.3 at 1,024."""
    rng = np.random.default_rng(0)
    for count, expected in ((64, 61.8), (256, 206.3), (1024, 247.3)):
        moments = RepresentationMoments(256, blocks=1)
        moments.update(torch.from_numpy(rng.standard_normal((count, 256))))
        assert entropy_effective_rank(moments.singular_values()) == pytest.approx(expected, rel=0.01)
