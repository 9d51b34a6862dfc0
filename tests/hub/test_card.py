# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""A card holds what the measured files hold and nothing else, and its snippets run."""

import ast
import json
import re
import shutil
from pathlib import Path

import pytest
import yaml
from hub_helpers import tiny_model
from huggingface_hub import ModelCard, parse_eval_result_entries
from transformers import DistilBertConfig, RobertaConfig

from maelm_hf import MaeLmConfig, MaeLmForMaskedLM, MaeLmForSequenceClassification
from maelm_hf.hub import export_native
from maelm_hf.hub.publish import build_folder

RELEASED = sorted((Path(__file__).resolve().parents[2] / "model_cards").glob("*/README.md"))
SECTIONS = [
    "How to use",
    "Training data",
    "Recipe",
    "Compute",
    "Results",
    "Rank of the representations",
    "Limits",
    "Citation",
]

HEADER = ("Value", "Metric", "Seeds", "Standard deviation", "---")
# A number or a name out of a file, or that there is none.
VALUE = r"-?[\d,.]+(e[+-]\d+)?|not measured|not stated|[a-z][a-z0-9_]*|([a-z]+ [\d.+a-z]+(, )?)+"

SUMMARY = {
    "finished": True,
    "steps": 1234,
    "tokens": 5_678_901,
    "seconds": 7200.0,
    "tokens_per_second": 788.7,
    "held_out_loss": 2.98,
    "held_out_accuracy": 0.456,
    "samples": {"texts/sample.txt": {"loss": 3.25}},
    "fill_mask": [
        {"text": "It was <mask>.", "words": ["good", "bad"], "expected": ["bad", "sad"]},
        {"text": "In <mask>.", "words": ["a", "b"], "expected": ["c"]},
    ],
    "corpus": "docstrings: 45,521 documents",
    "notes": ["It knows documentation alone."],
    "cpu_seconds_a_step": 1.25,
    "choices": {"precision": {"value": "bf16", "reason": "faster"}},
    "versions": {"torch": "2.13.0"},
}
RECIPE = {
    "seed": 17,
    "data": {"mask_ratio": 0.15, "batch_size": 64},
    "optimizer": {"name": "adamw", "learning_rate": 2e-4, "warmup_steps": 100, "schedule": "wsd"},
}
# As training/finetune.py writes its list "evaluation".
EVALUATION = [
    {
        "task_type": "text-classification",
        "task_name": "rte",
        "dataset_type": "nyu-mll/glue",
        "dataset_name": "GLUE RTE",
        "dataset_config": "rte",
        "dataset_split": "validation",
        "metric_type": "accuracy",
        "value": 0.6137,
        "seeds": 5,
        "std": 0.0214,
        "setting": {"mode": "finetune", "learning_rate": 2e-5, "batch_size": 32, "epochs": 3.0},
    },
    {
        "task_type": "text-classification",
        "task_name": "ours",
        "dataset_type": "local",
        "dataset_name": "reviews.csv",
        "dataset_config": "ours",
        "dataset_split": "test",
        "metric_type": "f1",
        "value": 0.7071,
        "seeds": 1,
        "std": None,
        "setting": {"mode": "frozen"},
    },
]
# The same on validation, by which the setting was chosen.
CHOSEN_BY = EVALUATION[1] | {"dataset_split": "validation", "value": 0.75}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The files of a training run, of fine-tuning, and of a rank report made by the probe itself."""
    from maelm_hf.probing import RankReport

    folder = tmp_path_factory.mktemp("measured")
    (folder / "summary.json").write_text(json.dumps(SUMMARY))
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    results = {
        "schema": 1,
        "evaluation": [*EVALUATION, CHOSEN_BY],
        "environment": {"date": "2026-11-30", "hardware": "2 CPU cores"},
    }
    (folder / "results.json").write_text(json.dumps(results))
    rows = [
        {"layer_index": layer, "layer": f"layers.{layer}", "population": population, "dim": 32, "tokens": 4096}
        | {"effective_rank": rank}
        for layer, ranks in enumerate([(30, 29), (25, 24), (22, 21)])
        for population, rank in zip(("unmasked", "masked/all"), ranks, strict=True)
    ]
    settings = {"model": "tiny", "tau": 0.9, "power": 2, "centred": False, "data": "held-out docstrings"}
    document = {"format_version": 1, "kind": RankReport.kind, "settings": settings, "notes": [], "rows": rows}
    (folder / "rank").mkdir()
    (folder / "rank" / "report.json").write_text(json.dumps(document))
    (folder / "rank" / "rank_by_layer.png").write_bytes(b"\x89PNG\r\n")
    return folder


def files_of(measured) -> dict[str, Path]:
    return {"training_summary": measured, "results": measured, "rank_report": measured / "rank"}


@pytest.fixture(scope="module")
def folders(measured, tokenizer, tmp_path_factory):
    """Published folders of every form, with and without measurements."""
    out = tmp_path_factory.mktemp("cards")
    build_folder(
        tiny_model(), "org/full", out / "full", tokenizer=tokenizer, license="mit", language="en", **files_of(measured)
    )
    build_folder(tiny_model(), "org/empty", out / "empty")
    export_native(tiny_model(relative_position_buckets=0), out / "bert", tokenizer=tokenizer)
    build_folder(out / "bert", "org/stock", out / "stock", data_license="CC0", **files_of(measured))
    head = tiny_model(MaeLmForSequenceClassification, relative_position_buckets=0)
    build_folder(head, "org/head", out / "head", tokenizer=tokenizer, revision="v2")
    plain = tiny_model(decoder_num_hidden_layers=0, encoder_mask_fraction=1.0)
    build_folder(plain, "org/plain", out / "plain", tokenizer=tokenizer)
    return {name: out / name for name in ("full", "empty", "stock", "head", "plain")}


def section(card: str, title: str) -> str:
    return card.split(f"\n## {title}\n")[1].split("\n## ")[0]


def check_pattern(text: str) -> None:
    """What every card has to be, whatever it is filled with."""
    metadata = yaml.safe_load(text.split("---\n")[1])
    assert metadata["library_name"] == "transformers"
    assert metadata["pipeline_tag"]
    assert re.findall(r"^## (.*)$", text, re.M) == SECTIONS
    assert not re.search(r"\{\{|\}\}|\{%|TODO|FIXME|\bNone\b|\bnan\b", text.split("```bibtex")[0])
    snippets = re.findall(r"```python\n(.*?)```", text, re.S)
    assert len(snippets) == 3
    for snippet in snippets:
        ast.parse(snippet)
    # In the tables of measurements a value is a number, or says that there is none.
    for title in ("Compute", "Results"):
        for row in re.findall(r"^\|(.*)\|$", section(text, title), re.M):
            cells = [cell.strip() for cell in row.split("|")]
            if cells[0] == "Hardware":  # named as the system names it
                continue
            for value in cells[3:] if len(cells) > 2 else cells[1:]:
                assert value in HEADER or re.fullmatch(VALUE, value), row
    for title in ("Results", "Rank of the representations"):
        assert re.search(r"\d|not measured", section(text, title))
    assert "Licence of the training data: " in section(text, "Training data")
    for link in re.findall(r"\]\(([^)]+)\)", text):
        assert link.startswith(("https://", "figures/"))


@pytest.mark.parametrize("name", ["full", "empty", "stock", "head", "plain"])
def test_a_card_of_every_form_has_the_pattern(name, folders):
    check_pattern((folders[name] / "README.md").read_text())


@pytest.mark.parametrize("path", RELEASED, ids=lambda path: path.parent.name)
def test_every_released_card_has_the_pattern(path):
    check_pattern(path.read_text())


def test_measured_numbers_are_in_the_card(folders, measured):
    card = (folders["full"] / "README.md").read_text()
    for row in (
        "| Steps | 1,234 |",
        "| Tokens | 5,678,901 |",
        "| Hours of training | 2 |",
        "| Precision | bf16 |",
        "| Held-out loss on hidden tokens (nats) | 2.98 |",
        "| Loss on hidden tokens of texts/sample.txt (nats) | 3.2500 |",
        "| `It was <mask>.` | `good`, `bad` | `bad`, `sad`: among them |",
        "| `In <mask>.` | `a`, `b` | `c`: none of them |",
        "| rte | fine-tuned, learning rate 2e-05, batch 32, epochs 3 | validation | accuracy | 0.6137 | 5 | 0.0214 |",
        "| ours | frozen | test | f1 | 0.7071 | 1 | not measured |",
        "| ours | frozen | validation | f1 | 0.75 | 1 | not measured |",
        "| 1 | 32 | 25 | 24 |",
        "| Learning rate | 0.0002 |",
        "| Mask ratio | 0.15 |",
        "| Schedule | wsd |",
        "| Decay (steps) | not stated |",
        "| Processor seconds a step, measured apart | 1.25 |",
        "- It knows documentation alone.",
    ):
        assert row in card
    assert "date 2026-11-30, hardware 2 CPU cores" in card
    assert "the least number of squared singular values that hold a share 0.9 of their sum, not centred." in card
    assert "held-out docstrings; 4,096 tokens a layer" in card
    assert "docstrings: 45,521 documents." in card
    figure = folders["full"] / "figures" / "rank_by_layer.png"
    assert figure.read_bytes() == (measured / "rank" / "rank_by_layer.png").read_bytes()
    parameters = sum(parameter.numel() for parameter in tiny_model().parameters())
    assert f"| Parameters in this repository | {parameters:,} |" in card


def test_results_are_read_back_from_both_forms_of_metadata(folders):
    data = ModelCard.load(folders["full"] / "README.md").data
    assert (data.license, data.language) == ("mit", "en")
    read = [
        (result.dataset_type, result.dataset_split, result.metric_type, result.metric_name, result.metric_value)
        for result in data.eval_results
    ]
    assert read == [  # of what was scored on both, test alone
        ("nyu-mll/glue", "validation", "accuracy", "Accuracy (fine-tuned)", 0.6137),
        ("local", "test", "f1", "F1 (linear probe of the frozen encoder)", 0.7071),
    ]
    (path,) = (folders["full"] / ".eval_results").iterdir()
    (entry,) = parse_eval_result_entries(yaml.safe_load(path.read_text()))
    assert (entry.dataset_id, entry.task_id, entry.value, entry.date) == ("nyu-mll/glue", "rte", 0.6137, "2026-11-30")
    assert "median of 5 seeds" in entry.notes


def test_without_files_every_measurement_reads_not_measured(folders):
    card = (folders["empty"] / "README.md").read_text()
    for label in ("Steps", "Tokens", "Hours of training", "Held-out loss on hidden tokens (nats)"):
        assert f"| {label} | not measured |" in card
    assert "Fine-tuning: not measured." in card
    assert "Effective rank by layer: not measured." in card
    assert "Licence of the training data: not stated." in card
    assert "Quality on downstream tasks is not measured." in card
    assert not (folders["empty"] / ".eval_results").exists()
    assert ModelCard.load(folders["empty"] / "README.md").data.eval_results is None
    assert not re.search(r"\d", section(card, "Results").replace("| Measure | Value |", ""))


def test_cards_recommend_the_stock_form_where_there_is_one(folders):
    stock, head, full, plain = (
        (folders[name] / "README.md").read_text() for name in ("stock", "head", "full", "plain")
    )
    assert "recommended form" in stock
    assert "trust_remote_code" not in stock
    assert "do not fill masks with it" in stock
    assert "maelm export" in head
    assert "no other form" in full
    assert "saw every [MASK]" in plain
    assert "- mae-lm\n" in full
    assert "- mae-lm\n" not in plain
    assert 'revision="v2"' in head


OTHER_ENCODERS = {
    "distilbert": DistilBertConfig(
        vocab_size=300, dim=32, n_layers=2, n_heads=4, hidden_dim=48, max_position_embeddings=64
    ),
    "roberta": RobertaConfig(
        vocab_size=300,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=66,  # the first two are no token's
    ),
}


@pytest.mark.parametrize("model_type", OTHER_ENCODERS)
def test_cards_of_other_encoders_say_what_they_are(model_type, tmp_path):
    config = OTHER_ENCODERS[model_type]
    model = MaeLmForMaskedLM(MaeLmConfig(backbone_config=config, mask_token_id=4, decoder_num_hidden_layers=1))
    build_folder(model, "org/continued", tmp_path / "continued")
    ours = (tmp_path / "continued" / "README.md").read_text()
    assert "trained with MAE-LM: in that training [MASK] never entered it" in ours
    assert "pretrained with MAE-LM" not in ours  # what the backbone was before, the config does not say
    (to,) = re.findall(r"`maelm export MODEL OUT --to (\w+)`", ours)
    export_native(tmp_path / "continued", tmp_path / "encoder", to=to)
    build_folder(tmp_path / "encoder", "org/encoder", tmp_path / "published")
    stock = (tmp_path / "published" / "README.md").read_text()
    assert f"in the form of a stock `{model_type}` model" in stock
    assert "do not fill masks" not in stock  # its config does not say how it met [MASK]
    for card in (ours, stock):
        check_pattern(card)
        assert "(2 layers, 32 dimensions)" in card
        for row in ("Encoder | 2 layers, 32 wide", "Attention heads | 4", "Vocabulary | 300"):
            assert f"| {row} |" in card
        assert "| Longest sequence (tokens) | 64 |" in card


def test_every_snippet_of_every_card_runs_without_the_package(folders, run_python):
    """A folder org/NAME in the working directory stands for the repository."""
    scripts = {}
    for name, folder in folders.items():
        shutil.copytree(folder, run_python.folder / "elsewhere" / "org" / name)
        scripts[name] = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.S)
    code = """
