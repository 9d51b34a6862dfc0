"""From files to a saved, reloaded classifier: grid, resume, determinism, frozen probe, comparison, pipelines."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from finetuning_toys import opinions, save_toy_model, toy_tokenizer, write_rows
from sklearn.metrics import accuracy_score, f1_score
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    pipeline,
    set_seed,
)
from typer.testing import CliRunner

from maelm_hf import MaeLmConfig, MaeLmForMaskedLM
from training.finetune import app
from training.finetune_cell import Cell, load_model, load_tokenizer, longest_input, run_cell
from training.finetune_data import DataOptions, data_digest, load_task, model_digest
from training.finetune_report import comparison_rows, evaluation_entries, group_settings, load_results, summarise

SPECIAL_IDS = {"mask": "mask", "pad": "pad", "bos": "cls", "eos": "sep"}
FAST = ["--attention", "eager", "--quiet", "--metrics", "sklearn", "--lr", "5e-3", "--batch-size", "16"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_toy_model(tmp_path_factory.mktemp("model.v1 with space"))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    names = {"train": (320, 0), "validation": (40, 1), "test": (40, 2)}
    return {name: str(write_rows(folder / f"{name}.jsonl", opinions(*size))) for name, size in names.items()}


def command(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.output


def own(files):
    return ["--task", "text", *(part for name, path in files.items() for part in (f"--{name}", path))]


@pytest.fixture(scope="module")
def finished(model, files, tmp_path_factory):
    out = tmp_path_factory.mktemp("run")
    code, output = command(model, *own(files), "--out", out, "--seeds", 2, "--epochs", 3, *FAST)
    assert code == 0, output
    return out


def cells(out, task="text"):
    return {path.name: json.loads(path.read_text()) for path in (out / task / "cells").glob("*.json")}


def read_rows(path):
    return [json.loads(line) for line in Path(path).read_text("utf-8").splitlines()]


def cell_of(model, files, seed=0, epochs=1.0):
    options = DataOptions("text", files=files)
    data = load_task(options)
    shared = {"task": "text", "data_digest": data_digest(data), "mode": "finetune", "max_length": 24}
    model_id = {"model": str(model), "model_digest": model_digest(str(model))}
    return Cell(
        **model_id, **shared, seed=seed, epochs=epochs, learning_rate=5e-3, batch_size=16, attention="eager"
    ), data


# ---- fine-tuning ---------------------------------------------


def test_a_learnable_task_is_learned_and_every_seed_reported(finished):
    task = load_results(finished)["tasks"]["text"]
    assert task["best"]["seeds"] == [0, 1]
    summary = task["best"]["scores"]["validation"]["accuracy"]
    assert summary["median"] > 0.9
    assert summary["min"] <= summary["median"] <= summary["max"]
    assert len(summary["values"]) == 2
    assert "test" in task["best"]["scores"]
    assert task["split_sizes"] == {"train": 320, "validation": 40, "test": 40}


def test_the_saved_model_works_in_the_pipeline_and_gives_the_reported_score(finished, files):
    classify = pipeline("text-classification", model=str(finished / "text/model"), device="cpu")
    rows = read_rows(files["test"])
    found = [entry["label"] for entry in classify([row["text"] for row in rows])]
    assert set(found) <= {"bad", "good"}
    gold = [row["label"] for row in rows]
    best = json.loads((finished / "text/best.json").read_text())
    reported = cells(finished)[best["cell"] + ".json"]["scores"]["test"]
    assert reported["accuracy"] == pytest.approx(accuracy_score(gold, found), abs=1e-9)
    assert reported["macro_f1"] == pytest.approx(f1_score(gold, found, average="macro"), abs=1e-9)


def test_a_finished_cell_is_not_run_again_and_more_seeds_add_cells(model, files, finished):
    before = {path: path.stat().st_mtime_ns for path in (finished / "text/cells").iterdir()}
    code, output = command(model, *own(files), "--out", finished, "--seeds", 3, "--epochs", 3, *FAST)
    assert code == 0
    assert "2 of 3 cells are finished already" in output
    after = {path: path.stat().st_mtime_ns for path in (finished / "text/cells").iterdir()}
    assert len(after) == 3
    assert all(after[path] == time for path, time in before.items())


def test_the_same_cell_twice_gives_the_same_number_and_weights(model, files, tmp_path):
    cell, data = cell_of(model, files)
    first, second = (run_cell(cell, data, tmp_path / name, "sklearn", quiet=True) for name in ("a", "b"))
    assert first["scores"] == second["scores"]
    losses = [[e["eval_loss"] for e in result["history"] if "eval_loss" in e] for result in (first, second)]
    assert losses[0] == losses[1]
    weights = [
        AutoModelForSequenceClassification.from_pretrained(tmp_path / name / "model").state_dict() for name in "ab"
    ]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    other, _ = cell_of(model, files, seed=1)
    third = run_cell(other, data, tmp_path / "c", "sklearn", quiet=True)
    assert [e["eval_loss"] for e in third["history"] if "eval_loss" in e] != losses[0]


def test_the_best_checkpoint_is_kept_not_the_last(model, files, tmp_path):
    cell, data = cell_of(model, files, epochs=4.0)
    result = run_cell(cell, data, tmp_path, "sklearn", quiet=True)
    by_epoch = [entry["eval_accuracy"] for entry in result["history"] if "eval_accuracy" in entry]
    assert len(by_epoch) == 4
    assert result["scores"]["validation"]["accuracy"] == max(by_epoch)


def test_early_stop_ends_before_the_last_epoch(model, files, tmp_path):
    cell, data = cell_of(model, files)
    frozen_rate = Cell(**{**cell.__dict__, "learning_rate": 0.0, "epochs": 6.0, "early_stop": 1})
    result = run_cell(frozen_rate, data, tmp_path, "sklearn", quiet=True)
    assert sum("eval_accuracy" in entry for entry in result["history"]) == 2


def test_class_names_are_in_the_config(finished):
    config = AutoModelForSequenceClassification.from_pretrained(finished / "text/model").config
    assert config.id2label == {0: "bad", 1: "good"}
    assert config.label2id == {"bad": 0, "good": 1}
    assert config.problem_type == "single_label_classification"


def test_cells_side_by_side_one_fails_and_is_named_and_a_second_run_fills_the_gap(
    model, files, finished, tmp_path, monkeypatch
):
    from training import finetune_grid

    original = finetune_grid._run_apart

    def first_fails(spec, slot, jobs, devices):
        if spec["cell"]["seed"] == 0:
            spec = {**spec, "cell": {**spec["cell"], "model": "no/such/model"}}
        return original(spec, slot, jobs, devices)

    monkeypatch.setattr(finetune_grid, "_run_apart", first_fails)
    arguments = [model, *own(files), "--out", tmp_path, "--seeds", 2, "--epochs", 3, *FAST]
    code, output = command(*arguments, "--jobs", 2)
    assert code == 1
    assert "failed, see" in output
    assert [cell["cell"]["seed"] for cell in cells(tmp_path).values()] == [1]
    code, output = command(*arguments)
    assert code == 0
    assert "1 of 2 cells are finished already" in output
    assert cells(tmp_path).keys() <= cells(finished).keys()  # the same cells, whatever folder and process


def test_the_encoder_of_mae_lm_goes_the_same_way(files, tmp_path):
    tokenizer = toy_tokenizer()
    ids = {f"{ours}_token_id": getattr(tokenizer, f"{theirs}_token_id") for ours, theirs in SPECIAL_IDS.items()}
    config = MaeLmConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        decoder_num_hidden_layers=1,
        initializer_range=0.2,
        **ids,
    )
    set_seed(0)
    MaeLmForMaskedLM(config).save_pretrained(tmp_path / "pretrained")
    tokenizer.save_pretrained(tmp_path / "pretrained")
    arguments = [tmp_path / "pretrained", *own(files), "--out", tmp_path / "out", *FAST]
    assert command(*arguments, "--epochs", 3)[0] == 0
    assert command(*arguments, "--frozen")[0] == 0
    settings = load_results(tmp_path / "out")["tasks"]["text"]["settings"]
    assert {entry["setting"]["mode"] for entry in settings} == {"finetune", "frozen"}
    assert settings[0]["scores"]["test"]["accuracy"]["median"] > 0.9
    classify = pipeline("text-classification", model=str(tmp_path / "out/text/model"), device="cpu")
    assert classify("the film was very warm .")[0]["label"] == "good"


def test_bf16_without_a_gpu(model, files, tmp_path):
    cell, data = cell_of(model, files, epochs=3.0)
    result = run_cell(Cell(**{**cell.__dict__, "precision": "bf16"}), data, tmp_path, "sklearn", quiet=True)
    assert result["scores"]["validation"]["accuracy"] > 0.9
    saved = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    assert {parameter.dtype for parameter in saved.parameters()} == {torch.float32}


# ---- other kinds of task -------------------------------------


def test_regression(model, tmp_path):
    rows = [{"text": row["text"], "label": 1.0 if row["label"] == "good" else 0.25} for row in opinions(320, 0)]
    path = str(write_rows(tmp_path / "rows.jsonl", rows))
    arguments = ["--task", "regression", "--train", path, "--validation", path, "--epochs", 8]
    code, output = command(model, *arguments, "--out", tmp_path / "out", *FAST)
    assert code == 0, output
    task = load_results(tmp_path / "out")["tasks"]["regression"]
    assert task["metric"] == "pearson"
    assert task["best"]["scores"]["validation"]["pearson"]["median"] > 0.8
    saved = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out/regression/model")
    assert (saved.config.num_labels, saved.config.problem_type) == (1, "regression")


def test_tagging_works_in_the_pipeline(model, tmp_path):
    lines = [
        "john B-PER\nlived O\nin O\nparis B-LOC\n",
        "mary B-PER\nsleeps O\n",
        "the O\ndog O\neats O\n",
        "lake B-LOC\n",
    ]
    (tmp_path / "tags.conll").write_text("\n".join(lines * 12))
    path = str(tmp_path / "tags.conll")
    arguments = ["--task", "tokens", "--train", path, "--validation", path, "--epochs", 6]
    code, output = command(model, *arguments, "--out", tmp_path / "out", *FAST)
    assert code == 0, output
    assert (
        load_results(tmp_path / "out")["tasks"]["tokens"]["best"]["scores"]["validation"]["entity_f1"]["median"] > 0.9
    )
    tag = pipeline(
        "token-classification", model=str(tmp_path / "out/tokens/model"), aggregation_strategy="simple", device="cpu"
    )
    assert [(e["word"], e["entity_group"]) for e in tag("john lived in paris")] == [("john", "PER"), ("paris", "LOC")]
    saved = AutoModelForTokenClassification.from_pretrained(tmp_path / "out/tokens/model")
    assert set(saved.config.label2id) == {"O", "B-PER", "B-LOC"}


def test_question_answering_learns_where_the_answer_stands(model, tmp_path):
    questions = []
    for number in range(48):
        person, place = ("john", "mary")[number % 2], ("paris", "lake", "town")[number % 3]
        context = f"{person} lived in {place} ."
        answer = {"text": place, "answer_start": context.index(place)}
        questions.append({"context": context, "qas": [{"id": str(number), "question": "where ?", "answers": [answer]}]})
    (tmp_path / "qa.json").write_text(json.dumps({"data": [{"paragraphs": questions}]}))
    path = str(tmp_path / "qa.json")
    arguments = ["--task", "squad", "--train", path, "--validation", path, "--epochs", 8, "--max-length", 24]
    code, output = command(model, *arguments, "--out", tmp_path / "out", *FAST)
    assert code == 0, output
    scores = load_results(tmp_path / "out")["tasks"]["squad"]["best"]["scores"]["validation"]
    assert scores["exact_match"]["median"] > 90


def test_an_unlabelled_test_split_is_predicted_in_its_order(model, files, tmp_path):
    rows = opinions(21, 9)
    bare = write_rows(tmp_path / "bare.jsonl", [{"text": row["text"]} for row in rows])
    named = {name: files[name] for name in ("train", "validation")} | {"test": str(bare)}
    code, output = command(model, *own(named), "--out", tmp_path / "out", "--epochs", 3, *FAST)
    assert code == 0, output
    assert "bare.jsonl: the test split has no labels: it is predicted, not scored" in " ".join(output.split())
    lines = (tmp_path / "out/text/predictions/test.tsv").read_text().splitlines()
    assert lines[0] == "index\tprediction"
    classify = pipeline("text-classification", model=str(tmp_path / "out/text/model"), device="cpu")
    expected = [f"{i}\t{entry['label']}" for i, entry in enumerate(classify([row["text"] for row in rows]))]
    assert lines[1:] == expected
    assert load_results(tmp_path / "out")["tasks"]["text"]["test_unlabelled"]


# ---- the frozen encoder --------------------------------------


def test_the_frozen_probe_scores_what_scikit_learn_scores_on_the_same_features(model, files, tmp_path):
    code, output = command(
        model, *own(files), "--out", tmp_path, "--frozen", "--seeds", 2, "--attention", "eager", "--quiet"
    )
    assert code == 0, output
    found = next(cell for cell in cells(tmp_path).values() if cell["cell"]["seed"] == 0)
    assert found["setting"]["mode"] == "frozen"
    features = dict(np.load(next((tmp_path / "text").glob("features_*.npz"))))
    encoder, tokenizer = AutoModel.from_pretrained(model).eval(), AutoTokenizer.from_pretrained(model)
    text = read_rows(files["test"])[0]["text"]
    with torch.no_grad():
        hidden = encoder(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].numpy()  # (tokens, hidden)
    assert features["test/mean"][0] == pytest.approx(hidden.mean(0), abs=1e-5)
    assert features["test/first"][0] == pytest.approx(hidden[0], abs=1e-5)
    for pool in ("mean", "first"):
        assert 0 <= found["pooled"][pool]["test"]["accuracy"] <= 1
    assert found["scores"] == found["pooled"][found["pool"]]


def test_the_frozen_probe_of_tags_tells_words_apart(model, tmp_path):
    lines = ["john B-PER\nlived O\nin O\nparis B-LOC\n", "mary B-PER\nsleeps O\n", "the O\ndog O\neats O\n"]
    path = tmp_path / "tags.conll"
    path.write_text("\n".join(lines * 8))
    arguments = ["--task", "tokens", "--train", path, "--validation", path, "--frozen", "--attention", "eager"]
    code, output = command(model, *arguments, "--out", tmp_path, "--quiet")
    assert code == 0, output
    (found,) = cells(tmp_path, "tokens").values()
    assert found["scores"]["validation"]["accuracy"] == 1.0
    features = dict(np.load(next((tmp_path / "tokens").glob("features_*.npz"))))
    assert features["train/tags"].shape == features["validation/tags"].shape == (8 * 9,)


def test_question_answering_has_no_frozen_probe(model, tmp_path):
    entry = {"id": "1", "question": "where ?", "answers": [{"text": "paris", "answer_start": 0}]}
    (tmp_path / "qa.json").write_text(json.dumps({"data": [{"paragraphs": [{"context": "paris", "qas": [entry]}]}]}))
    path = str(tmp_path / "qa.json")
    arguments = ["--task", "squad", "--train", path, "--validation", path, "--frozen", "--attention", "eager"]
    code, output = command(model, *arguments, "--max-length", 24, "--out", tmp_path / "out")
    assert code == 1
    assert "no linear probe" in output


# ---- results -------------------------------------------------


def made_cell(seed, rate, validation, test):
    return {
        "cell": {"seed": seed},
        "setting": {"mode": "finetune", "learning_rate": rate, "batch_size": 8, "epochs": 1.0},
        "scores": {"validation": {"accuracy": validation}, "test": {"accuracy": test}},
    }


def test_a_card_gets_the_best_setting_of_either_mode():
    def entry_of(mode, score):
        accuracy = {"values": [score], "median": score, "std": None}
        return {"setting": {"mode": mode}, "scores": {"test": {"accuracy": accuracy}}}

    settings = [entry_of("frozen", 0.5), entry_of("finetune", 0.4), entry_of("finetune", 0.9)]
    task = {"kind": "classification", "dataset": {}, "settings": settings}
    found = [(entry["setting"]["mode"], entry["value"]) for entry in evaluation_entries({"one": task})]
    assert found == [("finetune", 0.4), ("frozen", 0.5)]
    (entry,) = evaluation_entries({"one": task | {"settings": settings[:1]}})
    assert (entry["setting"]["mode"], entry["value"]) == ("frozen", 0.5)


def test_settings_are_chosen_by_the_median_on_validation_never_by_test():
    found = group_settings(
        [
            made_cell(0, 1e-5, 0.9, 0.1), made_cell(1, 1e-5, 0.6, 0.1), made_cell(2, 1e-5, 0.8, 0.1),
            made_cell(0, 2e-5, 1.0, 0.9), made_cell(1, 2e-5, 0.7, 0.9), made_cell(2, 2e-5, 0.7, 0.9),
        ],
        "accuracy",
    )  # fmt: skip
    assert [entry["setting"]["learning_rate"] for entry in found] == [1e-5, 2e-5]
    assert found[0]["scores"]["validation"]["accuracy"] == summarise([0.9, 0.6, 0.8])
    assert found[0]["scores"]["validation"]["accuracy"]["std"] == pytest.approx(np.std([0.9, 0.6, 0.8], ddof=1))


def test_settings_of_one_median_are_told_apart_by_the_mean():
    scores = {1e-5: (0.7, 0.7, 0.6), 2e-5: (0.7, 0.7, 0.9)}
    cells = [made_cell(seed, rate, score, 0.5) for rate, found in scores.items() for seed, score in enumerate(found)]
    for order in (cells, cells[::-1]):
        assert group_settings(order, "accuracy")[0]["setting"]["learning_rate"] == 2e-5


def test_models_side_by_side(finished, tmp_path):
    results = load_results(finished)
    worse = json.loads(json.dumps(results).replace(results["tasks"]["text"]["data_digest"], "0" * 64))
    header, rows = comparison_rows([results, worse], ["ours", "theirs"], "test")
    assert header == ["task", "mode", "metric", "ours", "theirs"]
    assert "other data!" in rows[0][0]
    median = 100 * results["tasks"]["text"]["best"]["scores"]["test"]["accuracy"]["median"]
    assert rows[0][3].startswith(f"{median:.2f} ± ")
    code, output = command("compare", finished, finished, "--names", "a,b", "--write", tmp_path / "table.md")
    assert code == 0, output
    assert (tmp_path / "table.md").read_text().startswith("| task | mode | metric | a | b |\n| --- |")


def test_means_are_of_one_mode_over_the_tasks_every_model_has():
    def run(**tasks):
        entry = lambda mode, value: {"setting": {"mode": mode}, "scores": {"test": {"accuracy": summarise([value])}}}  # noqa: E731
        shared = {"kind": "classification", "metric": "accuracy", "data_digest": "0"}
        return {"tasks": {name: shared | {"settings": [entry(*s) for s in found]} for name, found in tasks.items()}}

    first = run(a=[("finetune", 0.9), ("frozen", 0.5)], b=[("finetune", 0.7), ("frozen", 0.3)], c=[("finetune", 0.1)])
    second = run(a=[("finetune", 0.8), ("frozen", 0.6)], b=[("finetune", 0.6)])
    rows = comparison_rows([first, second], ["x", "y"], "test")[1]
    assert [row for row in rows if row[0].startswith("mean")] == [["mean of 2 tasks", "finetune", "", "80.00", "70.00"]]
    assert ["c", "finetune", "accuracy", "10.00 (1)", "–"] in rows


def test_results_for_a_card(finished):
    results = load_results(finished)
    entry = next(e for e in results["evaluation"] if e["dataset_split"] == "test" and e["metric_type"] == "accuracy")
    assert entry["task_type"] == "text-classification"
    assert entry["value"] == results["tasks"]["text"]["best"]["scores"]["test"]["accuracy"]["median"]
    assert entry["seeds"] >= 2
    assert {"date", "hardware", "torch", "transformers"} <= results["environment"].keys()


# ---- what is refused -----------------------------------------


def test_other_weights_need_another_folder(finished, files, tmp_path):
    other = save_toy_model(tmp_path / "other", seed=1)
    code, output = command(other, *own(files), "--out", finished, *FAST)
    assert code == 1
    assert "holds the results of other weights" in output


def test_an_encoder_with_weights_missing_is_refused(model, files, tmp_path):
    from safetensors.torch import load_file, save_file

    broken = save_toy_model(tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    del weights["encoder.layer.1.output.dense.weight"]
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=r"lacks 1 weights of the encoder, the first is 'bert\.encoder\.layer\.1\.output"
    ):
        load_model(str(broken), load_task(DataOptions("text", files=files)))


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    folder = save_toy_model(tmp_path)
    config = json.loads((folder / "config.json").read_text()) | {"vocab_size": 10}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="they do not belong together"):
        load_tokenizer(str(folder))


def test_bf16_checkpoints_are_fine_tuned_in_fp32(files, tmp_path):
    folder = save_toy_model(tmp_path)
    AutoModel.from_pretrained(folder).to(torch.bfloat16).save_pretrained(folder)
    loaded = load_model(str(folder), load_task(DataOptions("text", files=files)))
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}


def test_positions_behind_the_padding_id_are_counted(tmp_path):
    from transformers import RobertaConfig

    folder = save_toy_model(tmp_path)
    tokenizer = load_tokenizer(str(folder))
    RobertaConfig(max_position_embeddings=34, pad_token_id=1, vocab_size=500).save_pretrained(folder)
    assert longest_input(str(folder), tokenizer) == 32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task", "sst3"], "unknown task 'sst3'"),
        (["--task", "text"], "needs --train FILE and --validation FILE"),
        (["--task", "sst2", "--train", "x.csv"], "sst2 has its own files"),
        (["--task", "text", "--train", "x.csv"], "needs both --train and --validation"),
        (["--task", "text", "--train", "x.csv", "--validation", "x.csv"], "x.csv: no such file"),
        (["--task", "rte", "--data", "nowhere"], "nowhere: no such folder"),
        (["--task", "text", "--attention", "flash"], "--attention must be one of"),
        (["--task", "text", "--grid", "huge"], "--grid must be one of single, paper"),
        (["--task", "text", "--lr", "fast"], "'fast' is not a comma-separated list of floats"),
    ],
)
def test_wrong_arguments_are_one_line(model, tmp_path, arguments, message):
    code, output = command(model, *arguments, "--out", tmp_path)
    assert code != 0
    assert message in " ".join(output.split())
    assert "Traceback" not in output


def test_the_kernel_is_measured_once_and_kept(model, files, tmp_path):
    arguments = [model, *own(files), "--out", tmp_path, "--epochs", 1, "--quiet", "--metrics", "sklearn"]
    code, output = command(*arguments)
    assert code == 0, output
    assert "fastest over 3 training batches" in " ".join(output.split())
    kept = (tmp_path / "text/choices.json").read_bytes()
    assert command(*arguments)[0] == 0
    assert (tmp_path / "text/choices.json").read_bytes() == kept
    assert len(cells(tmp_path)) == 1
