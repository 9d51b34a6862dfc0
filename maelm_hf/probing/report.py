# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""What a probe hands back: a table with the settings that produced it, figures, a folder on disk and a page to open.

:class:`Report` holds what all probes share; a probe subclasses it, names its ``kind`` and draws its figures.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import pandas as pd
import torch
from matplotlib.figure import Figure
from safetensors.torch import load_file, save_file

from .html import render_page

_KIND_MODULES = {"rank": ".rank_report", "attention": ".attention_report"}
REPORT_FILE, TABLE_FILE, PAGE_FILE = "report.json", "table.csv", "report.html"
FORMAT_VERSION = 1


class _Document:
    """A table and figures that can be saved, and looked at in a browser or a notebook."""

    title: str = ""
    settings: dict[str, Any]
    notes: list[str]

    def to_dataframe(self) -> pd.DataFrame:
        raise NotImplementedError

    def figures(self) -> dict[str, Figure]:
        """The figures by name, the main one first; ``save`` writes each to ``<name>.png``."""
        raise NotImplementedError

    def plot(self) -> Figure:
        """The main figure."""
        return next(iter(self.figures().values()))

    def summary(self) -> pd.DataFrame:
        """The few columns one reads first."""
        return self.to_dataframe()

    def to_html(self) -> str:
        """One page with everything in it: no network, no other file is needed to open it."""
        tables = {"Summary": self.summary(), "All numbers": self.to_dataframe()}
        return render_page(self.title, tables, self.figures(), self.settings, self.notes)

    def _repr_html_(self) -> str:
        return render_page(
            self.title, {"": self.summary()}, {"": self.plot()}, self.settings, self.notes, fragment=True
        )

    def _save_page(self, directory: Path) -> None:
        self.to_dataframe().to_csv(directory / TABLE_FILE, index=False)
        for name, figure in self.figures().items():
            figure.savefig(directory / f"{name}.png", dpi=150)
        (directory / PAGE_FILE).write_text(self.to_html(), encoding="utf-8")


