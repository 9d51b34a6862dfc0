# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""The eight GLUE tasks: their columns, labels and metrics, from the Hub, from GLUE's own TSV folders, or from saved
`datasets`.

The TSV files differ from task to task: CoLA's train and dev have no header, quotes are text and never quoting, MRPC's
header holds `#1 String`, MNLI's dev comes twice, QQP has rows cut short, test files have an index and no labels.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.metrics import GLUE_METRIC
from training.tabular import DataError, Split, TaskData, class_ids, refuse_unusable, target_numbers

HUB_NAME = "nyu-mll/glue"


@dataclass(frozen=True)
class GlueTask:
    """Columns and labels of one task, in the Hub's form and in GLUE's TSV form.

    `labels` is in the Hub's order of class ids. `tsv_labels` is how the TSV files write them, in the same order;
    empty for regression. `submission` is the file name the benchmark expects predictions under.
    """

    folder: str
    columns: tuple[str, ...]
    labels: tuple[str, ...]
    tsv_columns: tuple[str, ...]
    tsv_label: str
    tsv_labels: tuple[str, ...]
    submission: str
    tsv_header: tuple[str, ...] | None = None  # for files that come without one


BINARY = ("0", "1")
ENTAILMENT = ("entailment", "not_entailment")
NLI = ("entailment", "neutral", "contradiction")
PAIR = ("sentence1", "sentence2")
TASKS = {
    "cola": GlueTask(
        "CoLA",
        ("sentence",),
        ("unacceptable", "acceptable"),
        ("sentence",),
        "label",
        BINARY,
        "CoLA.tsv",
        tsv_header=("source", "label", "original", "sentence"),
    ),
    "sst2": GlueTask("SST-2", ("sentence",), ("negative", "positive"), ("sentence",), "label", BINARY, "SST-2.tsv"),
    "mrpc": GlueTask(
        "MRPC", PAIR, ("not_equivalent", "equivalent"), ("#1 String", "#2 String"), "Quality", BINARY, "MRPC.tsv"
    ),
    "stsb": GlueTask("STS-B", PAIR, (), PAIR, "score", (), "STS-B.tsv"),
    "qqp": GlueTask(
        "QQP",
        ("question1", "question2"),
        ("not_duplicate", "duplicate"),
        ("question1", "question2"),
        "is_duplicate",
        BINARY,
        "QQP.tsv",
    ),
    "mnli": GlueTask("MNLI", ("premise", "hypothesis"), NLI, PAIR, "gold_label", NLI, "MNLI-m.tsv"),
    "qnli": GlueTask(
        "QNLI", ("question", "sentence"), ENTAILMENT, ("question", "sentence"), "label", ENTAILMENT, "QNLI.tsv"
    ),
    "rte": GlueTask("RTE", PAIR, ENTAILMENT, PAIR, "label", ENTAILMENT, "RTE.tsv"),
}


def tsv_files(task: str) -> dict[str, str]:
    """`{split: file name}` of a task's folder."""
    if task == "mnli":
        return {
            "train": "train.tsv",
            "validation": "dev_matched.tsv",
            "validation_mismatched": "dev_mismatched.tsv",
            "test": "test_matched.tsv",
            "test_mismatched": "test_mismatched.tsv",
        }
    return {"train": "train.tsv", "validation": "dev.tsv", "test": "test.tsv"}


def submission_name(task: str, split: str) -> str:
    """The file name the benchmark expects the predictions of a test split under."""
    return "MNLI-mm.tsv" if split == "test_mismatched" else TASKS[task].submission


def load_glue(task: str, data: str | Path | Mapping[str, Any] | None = None) -> TaskData:
    """A GLUE task.

    Args:
        task: `cola`, `sst2`, `mrpc`, `stsb`, `qqp`, `mnli`, `qnli` or `rte`.
        data: None for the Hub's `nyu-mll/glue`; a folder in GLUE's TSV layout (the task's own, or the one above it);
            a folder of `save_to_disk`; or a mapping of loaded splits.
    """
    if task not in TASKS:
        raise ValueError(f"unknown GLUE task {task!r}: choose from {', '.join(TASKS)}")
    notes: list[str] = []
    if data is None:
        splits = _from_hub(task)
    elif isinstance(data, Mapping):
        splits = _from_datasets(task, data, f"{HUB_NAME}/{task}")
    elif not Path(data).is_dir():
        raise DataError(f"{data}: no such folder (GLUE's TSV layout, or a saved dataset)")
    elif any((Path(data) / name).is_file() for name in ("dataset_dict.json", "state.json")):
        import datasets

        splits = _from_datasets(task, datasets.load_from_disk(str(data)), str(data))
    else:
        splits = _from_tsv(task, Path(data), notes)
    spec = TASKS[task]
    result = TaskData(
        name=task,
        kind="regression" if not spec.labels else "classification",
        splits=splits,
        metrics=GLUE_METRIC[task],
        label_names=list(spec.labels),
        dataset={"type": HUB_NAME, "name": f"GLUE {spec.folder}", "config": task},
        notes=notes,
    )
    refuse_unusable(result)
    return result


