# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""One cell of a fine-tuning grid: one model, one task, one setting, one seed. Trainer underneath.

A cell is a function of its `Cell` and the data: the seed is set before the new head is drawn, batches follow (seed,
epoch), the attention kernel is part of the cell, so the same cell run twice gives the same number.
"""

import contextlib
import hashlib
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    EarlyStoppingCallback,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    set_seed,
)

from training import glue, squad, squad_metrics
from training.encoding import IGNORED, Encoded, LengthGroupedBatches, PadToLongest, encode_texts, encode_words
from training.metrics import Metrics
from training.tabular import TaskData

HEADS = {
    "classification": AutoModelForSequenceClassification,
    "regression": AutoModelForSequenceClassification,
    "tokens": AutoModelForTokenClassification,
    "squad": AutoModelForQuestionAnswering,
}
NOT_SCORES = ("loss", "runtime", "samples", "steps", "model_preparation_time")  # what Trainer adds to the metrics


@dataclass(frozen=True)
class Cell:
    """Everything a fine-tuned number depends on, beside the data (`data_digest`) and the weights (`model_digest`)."""

    model: str
    model_digest: str
    task: str
    data_digest: str
    mode: str  # "finetune" or "frozen"
    seed: int
    max_length: int
    learning_rate: float = 2e-5
    batch_size: int = 32
    epochs: float = 3.0
    warmup_ratio: float = 1 / 16
    weight_decay: float = 0.01
    early_stop: int = 0
    attention: str = "sdpa"
    precision: str = "fp32"

    @property
    def setting(self) -> dict:
        """Everything but the seed and what the whole run shares: cells of one setting are summed up together."""
        names = {"mode", "max_length", "attention"}
        if self.mode == "finetune":
            names |= {
                "learning_rate",
                "batch_size",
                "epochs",
                "warmup_ratio",
                "weight_decay",
                "early_stop",
                "precision",
            }
        return {name: value for name, value in asdict(self).items() if name in names}

    @property
    def id(self) -> str:
        """The cell's file name: what differs in words, and a digest of all but the folder the model lies in."""
        digest = _digest({name: value for name, value in asdict(self).items() if name != "model"})
        if self.mode == "frozen":
            return f"frozen_seed{self.seed}_{digest}"
        return f"lr{self.learning_rate:g}_bs{self.batch_size}_ep{self.epochs:g}_seed{self.seed}_{digest}"

    @property
    def features_id(self) -> str:
        """What the features of a frozen encoder depend on: not the seed."""
        return _digest([self.model_digest, self.data_digest, self.max_length, self.attention])


def _digest(value: dict | list) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:10]


def load_tokenizer(model: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint; ValueError where there is none, or its ids do not fit the embedding matrix."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{model}: no tokenizer can be loaded from it ({str(error).splitlines()[0]})") from error
    vocabulary = getattr(AutoConfig.from_pretrained(model), "vocab_size", None)
    if vocabulary is not None and len(tokenizer) > vocabulary:
        raise ValueError(
            f"{model}: the tokenizer has {len(tokenizer)} tokens, the model {vocabulary}: they do not belong together"
        )
    return tokenizer


def longest_input(model: str, tokenizer: PreTrainedTokenizerBase) -> int:
    """The longest input (tokens) that both the positions of the model and its tokenizer allow."""
    config = AutoConfig.from_pretrained(model)
    positions = getattr(config, "max_position_embeddings", None) or 512
    if config.model_type in ("roberta", "xlm-roberta", "camembert", "mpnet", "longformer"):
        positions -= (config.pad_token_id or 0) + 1  # their position ids start behind the padding id
    return int(min(positions, tokenizer.model_max_length))


@contextlib.contextmanager
def no_bars(hide: bool = True):
    """No bars for the reading and writing of checkpoints, where `hide`."""
    shown = transformers.logging.is_progress_bar_enabled()
    if hide:
        transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers.logging.enable_progress_bar()


