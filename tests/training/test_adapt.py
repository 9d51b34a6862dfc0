# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Continued pretraining of an existing encoder, from the command line to the comparison."""

import json
from pathlib import Path

import pytest
import torch
from pretraining_helpers import write_corpus
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoModel, AutoTokenizer, BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

from maelm_hf import DataCollatorForMaeLm, MaeLmForMaskedLM
from training import adapt, pretrain
from training.evaluation import HeldOut
from training.memory import count_parameters
from training.monitoring import read_log
from training.recipe import OptimizerSection, RecipeError, load_recipe, recipe_from_dict
from training.start import build_model
from training.text import prepare_text

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def save_encoder(folder: Path, text: Path, mask_token: bool = True) -> Path:
    """A tiny random BERT with its head, and a tokenizer of the words of the text."""
    words = sorted({word.lower() for word in text.read_text().split()})
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *words])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    roles = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    roles |= {"mask_token": "[MASK]"} if mask_token else {}
    PreTrainedTokenizerFast(tokenizer_object=core, model_max_length=40, **roles).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=40,
        initializer_range=0.2,
        pad_token_id=0,
    )
    BertForMaskedLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def files(tmp_path):
    text = write_corpus(tmp_path / "corpus.txt")
    return text, save_encoder(tmp_path / "bert", text)


def command(tmp_path: Path, text: Path, encoder: Path, *options: str) -> list[str]:
    return [
        *("--from-encoder", str(encoder), "--data", str(text), "--cache_dir", str(tmp_path / "cache")),
        *("--output_dir", str(tmp_path / "run"), "--max_steps", "6", "--warmup_steps", "2", "--max_length", "32"),
        *("--batch_size", "8", "--micro_batch_size", "4", "--evaluate_every", "3", "--checkpoint_every", "3"),
        *("--probe_every", "3", "--precision", "fp32", "--attention", "eager", "--held_out_share", "0.15"),
        *("--learning_rate", "0.01", *options),
    ]


def labelled_files(tmp_path: Path) -> list[str]:
    options = []
    for split, count in (("train", 24), ("validation", 12)):
        lines = [f"{'encoder masks' if n % 2 else 'decoder tokens'} the real {n % 7},{n % 2}" for n in range(count)]
        (tmp_path / f"{split}.csv").write_text("text,stars\n" + "\n".join(lines) + "\n")
        options += [f"--{split}", str(tmp_path / f"{split}.csv")]
    return ["--task", "text", "--label", "stars", "--epochs", "1", *options]