class Report(_Document):
    """The result of one probe of one model.

    Args:
        rows: the table, one dict a row; the same keys in every row.
        settings: what produced it (model, revision, data, seed, versions ...): plain JSON values.
        tensors: what is saved beside the table as safetensors (moments, per-image statistics ...).
        notes: what the reader has to know (warnings, populations that do not exist and why), one sentence each.
    """

    kind: ClassVar[str]
    tensors_file: ClassVar[str] = "tensors.safetensors"
    _kinds: ClassVar[dict[str, type[Report]]] = {}

    def __init__(
        self,
        rows: Iterable[dict[str, Any]],
        settings: dict[str, Any],
        tensors: dict[str, torch.Tensor] | None = None,
        notes: Iterable[str] = (),
    ) -> None:
        self.rows = list(rows)
        self.settings = dict(settings)
        self.tensors = dict(tensors or {})
        self.notes = list(notes)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "kind" in cls.__dict__:
            Report._kinds[cls.kind] = cls

    @property
    def model(self) -> str:
        """The model's name, as comparisons label it."""
        return str(self.settings.get("model", "model"))

    def to_dataframe(self) -> pd.DataFrame:
        return pd.DataFrame(self.rows)

    @classmethod
    def comparison_figures(cls, reports: Sequence[Self], labels: Sequence[str]) -> dict[str, Figure]:
        """Figures with several models on one axis, the main one first."""
        raise NotImplementedError

    @classmethod
    def comparison_summary(cls, reports: Sequence[Self], labels: Sequence[str]) -> pd.DataFrame:
        """The table that sets the models side by side."""
        return pd.concat(
            [report.summary().assign(model=label) for report, label in zip(reports, labels, strict=True)],
            ignore_index=True,
        )

    def save(self, directory: str | Path) -> Path:
        """Write ``report.json``, ``table.csv``, PNG figures, the tensors and ``report.html``; returns the folder."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        document = {
            "format_version": FORMAT_VERSION,
            "kind": self.kind,
            "settings": self.settings,
            "notes": self.notes,
            "rows": self.rows,
        }
        text = json.dumps(_map_floats(document, _to_json), indent=1, allow_nan=False)
        (directory / REPORT_FILE).write_text(text + "\n", encoding="utf-8")
        if self.tensors:
            contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in self.tensors.items()}
            save_file(contiguous, directory / self.tensors_file)
        self._save_page(directory)
        return directory

    @classmethod
    def load(cls, directory: str | Path) -> Self:
        """Read a folder that ``save`` wrote. ``Report.load`` takes any kind, ``RankReport.load`` its own only.

        Raises:
            FileNotFoundError: the folder holds no ``report.json``.
            ValueError: it holds another kind of report, or one that this version does not know.
        """
        directory = Path(directory)
        path = directory / REPORT_FILE
        if not path.is_file():
            raise FileNotFoundError(f"{directory} holds no {REPORT_FILE}: pass a folder that a report's save() wrote")
        document = json.loads(path.read_text(encoding="utf-8"))
        if document.get("kind") in _KIND_MODULES:  # importing it registers the class
            importlib.import_module(_KIND_MODULES[document["kind"]], __package__)
        if document.get("format_version") != FORMAT_VERSION or document.get("kind") not in Report._kinds:
            raise ValueError(
                f"{path} has kind {document.get('kind')!r}, format {document.get('format_version')!r}: "
                f"this version reads format {FORMAT_VERSION} of {sorted(_KIND_MODULES)}"
            )
        kind = Report._kinds[document["kind"]]
        if not issubclass(kind, cls):
            raise ValueError(f"{path} is a {kind.__name__}, not a {cls.__name__}: use {kind.__name__}.load")
        tensors_path = directory / kind.tensors_file
        tensors = load_file(tensors_path) if tensors_path.is_file() else {}
        rows = [{key: _from_json(value) for key, value in row.items()} for row in document["rows"]]
        return kind(rows, document["settings"], tensors, document["notes"])


class Comparison(_Document):
    """Several reports of one kind side by side; made by :func:`compare`."""

    def __init__(self, reports: Sequence[Report]) -> None:
        self.reports = list(reports)
        self.labels = _distinct([report.model for report in self.reports])
        self.title = f"{type(self.reports[0]).title}: {' / '.join(self.labels)}"
        labelled = list(zip(self.labels, self.reports, strict=True))
        self.settings = {label: report.settings for label, report in labelled}
        self.notes = [f"{label}: {note}" for label, report in labelled for note in report.notes]

    def to_dataframe(self) -> pd.DataFrame:
        frames = [
            report.to_dataframe().assign(model=label) for report, label in zip(self.reports, self.labels, strict=True)
        ]
        return pd.concat(frames, ignore_index=True)

    def summary(self) -> pd.DataFrame:
        return type(self.reports[0]).comparison_summary(self.reports, self.labels)

    def figures(self) -> dict[str, Figure]:
        return type(self.reports[0]).comparison_figures(self.reports, self.labels)

    def save(self, directory: str | Path) -> Path:
        """Write ``table.csv``, the figures as PNG, the settings as JSON and ``report.html``; returns the folder."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        document = {"settings": self.settings, "notes": self.notes}
        text = json.dumps(_map_floats(document, _to_json), indent=1, allow_nan=False)
        (directory / "comparison.json").write_text(text + "\n", encoding="utf-8")
        self._save_page(directory)
        return directory


def compare(reports: Sequence[Report | str | Path]) -> Comparison:
    """Set several reports of one kind side by side.

    Args:
        reports: reports, or folders that ``Report.save`` wrote; two or more, all of one kind.

    Raises:
        ValueError: fewer than two reports, or reports of different kinds.
    """
    loaded = [report if isinstance(report, Report) else Report.load(report) for report in reports]
    if len(loaded) < 2:
        raise ValueError(f"compare needs at least two reports, got {len(loaded)}")
    kinds = {type(report).__name__ for report in loaded}
    if len(kinds) > 1:
        raise ValueError(f"compare needs reports of one kind, got {sorted(kinds)}")
    return Comparison(loaded)


def _distinct(labels: Sequence[str]) -> list[str]:
    """Number the labels that occur more than once."""
    counted: dict[str, int] = {}
    distinct = []
    for label in labels:
        counted[label] = counted.get(label, 0) + 1
        distinct.append(f"{label} ({counted[label]})" if labels.count(label) > 1 else label)
    return distinct


def _to_json(value: float) -> float | str | None:
    """JSON has neither NaN nor infinity."""
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return None if math.isnan(value) else value


def _from_json(value: Any) -> Any:
    return {None: math.nan, "inf": math.inf, "-inf": -math.inf}.get(value, value)


def _map_floats(value: Any, function: Callable[[float], Any]) -> Any:
    """Apply ``function`` to every float of a nested JSON value."""
    if isinstance(value, dict):
        return {key: _map_floats(item, function) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map_floats(item, function) for item in value]
    return function(value) if isinstance(value, float) else value
