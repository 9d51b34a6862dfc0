# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""The model card and the evaluation results of a repository, out of files that a program measured.

A number enters a card from a file alone: `summary.json` and `recipe.yaml` of a training run, `results.json` of a
fine-tuning run, the folder of a rank report. Where the file or the number is missing, the card reads "not measured".
"""

import json
import logging
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, EvalResultEntry, ModelCard, ModelCardData, eval_result_entries_to_yaml
from safetensors import safe_open
from transformers import AutoConfig

from ..configuration_maelm import OFFSET_BACKBONES
from .card_text import LIMITS, describe, form, method, snippets

logger = logging.getLogger(__name__)

TEMPLATE = Path(__file__).with_name("model_card.md.jinja")
CARD_FILE, RESULTS_FOLDER, RANK_FIGURE = "README.md", ".eval_results", "rank_by_layer.png"
NOT_MEASURED = "not measured"
NOT_STATED = "not stated"
# Data sets that training/finetune.py takes from elsewhere have no page on the Hub, which .eval_results links to.
NOT_ON_THE_HUB = ("local", "pypi/", "npm/", "debian/", "cran/", "conda/", "maven/")
# Our metrics that the Hub knows by another name: its name, what is shown, and its arguments.
HUB_METRICS = {
    "accuracy": ("accuracy", "Accuracy", None),
    "f1": ("f1", "F1", None),
    "macro_f1": ("f1", "Macro F1", {"average": "macro"}),
}
SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings")
PIPELINES = {
    "ForMaskedLM": "fill-mask",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMultipleChoice": "multiple-choice",
}


@dataclass
class Measurements:
    """What was measured, as read from the files; empty where there is no file.

    Attributes:
        training: `summary.json` of a pretraining run.
        recipe: its `recipe.yaml`.
        results: `results.json` of a fine-tuning run.
        rank: `report.json` of a rank report, and `rank_figure`, its main figure.
    """

    training: dict[str, Any] = field(default_factory=dict)
    recipe: dict[str, Any] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)
    rank: dict[str, Any] = field(default_factory=dict)
    rank_figure: Path | None = None

    @classmethod
    def read(
        cls,
        training_summary: str | Path | None = None,
        results: str | Path | None = None,
        rank_report: str | Path | None = None,
    ) -> "Measurements":
        """
        Args:
            training_summary: `summary.json`, or the folder of the run that holds it; `recipe.yaml` beside it is read.
            results: `results.json`, or the folder that holds it.
            rank_report: The folder of a rank report, or its `report.json`.

        Raises:
            FileNotFoundError, ValueError: A file that was named is missing, or is not what it should be.
        """
        read = cls()
        if training_summary is not None:
            path = _file(training_summary, "summary.json")
            read.training = _read_json(path)
            if (path.parent / "recipe.yaml").is_file():
                read.recipe = yaml.safe_load((path.parent / "recipe.yaml").read_text(encoding="utf-8")) or {}
        if results is not None:
            read.results = _read_json(_file(results, "results.json"))
            if not isinstance(read.results.get("evaluation"), list):
                raise ValueError(f"{results} has no list 'evaluation': give the results.json of a fine-tuning run")
        if rank_report is not None:
            path = _file(rank_report, "report.json")
            read.rank = _read_json(path)
            if read.rank.get("kind") != "rank":
                raise ValueError(f"{path} is a report of kind {read.rank.get('kind')!r}: give a rank report")
            figure = path.parent / RANK_FIGURE
            read.rank_figure = figure if figure.is_file() else None
        return read

    def __bool__(self) -> bool:
        return bool(self.training or self.results or self.rank)


def write_card(
    folder: Path,
    repo_id: str,
    config: Mapping[str, Any],
    measured: Measurements,
    *,
    has_tokenizer: bool,
    revision: str | None = None,
    subfolder: str | None = None,
    license: str | None = None,
    data_license: str | None = None,
    language: str | None = None,
) -> None:
    """
    Writes `README.md`, `.eval_results/` and the rank figure into `folder`.

    Args:
        config: The model's `config.json`: the card describes what it says.
        license: Of the weights, by its Hub identifier ("apache-2.0").
        data_license: Of the training data, in words.
        language: Of the training data, by its code ("en").
    """
    config = with_sizes(config)
    entries = measured.results.get("evaluation", [])
    native = config["model_type"] != "maelm"
    pipeline = _pipeline(config)
    metadata = ModelCardData(
        model_name=repo_id.rpartition("/")[2],
        library_name="transformers",
        pipeline_tag=pipeline,
        license=license,
        language=language,
        tags=[_objective_tag(config), "encoder", *([] if native else ["custom_code"])],
        eval_results=[_eval_result(entry) for entry in _reported(entries)] or None,
    )
    if not entries:
        metadata.model_name = None  # only the index of results has a place for it
    card = ModelCard.from_template(
        metadata,
        template_path=str(TEMPLATE),
        name=repo_id.rpartition("/")[2],
        what=describe(config),
        form=form(config),
        method=method(config),
        snippets=snippets(
            repo_id, config, pipeline, has_tokenizer=has_tokenizer, revision=revision, subfolder=subfolder
        ),
        data=_training_data(measured),
        data_license=data_license or NOT_STATED,
        recipe=_recipe(config, measured.recipe, _count_parameters(folder / (subfolder or ""))),
        compute=_compute(measured.training),
        pretraining=_pretraining(measured.training),
        fill_mask=[_guesses(found) for found in measured.training.get("fill_mask", [])],
        results=[_result_row(entry) for entry in entries],
        results_source=_environment(measured.results.get("environment", {})),
        rank=_rank(measured, config),
        limits=[text for condition, text in LIMITS if condition(config, measured)] + measured.training.get("notes", []),
    )
    (folder / CARD_FILE).write_text(str(card).rstrip() + "\n", encoding="utf-8")
    _write_eval_results(folder, entries, measured.results.get("environment", {}).get("date"))
    if measured.rank_figure is not None:
        (folder / "figures").mkdir(exist_ok=True)
        shutil.copyfile(measured.rank_figure, folder / "figures" / RANK_FIGURE)


def _write_eval_results(folder: Path, entries: list[dict[str, Any]], date: str | None) -> None:
    """One file for each data set, as the Hub reads them (https://huggingface.co/docs/hub/eval-results)."""
    by_dataset: dict[str, list[EvalResultEntry]] = {}
    for entry in entries:
        if str(entry["dataset_type"]).startswith(NOT_ON_THE_HUB):
            logger.info("%s is no data set of the Hub: its result is in the card alone", entry["dataset_name"])
            continue
        seeds, setting = entry.get("seeds"), entry.get("setting")
        notes = [f"{entry['metric_type']} on {entry.get('dataset_split') or 'unknown split'}"]
        notes += [f"median of {seeds} seeds"] if seeds else []
        notes += [json.dumps(setting)] if setting else []
        by_dataset.setdefault(entry["dataset_type"], []).append(
            EvalResultEntry(
                dataset_id=entry["dataset_type"],
                task_id=entry.get("dataset_config") or "default",
                value=entry["value"],
                date=date,
                notes="; ".join(notes),
            )
        )
    for dataset, results in by_dataset.items():
        (folder / RESULTS_FOLDER).mkdir(exist_ok=True)
        text = yaml.safe_dump(eval_result_entries_to_yaml(results), sort_keys=False)
        (folder / RESULTS_FOLDER / f"{dataset.replace('/', '--')}.yaml").write_text(text, encoding="utf-8")


def _objective_tag(config: Mapping[str, Any]) -> str:
    return "masked-language-modeling" if config.get("encoder_mask_fraction") == 1 else "mae-lm"


def _reported(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The entries without those of validation, by which the setting was chosen, where the same was scored on test."""

    def of(entry: Mapping[str, Any]) -> tuple:
        return *(entry.get(key) for key in ("dataset_type", "dataset_config", "metric_type")), _mode(entry)

    tested = {of(entry) for entry in entries if entry.get("dataset_split") == "test"}
    return [entry for entry in entries if entry.get("dataset_split") != "validation" or of(entry) not in tested]


def _mode(entry: Mapping[str, Any]) -> str:
    return "frozen" if (entry.get("setting") or {}).get("mode") == "frozen" else "fine-tuned"


def _eval_result(entry: Mapping[str, Any]) -> EvalResult:
    named = entry["metric_type"]
    metric, shown, arguments = HUB_METRICS.get(named, (named, named.replace("_", " "), None))
    how = {"frozen": "linear probe of the frozen encoder", "fine-tuned": "fine-tuned"}[_mode(entry)]
    return EvalResult(
        task_type=entry["task_type"],
        task_name=entry.get("task_name"),
        dataset_type=entry["dataset_type"],
        dataset_name=entry["dataset_name"],
        dataset_config=entry.get("dataset_config"),
        dataset_split=entry.get("dataset_split"),
        metric_type=metric,
        metric_name=f"{shown} ({how})",
        metric_args=arguments,
        metric_value=entry["value"],
    )


def _result_row(entry: Mapping[str, Any]) -> list[str]:
    return [
        str(entry.get("task_name") or entry["dataset_name"]),
        _setting(entry),
        str(entry.get("dataset_split") or NOT_STATED),
        entry["metric_type"],
        _number(entry["value"]),
        str(entry.get("seeds") or NOT_STATED),
        _number(entry.get("std")),
    ]


def _setting(entry: Mapping[str, Any]) -> str:
    if _mode(entry) == "frozen":
        return "frozen"
    setting = entry.get("setting") or {}
    named = {"learning_rate": "learning rate", "batch_size": "batch", "epochs": "epochs"}
    return ", ".join(["fine-tuned", *(f"{name} {setting[key]:g}" for key, name in named.items() if key in setting)])


def _environment(environment: Mapping[str, Any]) -> str:
    named = ", ".join(f"{name} {value}" for name, value in environment.items())
    return f"Measured with: {named}." if named else "Date and hardware: not stated."


def _training_data(measured: Measurements) -> str:
    corpus = measured.training.get("corpus")
    return f"{corpus}." if corpus else f"The training run left no summary: {NOT_MEASURED}."


def with_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """A `config.json` with its sizes by our names, whatever its architecture calls them (DistilBERT: n_layers, dim)."""
    if config["model_type"] == "maelm":
        return dict(config)
    stock = AutoConfig.for_model(**config)
    sizes = {name: getattr(stock, name, None) for name in SIZES}
    if stock.model_type in OFFSET_BACKBONES:  # the table of positions has rows that no token gets
        sizes["max_position_embeddings"] -= stock.pad_token_id + 1
    return {**config, **sizes}


def _count_parameters(folder: Path) -> int:
    """Numbers in the weight files, tied ones once."""
    count = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            count += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    return count


def _recipe(config: Mapping[str, Any], recipe: Mapping[str, Any], parameters: int) -> list[tuple[str, str]]:
    """Sizes from the config and the weights, the course of training from the run's recipe."""
    data, optimizer = recipe.get("data", {}), recipe.get("optimizer", {})
    batch = data.get("batch_size") or data.get("batch_tokens")
    unit = "sequences" if data.get("batch_size") else "tokens"
    rows = [
        ("Encoder", f"{config['num_hidden_layers']} layers, {config['hidden_size']} wide"),
        ("Parameters in this repository", f"{parameters:,}"),
        ("Attention heads", config["num_attention_heads"]),
        ("Vocabulary", config["vocab_size"]),
        ("Longest sequence (tokens)", config["max_position_embeddings"]),
        ("Decoder layers, pretraining only", config.get("decoder_num_hidden_layers")),
        ("Share of [MASK] that the encoder sees", config.get("encoder_mask_fraction")),
        ("Relative-position buckets", config.get("relative_position_buckets")),
        ("Mask ratio", data.get("mask_ratio")),
        ("Batch", f"{batch} {unit}" if batch else None),
        ("Optimizer", optimizer.get("name")),
        ("Learning rate", optimizer.get("learning_rate")),
        ("Learning rate of Muon", optimizer.get("muon_learning_rate") if optimizer.get("name") == "muon" else "none"),
        ("Schedule", optimizer.get("schedule")),
        ("Warm-up (steps)", optimizer.get("warmup_steps")),
        ("Decay (steps)", optimizer.get("decay_steps")),
        ("Seed", recipe.get("seed")),
    ]
    return [(label, NOT_STATED if value is None else str(value)) for label, value in rows]


def _compute(training: Mapping[str, Any]) -> list[tuple[str, str]]:
    seconds, choices = training.get("seconds"), training.get("choices", {})
    precision, attention = (choices.get(name, {}).get("value", NOT_STATED) for name in ("precision", "attention"))
    software = ", ".join(f"{name} {version}" for name, version in training.get("versions", {}).items())
    alone = training.get("cpu_seconds_a_step")  # of a run that shared its processor its hours say little
    return [
        ("Steps", _number(training.get("steps"))),
        ("Tokens", _number(training.get("tokens"))),
        ("Hours of training", _number(None if seconds is None else seconds / 3600)),
        ("Tokens a second", _number(training.get("tokens_per_second"))),
        *([] if alone is None else [("Processor seconds a step, measured apart", _number(alone))]),
        ("Precision", precision),
        ("Attention", attention),
        ("Software", software or NOT_STATED),
        ("Hardware", str(training.get("hardware") or NOT_STATED)),
    ]


def _pretraining(training: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        ("Held-out loss on hidden tokens (nats)", _number(training.get("held_out_loss"))),
        ("Held-out accuracy on hidden tokens", _number(training.get("held_out_accuracy"))),
        *(
            (f"Loss on hidden tokens of {name} (nats)", f"{found['loss']:.4f}")
            for name, found in training.get("samples", {}).items()
        ),
    ]


def _guesses(found: Mapping[str, Any]) -> tuple[str, str, str]:
    words, expected = (", ".join(f"`{word}`" for word in found[key]) for key in ("words", "expected"))
    among = "among them" if set(found["words"]) & set(found["expected"]) else "none of them"
    return f"`{found['text']}`", words, f"{expected}: {among}"


def _rank(measured: Measurements, config: Mapping[str, Any]) -> dict[str, Any] | None:
    if not measured.rank:
        return None
    rows, settings = measured.rank["rows"], measured.rank["settings"]
    populations = list(dict.fromkeys(row["population"] for row in rows))
    layers: dict[int, dict[str, Any]] = {}
    for row in rows:
        layers.setdefault(row["layer_index"], {"dim": row["dim"]})[row["population"]] = row["effective_rank"]
    tau, power = settings.get("tau", NOT_STATED), settings.get("power", NOT_STATED)
    summed = {1: "singular values", 2: "squared singular values"}.get(power, f"singular values (power {power})")
    return {
        "definition": (
            f"the least number of {summed} that hold a share {tau} of their sum, "
            f"{'centred' if settings.get('centred') else 'not centred'}."
        ),
        "figure": f"figures/{RANK_FIGURE}" if measured.rank_figure else "",
        "populations": populations,
        "rows": [
            [str(layer), str(values["dim"]), *(_number(values.get(population)) for population in populations)]
            for layer, values in sorted(layers.items())
        ],
        "source": f"Text: {settings.get('data', NOT_STATED)}; {max(row['tokens'] for row in rows):,} tokens a layer.",
    }


def _pipeline(config: Mapping[str, Any]) -> str:
    architecture = (config.get("architectures") or [""])[0]
    return next((tag for suffix, tag in PIPELINES.items() if architecture.endswith(suffix)), "feature-extraction")


def _number(value: float | int | None) -> str:
    if value is None:
        return NOT_MEASURED
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def _file(path: str | Path, name: str) -> Path:
    path = Path(path)
    file = path / name if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"there is no {file}")
    return file


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not an object")
    return content
