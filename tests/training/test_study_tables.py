"""What the study reads off its measurements, and the tables and the page it makes of them."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from finetuning_toys import opinions, save_toy_model, write_rows

from training import study, study_pairs, study_report, study_results
from training.finetune_data import DataOptions
from training.finetune_grid import Plan, run_task
from training.finetune_report import SCHEMA, load_results, write_json

ROOT = Path(__file__).resolve().parents[2]
SCORES = ["arm", "task", "mode", "learning_rate", "seed", "split", "examples", "accuracy"]


def cells_of(table):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()[2:]]


def test_share_of_compute_is_where_the_curve_crosses():
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


class TestIntervals:
    def test_the_difference_of_means_and_welchs_interval(self):
        first, second = np.array([1.0, 2.0, 4.0, 5.0]), np.array([0.0, 1.0, 1.0, 3.0])
        gap, low, high = study_results.difference(first, second)
        error = np.sqrt(first.var(ddof=1) / 4 + second.var(ddof=1) / 4)
        assert gap == pytest.approx(1.75)
        assert (low + high) / 2 == pytest.approx(gap)
        assert 2.4 < (high - low) / 2 / error < 2.6  # Student's 97.5 % quantile of 5 to 6 degrees of freedom
        assert study_results.difference(np.full(5, 3.0), np.full(5, 1.0)) == (2.0, 2.0, 2.0)

    def test_one_seed_has_no_interval(self):
        with pytest.raises(ValueError, match="there are 1 and 5"):
            study_results.difference(np.ones(1), np.zeros(5))

    def test_the_paired_error_is_that_of_many_draws_of_examples(self):
        draw = np.random.default_rng(0)
        items = draw.integers(1, 40, 300)  # sentences of unequal length, some harder than others
        hardness = draw.beta(4, 1, 300)
        first, second = draw.binomial(items, hardness), draw.binomial(items, 0.95 * hardness)
        drawn = draw.integers(0, 300, (20_000, 300))
        gaps = (first - second)[drawn].sum(1) / items[drawn].sum(1)
        half = np.ptp(np.quantile(gaps, [0.025, 0.975])) / 2
        assert study_results.paired_error(first, second, items) == pytest.approx(half, rel=0.03)

    def test_errors_in_common_cancel(self):
        right = np.random.default_rng(0).binomial(1, 0.7, 200)
        items = np.ones(200, int)
        assert study_results.paired_error(right, right, items) == 0
        other = np.where(np.arange(200) < 10, 1 - right, right)
        apart = 1.96 * math.sqrt(2 * 0.7 * 0.3 / 200)  # as if of examples of its own
        assert 0 < study_results.paired_error(right, other, items) < apart / 2


@pytest.fixture
def tasks(tmp_path):
    """Cells of one task: two rates, of which validation prefers one and test the other; and one probe."""
    folder = tmp_path / "mlm" / "task" / "cells"
    folder.mkdir(parents=True)
    for rate, validation, test in ((1e-4, 0.9, 0.5), (3e-4, 0.8, 0.7)):
        for seed in (0, 1):
            about = {"mode": "finetune", "seed": seed, "data_digest": "new", "precision": "bf16"}
            scores = {"validation": {"accuracy": validation}, "test": {"accuracy": test + seed / 8}}
            cell = {"cell": about, "setting": {"mode": "finetune", "learning_rate": rate}, "scores": scores}
            (folder / f"{rate}-{seed}.json").write_text(json.dumps(cell))
    for digest, score in (("new", 0.4), ("old", 0.3)):
        splits = {"validation": {"accuracy": 0.5}, "test": {"accuracy": score}}
        pooled = dict.fromkeys(("mean", "first"), splits)
        about = {"mode": "frozen", "seed": 0, "data_digest": digest, "precision": "fp32"}
        cell = {"cell": about, "setting": {"mode": "frozen"}, "scores": pooled["mean"], "pooled": pooled}
        (folder / f"frozen_{digest}.json").write_text(json.dumps(cell))
    (folder / ".cut-off.json").write_text("{")
    about = {"split_sizes": {"validation": 10, "test": 20}, "data_digest": "new", "metric": "accuracy"}
    write_json(tmp_path / "mlm" / "results.json", {"schema": SCHEMA, "tasks": {"task": about}})
    return tmp_path


class TestScores:
    def test_every_setting_is_there_and_validation_chooses(self, tasks):
        found = study_results.score_rows(tasks, {"mlm": "MLM", "mae-lm": "MAE-LM"})  # of the latter there is nothing
        test = found[(found["split"] == "test") & (found["mode"] == "finetune")]
        assert sorted(test["accuracy"]) == [0.5, 0.625, 0.7, 0.825]
        assert (set(test["examples"]), set(test["precision"])) == ({20}, {"bf16"})
        best = study_results.chosen(found[found["mode"] == "finetune"])
        assert sorted(best[best["split"] == "test"]["accuracy"]) == [0.5, 0.625]
        assert set(best["learning_rate"]) == {1e-4}

    def test_equal_medians_are_decided_by_the_mean(self):
        validation = {1e-4: (0.7, 0.8, 0.8), 3e-4: (0.75, 0.8, 0.9)}
        rows = [
            ("mlm", "task", "finetune", rate, seed, "validation", 10, score)
            for rate, scores in validation.items()
            for seed, score in enumerate(scores)
        ]
        for order in (rows, rows[::-1]):
            assert set(study_results.chosen(pd.DataFrame(order, columns=SCORES))["learning_rate"]) == {3e-4}

    def test_of_other_data_nothing_is_read(self, tasks):
        found = study_results.score_rows(tasks, {"mlm": "MLM"})
        assert list(found[found["mode"] == "first"]["accuracy"]) == [0.5, 0.4]
        assert set(study_results.chosen(found)["mode"]) == {"finetune", "mean", "first"}

    def test_frozen_scores_are_of_the_mean_and_of_all_tasks_or_none(self, tasks):
        assert study_results.frozen_scores(tasks / "mlm", ["task"]) == {"frozen_task": 0.4, "frozen_mean": 0.4}
        assert study_results.frozen_scores(tasks / "mlm", ["task", "other"]) == {}
        assert study_results.frozen_scores(tasks / "none", ["task"]) == {}

    def test_what_one_twin_has_not_finished_is_left_out_by_name(self):
        rows = [
            (arm, task, "finetune", rate, seed, "test", 100, 0.5)
            for arm in ("mlm", "mae-lm")
            for task in ("done", "seed missing", "rate missing")
            for rate in (1e-4, 3e-4)
            for seed in (0, 1)
            if (arm, task, seed, rate) != ("mlm", "seed missing", 1, 3e-4)
            and (arm, task, rate) != ("mae-lm", "rate missing", 1e-4)
        ]
        rows += [(arm, "done", "mean", 0.0, seed, "test", 100, 0.5) for arm in ("mlm", "mae-lm") for seed in (0, 1)]
        rows.append(("mlm", "probed once", "mean", 0.0, 0, "test", 100, 0.5))
        scores = pd.DataFrame(rows, columns=SCORES)
        compared = study_results.both_measured(scores)
        assert len(compared) == 8 + 4 + 4 + 4
        assert set(compared[compared["task"] == "rate missing"]["learning_rate"]) == {3e-4}
        assert set(compared[compared["task"] == "seed missing"]["learning_rate"]) == {1e-4}
        assert study_results.left_out(scores) == [
            "probed once, mean",
            "rate missing, finetune at 0.0001",
            "seed missing, finetune at 0.0003",
        ]

    def test_a_card_shows_the_best_setting_by_validation(self):
        rows = [
            ("mlm", "one", "finetune", rate, seed, split, 10, score[split] + seed / 8)
            for rate, score in ((1e-4, {"validation": 0.5, "test": 0.25}), (3e-4, {"validation": 0.25, "test": 0.5}))
            for seed in (0, 1, 2)
            for split in ("validation", "test")
        ]
        rows += [
            ("mlm", "one", pool, 0.0, 0, split, 10, score)
            for pool, score in (("mean", 0.75), ("first", 0.5))
            for split in ("validation", "test")
        ]
        about = {"kind": "classification", "dataset": {"type": "local"}, "metric": "accuracy", "settings": []}
        results = {"tasks": {"one": about}, "environment": {"date": "2026-01-01"}}
        found = study_results.card_results(pd.DataFrame(rows, columns=SCORES), "mlm", results)
        assert found["environment"] == results["environment"]
        tuned, frozen = (
            [entry for entry in found["evaluation"] if entry["setting"]["mode"] == mode]
            for mode in ("finetune", "frozen")
        )
        assert [(entry["dataset_split"], entry["value"], entry["seeds"]) for entry in tuned] == [
            ("validation", 0.625, 3),
            ("test", 0.375, 3),
        ]
        assert {entry["setting"]["learning_rate"] for entry in tuned} == {1e-4}
        assert [entry["value"] for entry in frozen] == [0.75, 0.75]

    def test_they_are_compared_by_seeds_where_seeds_matter(self):
        values = {"mlm": ([0.5, 0.7], [0.2, 0.2]), "mae-lm": ([0.6, 0.6], [0.3, 0.3])}
        rows = [
            (arm, task, mode, 1e-4 if mode == "finetune" else 0.0, seed, split, 100, tasks[number][seed])
            for arm, tasks in values.items()
            for number, task in enumerate(("one", "two"))
            for mode in ("finetune", "mean")
            for seed in (0, 1)
            for split in ("validation", "test")
        ]
        scores = pd.DataFrame(rows, columns=SCORES)
        errors = [
            (task, mode, 100, error) for task, error in (("one", 0.06), ("two", 0.08)) for mode in ("finetune", "mean")
        ]
        pairs = pd.DataFrame(errors, columns=["task", "mode", "examples", "half_width"])
        one, two, both = cells_of(study_report.score_table(scores, pairs, "finetune"))
        # MAE-LM's seeds agree: one degree of freedom, t = 12.7, the error of MLM's mean 10 points
        assert one == ["one", "0.0001, 0.0001", "60.0 ± 14.1", "60.0 ± 0.0", "+0.0 [-127.1, +127.1]", "± 6.0 (100)"]
        assert two[4] == "+10.0 [+10.0, +10.0]"
        assert both == ["mean of 2", "", "40.0 ± 7.1", "45.0 ± 0.0", "+5.0 [-58.5, +68.5]", "± 5.0"]
        assert [row[3] for row in cells_of(study_report.score_table(scores, pairs, "mean"))] == [
            "+0.0",
            "+10.0",
            "+5.0",
        ]
        *_, two, both = cells_of(study_report.score_table(scores, pairs[pairs["task"] == "one"], "mean"))
        assert (two[-1], both[-1]) == ("–", "–")  # not compared example by example: no mean of the others' either

    def test_what_the_choice_of_the_rate_does(self):
        # Three seeds a rate: of (validation), the first rate has the better median, the second the better mean.
        validation = {1e-4: (0.8, 0.8, 0.2), 3e-4: (0.7, 0.7, 0.7)}
        test = {"mlm": {1e-4: 0.5, 3e-4: 0.6}, "mae-lm": {1e-4: 0.55, 3e-4: 0.4}}
        rows = [
            (arm, task, "finetune", rate, seed, split, 10, score)
            for arm in test
            for task in ("one", "two")
            for rate in validation
            for seed in range(3)
            for split, score in (("validation", validation[rate][seed]), ("test", test[arm][rate]))
        ]
        rows += [
            (arm, "one rate", "finetune", 1e-4, seed, "test", 10, 0.0) for arm in test for seed in range(3)
        ]  # has no choice
        assert cells_of(study_report.rate_table(pd.DataFrame(rows, columns=SCORES))) == [
            ["0.0001 for every task", "50.0", "55.0", "+5.0"],
            ["0.0003 for every task", "60.0", "40.0", "-20.0"],
            ["the best median on validation, as above", "50.0", "55.0", "+5.0"],
            ["the best mean on validation", "60.0", "40.0", "-20.0"],
        ]


class TestRanks:
    def table(self):
        rows = [
            (
                arm,
                objective,
                when,
                math.nan if when == "final" else 3e-4,
                layer,
                population,
                rank,
                rank // 2,
                rank,
                rank,
            )
            for arm, objective in study_results.TWINS.items()
            for when, extra in (("final", 0), ("after-spam", 5))
            for layer in (0, 1)
            for population, rank in (("unmasked", 20 + 10 * layer + extra), ("masked/all", 24 + 10 * layer + extra))
        ]
        powers = [f"rank_power_{power}{centred}" for centred in ("", "_centred") for power in (1, 2)]
        ranks = pd.DataFrame(
            rows, columns=["arm", "objective", "when", "learning_rate", "layer", "population", *powers]
        )
        return ranks.assign(deficiency_power_1_low=3.1, deficiency_power_1_high=4.4)

    def test_by_layer(self):
        found = cells_of(study_report.rank_table(self.table(), "rank_power_1"))
        assert found == [["embeddings", "20", "24", "20", "24"], ["1", "30", "34", "30", "34"]]

    def test_deficiency_of_the_last_layer(self):
        found = cells_of(study_report.deficiency_table(self.table()))
        assert found[0] == ["mlm", "MLM", "30 (+4)", "+3.1 to +4.4", "15 (+2)", "30 (+4)", "30 (+4)", "–"]

    def test_before_and_after_fine_tuning(self):
        found = cells_of(study_report.after_table(self.table()))
        assert found == [
            ["before", "–", "–", "30", "30", "15", "15"],
            ["spam", "0.0003", "0.0003", "35", "35", "17", "17"],
        ]

    def test_over_time_the_end_is_the_last_step(self):
        ranks = self.table().replace({"when": {"after-spam": "step-000000050"}})
        found = study_results.rank_over_time(ranks, "mlm", {0: 0.0, 50: 10.0, 100: 20.0})
        assert list(found["minutes"]) == [10.0, 20.0]
        assert list(found["masked_1"] - found["unmasked_1"]) == [4, 4]


def test_equal_tokens_are_compared_where_both_were_scored_at_a_constant_rate():
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
    (cells,) = cells_of(study_report.equal_tokens_table(pd.DataFrame(rows, columns=columns), ranks))
    assert cells == ["250", "2.0", "6.500", "7.000", "50.0", "40.0", *["20 (+1)"] * 2, *["5 (+0)"] * 2]


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """Two toy models, fine-tuned on one task and probed, and compared."""
    folder = tmp_path_factory.mktemp("pairs")
    rows = {"train": opinions(96, 0), "validation": opinions(32, 1), "test": opinions(40, 2)}
    options = DataOptions(
        "text", files={name: str(write_rows(folder / f"{name}.jsonl", part)) for name, part in rows.items()}
    )
    shared = {"attention": "eager", "metrics": "sklearn", "quiet": True}
    for arm, seed in (("mlm", 1), ("mae-lm", 2)):
        model = str(save_toy_model(folder / f"model-{arm}", seed))
        run_task(model, options, Plan(frozen=True, seeds=1, **shared), folder / "tasks" / arm)
        run_task(model, options, Plan(learning_rates=(1e-3,), epochs=(1.0,), **shared), folder / "tasks" / arm)
    study_pairs.compare_twins(folder / "tasks", options, folder / "pairs")
    return folder, options


class TestPairs:
    def test_the_models_compared_answer_as_they_were_scored(self, compared):
        folder, _ = compared
        pairs = study_pairs.pair_rows(folder / "pairs").set_index("mode")
        assert set(pairs.index) == {"finetune", "mean", "first"}
        assert set(pairs["task"]) == {"text"}
        assert set(pairs["examples"]) == {40}
        scores = study_results.score_rows(folder / "tasks", study_results.TWINS)
        for (arm, mode), of in scores[scores["split"] == "test"].groupby(["arm", "mode"]):
            assert pairs.loc[mode, f"accuracy_{arm}"] == pytest.approx(of["accuracy"].iloc[0], abs=1e-9)

    def test_nothing_is_compared_twice_but_other_cells_are(self, compared):
        folder, options = compared
        file = folder / "pairs" / "text-mean.json"
        kept = json.loads(file.read_text())
        write_json(file, kept | {"half_width": -1})
        study_pairs.compare_twins(folder / "tasks", options, folder / "pairs")
        assert json.loads(file.read_text())["half_width"] == -1
        write_json(file, kept | {"cells": {"mlm": "another", "mae-lm": "another"}, "half_width": -1})
        study_pairs.compare_twins(folder / "tasks", options, folder / "pairs")
        assert json.loads(file.read_text()) == kept
        assert load_results(folder / "tasks" / "mlm")["tasks"]["text"]["split_sizes"]["test"] == kept["examples"]


class TestPage:
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

    def test_the_page_says_what_its_files_hold(self):
        tables = study_report.all_tables(**study_report.read_tables(ROOT / study.STUDY))
        page = (ROOT / study.PAGE).read_text("utf-8")
        for name, table in tables.items():
            (shown,) = re.findall(rf"<!-- table: {name} -->\n\n(.*?)\n\n<!-- end -->", page, re.DOTALL)
            assert shown == table.strip(), name

    def test_the_models_compared_are_among_those_scored(self):
        tables = study_report.read_tables(ROOT / study.STUDY)
        scores = tables["scores"][tables["scores"]["split"] == "test"]
        for pair in tables["pairs"].itertuples(index=False):
            for arm, accuracy in (("mlm", pair[-2]), ("mae-lm", pair[-1])):
                found = scores[(scores["arm"] == arm) & (scores["task"] == pair.task) & (scores["mode"] == pair.mode)]
                # In fp32, scored in bf16: an answer or two may differ.
                assert (found["accuracy"] - accuracy).abs().min() < 0.005 + 1e-9, pair


class TestKeptTables:
    KEYS = ("arm", "when")

    def file(self, folder):
        rows = [("mlm", "final", 1), ("mlm", "final", 2), ("mlm", "after", 3), ("mae-lm", "final", 4)]
        pd.DataFrame(rows, columns=[*self.KEYS, "rank"]).to_csv(folder / "ranks.csv", index=False)
        return folder / "ranks.csv"

    def test_what_is_measured_anew_takes_the_place_of_what_was_known(self, tmp_path):
        measured = pd.DataFrame([("mlm", "final", 9)], columns=[*self.KEYS, "rank"])
        found, kept = study_report.keep_unmeasured(measured, self.file(tmp_path), self.KEYS)
        assert sorted(found.itertuples(index=False, name=None)) == [
            ("mae-lm", "final", 4),
            ("mlm", "after", 3),
            ("mlm", "final", 9),
        ]
        assert kept == ["mlm after", "mae-lm final"]

    def test_without_measurements_or_without_a_file(self, tmp_path):
        file = self.file(tmp_path)
        found, kept = study_report.keep_unmeasured(pd.DataFrame(), file, self.KEYS)
        assert (len(found), kept) == (4, ["mlm final", "mlm after", "mae-lm final"])
        measured = pd.DataFrame([("mlm", "final", 9)], columns=[*self.KEYS, "rank"])
        found, kept = study_report.keep_unmeasured(measured, tmp_path / "none.csv", self.KEYS)
        assert (len(found), kept) == (1, [])