@contextlib.contextmanager
def quiet_loading():
    """No wall of reports and bars while a checkpoint loads; what matters of them is checked by `load_model`."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        with no_bars():
            yield
    finally:
        transformers.logging.set_verbosity(level)


def load_model(model: str, data: TaskData, attention: str | None = None) -> PreTrainedModel:
    """The encoder in fp32 with a head for this task, classes named in its config. The head is new, but where the
    checkpoint has one of the same shape, which then learns on.

    Only weights of the head may be new: where the checkpoint lacks weights of the encoder, ValueError names them,
    since a half-random encoder trains without complaint and scores badly.
    """
    options: dict = {"dtype": torch.float32}
    if attention:
        options["attn_implementation"] = attention
    if data.kind != "squad":
        names = data.label_names or ["score"]
        options |= {"num_labels": len(names), "id2label": dict(enumerate(names))}
        options["label2id"] = {name: number for number, name in enumerate(names)}
    if data.kind in ("classification", "regression"):
        options["problem_type"] = "regression" if data.kind == "regression" else "single_label_classification"
    with quiet_loading():
        loaded, report = HEADS[data.kind].from_pretrained(
            model, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    refuse_missing(model, report, f"{loaded.base_model_prefix}.")
    return loaded


def refuse_missing(model: str, report: dict, prefix: str = "") -> None:
    """ValueError where a report on loading lacks weights below `prefix`, or reshaped some; poolers may be new."""
    mismatched = [key[0] if isinstance(key, tuple) else key for key in report["mismatched_keys"]]
    for kind, names in (("lacks", report["missing_keys"]), ("has other shapes for", mismatched)):
        absent = sorted(name for name in names if name.startswith(prefix) and "pooler." not in name)
        if absent:
            first = f"{len(absent)} weights of the encoder, the first is {absent[0]!r}"
            raise ValueError(f"{model}: the checkpoint {kind} {first}")


def encode(data: TaskData, split: str, tokenizer: PreTrainedTokenizerBase, max_length: int) -> Encoded:
    if data.kind == "tokens":
        return encode_words(data.splits[split], tokenizer, max_length)
    if data.kind == "squad":
        return squad.encode_questions(data.splits[split], tokenizer, max_length)
    encoded = encode_texts(data.splits[split], tokenizer, max_length)
    if data.kind == "regression":
        for example in encoded.examples:
            if "labels" in example:
                example["labels"] = float(example["labels"])
    return encoded


class GroupedTrainer(Trainer):
    """Trainer whose training batches hold examples of like length."""

    def _get_train_sampler(self, train_dataset=None):
        dataset = train_dataset if train_dataset is not None else self.train_dataset
        step = self.args.train_batch_size * self.args.world_size * self.args.gradient_accumulation_steps
        return LengthGroupedBatches(dataset.lengths, step, seed=self.args.seed)


class Scorer:
    """Turns what the model puts out on one split into the task's metrics."""

    def __init__(self, data: TaskData, split: str, encoded: Encoded, metrics: Metrics | None) -> None:
        self.data, self.split, self.encoded, self.metrics = data, split, encoded, metrics

    def __call__(self, output: transformers.EvalPrediction) -> dict[str, float]:
        predictions, labels = output.predictions, output.label_ids
        if self.data.kind == "squad":
            examples = self.data.splits[self.split]
            return squad_metrics.score(examples, squad.answers(examples, self.encoded, predictions[0], predictions[1]))
        if self.data.kind == "classification":
            return self.metrics(predictions.argmax(-1), labels)
        if self.data.kind == "regression":
            return self.metrics(predictions.reshape(-1), labels.reshape(-1))
        names, kept = self.data.label_names, labels != IGNORED
        if self.metrics.names[0] == "accuracy":
            return self.metrics(predictions[kept], labels[kept])
        spans = [
            [[names[i] for i in row[keep]] for row, keep in zip(ids, kept, strict=True)]
            for ids in (predictions, labels)
        ]
        results = Metrics(("entity_f1",), "sklearn")(*spans)
        return results | Metrics(("accuracy",), "sklearn")(predictions[kept], labels[kept])


def _best_tag(logits, _labels):
    return (logits[0] if isinstance(logits, tuple) else logits).argmax(-1)


def _first_output(logits, _labels):
    return logits[0] if isinstance(logits, tuple) else logits


def training_arguments(cell: Cell, work: Path, data: TaskData, quiet: bool) -> TrainingArguments:
    """Small-data recipe (Mosbach and others, Zhang and others 2021): bias-corrected AdamW, warm-up, linear decay."""
    return TrainingArguments(
        output_dir=str(work),
        per_device_train_batch_size=cell.batch_size,
        per_device_eval_batch_size=max(cell.batch_size, 32),
        num_train_epochs=cell.epochs,
        learning_rate=cell.learning_rate,
        warmup_steps=cell.warmup_ratio,
        lr_scheduler_type="linear",
        optim="adamw_torch_fused",
        adam_beta2=0.98,
        adam_epsilon=1e-6,
        weight_decay=cell.weight_decay,
        max_grad_norm=1.0,
        seed=cell.seed,
        bf16=cell.precision == "bf16",
        use_cpu=cell.precision == "bf16" and not torch.accelerator.is_available(),  # Trainer wants it said for bf16
        eval_strategy="epoch",
        save_strategy="best",
        save_only_model=True,
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model=data.metrics[0],
        greater_is_better=True,
        label_names=["start_positions", "end_positions"] if data.kind == "squad" else ["labels"],
        logging_strategy="epoch",
        report_to="none",
        disable_tqdm=quiet,
        dataloader_pin_memory=torch.cuda.is_available(),
    )


