# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""The one-layer theory: the images and the layer are what they are said to be, and the two objectives part ways."""

import math
from pathlib import Path

import pandas as pd
import pytest
import torch

from training.vit_theory import CLUSTERS, LOCAL_PATCHES, PATCHES, Attention, Images, Point, draw, measure, points, train


def images(global_patches: int = 16, seed: int = 0) -> Images:
    return Images(global_patches, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("global_patches", [8, 48])
def test_a_cluster_parts_the_patches_into_one_global_area_and_equal_local_ones(global_patches):
    for area in images(global_patches).area:
        sizes = torch.bincount(area).tolist()
        assert sizes == [global_patches] + [LOCAL_PATCHES] * ((PATCHES - global_patches) // LOCAL_PATCHES)


def test_no_two_areas_share_a_feature():
    made = images()
    pairs = {}
    for cluster in range(CLUSTERS):
        for area, feature in zip(made.area[cluster].tolist(), made.feature[cluster].tolist(), strict=True):
            assert pairs.setdefault((cluster, area), feature) == feature
    assert len(set(pairs.values())) == len(pairs) == made.features


@pytest.mark.parametrize(("global_patches", "delta"), [(8, -1 / 3), (16, 0), (48, 2 * math.log(48, 64) - 4 / 3)])
def test_information_gap(global_patches, delta):
    # kappa_s = 1/3 for 4 of 64 patches; kappa_c = 1/2 for 8 and 2/3 for 16 of them.
    assert Point("mae", global_patches, 0).delta == pytest.approx(delta, abs=1e-9)


def test_the_layer_is_one_softmax_with_a_merged_matrix():
    """Against the formula with the full Q, position codes and features as explicit orthonormal vectors."""
    made = images()
    layer = Attention(made)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        layer.feature.copy_(torch.randn(layer.feature.shape, generator=generator))
        layer.position.copy_(torch.randn(layer.position.shape, generator=generator))
    cluster, strength = made.sample(3)
    visible = made.visible(3, 0.75)
    assert visible.sum(1).tolist() == [16] * 3
    width = PATCHES + made.features
    basis = torch.linalg.qr(torch.randn(width, width, generator=generator, dtype=torch.float64))[0]
    codes, features = basis[:PATCHES], basis[PATCHES:]  # e_p and v, rows
    merged = codes.T @ (layer.feature.detach().double() @ features + layer.position.detach().double() @ codes)
    content = strength.double().unsqueeze(-1) * features[made.feature[cluster]]  # (3, patches, width)
    masked = content * visible.unsqueeze(-1)
    logits = codes @ merged @ (masked + codes).mT
    expected = logits.softmax(-1)
    torch.testing.assert_close(layer.maps(cluster, strength, visible).double(), expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(
        (layer(cluster, strength, visible).double() @ features), expected @ masked, rtol=1e-4, atol=1e-5
    )


def test_before_training_every_patch_looks_everywhere():
    made = images(24)
    numbers = measure(Attention(made), made.sample(8))
    assert numbers["own_mass_of_local"] == pytest.approx(LOCAL_PATCHES / PATCHES)
    assert numbers["global_mass_of_local"] == pytest.approx(24 / PATCHES)
    assert numbers["diversity"] == pytest.approx(0, abs=1e-6)


@pytest.mark.usefixtures("one_thread")  # as the command runs
def test_the_objectives_part_ways_and_the_same_seed_gives_the_same_run():
    mae = Point("mae", 32, 0, steps=128)
    contrastive = Point("contrastive", 32, 0, 0.3, 1e-5, 900.0, steps=16)
    ends = [train(point)[-1] for point in (mae, contrastive)]
    assert ends[0]["own_mass_of_local"] > 0.7
    assert ends[1]["global_mass_of_local"] > 0.9
    assert ends[0]["diversity"] > 1 > ends[1]["diversity"]
    assert train(contrastive)[-1] == ends[1]


def test_committed_runs_are_complete_and_the_figure_is_drawn_from_them():
    frame = pd.read_csv(Path(__file__).resolve().parents[2] / "results/vit_theory/runs.csv")
    found = frame.groupby(["objective", "temperature", "global_patches", "seed"], dropna=False).ngroups
    assert found == len(points(3)) == 75
    assert len(draw(frame).axes) == 6
