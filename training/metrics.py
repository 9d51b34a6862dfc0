# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Task metrics: by `evaluate` where the Hub answers, by scikit-learn and SciPy otherwise; the numbers are the same.

`evaluate` holds no metric of its own: `evaluate.load("glue", "cola")` fetches the metric's script. Offline that is a
long wait and then an error, so one short probe decides, and `Metrics.reason` says what was chosen and why.
"""

import contextlib
import os
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np

PROBE_SECONDS = 3
GLUE_METRIC = {  # the metrics the GLUE benchmark reports, the one that chooses checkpoints and settings first
    "cola": ("matthews_correlation",),
    "sst2": ("accuracy",),
    "mrpc": ("accuracy", "f1"),
    "stsb": ("pearson", "spearmanr"),
    "qqp": ("accuracy", "f1"),
    "mnli": ("accuracy",),
    "qnli": ("accuracy",),
    "rte": ("accuracy",),
}


@cache
def hub_answers() -> tuple[bool, str]:
    """Whether the Hub can be reached, and the reason in words. Asks at most once a process, for at most 3 seconds."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        return False, "HF_HUB_OFFLINE is set"
    from huggingface_hub.constants import ENDPOINT

    try:
        urllib.request.urlopen(urllib.request.Request(ENDPOINT, method="HEAD"), timeout=PROBE_SECONDS).close()
    except urllib.error.HTTPError as error:
        return error.code < 500, f"the Hub answered {error.code}"
    except (OSError, ValueError) as error:
        return False, f"the Hub does not answer ({getattr(error, 'reason', error)})"
    return True, "the Hub answers"


@contextlib.contextmanager
def offline_if_unreachable() -> Iterator[str | None]:
    """Tells the Hub's libraries where the Hub does not answer, and yields the reason: each would ask six times."""
    reachable, reason = hub_answers()
    if reachable:
        yield None
        return
    import datasets
    import huggingface_hub.constants

    before = os.environ.get("HF_HUB_OFFLINE")
    switches = (huggingface_hub.constants, datasets.config)
    kept = [switch.HF_HUB_OFFLINE for switch in switches]
    os.environ["HF_HUB_OFFLINE"] = "1"  # for the processes of cells
    for switch in switches:
        switch.HF_HUB_OFFLINE = True
    try:
        yield reason
    finally:
        for switch, value in zip(switches, kept, strict=True):
            switch.HF_HUB_OFFLINE = value
        if before is None:
            del os.environ["HF_HUB_OFFLINE"]
        else:
            os.environ["HF_HUB_OFFLINE"] = before


class Metrics:
    """The metrics of one task.

    Args:
        names: any of `accuracy`, `f1` (binary, class 1), `macro_f1`, `matthews_correlation`, `pearson`, `spearmanr`,
            and `entity_f1` (exact spans of BIO tags, micro-averaged; with `entity_precision` and `entity_recall`).
        backend: "auto", "evaluate" or "sklearn". "evaluate" loads and runs the metric scripts of the Hub.
    """

    def __init__(self, names: Sequence[str], backend: str = "auto", glue_task: str | None = None) -> None:
        if backend not in ("auto", "evaluate", "sklearn"):
            raise ValueError(f"backend must be 'auto', 'evaluate' or 'sklearn', got {backend!r}")
        unknown = [name for name in names if name not in _LOCAL]
        if unknown:
            raise ValueError(f"unknown metric {unknown[0]!r}: choose from {', '.join(_LOCAL)}")
        self.names, self._modules = tuple(names), {}
        reachable, reason = (False, "asked for") if backend == "sklearn" else hub_answers()
        if backend == "evaluate" and not reachable:
            raise RuntimeError(f"backend='evaluate' needs the Hub, and {reason}: use backend='sklearn'")
        if reachable:
            self._load_from_hub(glue_task)
        self.backend = "evaluate" if self._modules else "sklearn"
        library = "evaluate" if self._modules else "scikit-learn and SciPy"
        self.reason = f"metrics by {library}: {reason}"

    def _load_from_hub(self, glue_task: str | None) -> None:
        import evaluate

        names = [n for n in self.names if not n.startswith("entity") and n != "macro_f1"]
        if glue_task is not None and names:
            module = evaluate.load("glue", glue_task)
            self._modules = dict.fromkeys(names, module)
        else:
            hub_name = {"pearson": "pearsonr", "spearmanr": "spearmanr"}
            self._modules = {name: evaluate.load(hub_name.get(name, name)) for name in names}

    def __call__(self, predictions: Sequence, references: Sequence) -> dict[str, float]:
        """`{name: value}`; class metrics take ids (n,), correlations numbers (n,), entity metrics n lists of tags."""
        results: dict[str, float] = {}
        for name in self.names:
            if name in self._modules:
                found = self._modules[name].compute(predictions=predictions, references=references)
                results[name] = float(found.get(name, next(iter(found.values()))))
            else:
                results |= _LOCAL[name](predictions, references)
        return results


def _sklearn(function: str, name: str, **options):
    def compute(predictions, references):
        import sklearn.metrics

        return {name: float(getattr(sklearn.metrics, function)(references, predictions, **options))}

    return compute


def _correlation(function: str, name: str):
    def compute(predictions, references):
        import scipy.stats

        predictions, references = np.asarray(predictions, np.float64), np.asarray(references, np.float64)
        if np.ptp(predictions) == 0 or np.ptp(references) == 0:
            return {name: 0.0}  # undefined for a constant; a collapsed model has learned nothing
        return {name: float(getattr(scipy.stats, function)(predictions, references).statistic)}

    return compute


def entity_spans(tags: Sequence[str]) -> set[tuple[str, int, int]]:
    """Spans `(type, first, last + 1)` of one sentence of BIO tags.

    An I- that continues no span of its type begins one, as conlleval does.
    """
    spans, kind, start = set(), None, 0
    for position, tag in enumerate([*tags, "O"]):
        prefix, _, name = tag.partition("-")
        if kind is not None and (prefix != "I" or name != kind):
            spans.add((kind, start, position))
            kind = None
        if prefix == "B" or (prefix == "I" and kind is None):
            kind, start = name, position
    return spans


def _entity_scores(predictions: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> dict[str, float]:
    correct = found = gold = 0
    for predicted, reference in zip(predictions, references, strict=True):
        predicted_spans, reference_spans = entity_spans(predicted), entity_spans(reference)
        correct += len(predicted_spans & reference_spans)
        found += len(predicted_spans)
        gold += len(reference_spans)
    precision, recall = correct / found if found else 0.0, correct / gold if gold else 0.0
    f1 = 2 * precision * recall / (precision + recall) if correct else 0.0
    return {"entity_f1": f1, "entity_precision": precision, "entity_recall": recall}


_LOCAL = {
    "accuracy": _sklearn("accuracy_score", "accuracy"),
    "f1": _sklearn("f1_score", "f1", zero_division=0),
    "macro_f1": _sklearn("f1_score", "macro_f1", average="macro", zero_division=0),
    "matthews_correlation": _sklearn("matthews_corrcoef", "matthews_correlation"),
    "pearson": _correlation("pearsonr", "pearson"),
    "spearmanr": _correlation("spearmanr", "spearmanr"),
    "entity_f1": _entity_scores,
}