import json, sys
done = {}
for name, snippets in json.loads(sys.argv[1]).items():
    for snippet in snippets:
        scope = {}
        exec(snippet, scope)
        done.setdefault(name, []).append(type(scope["model"]).__name__)
print()
print(json.dumps(done))
"""
    assert run_python(code, json.dumps(scripts)) == {
        "full": ["MaeLmModel", "MaeLmForSequenceClassification", "MaeLmForMaskedLM"],
        "empty": ["MaeLmModel", "MaeLmForSequenceClassification", "MaeLmForMaskedLM"],
        "stock": ["BertModel", "BertForSequenceClassification", "BertModel"],
        "head": ["MaeLmModel", "MaeLmForSequenceClassification", "MaeLmForSequenceClassification"],
        "plain": ["MaeLmModel", "MaeLmForSequenceClassification", "MaeLmForMaskedLM"],
    }


def test_files_that_are_something_else_are_refused_by_name(measured, tmp_path):
    model, out = tiny_model(), tmp_path / "out"
    with pytest.raises(FileNotFoundError, match=r"results\.json"):
        build_folder(model, "org/tiny", out, results=tmp_path)
    with pytest.raises(ValueError, match="no list 'evaluation'"):
        build_folder(model, "org/tiny", out, results=measured / "summary.json")
    with pytest.raises(ValueError, match="a report of kind None"):
        build_folder(model, "org/tiny", out, rank_report=measured / "summary.json")
    (tmp_path / "summary.json").write_text("{")
    with pytest.raises(ValueError, match="is no JSON"):
        build_folder(model, "org/tiny", out, training_summary=tmp_path)
    assert not out.exists()
