# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""MAE and SimCLR on one encoder: the loss is NT-Xent, both start equal, runs are repeatable and not repeated."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("skimage")

from training.vit_pair import (
    PROBED_PHOTOGRAPHS,
    TRAIN_PHOTOGRAPHS,
    Settings,
    build,
    draw,
    measure,
    normalise,
    photograph,
    probed_images,
    train_all,
)

SHORT = Settings(mae_steps=2, simclr_steps=2, batch_size=4)


def test_photographs_are_rgb_in_zero_to_one_and_none_is_both_trained_on_and_probed():
    assert not set(TRAIN_PHOTOGRAPHS) & set(PROBED_PHOTOGRAPHS)
    for name in ("camera", "coffee", "stereo_motorcycle", "china"):
        image = photograph(name)
        assert image.shape[0] == 3
        assert 0 <= image.min() < image.max() <= 1
    assert torch.equal(probed_images(3, SHORT), probed_images(3, SHORT))


def test_both_objectives_start_from_the_same_encoder():
    encoders = [build(objective, 1, SHORT).vit.state_dict() for objective in ("mae", "simclr")]
    assert all(torch.equal(value, encoders[1][name]) for name, value in encoders[0].items())


def test_simclr_loss_is_nt_xent():
    model = build("simclr", 0, SHORT).eval()
    views = [normalise(torch.rand(3, 3, 64, 64, generator=torch.Generator().manual_seed(s))) for s in range(2)]
    with torch.no_grad():
        noise = torch.arange(64).float().expand(6, -1)
        tokens = model.vit(torch.cat(views), noise=noise).last_hidden_state[:, 1:]
        z = model.projection(tokens.mean(1)).double().numpy()
        loss = model(*views).item()
    z /= np.linalg.norm(z, axis=1, keepdims=True)
    total = 0.0
    for i in range(6):
        others = [math.exp(z[i] @ z[j] / SHORT.temperature) for j in range(6) if j != i]
        total -= math.log(math.exp(z[i] @ z[(i + 3) % 6] / SHORT.temperature) / sum(others))
    assert loss == pytest.approx(total / 6, rel=1e-4)


def test_a_finished_run_is_not_repeated_and_the_same_seed_gives_the_same_encoder(tmp_path, capsys):
    train_all(tmp_path / "a", tmp_path / "wa", range(1), SHORT)
    train_all(tmp_path / "b", tmp_path / "wb", range(1), SHORT)
    for name in ("mae_seed0", "simclr_seed0"):
        first, second = (load_file(tmp_path / folder / f"{name}.safetensors") for folder in ("wa", "wb"))
        assert all(torch.equal(value, second[key]) for key, value in first.items())
    assert capsys.readouterr().out.count("step 2/2") == 4
    train_all(tmp_path / "a", tmp_path / "wa", range(1), SHORT)
    assert "not trained again" in capsys.readouterr().out
    frame = measure(tmp_path / "a", tmp_path / "wa", range(2), SHORT, images=4)
    assert "seed 1 is left out" in capsys.readouterr().out
    assert frame.groupby("objective").size().to_dict() == {"init": 18, "mae": 18, "simclr": 18}
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "a" / "layers.csv"), frame, rtol=1e-4)
    assert len(draw(frame).axes) == 3