def _from_hub(task: str) -> dict[str, Split]:
    from training.metrics import hub_answers

    reachable, reason = hub_answers()
    import datasets

    try:
        return _from_datasets(task, datasets.load_dataset(HUB_NAME, task), f"{HUB_NAME}/{task}")
    except (OSError, ValueError, RuntimeError) as error:
        why = reason if not reachable else str(error).splitlines()[0]
        raise DataError(
            f"{HUB_NAME}/{task}: cannot be loaded ({why}); pass --data FOLDER (GLUE's TSV files or a saved dataset)"
        ) from error


def _from_datasets(task: str, loaded: Mapping[str, Any], source: str) -> dict[str, Split]:
    spec, splits = TASKS[task], {}
    renamed = {"validation_matched": "validation", "test_matched": "test"}
    for name, rows in loaded.items():
        where = f"{source} ({name})"
        table = {column: list(rows[column]) for column in rows.column_names}
        for wanted in spec.columns:
            if wanted not in table:
                raise DataError(f"{where}: no column {wanted!r}; the columns are {', '.join(map(repr, table))}")
        values = table.get("label")
        if values is not None and name.startswith("test") and all(value in (-1, -1.0, None) for value in values):
            values = None
        if values is not None:
            if spec.labels:
                values = class_ids(values, [str(i) for i in range(len(spec.labels))], where, "label")
            else:
                values = target_numbers(values, where, "label")
        splits[renamed.get(name, name)] = _split(where, [table[c] for c in spec.columns], spec.columns, values)
    return splits


def _from_tsv(task: str, folder: Path, notes: list[str]) -> dict[str, Split]:
    spec = TASKS[task]
    if (folder / spec.folder).is_dir():
        folder = folder / spec.folder
    splits = {}
    for split, file_name in tsv_files(task).items():
        path = folder / file_name
        if path.is_file():
            splits[split] = _read_tsv(task, path, split, notes)
        elif not split.startswith("test"):
            raise DataError(
                f"{path}: no such file; GLUE's {spec.folder} folder holds {', '.join(tsv_files(task).values())}"
            )
    return splits


def _read_tsv(task: str, path: Path, split: str, notes: list[str]) -> Split:
    spec, is_test = TASKS[task], split.startswith("test")
    lines = path.read_text("utf-8-sig").split("\n")  # not splitlines: the texts hold U+2028 and U+0085
    rows = [line.rstrip("\r").split("\t") for line in lines if line.strip()]
    if spec.tsv_header and not (is_test and rows and rows[0][-1] == "sentence"):
        header = list(spec.tsv_header)
    else:
        header, rows = (rows[0], rows[1:]) if rows else ([], [])
    for name in (*spec.tsv_columns, *(() if is_test else (spec.tsv_label,))):
        if rows and name not in header:
            raise DataError(f"{path}: no column {name!r}; the columns are {', '.join(map(repr, header))}")
    labelled = spec.tsv_label in header
    wanted = [header.index(name) for name in spec.tsv_columns] if rows else []
    label_at = header.index(spec.tsv_label) if rows and labelled else None
    texts: list[list[str]] = [[] for _ in spec.tsv_columns]
    values, short = [], 0
    for number, row in enumerate(rows, 1):
        if len(row) <= max([*wanted, label_at or 0]):
            if (
                task == "qqp" and not is_test
            ):  # the published file has a few rows cut short; every reader leaves them out
                short += 1
                continue
            raise DataError(
                f"{path}, row {number}: {len(row)} fields, but the columns are {', '.join(map(repr, header))}"
            )
        for column, at in zip(texts, wanted, strict=True):
            column.append(row[at])
        if label_at is not None:
            values.append((number, row[label_at]))
    if short:
        notes.append(f"{path}: {short} rows cut short were left out")
    labels = _tsv_labels(spec, path, values) if labelled else None
    return _split(str(path), texts, spec.tsv_columns, labels)


def _tsv_labels(spec: GlueTask, path: Path, values: list[tuple[int, str]]) -> list:
    ids, labels = {label: number for number, label in enumerate(spec.tsv_labels)}, []
    for number, value in values:
        known = list(spec.tsv_labels) or "a number"
        try:
            labels.append(ids[value] if spec.tsv_labels else float(value))
        except (KeyError, ValueError):
            where = f"{path}, row {number}, column {spec.tsv_label!r}"
            raise DataError(
                f"{where}: label {value!r} is not {'in the list ' if spec.tsv_labels else ''}{known}"
            ) from None
    return labels


def _split(source: str, texts: list[list], names: tuple[str, ...], labels: list | None) -> Split:
    for name, values in zip(names, texts, strict=True):
        for number, value in enumerate(values, 1):
            if not isinstance(value, str):
                raise DataError(f"{source}, row {number}, column {name!r}: the text is {value!r}")
    return Split(source, texts=texts[0] if texts else [], pairs=texts[1] if len(texts) > 1 else None, labels=labels)
