# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""The exported encoder is stock BERT, and computes what ours does."""

import json

import pytest
import torch
from hub_helpers import TEXT, padded_batch, tiny_model
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    BertModel,
    Trainer,
    TrainingArguments,
)

from maelm_hf import (
    MaeLmForMaskedLM,
    MaeLmForMultipleChoice,
    MaeLmForQuestionAnswering,
    MaeLmForSequenceClassification,
    MaeLmForTokenClassification,
    MaeLmModel,
)
from maelm_hf.hub import export_native

NO_BIAS = {"relative_position_buckets": 0}


def largest_difference(ours, theirs, mask) -> float:
    return (ours - theirs)[mask.bool()].abs().max().item()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("model_class", [MaeLmForMaskedLM, MaeLmModel])
def test_every_hidden_state_equals_ours_at_real_tokens(model_class, attention, tmp_path):
    model = tiny_model(model_class, **NO_BIAS)
    encoder = getattr(model, "encoder", model)
    encoder.set_attn_implementation(attention)
    stock = AutoModel.from_pretrained(export_native(model, tmp_path / "bert"), attn_implementation=attention)
    assert type(stock) is BertModel
    batch = padded_batch()
    with torch.no_grad():
        ours = encoder(**batch, output_hidden_states=True).hidden_states
        theirs = stock(**batch, output_hidden_states=True).hidden_states
    assert len(ours) == len(theirs) == 3
    for our_state, their_state in zip(ours, theirs, strict=True):
        assert largest_difference(our_state, their_state, batch["attention_mask"]) < 1e-5


def test_segment_ids_change_nothing(tmp_path):
    stock = AutoModel.from_pretrained(export_native(tiny_model(**NO_BIAS), tmp_path / "bert"))
    batch = padded_batch()
    with torch.no_grad():
        plain = stock(**batch).last_hidden_state
        segments = stock(**batch, token_type_ids=torch.ones_like(batch["input_ids"])).last_hidden_state
    assert torch.equal(plain, segments)


