# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Extractive question answering: SQuAD 1.1 and 2.0, windows, n-best answers, the null threshold, exact match and F1.

A context longer than the model is read in overlapping windows. Every window proposes spans; the best span of all
windows answers the question. In SQuAD 2.0 a question may have no answer: the model says so by the score of its first
token, and the null odds (that score, the lowest of all windows, minus the best span's) are compared with a threshold.
Definitions: Rajpurkar and others 2016 and 2018, and Devlin and others 2019, section 4.3.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from training.encoding import CHUNK, Encoded, PadToLongest
from training.tabular import DataError, TaskData, refuse_unusable

HUB_NAMES = {"squad": "rajpurkar/squad", "squad_v2": "rajpurkar/squad_v2"}
FILE_NAMES = {"squad": "{}-v1.1.json", "squad_v2": "{}-v2.0.json"}
MAX_LENGTH, OVERLAP, MAX_QUESTION, MAX_ANSWER, N_BEST = 384, 128, 64, 30, 20


@dataclass(frozen=True)
class Question:
    """One question.

    `starts` are positions of `answers` in `context`, in characters; no answers means unanswerable (2.0).
    """

    id: str
    question: str
    context: str
    answers: tuple[str, ...] = ()
    starts: tuple[int, ...] = ()


@dataclass
class QuestionSplit:
    """Questions of one split. `labels` is None where none has gold answers and the version demands them."""

    source: str
    questions: list[Question]
    may_be_unanswerable: bool

    def __len__(self) -> int:
        return len(self.questions)

    def __iter__(self) -> Iterator[Question]:
        return iter(self.questions)

    @property
    def labels(self) -> list | None:
        labels = [question.answers for question in self.questions]
        return labels if any(labels) or not labels else None


@dataclass(frozen=True)
class Window:
    """A window's question, the position of its no-answer token, and each token's context span (characters) or None."""

    question: int
    null_position: int
    spans: list[tuple[int, int] | None]


@dataclass
class Answer:
    """The answer ("" = none), its score, the null odds (None for 1.1), the best non-empty text, the n-best list."""

    text: str
    score: float
    null_odds: float | None
    best_text: str
    n_best: list[dict] = field(default_factory=list)


# ---- reading ---------------------------------------------


def load_squad(version: str, data: str | Path | None = None, files: dict[str, str] | None = None) -> TaskData:
    """SQuAD from the Hub, a folder of the published JSON files, saved `datasets`, or own files of that form."""
    if version not in HUB_NAMES:
        raise ValueError(f"version must be 'squad' or 'squad_v2', got {version!r}")
    if files is None and data is not None and not (Path(data) / "dataset_dict.json").is_file():
        pattern = FILE_NAMES[version]
        files = {"train": f"{data}/{pattern.format('train')}", "validation": f"{data}/{pattern.format('dev')}"}
    if files is not None:
        splits = {name: QuestionSplit(str(path), list(_read_json(Path(path))), False) for name, path in files.items()}
    else:
        splits = _from_datasets(version, data)
    for split in splits.values():
        split.may_be_unanswerable = version == "squad_v2"
        _check(split)
    info = {
        "type": HUB_NAMES[version],
        "name": "SQuAD 2.0" if version == "squad_v2" else "SQuAD 1.1",
        "config": "default",
    }
    task = TaskData(version, "squad", splits, ("f1", "exact_match"), dataset=info)
    refuse_unusable(task)
    return task


def _read_json(path: Path) -> Iterator[Question]:
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    try:
        articles = json.loads(path.read_text("utf-8"))["data"]
        for article in articles:
            for paragraph in article["paragraphs"]:
                for qa in paragraph["qas"]:
                    gold = [] if qa.get("is_impossible") else qa.get("answers", [])
                    texts, starts = tuple(a["text"] for a in gold), tuple(a["answer_start"] for a in gold)
                    yield Question(str(qa["id"]), qa["question"], paragraph["context"], texts, starts)
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise DataError(f"{path}: not in SQuAD's JSON form ({type(error).__name__}: {error})") from error


def _from_datasets(version: str, data: str | Path | None) -> dict[str, QuestionSplit]:
    import datasets

    from training.metrics import hub_answers

    source = str(data) if data is not None else HUB_NAMES[version]
    try:
        loaded = datasets.load_from_disk(source) if data is not None else datasets.load_dataset(source)
    except (OSError, ValueError, RuntimeError) as error:
        reachable, reason = hub_answers()
        why = str(error).splitlines()[0] if reachable or data is not None else reason
        raise DataError(f"{source}: cannot be loaded ({why}); pass --data FOLDER with SQuAD's JSON files") from error
    splits = {}
    for name, rows in loaded.items():
        for wanted in ("id", "question", "context", "answers"):
            if wanted not in rows.column_names:
                raise DataError(f"{source} ({name}): no column {wanted!r}; the columns are {rows.column_names}")
        questions = [
            Question(
                r["id"], r["question"], r["context"], tuple(r["answers"]["text"]), tuple(r["answers"]["answer_start"])
            )
            for r in rows
        ]
        splits[name] = QuestionSplit(f"{source} ({name})", questions, False)
    return splits


def _check(split: QuestionSplit) -> None:
    labelled = split.labels is not None
    for number, question in enumerate(split, 1):
        where = f"{split.source}, row {number} (id {question.id})"
        for name in ("question", "context"):
            if not isinstance(getattr(question, name), str) or not getattr(question, name).strip():
                raise DataError(f"{where}, column {name!r}: the text is {getattr(question, name)!r}")
        for text, start in zip(question.answers, question.starts, strict=True):
            found = question.context[start : start + len(text)]
            if found != text:
                raise DataError(
                    f"{where}, column 'answers': at {start} the context reads {found!r}, the answer is {text!r}"
                )
        if labelled and not question.answers and not split.may_be_unanswerable:
            raise DataError(f"{where}, column 'answers': no answer; unanswerable questions need --task squad_v2")


# ---- windows ---------------------------------------------


class Windows(Encoded):
    """Encoded windows, with what leads from their tokens back to the text."""

    def __init__(self, examples: list[dict], windows: list[Window]) -> None:
        super().__init__(examples)
        self.windows = windows

    def longest_first(self) -> tuple["Windows", np.ndarray]:
        order = np.argsort(-self.lengths, kind="stable")
        return Windows([self.examples[i] for i in order], [self.windows[i] for i in order]), order


def encode_questions(
    split: Sequence[Question], tokenizer: PreTrainedTokenizerBase, max_length: int = MAX_LENGTH, overlap: int = OVERLAP
) -> Windows:
    """Question and context in windows of `max_length` tokens; neighbours share `overlap` context tokens.

    A question keeps its first 64 tokens, and at least half a window is left for the context. A window that does not
    hold the whole first answer is labelled with its no-answer token.
    """
    questions = list(split)
    specials = tokenizer.num_special_tokens_to_add(pair=True)
    longest_question = min(MAX_QUESTION, (max_length - specials) // 2)
    examples: list[dict] = []
    windows: list[Window] = []
    for start in range(0, len(questions), CHUNK):
        chunk = questions[start : start + CHUNK]
        asked = _first_tokens([question.question for question in chunk], tokenizer, longest_question)
        lengths = [len(ids) for ids in tokenizer(asked, add_special_tokens=False)["input_ids"]]
        room = max_length - specials - max(lengths)
        batch = tokenizer(
            asked,
            [question.context for question in chunk],
            truncation="only_second",
            max_length=max_length,
            stride=min(overlap, room // 2),
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        inputs = [name for name in batch if name in tokenizer.model_input_names]
        for row, sample in enumerate(batch["overflow_to_sample_mapping"]):
            ids = batch["input_ids"][row]
            parts = batch.sequence_ids(row)
            spans = [
                span if part == 1 else None for span, part in zip(batch["offset_mapping"][row], parts, strict=True)
            ]
            null_position = ids.index(tokenizer.cls_token_id) if tokenizer.cls_token_id in ids else 0
            window = Window(start + sample, null_position, spans)
            first, last = _answer_tokens(window, chunk[sample])
            windows.append(window)
            examples.append(
                {name: batch[name][row] for name in inputs} | {"start_positions": first, "end_positions": last}
            )
    return Windows(examples, windows)


def _first_tokens(texts: list[str], tokenizer: PreTrainedTokenizerBase, count: int) -> list[str]:
    """The texts, each cut behind its `count`-th token.

    Leading spaces go: some tokenizers count them against `only_second`.
    """
    texts = [text.strip() for text in texts]
    batch = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
    return [
        text if len(offsets) <= count else text[: offsets[count - 1][1]]
        for text, offsets in zip(texts, batch["offset_mapping"], strict=True)
    ]


def _answer_tokens(window: Window, question: Question) -> tuple[int, int]:
    if not question.answers:
        return window.null_position, window.null_position
    start, end = question.starts[0], question.starts[0] + len(question.answers[0])
    covering = [i for i, span in enumerate(window.spans) if span is not None and span[0] < end and span[1] > start]
    whole = covering and window.spans[covering[0]][0] <= start and window.spans[covering[-1]][1] >= end
    return (covering[0], covering[-1]) if whole else (window.null_position, window.null_position)


# ---- answers ---------------------------------------------


def answers(
    split: QuestionSplit,
    encoded: Windows,
    start_logits: np.ndarray,
    end_logits: np.ndarray,
    null_threshold: float = 0.0,
    n_best: int = N_BEST,
    max_answer_length: int = MAX_ANSWER,
) -> list[Answer]:
    """One Answer a question, in the order of `split`.

    Args:
        start_logits, end_logits: (windows, longest), in the order of `encoded.windows`; what stands behind a window's
            length is ignored.
        null_threshold: SQuAD 2.0 answers "" where the null odds exceed it.
        n_best: starts and ends looked at in a window, and answers kept.
        max_answer_length: in tokens.
    """
    proposals: list[list[tuple[float, int, int]]] = [[] for _ in split]
    null_scores = np.full(len(split), np.inf)
    for row, window in enumerate(encoded.windows):
        starts, ends = start_logits[row, : len(window.spans)], end_logits[row, : len(window.spans)]
        null_scores[window.question] = min(
            null_scores[window.question], float(starts[window.null_position]) + float(ends[window.null_position])
        )
        proposals[window.question] += _best_spans(window, starts, ends, n_best, max_answer_length)
    found = []
    for question, spans, null_score in zip(split, proposals, null_scores, strict=True):
        found.append(_choose(question, spans, float(null_score), split.may_be_unanswerable, null_threshold, n_best))
    return found


def _best_spans(
    window: Window, starts: np.ndarray, ends: np.ndarray, n_best: int, longest: int
) -> list[tuple[float, int, int]]:
    inside = np.array([span is not None for span in window.spans])
    firsts = np.argsort(-np.where(inside, starts, -np.inf), kind="stable")[: min(n_best, inside.sum())]
    lasts = np.argsort(-np.where(inside, ends, -np.inf), kind="stable")[: min(n_best, inside.sum())]
    return [
        (float(starts[first]) + float(ends[last]), window.spans[first][0], window.spans[last][1])
        for first in firsts
        for last in lasts
        if first <= last < first + longest
    ]


def _choose(
    question: Question,
    spans: list[tuple[float, int, int]],
    null_score: float,
    may_be_null: bool,
    threshold: float,
    n_best: int,
) -> Answer:
    by_text: dict[str, float] = {}  # two windows propose the same text: the better score counts
    for score, start, end in sorted(spans, key=lambda span: -span[0]):
        by_text.setdefault(question.context[start:end], score)
    ranked = sorted(by_text.items(), key=lambda item: -item[1])[:n_best]
    best_text, best_score = ranked[0] if ranked else ("", -np.inf)
    candidates = [*ranked, ("", null_score)] if may_be_null or not ranked else ranked
    scores = np.array([score for _, score in candidates], np.float64)
    weights = np.exp(scores - scores.max())
    listed = [
        {"text": text, "score": float(score), "probability": float(weight)}
        for (text, score), weight in zip(candidates, weights / weights.sum(), strict=True)
    ]
    listed.sort(key=lambda entry: -entry["score"])
    odds = float(null_score - best_score) if may_be_null else None
    empty = not ranked or (may_be_null and odds > threshold)
    return Answer("" if empty else best_text, null_score if empty else best_score, odds, best_text, listed)


def answer_question(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    question: str,
    context: str,
    may_be_unanswerable: bool = False,
) -> Answer:
    """Answers one question; stands in for the question-answering pipeline that transformers 5 dropped."""
    split = QuestionSplit("question", [Question("0", question, context)], may_be_unanswerable)
    max_length = min(MAX_LENGTH, getattr(model.config, "max_position_embeddings", MAX_LENGTH))
    encoded = encode_questions(split, tokenizer, max_length)
    batch = PadToLongest(tokenizer)(encoded.examples)
    inputs = {n: v.to(model.device) for n, v in batch.items() if n not in ("start_positions", "end_positions")}
    model.eval()
    with torch.no_grad():
        output = model(**inputs)
    return answers(split, encoded, output.start_logits.float().cpu().numpy(), output.end_logits.float().cpu().numpy())[
        0
    ]
