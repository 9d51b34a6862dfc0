"""The study of the released pair: its arms, the reading of its measurements, and the folders it releases."""

import json

import numpy as np
import pandas as pd
import pytest
import torch
from pretraining_helpers import tiny_recipe
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer

from training import study, study_report, study_results
from training.finetune_report import SCHEMA, write_json
from training.pretrain import run
from training.recipe import recipe_from_dict
from training.release import publish_into, round_to_bf16
from training.study_measure import FILL_MASK, fill_mask, loss_on, sample_loss

_WARM = {"optimizer__warmup_steps": 1}
SECONDS = {"MLM": 1.0, "MAE-LM": 1.25, "decoder, [MASK] kept": 1.5}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with one finished run, `mae-lm`."""
    folder = tmp_path_factory.mktemp("study")
    run(
        recipe_from_dict(
            tiny_recipe(folder, "mae-lm", max_steps=3, model__relative_position_buckets=0, data__max_length=64, **_WARM)
        )
    )
    return folder


class TestArms:
    def test_they_differ_in_what_they_are_compared_by_alone(self, tmp_path):
        recipes = {name: study.recipe_of(name, SECONDS, tmp_path) for name in study.ARMS}
        courses = {name: recipe.course() for name, recipe in recipes.items()}

        def differing(one, other):
            keys = courses[one] | courses[other]
            return {key for key in keys if courses[one].get(key) != courses[other].get(key)}

        assert differing("mlm", "mae-lm") == {"twin", "model.decoder_num_hidden_layers", *_FRACTION, "max_steps"}
        assert differing("mlm-15", "mlm-50") == {"data.mask_ratio"}
        assert differing("mae-lm-15", "mae-lm-30") == {"data.mask_ratio"}
        assert differing("mae-lm-15", "control-15") == _FRACTION
        assert differing("mlm", "mlm-15") == {"max_steps", "optimizer.decay_steps"}

    def test_the_long_arms_get_the_same_time(self, tmp_path):
        steps = {name: study.recipe_of(name, SECONDS, tmp_path).max_steps for name in study.LONG_ARMS}
        times = [count * SECONDS[study.ARMS[name].objective] for name, count in steps.items()]
        assert times[1] == pytest.approx(times[0], rel=0.01)

    def test_a_branch_needs_its_long_arm(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="pretrain mlm first"):
            study.start_branch("mlm-15", tmp_path)

    def test_a_branch_takes_checkpoint_and_logs_and_is_begun_once(self, tmp_path):
        step = f"step-{study.COOLED_FROM:09d}"
        (tmp_path / "mlm" / "checkpoints" / step).mkdir(parents=True)
        (tmp_path / "mlm" / "checkpoints" / step / "state.json").write_text("{}")
        for log in ("log.jsonl", "evaluations.jsonl"):
            (tmp_path / "mlm" / log).write_text("{}\n")
        study.start_branch("mlm-15", tmp_path)
        assert [path.name for path in (tmp_path / "mlm-15" / "checkpoints").iterdir()] == [step]
        (tmp_path / "mlm-15" / "log.jsonl").write_text("its own\n")
        study.start_branch("mlm-15", tmp_path)
        assert (tmp_path / "mlm-15" / "log.jsonl").read_text() == "its own\n"

    def test_an_unknown_arm(self):
        with pytest.raises(ValueError, match="unknown arm 'bert': the arms are mlm"):
            study.arms_named(["bert"])


_FRACTION = {"model.encoder_mask_fraction"}


class TestResults:
    def test_share_of_compute_is_where_the_curve_crosses(self):
        rows = [("mlm", 0, 50, "stable"), ("mlm", 100, 60, "stable"), ("mlm", 120, 90, "end")]
        rows += [("mae-lm", 0, 50, "stable"), ("mae-lm", 40, 58, "stable"), ("mae-lm", 60, 62, "stable")]
        curves = pd.DataFrame(rows, columns=["arm", "cpu_minutes", "frozen_mean", "phase"])
        share = study_results.share_of_compute(curves, "frozen_mean")
        assert (share.reached, share.observed) == (pytest.approx(0.5), pytest.approx(0.6))
        assert (share.goal, share.minutes) == (60, 100)
        curves.loc[len(curves)] = ("mae-lm", 80, 59, "stable")  # reached, and lost again
        assert study_results.share_of_compute(curves, "frozen_mean").reached is None
        curves.loc[len(curves)] = ("mae-lm", 90, 60, "stable")
        assert study_results.share_of_compute(curves, "frozen_mean").reached == pytest.approx(0.9)

    def test_the_difference_of_means_and_welchs_interval(self):
        first, second = np.array([1.0, 2.0, 4.0, 5.0]), np.array([0.0, 1.0, 1.0, 3.0])
        gap, low, high = study_results.difference(first, second)
        error = np.sqrt(first.var(ddof=1) / 4 + second.var(ddof=1) / 4)
        assert gap == pytest.approx(1.75)
        assert (low + high) / 2 == pytest.approx(gap)
        assert 2.4 < (high - low) / 2 / error < 2.6  # Student's 97.5 % quantile of 5 to 6 degrees of freedom
        assert study_results.difference(np.full(5, 3.0), np.full(5, 1.0)) == (2.0, 2.0, 2.0)

    def test_the_sampling_error_is_that_of_many_draws(self):
        draws = np.random.default_rng(0).binomial(200, [0.8, 0.6], (20_000, 2)) / 200
        spread = np.quantile(draws[:, 0] - draws[:, 1], [0.025, 0.975])
        assert study_results.sampling_error(0.8, 0.6, 200) == pytest.approx(np.ptp(spread) / 2, rel=0.05)

    def test_the_best_setting_is_that_of_the_most_seeds(self, tmp_path):
        cells = tmp_path / "mlm" / "task" / "cells"
        cells.mkdir(parents=True)
        for rate, seed, score in ((1, 0, 0.9), (2, 0, 0.8), (2, 1, 0.7)):
            cell = {"cell": {"mode": "finetune", "seed": seed, "data_digest": "new"}, "setting": {"lr": rate}}
            scores = {split: {"accuracy": score} for split in ("validation", "test")}
            (cells / f"{rate}-{seed}.json").write_text(json.dumps(cell | {"scores": scores}))
        pooled = {"mean": {"test": {"accuracy": 0.5}}, "first": {"test": {"accuracy": 0.4}}}
        for digest in ("new", "old"):
            about = {"mode": "frozen", "seed": 0, "data_digest": digest}
            frozen = {"cell": about, "setting": {}, "scores": {}, "pooled": pooled}
            (cells / f"frozen_{digest}.json").write_text(json.dumps(frozen))
        sizes = {"task": {"split_sizes": {"validation": 10, "test": 20}, "data_digest": "new"}}
        write_json(tmp_path / "mlm" / "results.json", {"schema": SCHEMA, "tasks": sizes})
        found = study_results.score_rows(tmp_path, {"mlm": "MLM"})
        test = found[found["split"] == "test"]
        assert sorted(test[test["mode"] == "finetune"]["accuracy"]) == [0.7, 0.8]
        assert set(test["examples"]) == {20}
        assert list(test[test["mode"] == "first"]["accuracy"]) == [0.4]  # not the one of other data

    def test_curves_know_their_phase(self, finished):
        names, seconds, at_end = {"mae-lm": "MAE-LM"}, {"MAE-LM": 30.0}, {"mae-lm": 0.6}
        curves = study_results.curve_rows(finished, finished / "none", names, seconds, ("spam",), at_end)
        log = [json.loads(line) for line in (finished / "mae-lm" / "log.jsonl").read_text().splitlines()]
        assert list(curves["step"]) == [0, 3]
        assert list(curves["phase"]) == ["stable", "end"]
        assert curves["tokens"].iloc[-1] == sum(row["tokens"] for row in log)
        assert (curves["cpu_minutes"].iloc[-1], curves["frozen_mean"].iloc[-1]) == (1.5, 0.6)

    def test_equal_tokens_are_compared_where_both_were_scored_at_a_constant_rate(self):
        columns = ["arm", "step", "phase", "tokens", "held_out_loss", "frozen_mean"]
        rows = [("mlm", 250, "stable", 2e6, 6.5, 0.5), ("mlm", 500, "stable", 4e6, 6.0, 0.6)]
        rows += [("mae-lm", 250, "stable", 2e6, 7.0, 0.4), ("mae-lm", 500, "decay", 4e6, 5.0, 0.7)]
        ranks = pd.DataFrame(
            [
                (arm, f"step-{step:09d}", layer, population, 10 * layer + (population != "unmasked"), 5)
                for arm in ("mlm", "mae-lm")
                for step in (250, 500)
                for layer in (1, 2)
                for population in ("unmasked", "masked/all")
            ],
            columns=["arm", "when", "layer", "population", "rank_power_1", "rank_power_2"],
        )
        table = study_report.equal_tokens_table(pd.DataFrame(rows, columns=columns), ranks).strip().splitlines()
        cells = [cell.strip() for cell in table[-1].strip("|").split("|")]
        assert len(table) == 3  # the header, its rule, and one step
        assert cells == ["250", "2.0", "6.500", "7.000", "50.0", "40.0", *["20 (+1)"] * 2, *["5 (+0)"] * 2]

    def test_tables_are_filled_in_place_and_unknown_ones_refused(self, tmp_path):
        page = tmp_path / "page.md"
        page.write_text("before\n<!-- table: one -->\nold\n<!-- end -->\nafter\n")
        study_report.fill_tables(page, {"one": "| new |\n"})
        study_report.fill_tables(page, {"one": "| new |\n"})
        assert page.read_text() == "before\n<!-- table: one -->\n\n| new |\n\n<!-- end -->\nafter\n"
        with pytest.raises(ValueError, match="asks for the table 'one'"):
            study_report.fill_tables(page, {})
        with pytest.raises(ValueError, match="no mark <!-- table: two -->"):
            study_report.fill_tables(page, {"one": "", "two": ""})

    def test_scores_are_compared_by_seeds_where_seeds_matter(self):
        values = {"mlm": ([0.5, 0.7], [0.2, 0.2]), "mae-lm": ([0.6, 0.6], [0.3, 0.3])}
        rows = [
            (arm, task, mode, seed, "test", 100, tasks[number][seed])
            for arm, tasks in values.items()
            for number, task in enumerate(("one", "two"))
            for mode in ("finetune", "mean")
            for seed in (0, 1)
        ]
        columns = ["arm", "task", "mode", "seed", "split", "examples", "accuracy"]
        scores = pd.DataFrame(rows, columns=columns)

        def cells(mode):
            lines = study_report.score_table(scores, mode).strip().splitlines()[2:]
            return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]

        one, two, both = cells("finetune")
        # MAE-LM's seeds agree: one degree of freedom, t = 12.7, the error of MLM's mean 10 points
        assert one == ["one", "60.0 ± 14.1", "60.0 ± 0.0", "+0.0 [-127.1, +127.1]", "± 13.6 (100)"]
        assert two[3] == "+10.0 [+10.0, +10.0]"
        assert both == ["mean of 2", "40.0 ± 7.1", "45.0 ± 0.0", "+5.0 [-58.5, +68.5]", "± 9.0"]
        assert [row[3] for row in cells("mean")] == ["+0.0", "+10.0", "+5.0"]


class TestRelease:
    def test_rounded_weights_load_in_float32(self, finished, tmp_path):
        rounded = round_to_bf16(finished / "mae-lm" / "final", tmp_path / "rounded")
        stored, trained = load_file(rounded), load_file(finished / "mae-lm" / "final" / "model.safetensors")
        assert all(torch.equal(stored[name], tensor.bfloat16()) for name, tensor in trained.items())
        model = AutoModelForMaskedLM.from_pretrained(rounded.parent)
        assert model.dtype == torch.float32
        name, parameter = next(iter(model.named_parameters()))
        assert torch.equal(parameter, stored[name].float())

    def test_the_released_folder_holds_them_as_they_were_rounded(self, finished, tmp_path):
        rounded = round_to_bf16(finished / "mae-lm" / "final", tmp_path / "rounded")
        folder = publish_into(tmp_path / "cards", "tiny", rounded.parent, license="mit")
        released, expected = load_file(folder / "model.safetensors"), load_file(rounded)
        assert released.keys() == expected.keys()
        assert all(torch.equal(released[name], tensor) for name, tensor in expected.items())
        model = AutoModel.from_pretrained(folder)
        assert (model.dtype, json.loads((folder / "config.json").read_text())["dtype"]) == (torch.float32, "float32")
        card = (folder / "README.md").read_text()
        assert 'AutoModel.from_pretrained("cards/tiny", trust_remote_code=True)' in card

    def test_loss_of_a_sample_text(self, finished, tmp_path):
        text = tmp_path / "sample.txt"
        text.write_text("the encoder sees real tokens\nwhile a shallow decoder predicts those hidden behind masks\n")
        found = sample_loss(finished / "mae-lm" / "final", text)
        assert found == sample_loss(str(finished / "mae-lm" / "final"), text)
        tokenizer = AutoTokenizer.from_pretrained(finished / "mae-lm" / "final")
        lengths = [len(tokenizer(line)["input_ids"]) - 2 for line in text.read_text().splitlines()]
        assert (
            sum(0.15 * length - 1 for length in lengths)
            < found["hidden_tokens"]
            < sum(0.15 * length + 1 for length in lengths)
        )
        assert 0 < found["loss"] < 2 * np.log(len(tokenizer))
        many = loss_on(finished / "mae-lm" / "final", 70 * text.read_text().splitlines())  # in three batches
        assert many == {
            key: pytest.approx(value * (70 if key == "hidden_tokens" else 1)) for key, value in found.items()
        }

    def test_the_likeliest_words(self, finished):
        model = AutoModelForMaskedLM.from_pretrained(finished / "mae-lm" / "final").eval()
        tokenizer = AutoTokenizer.from_pretrained(finished / "mae-lm" / "final")
        found = fill_mask(finished / "mae-lm" / "final")
        assert [entry["text"] for entry in found] == list(FILL_MASK)
        for entry in found:
            ids = tokenizer(entry["text"].replace("[MASK]", tokenizer.mask_token), return_tensors="pt")
            with torch.inference_mode():
                logits = model(**ids).logits[ids["input_ids"] == tokenizer.mask_token_id]
            (best,) = logits.topk(5).indices.tolist()
            assert entry["words"] == [tokenizer.decode([index]).strip() for index in best]
