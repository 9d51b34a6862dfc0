# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""What else expects a model: PEFT, torch.compile, half precision, device_map, evaluate and datasets."""

import datasets
import evaluate
import numpy as np
import pytest
import torch
from hub_helpers import TEXT, padded_batch, tiny_model
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)

from maelm_hf import MaeLmForMaskedLM, MaeLmForSequenceClassification, MaeLmModel

NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@pytest.fixture
def folder(tmp_path):
    tiny_model(**NO_DROPOUT).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def texts(tokenizer):
    """A `datasets` data set, tokenized by map: is the text about a mask?"""
    data = datasets.Dataset.from_dict(
        {"text": TEXT * 8, "label": [int("token" in text) for text in TEXT] * 8}, features=None
    )
    return data.map(lambda rows: tokenizer(rows["text"], truncation=True), batched=True, remove_columns=["text"])


def arguments(tmp_path, **more) -> TrainingArguments:
    defaults = {"max_steps": 30, "per_device_train_batch_size": 8, "learning_rate": 5e-3, "logging_steps": 1, "seed": 0}
    fixed = {"report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True}
    return TrainingArguments(output_dir=str(tmp_path / "run"), **defaults | fixed | more)


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


class Accuracy(evaluate.Metric):
    """A metric of one's own: those of the Hub need a network."""

    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")})
        return evaluate.MetricInfo(description="share of right answers", citation="", features=features)

    def _compute(self, predictions, references):
        return {"accuracy": float(np.mean(np.array(predictions) == np.array(references)))}


def test_trainer_with_datasets_map_and_an_evaluate_metric(folder, texts, tokenizer, tmp_path):
    metric = Accuracy()

    def compute_metrics(outputs):
        return metric.compute(predictions=outputs.predictions.argmax(-1), references=outputs.label_ids)

    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2, dtype=torch.float32)
    trainer = Trainer(
        model,
        arguments(tmp_path),
        train_dataset=texts,
        eval_dataset=texts,
        processing_class=tokenizer,
        compute_metrics=compute_metrics,
    )
    trainer.train()
    measured = trainer.evaluate()["eval_accuracy"]
    batch = DataCollatorWithPadding(tokenizer)(list(texts))
    labels = batch.pop("labels")
    with torch.no_grad():
        right = model.eval()(**batch).logits.argmax(-1) == labels
    assert measured == right.float().mean().item()
    assert measured == 1.0
    assert losses(trainer)[-1] < 0.2 < losses(trainer)[0]


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT's own call
def test_peft_lora_trains_saves_loads_and_merges(folder, texts, tokenizer, tmp_path):
    peft = pytest.importorskip("peft", reason="needs pip install peft")
    torch.manual_seed(0)
    base = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2, dtype=torch.float32)
    before = {name: parameter.clone() for name, parameter in base.named_parameters()}
    config = peft.LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value"])
    model = peft.get_peft_model(base, config)
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trainable
    assert all("lora_" in name or "sequence_classifier" in name for name in trainable)

    trainer = Trainer(model, arguments(tmp_path), train_dataset=texts, processing_class=tokenizer)
    trainer.train()
    assert losses(trainer)[-1] < 0.5 * losses(trainer)[0]
    for name, parameter in model.named_parameters():  # the encoder itself stays
        plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
        if "lora_" not in name and "modules_to_save" not in name:
            assert torch.equal(parameter, before[plain.replace(".original_module", "")])

    model.save_pretrained(tmp_path / "adapter")
    fresh = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2, dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(fresh, tmp_path / "adapter").eval()
    batch = padded_batch()
    with torch.no_grad():
        expected = model.eval()(**batch).logits
        assert torch.equal(loaded(**batch).logits, expected)
        merged = loaded.merge_and_unload()
        assert type(merged) is MaeLmForSequenceClassification
        torch.testing.assert_close(merged(**batch).logits, expected, rtol=0, atol=1e-5)


def test_compiled_in_one_graph_it_computes_the_same(folder):
    model = AutoModel.from_pretrained(folder).eval()
    batch = padded_batch()
    with torch.no_grad():
        expected = model(**batch).last_hidden_state
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(**batch).last_hidden_state
    torch.testing.assert_close(compiled, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 0.02), (torch.bfloat16, 0.15)])
def test_half_precision_stays_near_single(dtype, tolerance):
    """States are of size 1 after a LayerNorm; half holds 11 bits, bfloat16 8."""
    model = tiny_model(MaeLmForMaskedLM)
    batch = padded_batch()
    batch["input_ids"][:, ::7] = model.config.mask_token_id
    with torch.no_grad():
        expected = model.encoder(**batch).last_hidden_state
        model = model.half() if dtype is torch.float16 else model.to(dtype)
        states, logits = model.encoder(**batch).last_hidden_state, model(**batch).logits
    assert states.dtype == logits.dtype == dtype
    assert logits.isfinite().all()
    assert (states.float() - expected).abs().max() < tolerance


def test_device_map_auto_places_the_model(folder):
    batch = padded_batch()
    placed = AutoModel.from_pretrained(folder, device_map="auto").eval()
    assert type(placed) is MaeLmModel
    assert {parameter.device.type for parameter in placed.parameters()} == {
        "cuda" if torch.cuda.is_available() else "cpu"
    }
    with torch.no_grad():
        states = placed(**{name: value.to(placed.device) for name, value in batch.items()}).last_hidden_state.cpu()
        expected = AutoModel.from_pretrained(folder).eval()(**batch).last_hidden_state
    torch.testing.assert_close(states, expected, rtol=0, atol=1e-5)
