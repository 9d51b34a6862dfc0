# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""From what the command line names to a task's data: GLUE, SQuAD, an offline task, or the user's own files."""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from training import glue, squad
from training.tabular import DataError, TaskData, load_text_task, load_token_task, read_table
from training.tasks import TASK_CACHE, TASKS, prepare_task

CUSTOM = ("text", "regression", "tokens", "squad", "squad_v2")

# Epochs of the published recipe nearest to the paper (AMOS and COCO-LM, by its first author), other tasks by size.
EPOCHS = {
    "mnli": 3,
    "qnli": 3,
    "qqp": 5,
    "sst2": 5,
    "rte": 5,
    "cola": 10,
    "mrpc": 10,
    "stsb": 10,
    "squad": 3,
    "squad_v2": 3,
}
DEFAULT_EPOCHS = 3


@dataclass(frozen=True)
class DataOptions:
    """Where a task's data come from.

    `folder`: GLUE's TSV files, SQuAD's JSON files or a saved dataset. `files`: `{split: path}` of the user's own;
    with `text`, `pair` and `label` naming columns, or `token_column` and `tag_column` numbering them. `limit` keeps
    the first rows of train.
    """

    task: str
    folder: str | None = None
    files: dict[str, str] = field(default_factory=dict)
    text: str = "text"
    pair: str | None = None
    label: str = "label"
    labels: tuple[str, ...] | None = None
    token_column: int = 0
    tag_column: int = -1
    cache: str = str(TASK_CACHE)

    def to_json(self) -> dict:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict) -> "DataOptions":
        return cls(**values | {"labels": tuple(values["labels"]) if values["labels"] is not None else None})


def known_tasks() -> list[str]:
    return [*glue.TASKS, *squad.HUB_NAMES, *TASKS, "text", "regression", "tokens"]


def load_task(options: DataOptions) -> TaskData:
    """The data of a task, checked. DataError or ValueError, one line, where they cannot be used."""
    task = options.task
    if task in ("text", "regression", "tokens") and not options.files and options.folder is None:
        raise ValueError(f"--task {task} needs --train FILE and --validation FILE, or --data FOLDER of a saved dataset")
    if options.files and task not in CUSTOM:
        raise ValueError(
            f"--train, --validation and --test go with --task {', '.join(CUSTOM)}; {task} has its own files"
        )
    if options.files and not {"train", "validation"} <= options.files.keys():
        raise ValueError(f"--task {task} needs both --train and --validation, got {', '.join(options.files)}")
    if task in glue.TASKS:
        return glue.load_glue(task, options.folder)
    if task in squad.HUB_NAMES:
        return squad.load_squad(task, options.folder, options.files or None)
    if task in TASKS:
        return _offline(task, Path(options.cache))
    if task == "tokens":
        columns = {"token_column": options.token_column, "tag_column": options.tag_column}
        return load_token_task("tokens", options.files, labels=options.labels, **columns)
    if task in ("text", "regression"):
        return _own_files(options)
    raise ValueError(f"unknown task {task!r}: choose from {', '.join(known_tasks())}")


def _offline(task: str, cache: Path) -> TaskData:
    folder = prepare_task(task, cache)
    details = json.loads((folder / "task.json").read_text())
    if details["kind"] == "tokens":
        files = {split: folder / f"{split}.conll" for split in ("train", "validation", "test")}
        data = load_token_task(task, files, labels=details["labels"])
    else:
        tables = {}
        for split in ("train", "validation", "test"):
            path = folder / f"{split}.jsonl"
            tables[split] = (str(path), read_table(path))
        metrics = ("accuracy", "f1") if len(details["labels"]) == 2 else ("accuracy", "macro_f1")
        data = load_text_task(task, tables, labels=details["labels"], metrics=metrics)
    package = TASKS[task].package
    data.dataset = {"type": f"{package.registry}/{package.name}", "name": details["title"], "config": task}
    return data


def _own_files(options: DataOptions) -> TaskData:
    labels = options.labels
    if options.folder is not None:
        import datasets

        if not (Path(options.folder) / "dataset_dict.json").is_file():
            raise DataError(f"{options.folder}: not a saved dataset with splits (no dataset_dict.json)")
        loaded = datasets.load_from_disk(options.folder)
        tables = {
            split: (f"{options.folder} ({split})", {name: list(rows[name]) for name in rows.column_names})
            for split, rows in loaded.items()
        }
        feature = loaded["train"].features.get(options.label) if "train" in loaded else None
        if isinstance(feature, datasets.ClassLabel):
            labels = labels or tuple(feature.names)
            for _, table in tables.values():
                table[options.label] = [None if i is None or i < 0 else feature.names[i] for i in table[options.label]]
    else:
        tables = {split: (str(path), read_table(path)) for split, path in options.files.items()}
    if "train" not in tables:
        raise DataError(f"{options.folder}: there is no train split; the splits are {', '.join(tables)}")
    data = load_text_task(
        options.task,
        tables,
        text=options.text,
        pair=options.pair,
        label=options.label,
        labels=labels,
        regression=options.task == "regression",
    )
    data.dataset = {"type": "local", "name": Path(tables["train"][0]).name, "config": options.task}
    return data


def data_digest(data: TaskData) -> str:
    """sha256 over every example of every split; one changed label is another digest."""
    digest = hashlib.sha256(json.dumps([data.kind, data.label_names, list(data.metrics)]).encode())
    for name in sorted(data.splits):
        split = data.splits[name]
        digest.update(name.encode())
        if data.kind == "squad":
            rows = ([q.id, q.question, q.context, q.answers, q.starts] for q in split)
        else:
            columns = [split.words or split.texts, split.pairs, split.labels]
            rows = zip(*(column if column is not None else [None] * len(split) for column in columns), strict=True)
        for row in rows:
            digest.update(json.dumps(row, ensure_ascii=False).encode() + b"\n")
    return digest.hexdigest()


def model_digest(model: str) -> str:
    """sha256 of a folder's safetensors, config and tokenizer, or the commit of a Hub checkpoint."""
    folder = Path(model)
    if folder.is_dir():
        digest = hashlib.sha256()
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise ValueError(f"{model}: no .safetensors file in this folder; save the model with save_pretrained")
        for path in [*files, *sorted(folder.glob("config.json")), *sorted(folder.glob("tokenizer*.json"))]:
            with open(path, "rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{model}: neither a folder nor a checkpoint that can be had ({str(error).splitlines()[0]})"
        ) from error
    return f"commit {getattr(config, '_commit_hash', None)}"
