# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""SQuAD's scores: exact match and F1 of answers (Rajpurkar and others 2016), the null threshold of 2.0 (2018)."""

from __future__ import annotations

import collections
import re
import string
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from training.squad import Answer, QuestionSplit


def normalise(text: str) -> str:
    """SQuAD's answer form: lower case, no ASCII punctuation, no articles, single spaces."""
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def exact_match(prediction: str, gold: Sequence[str]) -> float:
    """1.0 where the prediction equals a gold answer in SQuAD's form; an unanswerable question has the one answer ""."""
    return float(any(normalise(prediction) == normalise(answer) for answer in _gold(gold)))


def f1(prediction: str, gold: Sequence[str]) -> float:
    """The best token F1 with a gold answer, between 0 and 1. Where one side is empty, 1 if both are, else 0."""
    return max(_token_f1(normalise(prediction).split(), normalise(answer).split()) for answer in _gold(gold))


def _gold(answers: Sequence[str]) -> Sequence[str]:
    return [answer for answer in answers if normalise(answer)] or [
        ""
    ]  # 2.0's scorer: a gold answer of nothing but "the" is none


def _token_f1(predicted: list[str], gold: list[str]) -> float:
    if not predicted or not gold:
        return float(predicted == gold)
    common = sum((collections.Counter(predicted) & collections.Counter(gold)).values())
    return 2 * common / (len(predicted) + len(gold))


def score(split: QuestionSplit, found: Sequence[Answer]) -> dict[str, float]:
    """Exact match and F1 in percent, as SQuAD reports them.

    For 2.0 also by answerable and unanswerable questions, and the best F1 any null threshold would give, with that
    threshold: an upper bound fitted to these very questions, never the headline number.
    """
    exact = np.array([exact_match(a.text, q.answers) for q, a in zip(split, found, strict=True)])
    overlap = np.array([f1(a.text, q.answers) for q, a in zip(split, found, strict=True)])
    results = {"f1": 100 * float(overlap.mean()), "exact_match": 100 * float(exact.mean())}
    if split.may_be_unanswerable:
        has_answer = np.array([bool(question.answers) for question in split])
        for name, kept in (("has_answer", has_answer), ("no_answer", ~has_answer)):
            if kept.any():
                results[f"{name}_f1"] = 100 * float(overlap[kept].mean())
                results[f"{name}_exact_match"] = 100 * float(exact[kept].mean())
        results["best_f1"], results["best_f1_threshold"] = best_threshold(split, found)
    return results


def best_threshold(split: QuestionSplit, found: Sequence[Answer]) -> tuple[float, float]:
    """The highest F1 (percent) over all null thresholds, and a threshold that gives it."""
    gains = [f1(a.best_text, q.answers) - f1("", q.answers) for q, a in zip(split, found, strict=True)]
    odds = np.array([answer.null_odds for answer in found])
    order = np.argsort(odds, kind="stable")
    total = sum(f1("", question.answers) for question in split)
    best, threshold = total, float(odds.min()) - 1.0  # nothing answered
    for place, index in enumerate(order):
        total += gains[index]
        tied = place + 1 < len(order) and odds[order[place + 1]] == odds[index]
        if total > best and not tied:
            best, threshold = total, float(odds[index])
    return 100 * best / len(found), threshold
