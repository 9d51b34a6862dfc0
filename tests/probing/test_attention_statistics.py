# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""The one-pass accumulator says what the single formulas say, whatever the blocks, batches and processes."""

import math

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from maelm_hf.probing import attention_statistics
from maelm_hf.probing.attention import (
    attention_distance,
    attention_diversity,
    attention_entropy,
    attention_head_redundancy,
    attention_mutual_information,
    attention_pairwise_diversity,
    attention_prefix_mass,
    grid_variance,
)
from maelm_hf.probing.attention_maps import ProductMaps
from maelm_hf.probing.attention_statistics import NUMBERS, AttentionStatistics

GRID, PREFIX, HEADS = (4, 5), 2, 3
TOKENS = 22


def random_maps(images: int = 4, seed: int = 0, sharpness: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (sharpness * torch.randn(images, HEADS, TOKENS, TOKENS, generator=generator)).softmax(dim=-1)


def single_formulas(maps: torch.Tensor) -> dict[str, torch.Tensor]:
    """(images, heads) of every number but the sampled one."""
    arguments = (GRID, PREFIX)
    diversity = attention_diversity(maps, *arguments)
    entropy = attention_entropy(maps, *arguments)
    return {
        "diversity": diversity,
        "diversity_share": diversity / grid_variance(GRID),
        "pairwise_cosine_distance": attention_pairwise_diversity(maps, *arguments)[1],
        "distance": attention_distance(maps, *arguments),
        "entropy": entropy,
        "entropy_share": entropy / math.log(20),
        "mutual_information": attention_mutual_information(maps, *arguments),
        "head_redundancy": attention_head_redundancy(maps, *arguments),
        "prefix_mass": attention_prefix_mass(maps, *arguments),
    }


def filled(maps: torch.Tensor, batch: int = 4) -> AttentionStatistics:
    statistics = AttentionStatistics(HEADS, GRID, PREFIX)
    for part in maps.split(batch):
        statistics.update(part)
    return statistics


@pytest.mark.parametrize("block", [2**21, 500])
@pytest.mark.parametrize("batch", [1, 3])
def test_agrees_with_the_single_formulas(monkeypatch, block, batch):
    monkeypatch.setattr(attention_statistics, "_BLOCK_ELEMENTS", block)  # 500: two or three queries at a time
    maps = random_maps()
    found = filled(maps, batch).compute()
    for name, expected in single_formulas(maps).items():
        expected = expected.double()
        torch.testing.assert_close(found[name], expected.mean(0), rtol=1e-5, atol=1e-6, msg=name)
        spread = expected.std(0, correction=0)
        torch.testing.assert_close(found[f"{name}_std"], spread, rtol=1e-3, atol=1e-4, msg=name)
    assert found["images"].tolist() == [4] * HEADS


def test_sampled_divergence_is_unbiased():
    maps = random_maps(images=2)
    exact = attention_pairwise_diversity(maps, GRID, PREFIX)[0].double()
    draws = []
    for seed in range(200):
        statistics = AttentionStatistics(HEADS, GRID, PREFIX, seed=seed)
        statistics.update(maps)
        draws.append(statistics.compute()["pairwise_jensen_shannon"])
    draws = torch.stack(draws)
    error = draws.std(0) / math.sqrt(len(draws))
    assert ((draws.mean(0) - exact.mean(0)).abs() < 4 * error).all()


def test_divergence_of_identical_and_of_disjoint_rows():
    statistics = AttentionStatistics(1, (4, 4))
    statistics.update(torch.eye(16)[None, None])
    assert statistics.compute()["pairwise_jensen_shannon"].item() == pytest.approx(math.log(2), rel=1e-6)
    statistics = AttentionStatistics(1, (4, 4))
    statistics.update(torch.full((1, 1, 16, 16), 1 / 16))
    assert statistics.compute()["pairwise_jensen_shannon"].item() == pytest.approx(0, abs=1e-7)


SPECIAL = {
    "uniform": torch.full((17, 17), 1 / 17),
    "identity": torch.eye(17),
    "collapsed on a patch": torch.eye(17)[[5] * 17],
    "collapsed on the prefix": torch.eye(17)[[0] * 17],
    "one-hot at random": torch.eye(17)[torch.randperm(17, generator=torch.Generator().manual_seed(0))],
}


@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.parametrize("heads", [1, 2])
def test_no_number_is_ever_nan(name, heads):
    statistics = AttentionStatistics(heads, (4, 4), 1)
    statistics.update(SPECIAL[name].expand(2, heads, 17, 17))
    for number, value in statistics.compute().items():
        assert torch.isfinite(value).all(), number


def test_a_head_that_looks_at_the_prefix_alone_is_counted_apart():
    statistics = AttentionStatistics(1, (4, 4), 1)
    statistics.update(SPECIAL["identity"][None, None])
    statistics.update(SPECIAL["collapsed on the prefix"][None, None])
    found = statistics.compute()
    # The image without any patch-level attention does not pull the mean of the other one down.
    assert found["diversity"].item() == pytest.approx(2.5)
    assert found["prefix_mass"].item() == pytest.approx(0.5)
    assert found["queries_left_out"].item() == pytest.approx(0.5)


def test_a_grid_of_one_patch():
    statistics = AttentionStatistics(1, (1, 1), 1)
    statistics.update(torch.full((1, 1, 2, 2), 0.5))
    assert all(torch.isfinite(value).all() for value in statistics.compute().values())


def test_maps_from_queries_and_keys_are_those_of_the_whole_map():
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, HEADS, TOKENS, 8, generator=generator) for _ in range(2))
    bias = torch.randn(HEADS, TOKENS, TOKENS, generator=generator)
    maps = ProductMaps(query, key, bias)
    whole = (query @ key.mT / math.sqrt(8) + bias).softmax(-1)
    torch.testing.assert_close(maps.full(), whole)
    torch.testing.assert_close(maps.rows(slice(1, 2), torch.tensor([3, 1])), whole[1:2, :, [3, 1]])


