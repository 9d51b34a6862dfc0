# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""transformers' Trainer pretrains, evaluates and fine-tunes the model, and how a step is cut changes nothing."""

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from toy_tokenizers import ROLES, SPECIALS
from transformers import (
    BertConfig,
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

from maelm_hf import (
    DataCollatorForMaeLm,
    MaeLmConfig,
    MaeLmForMaskedLM,
    MaeLmForMultipleChoice,
    MaeLmForQuestionAnswering,
    MaeLmForSequenceClassification,
    MaeLmForTokenClassification,
)


@pytest.fixture(scope="module")
def tokenizer():
    vocabulary = {token: i for i, token in enumerate([*SPECIALS, *map(chr, range(97, 123))])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, **ROLES)


def texts(count, seed=0):
    """Rows of different lengths, so that masked counts differ."""
    generator = np.random.default_rng(seed)
    return [
        {"input_ids": [0, *generator.integers(5, 31, length).tolist(), 2]}
        for length in generator.integers(3, 25, count)
    ]


def build(model_class=MaeLmForMaskedLM, **settings):
    torch.manual_seed(0)
    return model_class(
        MaeLmConfig(
            **{
                "vocab_size": 31,
                "hidden_size": 16,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "intermediate_size": 32,
                "max_position_embeddings": 32,
                "relative_position_buckets": 8,
                "relative_position_max_distance": 16,
                "decoder_num_hidden_layers": 1,
                "mask_token_id": 4,
                "hidden_dropout_prob": 0.0,
                "attention_probs_dropout_prob": 0.0,
            }
            | settings
        )
    )


def arguments(tmp_path, **settings):
    return TrainingArguments(
        **{
            "output_dir": str(tmp_path),
            "report_to": "none",
            "save_strategy": "no",
            "use_cpu": True,
            "disable_tqdm": True,
        }
        | settings
    )


@pytest.mark.parametrize("ours", [True, False], ids=["our collator", "the stock 80/10/10 collator"])
def test_trainer_pretrains_and_evaluates_with_metrics(ours, tokenizer, tmp_path):
    if ours:
        collator = DataCollatorForMaeLm(tokenizer, mask_ratio=0.3)
    else:
        collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.3, seed=0)

    def accuracy(prediction):
        logits, labels = prediction
        assert logits.shape[:2] == labels.shape
        labelled = labels != -100
        return {"accuracy": float((logits.argmax(-1)[labelled] == labels[labelled]).mean())}

    trainer = Trainer(
        model=build(),
        args=arguments(tmp_path, max_steps=3, per_device_train_batch_size=4, logging_steps=1),
        train_dataset=texts(16),
        eval_dataset=texts(8, seed=1),
        data_collator=collator,
        compute_metrics=accuracy,
    )
    before = trainer.evaluate()
    assert 0 <= before["eval_accuracy"] <= 1
    assert before["eval_loss"] == pytest.approx(np.log(31), rel=0.2)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 3
    assert np.isfinite(losses).all()


def test_how_a_step_is_cut_changes_nothing(tokenizer, tmp_path):
    """One batch of 8, two of 4 and eight of 1 with accumulation: the same weights to 1e-6, uneven masked counts."""
    rows = texts(16)
    counts = {int((DataCollatorForMaeLm(tokenizer, mask_ratio=0.3)([row])["labels"] != -100).sum()) for row in rows}
    assert len(counts) > 2
    results = []
    for size, accumulation in ((8, 1), (4, 2), (1, 8)):
        trainer = Trainer(
            model=build(),
            args=arguments(
                tmp_path,
                max_steps=2,
                per_device_train_batch_size=size,
                gradient_accumulation_steps=accumulation,
                learning_rate=1e-2,
                lr_scheduler_type="constant",
                optim="sgd",
                max_grad_norm=0.0,
                logging_steps=1,
                train_sampling_strategy="sequential",
            ),
            train_dataset=rows,
            data_collator=DataCollatorForMaeLm(tokenizer, mask_ratio=0.3),
        )
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        results.append((losses, {name: value.clone() for name, value in trainer.model.state_dict().items()}))
    (losses, weights), *others = results
    for other_losses, other_weights in others:
        assert other_losses == pytest.approx(losses, abs=1e-5)  # Trainer rounds what it logs
        for name, value in weights.items():
            assert torch.allclose(value, other_weights[name], atol=1e-6), name


def test_trainer_fine_tunes_a_pretrained_encoder(tokenizer, tmp_path):
    """Whether the first letter comes before n: learnt from a checkpoint of the pretraining model, and saved again."""
    build().save_pretrained(tmp_path / "pretrained")
    rows = [row | {"labels": int(row["input_ids"][1] < 18)} for row in texts(256)]
    torch.manual_seed(0)
    model = MaeLmForSequenceClassification.from_pretrained(tmp_path / "pretrained", num_labels=2)
    trainer = Trainer(
        model=model,
        args=arguments(tmp_path, num_train_epochs=6, per_device_train_batch_size=16, learning_rate=5e-3),
        train_dataset=rows,
        eval_dataset=rows[:64],
        processing_class=tokenizer,
        compute_metrics=lambda prediction: {"accuracy": float((prediction[0].argmax(-1) == prediction[1]).mean())},
    )
    trainer.train()
    assert trainer.evaluate()["eval_accuracy"] > 0.95
    trainer.save_model(str(tmp_path / "fine-tuned"))
    again = MaeLmForSequenceClassification.from_pretrained(tmp_path / "fine-tuned")
    ids = torch.tensor([rows[0]["input_ids"]])
    with torch.no_grad():
        assert torch.equal(again(ids).logits, trainer.model.eval()(ids).logits)


CLASSES = torch.tensor([0, 1])
HEADS = {
    MaeLmForSequenceClassification: {"labels": CLASSES},
    MaeLmForTokenClassification: {"labels": CLASSES[:, None].expand(2, 8)},
    MaeLmForQuestionAnswering: {"start_positions": CLASSES, "end_positions": CLASSES + 1},
    MaeLmForMultipleChoice: {"labels": CLASSES},
}


@pytest.mark.parametrize("head", HEADS, ids=lambda head: head.__name__)
def test_trainer_brings_segments_to_a_backbone(head, tmp_path):
    """Trainer drops the columns that forward does not name."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    bert = BertConfig(vocab_size=31, max_position_embeddings=32, initializer_range=0.5, **sizes)
    shape = (2, 3, 8) if head is MaeLmForMultipleChoice else (2, 8)
    inputs = {
        "input_ids": torch.randint(5, 31, shape),
        "token_type_ids": (torch.arange(8) >= 5).long().expand(shape),
    } | HEADS[head]
    model = head(MaeLmConfig(backbone_config=bert, mask_token_id=4))
    trainer = Trainer(
        model=model,
        args=arguments(tmp_path),
        eval_dataset=[{name: value[row] for name, value in inputs.items()} for row in range(2)],
    )
    loss = trainer.evaluate()["eval_loss"]
    with torch.no_grad():
        assert loss == pytest.approx(model(**inputs).loss.item(), rel=1e-5)
        assert loss != pytest.approx(model(**inputs | {"token_type_ids": None}).loss.item(), rel=1e-3)