def test_pooler_is_tanh_of_the_first_token_at_every_load(tmp_path):
    folder = export_native(tiny_model(**NO_BIAS), tmp_path / "bert")
    batch = padded_batch()
    with torch.no_grad():
        first, second = (AutoModel.from_pretrained(folder)(**batch) for _ in range(2))
    assert torch.equal(first.pooler_output, second.pooler_output)
    torch.testing.assert_close(first.pooler_output, first.last_hidden_state[:, 0].tanh(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("model_class", "auto_class", "outputs"),
    [
        (MaeLmForSequenceClassification, AutoModelForSequenceClassification, ["logits"]),
        (MaeLmForTokenClassification, AutoModelForTokenClassification, ["logits"]),
        (MaeLmForQuestionAnswering, AutoModelForQuestionAnswering, ["start_logits", "end_logits"]),
    ],
)
def test_a_fine_tuned_head_comes_along(model_class, auto_class, outputs, tmp_path):
    labels = {"id2label": {0: "no", 1: "yes", 2: "perhaps"}} if "logits" in outputs else {}
    model = tiny_model(model_class, **NO_BIAS, **labels)
    model.save_pretrained(tmp_path / "ours")
    stock = auto_class.from_pretrained(export_native(tmp_path / "ours", tmp_path / "bert"))
    if labels:
        assert stock.config.id2label == labels["id2label"]
    batch = padded_batch()
    with torch.no_grad():
        ours, theirs = model(**batch), stock(**batch)
    for name in outputs:
        difference = (ours[name] - theirs[name]).abs()
        if difference.shape[:2] == batch["attention_mask"].shape:
            difference = difference[batch["attention_mask"].bool()]
        assert difference.max() < 1e-5


def test_plain_mlm_keeps_its_head_and_its_tie(tmp_path):
    model = tiny_model(**NO_BIAS, decoder_num_hidden_layers=0, encoder_mask_fraction=1)
    stock = AutoModelForMaskedLM.from_pretrained(export_native(model, tmp_path / "bert"))
    assert stock.cls.predictions.decoder.weight is stock.bert.embeddings.word_embeddings.weight
    assert stock.config.encoder_mask_fraction == 1
    batch = padded_batch()
    batch["input_ids"][:, 3::5] = model.config.mask_token_id
    with torch.no_grad():
        ours, theirs = model(**batch).logits, stock(**batch).logits
    assert largest_difference(ours, theirs, batch["attention_mask"]) < 2e-5


def test_config_says_how_the_encoder_met_mask_and_names_no_code(tmp_path):
    folder = export_native(tiny_model(**NO_BIAS), tmp_path / "bert")
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "bert"
    assert config["encoder_mask_fraction"] == 0
    assert config["mask_token_id"] == 4
    assert config["pad_token_id"] == 1
    assert "auto_map" not in config
    assert not list(folder.glob("*.py"))


def test_dtype_of_the_checkpoint_is_kept(tmp_path):
    tiny_model(**NO_BIAS).to(torch.bfloat16).save_pretrained(tmp_path / "ours")
    stock = AutoModel.from_pretrained(export_native(tmp_path / "ours", tmp_path / "bert"))
    assert {parameter.dtype for parameter in stock.parameters()} == {torch.bfloat16}


def test_relative_bias_is_refused_with_the_way_out(tmp_path):
    with pytest.raises(ValueError, match=r"relative_position_buckets=64.*maelm publish"):
        export_native(tiny_model(), tmp_path / "bert")
    assert not (tmp_path / "bert").exists()


def test_a_head_that_bert_has_not_is_refused_and_its_encoder_is_not(tmp_path):
    model = tiny_model(MaeLmForMultipleChoice, **NO_BIAS)
    with pytest.raises(ValueError, match="MaeLmForMultipleChoice"):
        export_native(model, tmp_path / "bert")
    assert (export_native(model.encoder, tmp_path / "bert") / "model.safetensors").is_file()


def test_wrong_arguments_are_refused_by_name(tmp_path):
    model = tiny_model(**NO_BIAS)
    with pytest.raises(ValueError, match="to='roberta'"):
        export_native(model, tmp_path / "bert", to="roberta")
    with pytest.raises(FileNotFoundError, match=r"holds no config\.json"):
        export_native(tmp_path, tmp_path / "bert")
    with pytest.raises(TypeError, match="model_or_dir is a dict"):
        export_native({}, tmp_path / "bert")
    model.save_pretrained(tmp_path / "ours")
    with pytest.raises(FileExistsError, match="holds another model"):
        export_native(tmp_path / "ours", tmp_path / "ours")


def test_weights_that_are_missing_stop_the_export(tmp_path):
    model = tiny_model(**NO_BIAS)
    weights = {name: tensor for name, tensor in model.state_dict().items() if "layers.1.output." not in name}
    model.save_pretrained(tmp_path / "ours", state_dict=weights)
    with pytest.raises(ValueError, match=r"lacks weights of MaeLmForMaskedLM: .*layers\.1\.output\.weight"):
        export_native(tmp_path / "ours", tmp_path / "bert")


def test_tokenizer_gives_the_same_ids_after_export(tokenizer, tmp_path):
    tiny_model(**NO_BIAS).save_pretrained(tmp_path / "ours")
    tokenizer.save_pretrained(tmp_path / "ours")
    folder = export_native(tmp_path / "ours", tmp_path / "bert")
    stock = AutoTokenizer.from_pretrained(folder)
    assert stock(TEXT)["input_ids"] == tokenizer(TEXT)["input_ids"]
    assert stock.mask_token_id == 4


def test_stock_trainer_fine_tunes_the_export(tokenizer, tmp_path):
    folder = export_native(tiny_model(**NO_BIAS), tmp_path / "bert", tokenizer=tokenizer)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2)
    data = [
        dict(AutoTokenizer.from_pretrained(folder)(text, truncation=True), label=index % 2)
        for index, text in enumerate(TEXT * 8)
    ]
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "run"),
        max_steps=30,
        per_device_train_batch_size=8,
        learning_rate=2e-3,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.3 < losses[0]