def loss_of_the_stock_model(encoder: Path, run: Path) -> float:
    """On the batches of the run's own evaluation."""
    stock, losses = BertForMaskedLM.from_pretrained(encoder).eval(), []
    recipe = load_recipe(run / "recipe.yaml")
    text = prepare_text(recipe, lambda _line: None)
    collator = DataCollatorForMaeLm(text.tokenizer, recipe.data.mask_ratio, seed=recipe.seed)
    held_out = HeldOut(recipe, text, collator, rank=0, world_size=1, micro_batch_tokens=4 * 32)
    for batch in held_out.steps()[0].micro_batches:
        logits = stock(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        hidden = batch["labels"] != -100
        losses.append(torch.nn.functional.cross_entropy(logits[hidden], batch["labels"][hidden], reduction="none"))
    return torch.cat(losses).mean().item()


@pytest.mark.parametrize("twin", ["none", "mlm"])
def test_from_the_command_line_to_the_comparison(twin, files, tmp_path):
    options = labelled_files(tmp_path) if twin == "none" else ["--probe_every", "6"]
    assert pretrain.main(command(tmp_path, *files, "--twin", twin, *options)) == 0
    run = tmp_path / "run"

    # What is left is the stock encoder, trained, with its tokenizer.
    final, encoder = MaeLmForMaskedLM.from_pretrained(run / "final"), AutoModel.from_pretrained(run / "encoder")
    assert type(encoder).__name__ == "BertModel"
    assert final.config.decoder_num_hidden_layers == (0 if twin == "mlm" else 2)
    tokenizer = AutoTokenizer.from_pretrained(run / "encoder")
    batch = tokenizer("the real tokens", return_tensors="pt")
    expected = final.encoder(**batch).last_hidden_state
    torch.testing.assert_close(encoder(**batch).last_hidden_state, expected, atol=1e-6, rtol=1e-6)
    before = AutoModel.from_pretrained(files[1])
    assert not torch.equal(before.embeddings.word_embeddings.weight, encoder.embeddings.word_embeddings.weight)

    own, saved = (json.loads((folder / "tokenizer.json").read_text()) for folder in (files[1], run / "encoder"))
    assert saved == own  # nothing of the calls in between: no truncation, no padding

    # It was looked at before, during and after.
    assert [row["step"] for row in read_log(run / "evaluations.jsonl")] == [0, 3, 6]
    assert [row["step"] for row in read_log(run / "ranks.jsonl")] == ([0, 6] if twin == "mlm" else [0, 3, 6])
    found = json.loads((run / "adaptation.json").read_text())
    evaluations = read_log(run / "evaluations.jsonl")
    assert found["held_out"]["before"]["loss"] == evaluations[0]["loss"]
    assert found["held_out"]["after"]["loss"] == evaluations[-1]["loss"]
    assert found["layers"] == ["embeddings", "layer 1", "layer 2"]
    for when, row in (("before", 0), ("after", -1)):
        ranks = read_log(run / "ranks.jsonl")[row]
        assert found["ranks"][when] == [value for key, value in ranks.items() if key.endswith("/unmasked")]
    assert (run / "adaptation.png").stat().st_size > 10_000
    table = (run / "adaptation.md").read_text()
    assert "effective rank, layer 2" in table
    assert ("a decoder that is still new" in table) == (twin == "none")
    assert found["head"] == "the encoder's"
    if twin == "mlm":
        assert found["scores"] == {}
        assert evaluations[0]["loss"] == pytest.approx(loss_of_the_stock_model(files[1], run), abs=1e-5)
        return
    assert "text, frozen encoder, accuracy (validation)" in table
    assert set(found["scores"]) == {"frozen", "finetune"}
    for scores in found["scores"].values():
        assert {len(values) for values in scores.values()} == {1}
    assert found["scores"]["frozen"]["before"] == [1.0]  # two words tell the classes apart

    # Finished, the same command writes and scores the same once more.
    assert pretrain.main(command(tmp_path, *files, "--twin", twin, *options)) == 0


def test_an_interrupted_run_goes_on_as_if_it_had_not_been(files, tmp_path):
    without_probe = ["--probe_every", "0"]
    assert pretrain.main(command(tmp_path, *files, *without_probe)) == 0
    run = tmp_path / "run"
    expected = MaeLmForMaskedLM.from_pretrained(run / "final").state_dict()
    log, evaluations = read_log(run / "log.jsonl"), (run / "evaluations.jsonl").read_text()

    for step in (0, 3):  # from its first checkpoint, and from the one in the middle
        options = ["--output_dir", str(tmp_path / f"again-{step}"), "--keep_checkpoints", "9", *without_probe]
        assert pretrain.main(command(tmp_path, *files, *options)) == 0
        again = tmp_path / f"again-{step}"
        for checkpoint in (again / "checkpoints").iterdir():
            if int(checkpoint.name.removeprefix("step-")) > step:
                for file in checkpoint.iterdir():
                    file.unlink()
                checkpoint.rmdir()
        assert pretrain.main(command(tmp_path, *files, *options)) == 0
        weights = MaeLmForMaskedLM.from_pretrained(again / "final").state_dict()
        assert all(torch.equal(weights[name], value) for name, value in expected.items())
        assert [row["loss"] for row in read_log(again / "log.jsonl")] == [row["loss"] for row in log]
        assert (again / "evaluations.jsonl").read_text() == evaluations


def test_the_command_line_without_a_recipe():
    arguments = adapt.recipe_arguments(["--from-encoder", "some/bert", "--data=mine.txt", "--twin", "mlm"])
    recipe = load_recipe(arguments[0], arguments[1:])
    assert (recipe.from_encoder, recipe.corpus.source, recipe.tokenizer.path) == ("some/bert", "mine.txt", "some/bert")
    assert recipe.output_dir == "runs/adapt/some-bert-mlm"
    assert recipe.model["decoder_num_hidden_layers"] == 0
    named = ["training/recipes/adapt.yaml", "--from-encoder", "some/bert"]
    assert adapt.recipe_arguments(named) == [named[0], "--from_encoder", "some/bert"]
    assert adapt.recipe_arguments(["training/recipes/mini.yaml"]) == ["training/recipes/mini.yaml"]


def test_what_cannot_be_continued_is_refused_in_one_line(files, tmp_path, capsys):
    text, encoder = files

    def error_of(*options: str) -> str:
        assert pretrain.main(command(tmp_path, text, encoder, *options)) == 1
        errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
        assert len(errors) == 1
        return errors[0]

    assert "data.max_length 64 is more than" in error_of("--max_length", "64")
    assert "hidden_size=32 contradicts the backbone's 16" in error_of("--model.hidden_size", "32")
    assert "neither a tokenizer's folder nor its Hub name" in error_of("--from-encoder", str(tmp_path / "nothing"))
    assert "train.csv" in error_of("--task", "text", "--train", "train.csv", "--validation", "validation.csv")
    other = AutoTokenizer.from_pretrained(encoder)
    other.add_tokens(["more", "words"])
    other.save_pretrained(tmp_path / "other")
    assert "not this encoder's" in error_of("--tokenizer.path", str(tmp_path / "other"))
    with pytest.raises(RecipeError, match=r"labelled\.task scores an encoder before and after: give from_encoder"):
        recipe_from_dict({"output_dir": "x", "max_steps": 1, "data": {"batch_size": 1}, "labelled": {"task": "sst2"}})


def test_a_tokenizer_without_mask_token_gets_one_when_asked(tmp_path, capsys):
    text = write_corpus(tmp_path / "corpus.txt")
    encoder = save_encoder(tmp_path / "bert", text, mask_token=False)
    assert pretrain.main(command(tmp_path, text, encoder)) == 1
    assert "it has no mask_token; --tokenizer.add_mask_token true adds [MASK]" in capsys.readouterr().err
    arguments = adapt.recipe_arguments(command(tmp_path, text, encoder, "--tokenizer.add_mask_token", "true"))
    recipe = load_recipe(arguments[0], arguments[1:])
    tokenizer = prepare_text(recipe, lambda _line: None).tokenizer
    model = build_model(recipe, tokenizer, None)
    assert model.config.mask_token_id == tokenizer.mask_token_id == 4


def test_it_is_estimated_before_it_is_trained(files, tmp_path, capsys):
    assert pretrain.main([*command(tmp_path, *files), "--estimate", "--device", "h100"]) == 0
    assert "nothing was trained" in capsys.readouterr().out
    model = MaeLmForMaskedLM.from_encoder(files[1])
    counted = count_parameters(model, OptimizerSection())
    assert counted.total == model.num_parameters()
    assert counted.embedding == (model.config.vocab_size + 40) * 16