def run_cell(cell: Cell, data: TaskData, work: Path, metrics_backend: str = "auto", quiet: bool = False) -> dict:
    """Fine-tunes one cell and scores every labelled split with its best checkpoint.

    Writes the model with its tokenizer to `work/model`, and class or answer predictions of unlabelled splits to
    `work/predictions`. Returns `{"scores": {split: {metric: value}}, "history": [...], "seconds",
    "samples_per_second", ...}`.
    """
    started = time.perf_counter()
    if torch.cuda.is_available():
        torch.use_deterministic_algorithms(True, warn_only=True)
    tokenizer = load_tokenizer(cell.model)
    set_seed(cell.seed)
    model = load_model(cell.model, data, cell.attention)
    encoded = {split: encode(data, split, tokenizer, cell.max_length) for split in data.splits}
    longest_first = {split: encoded[split].longest_first() for split in data.splits if split != "train"}
    metrics = None if data.kind == "squad" else Metrics(data.metrics, metrics_backend, _glue_name(data))
    scorer = Scorer(data, "validation", longest_first["validation"][0], metrics)
    trainer = GroupedTrainer(
        model=model,
        args=training_arguments(cell, work / "trainer", data, quiet),
        data_collator=PadToLongest(tokenizer, multiple=8 if torch.cuda.is_available() else 1),
        train_dataset=encoded["train"],
        eval_dataset=longest_first["validation"][0],
        processing_class=tokenizer,
        compute_metrics=scorer,
        preprocess_logits_for_metrics={"tokens": _best_tag, "squad": None}.get(data.kind, _first_output),
        callbacks=[EarlyStoppingCallback(cell.early_stop)] if cell.early_stop else None,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    with no_bars():  # of every checkpoint; Trainer's own bar stays
        trained = trainer.train()
        trainer.save_model(str(work / "model"))
    scores, predictions = {}, {}
    for split, (dataset, order) in longest_first.items():
        scorer.split, scorer.encoded = split, dataset
        output = trainer.predict(dataset, metric_key_prefix="score")
        if data.splits[split].labels is not None:
            named = {name.removeprefix("score_"): float(value) for name, value in output.metrics.items()}
            scores[split] = {name: value for name, value in named.items() if name.split("_per_")[0] not in NOT_SCORES}
        else:
            predictions[split] = (output.predictions, order)
    if predictions:
        _write_predictions(work / "predictions", data, predictions, longest_first)
    return {
        "scores": scores,
        "history": [entry for entry in trainer.state.log_history if "eval_loss" in entry or "loss" in entry],
        "seconds": round(time.perf_counter() - started, 2),
        "train_seconds": round(trained.metrics["train_runtime"], 2),
        "samples_per_second": trained.metrics["train_samples_per_second"],
        "metrics_by": "SQuAD's definitions" if metrics is None else metrics.reason,
        "truncated": {split: float(np.mean(e.lengths >= cell.max_length)) for split, e in encoded.items()},
        "device": str(trainer.args.device),
    }


def _glue_name(data: TaskData) -> str | None:
    return data.name if data.dataset.get("type") == glue.HUB_NAME else None


def _write_predictions(folder: Path, data: TaskData, predictions: dict, encoded: dict) -> None:
    """Predictions of unlabelled splits in the caller's order: GLUE's submission form, JSON for SQuAD."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, (output, order) in predictions.items():
        if data.kind == "squad":
            examples = data.splits[split]
            found = squad.answers(examples, encoded[split][0], output[0], output[1])
            texts = {example.id: answer.text for example, answer in zip(examples, found, strict=True)}
            (folder / f"{split}.json").write_text(json.dumps(texts, ensure_ascii=False, indent=1) + "\n", "utf-8")
            continue
        if data.kind == "tokens":
            continue
        names, file_name = data.label_names, f"{split}.tsv"
        if _glue_name(data):
            names, file_name = glue.TASKS[data.name].tsv_labels, glue.submission_name(data.name, split)
        values = output.reshape(-1) if data.kind == "regression" else output.argmax(-1)
        restored = np.empty(len(order), dtype=values.dtype)
        restored[order] = values
        written = [f"{value:.3f}" if data.kind == "regression" else names[value] for value in restored]
        lines = "".join(f"{index}\t{value}\n" for index, value in enumerate(written))
        (folder / file_name).write_text("index\tprediction\n" + lines, "utf-8")
