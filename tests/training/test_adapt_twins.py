# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""The comparison of the twins: what differs between its runs, and what its table says."""

import pandas as pd
import pytest

from training.adapt_twins import describe, draw, finished_runs, recipe_of, steps_for
from training.finetune_report import write_json
from training.recipe import RecipeError


def test_the_runs_differ_in_the_objective_and_the_steps_alone(tmp_path):
    mae, mlm = (recipe_of("some/bert", twin, 2, 30, tmp_path, tmp_path / "text") for twin in ("MAE-LM", "MLM"))
    one, other = mae.course(), mlm.course()
    different = {key for key in one | other if one.get(key) != other.get(key)}
    assert different == {"twin", "model.decoder_num_hidden_layers", "model.encoder_mask_fraction"}
    assert (mae.seed, mae.max_steps, mae.tokenizer.path) == (2, 30, "some/bert")


def test_steps_are_measured_once_and_kept(tmp_path):
    write_json(tmp_path / "steps.json", {"minutes": 5.0, "steps": {"MAE-LM": 7, "MLM": 9}})
    assert steps_for(5.0, "nothing", tmp_path, tmp_path) == {"MAE-LM": 7, "MLM": 9}
    with pytest.raises(RecipeError, match="was begun with --minutes 5"):
        steps_for(6.0, "nothing", tmp_path, tmp_path)


def test_a_run_that_is_not_scored_is_left_out(tmp_path):
    (tmp_path / "mlm-seed-0" / "encoder").mkdir(parents=True)
    assert finished_runs(tmp_path) == []


def test_the_table_gives_median_and_range_of_the_seeds(tmp_path):
    frame = pd.DataFrame(
        [
            {"twin": twin, "seed": seed, "steps": 10, "tokens": 1000, "held_out_loss": 3.0, "held_out_accuracy": 0.5}
            | {"frozen_validation": 0.7, "frozen_test": 0.7 + 0.01 * seed + shift}
            for twin, shift in (("MAE-LM", 0.0), ("MLM", 0.05))
            for seed in range(3)
        ]
    )
    shared = {"tokens": 500, "width": 8, "rank_power_2": 2}
    ranks = pd.DataFrame(
        [
            {"model": name, "seed": seed, "layer": layer, "population": population, "rank_power_1": layer + 3} | shared
            for name, seeds in (("before", [""]), ("MAE-LM", range(3)), ("MLM", range(3)))
            for seed in seeds
            for layer in range(2)
            for population in ("unmasked", "masked/all")
        ]
    )
    table = describe("some/bert", 5.0, frame, ranks, {"validation": 0.69, "test": 0.68})
    assert "| frozen accuracy, test | 0.6800 | 0.7100 [0.7000, 0.7200] | 0.7600 [0.7500, 0.7700] |" in table
    assert "| layer 1, masked/all | 4 | 4 [4, 4] | 4 [4, 4] |" in table
    draw(frame, ranks, {"test": 0.68}, tmp_path / "adapt.png")
    assert (tmp_path / "adapt.png").stat().st_size > 10_000