def test_windows_of_an_image_are_averaged():
    maps = random_maps(images=6)
    statistics = AttentionStatistics(HEADS, GRID, PREFIX)
    statistics.update(maps, windows=3)
    expected = attention_diversity(maps, GRID, PREFIX).unflatten(0, (2, 3)).double().mean(1)
    found = statistics.compute()
    torch.testing.assert_close(found["diversity"], expected.mean(0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found["diversity_std"], expected.std(0, correction=0), rtol=1e-3, atol=1e-4)
    assert found["images"].tolist() == [2] * HEADS


def test_sequences_may_differ_in_length():
    statistics = AttentionStatistics(1)
    for tokens in (4, 7):
        statistics.update(torch.full((1, 1, tokens, tokens), 1 / tokens))
    assert statistics.compute()["entropy_share"].item() == pytest.approx(1)
    assert statistics.compute()["entropy"].item() == pytest.approx((math.log(4) + math.log(7)) / 2)


@pytest.mark.parametrize(
    ("maps", "message"),
    [
        (torch.full((1, HEADS, TOKENS, TOKENS), torch.nan), "NaN"),
        (torch.full((1, HEADS, 23, 23), 1 / 23), "makes 22 tokens, the maps have 23"),
        (torch.full((1, 2, TOKENS, TOKENS), 1 / TOKENS), "3 heads"),
        (torch.full((HEADS, TOKENS, TOKENS), 1 / TOKENS), "expected floats"),
        (torch.full((1, HEADS, 4, TOKENS), 1 / TOKENS), "expected"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_added(maps, message):
    statistics = filled(random_maps())
    before = statistics.compute()["diversity"].clone()
    with pytest.raises(ValueError, match=message):
        statistics.update(maps)
    statistics._computed = None  # torchmetrics caches the result
    assert torch.equal(statistics.compute()["diversity"], before)


def test_one_nan_in_one_map_is_found():
    maps = random_maps()
    maps[2, 1, 9, 9] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        filled(maps)


def test_sums_stay_float64_and_travel_in_the_state_dict():
    statistics = filled(random_maps())
    expected = statistics.compute()
    for changed in (statistics.to(torch.bfloat16), statistics.half(), statistics.float()):
        assert changed.total.dtype == torch.float64
    loaded = AttentionStatistics(HEADS, GRID, PREFIX)
    loaded.load_state_dict(statistics.state_dict())
    for name, value in loaded.compute().items():
        assert torch.equal(value, expected[name]), name


def test_merge_is_the_union():
    maps = random_maps()
    whole, merged = filled(maps).compute(), filled(maps[:1]).merge(filled(maps[1:])).compute()
    for name, value in merged.items():
        torch.testing.assert_close(value, whole[name], rtol=1e-5, atol=1e-6, msg=name)
    with pytest.raises(ValueError, match="shape"):
        filled(maps).merge(AttentionStatistics(5, GRID, PREFIX))


@pytest.mark.parametrize("how", ["merge", "load_state_dict"])
def test_what_was_computed_before_is_not_given_again(how):
    maps = random_maps()
    one, other = filled(maps[:1]), filled(maps[1:])
    one.compute()
    if how == "merge":
        one.merge(other)
        expected = filled(maps).compute()
    else:
        one.load_state_dict(other.state_dict())
        expected = other.compute()
    for name, value in one.compute().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6, msg=name)


def test_sums_that_do_not_fit_add_nothing():
    statistics = filled(random_maps())
    state = {name: value.clone() for name, value in statistics.metric_state.items()}
    for wrong in (state | {"queries_left_out": torch.zeros(1, 5)}, {k: v for k, v in state.items() if k != "count"}):
        with pytest.raises(ValueError, match=r"here and .* there: merge equal numbers and num_heads"):
            statistics.merge(wrong)
    assert all(torch.equal(getattr(statistics, name), value) for name, value in state.items())


def _one_of_two(rank: int, address: str, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{address}", rank=rank, world_size=2)
    statistics = filled(random_maps()[: 1 if rank == 0 else 4][rank:])  # one image here, three there
    torch.save(statistics.compute(), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_two_processes_are_one(tmp_path):
    multiprocessing.spawn(_one_of_two, args=(str(tmp_path / "store"), str(tmp_path)), nprocs=2)
    maps = random_maps()
    expected = filled(maps[:1]).merge(filled(maps[1:])).compute()
    for rank in range(2):
        for name, value in torch.load(tmp_path / f"{rank}.pt", weights_only=True).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-12, msg=name)


def test_every_number_is_named():
    assert set(NUMBERS) <= set(filled(random_maps()).compute())
