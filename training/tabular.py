# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Labelled examples out of files: CSV, TSV, JSON, JSON lines, parquet, CoNLL columns, saved `datasets`.

Every fault of the data is one DataError line that names the file, the row and the column.
"""

import csv
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

csv.field_size_limit(2**31 - 1)  # whole articles and mails are one field


class DataError(ValueError):
    """The data cannot be used as it is; the message names file, row and column, and is one line."""


@dataclass
class Split:
    """Examples of one split.

    `texts` (n) with `pairs` (n) or None; or `words`, n lists of words. `labels`: n class ids, n numbers, n lists of
    tag ids, or None where the split has no labels. `source` names the file in messages.
    """

    source: str
    texts: list[str] = field(default_factory=list)
    pairs: list[str] | None = None
    words: list[list[str]] = field(default_factory=list)
    labels: list | None = None

    def __len__(self) -> int:
        return len(self.words) or len(self.texts)


@dataclass
class TaskData:
    """A task ready to be encoded. `kind`: "classification", "regression", "tokens" or "squad".

    `splits` has "train", "validation" and perhaps more. `metrics` names what is computed, the deciding one first.
    `dataset` is
    what a model card says of the source: `{"type", "name", "config"}`.
    """

    name: str
    kind: str
    splits: dict[str, Any]
    metrics: tuple[str, ...]
    label_names: list[str] = field(default_factory=list)
    dataset: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


# ---- reading tables ---------------------------------------------


def read_table(path: str | Path) -> dict[str, list]:
    """Columns of a table file, by name. The format is the ending: .csv .tsv .json .jsonl .parquet."""
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    ending = path.suffix.lower()
    if ending in (".csv", ".tsv"):
        return _read_csv(path, "\t" if ending == ".tsv" else ",")
    if ending in (".json", ".jsonl", ".ndjson"):
        return _columns(path, _read_json(path))
    if ending == ".parquet":
        import pyarrow.parquet

        return pyarrow.parquet.read_table(path).to_pydict()
    raise DataError(
        f"{path}: cannot tell the format from the ending {ending!r}: use .csv, .tsv, .json, .jsonl or .parquet"
    )


def _read_csv(path: Path, delimiter: str) -> dict[str, list]:
    with open(path, encoding="utf-8-sig", newline="") as file:
        # Strict: a stray quote would otherwise swallow rows up to the next one without a word.
        rows = csv.reader(file, delimiter=delimiter, strict=True)
        header, number = next(rows, None), 0
        if header is None:
            raise DataError(f"{path}: the file is empty")
        columns: dict[str, list] = {name: [] for name in header}
        try:
            for number, row in enumerate((row for row in rows if row), 1):
                if len(row) > len(header):
                    raise DataError(
                        f"{path}, row {number}: {len(row)} fields, but the header names {len(header)} columns"
                    )
                for name, value in zip(header, row + [None] * (len(header) - len(row)), strict=True):
                    columns[name].append(value)
        except csv.Error as error:
            hint = "a field with quotes is quoted, and its quotes doubled"
            raise DataError(f"{path}, row {number + 1}: {error} ({hint})") from error
    return columns


def _read_json(path: Path) -> list[dict]:
    text = path.read_text("utf-8-sig")
    try:
        if path.suffix == ".json" and text.lstrip().startswith("["):
            return json.loads(text)
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    except json.JSONDecodeError as error:
        raise DataError(f"{path}: not JSON, nor JSON lines ({error})") from error


def _columns(path: Path, rows: list[dict]) -> dict[str, list]:
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise DataError(f"{path}, row {number}: expected an object with named fields, got {type(row).__name__}")
    if not rows:
        raise DataError(f"{path}: the file holds no rows")
    names = list(dict.fromkeys(name for row in rows for name in row))
    return {name: [row.get(name) for row in rows] for name in names}


# ---- checking ---------------------------------------------


def column(table: dict[str, list], name: str, source: str) -> list:
    """The column `name`, or a DataError that lists the columns there are."""
    if name not in table:
        raise DataError(f"{source}: no column {name!r}; the columns are {', '.join(map(repr, table)) or '(none)'}")
    return table[name]


def text_column(table: dict[str, list], name: str, source: str) -> list[str]:
    values = column(table, name, source)
    for number, value in enumerate(values, 1):
        if not isinstance(value, str) or not value.strip():
            found = "empty" if isinstance(value, str) else repr(value)
            raise DataError(f"{source}, row {number}, column {name!r}: the text is {found}")
    return values


def label_text(value: Any) -> str:
    """How a label of any type is named: 1, 1.0 and "1" are one class."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value)


def label_list(values: Sequence, source: str, name: str) -> list[str]:
    """The sorted label names of a training column; numbers in numeric order."""
    for number, value in enumerate(values, 1):
        if value is None or value == "":
            raise DataError(f"{source}, row {number}, column {name!r}: the label is missing")
    found = sorted({label_text(value) for value in values})
    if all(label.lstrip("-").isdigit() for label in found):
        found.sort(key=int)
    return found


def class_ids(values: Sequence, labels: Sequence[str], source: str, name: str) -> list[int]:
    ids = {label: number for number, label in enumerate(labels)}
    result = []
    for number, value in enumerate(values, 1):
        text = label_text(value)
        if value is None or text not in ids:
            raise DataError(
                f"{source}, row {number}, column {name!r}: label {value!r} is not in the list {list(labels)}"
            )
        result.append(ids[text])
    return result


def target_numbers(values: Sequence, source: str, name: str) -> list[float]:
    result = []
    for number, value in enumerate(values, 1):
        try:
            target = float(value)
        except (TypeError, ValueError):
            target = math.nan
        if not math.isfinite(target):
            raise DataError(f"{source}, row {number}, column {name!r}: {value!r} is not a finite number")
        result.append(target)
    return result


def refuse_unusable(data: TaskData) -> None:
    """No example, no labels to train on or to measure by, or one class only: DataError, one line."""
    for name, split in data.splits.items():
        if len(split) == 0:
            raise DataError(f"{split.source}: the {name} split is empty")
    for name in ("train", *[name for name in data.splits if name.startswith("validation")]):
        if name not in data.splits:
            raise DataError(f"{data.name}: there is no {name} split")
        if data.splits[name].labels is None:
            raise DataError(f"{data.splits[name].source}: the {name} split has no labels")
    train = data.splits["train"]
    if data.kind == "classification" and len(set(train.labels)) < 2:
        only = data.label_names[train.labels[0]]
        raise DataError(
            f"{train.source}: all {len(train)} rows have the one label {only!r}; at least two classes are needed"
        )
    if data.kind == "tokens" and len({tag for tags in train.labels for tag in tags}) < 2:
        only = data.label_names[train.labels[0][0]]
        raise DataError(f"{train.source}: every token has the one tag {only!r}; at least two are needed")


# ---- text and token tasks ---------------------------------------------


def load_text_task(
    name: str,
    tables: dict[str, tuple[str, dict[str, list]]],
    *,
    text: str = "text",
    pair: str | None = None,
    label: str = "label",
    labels: Sequence[str] | None = None,
    regression: bool = False,
    metrics: Sequence[str] | None = None,
) -> TaskData:
    """A single-sentence or pair task from `{split: (source, columns)}`.

    `labels` fixes the classes and their order; otherwise they are read from train, sorted. A test split without the
    label column (or with every label missing or -1) stays unlabelled: it is predicted, never scored.
    """
    source, train = tables["train"]
    names = list(labels) if labels is not None else []
    if not regression and labels is None:
        names = label_list(column(train, label, source), source, label)
    splits = {}
    for split, (source, table) in tables.items():
        texts = text_column(table, text, source)
        pairs = text_column(table, pair, source) if pair else None
        values = table.get(label) if split.startswith("test") else column(table, label, source)
        if (
            split.startswith("test")
            and values is not None
            and all(v is None or label_text(v) in ("-1", "") for v in values)
        ):
            values = None
        found = None
        if values is not None:
            found = target_numbers(values, source, label) if regression else class_ids(values, names, source, label)
        splits[split] = Split(source, texts=texts, pairs=pairs, labels=found)
    kind = "regression" if regression else "classification"
    default = ("pearson", "spearmanr") if regression else ("accuracy", "macro_f1")
    data = TaskData(name, kind, splits, tuple(metrics or default), names)
    refuse_unusable(data)
    return data


def read_conll(
    path: str | Path, token_column: int = 0, tag_column: int = -1
) -> tuple[list[list[str]], list[list[str]], list[int]]:
    """Sentences of words, of tags, and the row each begins at.

    One token a line, columns divided by tabs or else spaces, a blank line after a sentence. `-DOCSTART-` lines and
    comments (`# ...` on a line of its own before a sentence, as in CoNLL-U) are left out.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    words: list[list[str]] = [[]]
    tags: list[list[str]] = [[]]
    rows: list[int] = []
    needed = max(
        token_column + 1 if token_column >= 0 else -token_column, tag_column + 1 if tag_column >= 0 else -tag_column, 2
    )
    for number, line in enumerate(path.read_text("utf-8-sig").split("\n"), 1):
        stripped = line.strip()
        if not stripped or stripped.startswith("-DOCSTART-") or (stripped.startswith("# ") and not words[-1]):
            if words[-1]:
                words.append([])
                tags.append([])
            continue
        fields = line.rstrip("\r").split("\t") if "\t" in line else line.split()
        if len(fields) < needed or not fields[tag_column].strip() or not fields[token_column].strip():
            columns = f"columns {token_column} (token) and {tag_column} (tag)"
            raise DataError(f"{path}, row {number}, {columns}: only {len(fields)} fields in {stripped!r}")
        if not words[-1]:
            rows.append(number)
        words[-1].append(fields[token_column].strip())
        tags[-1].append(fields[tag_column].strip())
    if not words[-1]:
        words.pop()
        tags.pop()
    return words, tags, rows


def load_token_task(
    name: str,
    files: dict[str, str | Path],
    *,
    token_column: int = 0,
    tag_column: int = -1,
    labels: Sequence[str] | None = None,
) -> TaskData:
    """Token classification from CoNLL columns.

    BIO tags are scored by exact entities, others (parts of speech) by token accuracy.
    """
    read = {split: read_conll(path, token_column, tag_column) for split, path in files.items()}
    names = list(labels) if labels else sorted({tag for tags in read["train"][1] for tag in tags})
    ids = {label: number for number, label in enumerate(names)}
    splits = {}
    for split, (words, tags, rows) in read.items():
        for row, sentence in zip(rows, tags, strict=True):
            unknown = next((position for position, tag in enumerate(sentence) if tag not in ids), None)
            if unknown is not None:
                listed = f"{names[:12]}{' ...' if len(names) > 12 else ''}"
                where = f"{files[split]}, row {row + unknown}, column {tag_column}"
                raise DataError(f"{where}: tag {sentence[unknown]!r} is not in the list {listed}")
        splits[split] = Split(
            str(files[split]), words=words, labels=[[ids[tag] for tag in sentence] for sentence in tags]
        )
    entities = all(label == "O" or label[:2] in ("B-", "I-") for label in names) and "O" in names
    data = TaskData(name, "tokens", splits, ("entity_f1", "accuracy") if entities else ("accuracy",), names)
    refuse_unusable(data)
    return data
