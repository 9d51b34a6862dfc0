"""SQuAD: windows, answers and scores against cases worked by hand."""

import itertools
import json

import numpy as np
import pytest
from finetuning_toys import toy_tokenizer
from torchmetrics.text import SQuAD
from transformers import BertConfig, BertForQuestionAnswering, set_seed

from training import squad_metrics
from training.squad import Answer, Question, QuestionSplit, answer_question, answers, encode_questions, load_squad
from training.tabular import DataError


@pytest.fixture(scope="module")
def tokenizer():
    return toy_tokenizer()


def one(context, answer=None, question="where is john ?"):
    found = () if answer is None else (answer,)
    starts = () if answer is None else (context.index(answer),)
    return Question("q", question, context, found, starts)


def text_of(window, question, first, last):
    return question.context[window.spans[first][0] : window.spans[last][1]]


# ---- windows -------------------------------------------------


def test_one_window_holds_the_answer(tokenizer):
    question = one("john lived in the old town .", "old town")
    encoded = encode_questions([question], tokenizer, max_length=32)
    assert len(encoded) == 1
    example, window = encoded[0], encoded.windows[0]
    tokens = tokenizer.convert_ids_to_tokens(example["input_ids"])
    assert " ".join(tokens) == "[CLS] where is john ? [SEP] john lived in the old town . [SEP]"
    assert (example["start_positions"], example["end_positions"]) == (10, 11)
    assert text_of(window, question, 10, 11) == "old town"
    assert window.null_position == 0
    assert [span is None for span in window.spans] == [True] * 6 + [False] * 7 + [True]


def test_windows_overlap_and_cover_the_context(tokenizer):
    context = " ".join(["the dog eats . the cat sleeps ."] * 6)
    encoded = encode_questions([one(context)], tokenizer, max_length=24, overlap=6)
    assert len(encoded) > 2
    covered = [[span for span in window.spans if span] for window in encoded.windows]
    for before, after in itertools.pairwise(covered):
        assert before[-6:] == after[:6]
    every = {span for spans in covered for span in spans}
    words, place = [], 0
    for word in context.split():
        place = context.index(word, place)
        words.append((place, place + len(word)))
        place += len(word)
    assert every == set(words)


def test_an_answer_cut_by_the_edge_is_no_answer_of_that_window(tokenizer):
    context = "the dog eats the cat sleeps the old big town lake mary paris lived wrote runs"
    answer = "big town lake"
    encoded = encode_questions([one(context, answer)], tokenizer, max_length=16, overlap=3)
    room = 16 - 3 - 4  # positions, special tokens, question
    words = context.split()
    first = words.index("big")
    seen_whole = 0
    for number, (example, window) in enumerate(zip(encoded.examples, encoded.windows, strict=True)):
        begin = number * (room - 3)
        held = begin <= first and first + 3 <= min(begin + room, len(words))
        expected = (6 + first - begin, 6 + first + 2 - begin) if held else (0, 0)
        assert (example["start_positions"], example["end_positions"]) == expected
        if held:
            seen_whole += 1
            assert text_of(window, one(context, answer), *expected) == answer
    assert 0 < seen_whole < len(encoded)


def test_offsets_count_characters_not_bytes(tokenizer):
    context = "naïve mary wrote über café 東京 and john lived in 北 ."
    for answer in ("café", "東京", "john", "über café"):
        question = one(context, answer)
        example, window = (lambda e: (e[0], e.windows[0]))(encode_questions([question], tokenizer, 48))
        assert text_of(window, question, example["start_positions"], example["end_positions"]) == answer


def test_a_long_question_leaves_room_for_the_context(tokenizer):
    question = one("john lived in paris .", "paris", question="  " + "who is very old and " * 40 + "?")
    encoded = encode_questions([question], tokenizer, max_length=24)
    assert all(len(example["input_ids"]) <= 24 for example in encoded.examples)
    assert any(example["start_positions"] > 0 for example in encoded.examples)


# ---- answers -------------------------------------------------


def logits_for(encoded, starts, ends, floor=-5.0):
    """(windows, longest) logits: `floor` everywhere but at {(window, position): value}."""
    longest = max(len(window.spans) for window in encoded.windows)
    tables = []
    for wanted in (starts, ends):
        table = np.full((len(encoded), longest), floor)
        for place, value in wanted.items():
            table[place] = value
        tables.append(table)
    return tables


def test_the_best_window_answers(tokenizer):
    context = " ".join(["the dog eats . the cat sleeps ."] * 6)
    split = QuestionSplit("s", [one(context)], may_be_unanswerable=False)
    encoded = encode_questions(split, tokenizer, max_length=24, overlap=6)
    at = 8  # any context token
    starts, ends = logits_for(encoded, {(0, at): 2.0, (2, at): 3.0}, {(0, at + 1): 1.0, (2, at + 2): 1.5})
    found = answers(split, encoded, starts, ends)[0]
    first, last = encoded.windows[2].spans[at], encoded.windows[2].spans[at + 2]
    assert found.text == context[first[0] : last[1]]
    assert found.score == pytest.approx(4.5)
    assert found.null_odds is None


def test_impossible_spans_are_never_proposed(tokenizer):
    split = QuestionSplit("s", [one("john lived in the old town .")], may_be_unanswerable=False)
    encoded = encode_questions(split, tokenizer, 32)
    # The highest logits: the question (2), an end before the start (10, 8), padding behind the window (never read).
    starts, ends = logits_for(
        encoded, {(0, 2): 9.0, (0, 10): 5.0, (0, 6): 1.0}, {(0, 3): 9.0, (0, 8): 5.0, (0, 11): 2.0}
    )
    found = answers(split, encoded, starts, ends)[0]
    assert (found.text, found.score) == ("old town", 7.0)
    short = answers(split, encoded, starts, ends, max_answer_length=1)[0]
    assert len(short.text.split()) == 1


def test_the_n_best_list_is_a_distribution_over_distinct_texts(tokenizer):
    split = QuestionSplit("s", [one("mary and mary .")], may_be_unanswerable=False)
    encoded = encode_questions(split, tokenizer, 32)
    starts, ends = logits_for(encoded, {(0, 6): 2.0, (0, 8): 1.0}, {(0, 6): 2.0, (0, 8): 1.0})
    found = answers(split, encoded, starts, ends)[0]
    texts = [entry["text"] for entry in found.n_best]
    assert texts[0] == "mary"  # of the two places, the better score
    assert found.n_best[0]["score"] == 4.0
    assert len(set(texts)) == len(texts)
    scores = np.array([entry["score"] for entry in found.n_best])
    expected = np.exp(scores) / np.exp(scores).sum()
    assert [entry["probability"] for entry in found.n_best] == pytest.approx(expected)


def test_the_null_threshold(tokenizer):
    context = " ".join(["the dog eats . the cat sleeps ."] * 4)
    split = QuestionSplit("s", [one(context)], may_be_unanswerable=True)
    encoded = encode_questions(split, tokenizer, max_length=24, overlap=6)
    assert len(encoded) >= 2
    # No-answer scores 6 + 1 = 7 and 2 + 1 = 3: the lowest window counts. Best span 2 + 2 = 4: odds 3 - 4 = -1.
    starts, ends = logits_for(encoded, {(0, 0): 6.0, (1, 0): 2.0, (0, 8): 2.0}, {(0, 0): 1.0, (1, 0): 1.0, (0, 8): 2.0})
    for row in range(2, len(encoded)):
        starts[row, 0] = ends[row, 0] = 9.0
    found = answers(split, encoded, starts, ends)[0]
    assert found.null_odds == pytest.approx(-1.0)
    assert found.text == found.best_text != ""
    assert answers(split, encoded, starts, ends, null_threshold=-1.0)[0].text != ""  # odds must exceed it
    strict = answers(split, encoded, starts, ends, null_threshold=-1.5)[0]
    assert strict.text == ""
    assert strict.best_text == found.best_text
    assert "" in [entry["text"] for entry in strict.n_best]


# ---- scores --------------------------------------------------


@pytest.mark.parametrize(
    ("prediction", "gold", "exact", "f1"),
    [
        ("the Old Town!", ["old town"], 1.0, 1.0),
        ("old big town", ["old town"], 0.0, 0.8),  # 2 of 3 and 2 of 2: 2 * 2 / (3 + 2)
        ("town town", ["town"], 0.0, 2 / 3),
        ("x", ["old town", "X."], 1.0, 1.0),
        ("", [], 1.0, 1.0),
        ("x", [], 0.0, 0.0),
        ("", ["x"], 0.0, 0.0),
        ("東京", ["東京"], 1.0, 1.0),
    ],
)
def test_exact_match_and_f1(prediction, gold, exact, f1):
    assert squad_metrics.exact_match(prediction, gold) == exact
    assert squad_metrics.f1(prediction, gold) == pytest.approx(f1)


def test_scores_agree_with_torchmetrics():
    cases = [
        ("the old town", ["old town"]),
        ("a dog, big", ["big dog", "cat"]),
        ("Paris", ["paris", "lake"]),
        ("x y", ["y z w"]),
    ]
    split = QuestionSplit(
        "s", [Question(str(i), "q", "c", tuple(g), (0,) * len(g)) for i, (_, g) in enumerate(cases)], False
    )
    found = squad_metrics.score(split, [Answer(p, 0.0, None, p) for p, _ in cases])
    reference = SQuAD()
    reference.update(
        [{"prediction_text": p, "id": str(i)} for i, (p, _) in enumerate(cases)],
        [{"answers": {"text": g, "answer_start": [0] * len(g)}, "id": str(i)} for i, (_, g) in enumerate(cases)],
    )
    expected = {name: float(value) for name, value in reference.compute().items()}
    assert found == pytest.approx(expected, abs=1e-5)


def test_best_threshold_by_trying_all():
    draw = np.random.default_rng(0)
    questions, found = [], []
    for number in range(30):
        gold = ("old town",) if draw.random() < 0.6 else ()
        questions.append(Question(str(number), "q", "c", gold, (0,) * len(gold)))
        text = draw.choice(["old town", "town", "lake"])
        found.append(Answer(text, 0.0, float(np.round(draw.normal(), 1)), text))
    split = QuestionSplit("s", questions, True)
    best, threshold = squad_metrics.best_threshold(split, found)

    def f1_at(t):
        return 100 * np.mean(
            [
                squad_metrics.f1("" if a.null_odds > t else a.best_text, q.answers)
                for q, a in zip(questions, found, strict=True)
            ]
        )

    tried = [f1_at(t) for t in np.arange(-5, 5, 0.05)]
    assert best == pytest.approx(max(tried))
    assert f1_at(threshold) == pytest.approx(best)


def test_answerable_and_unanswerable_are_told_apart():
    split = QuestionSplit("s", [Question("1", "q", "c", ("town",), (0,)), Question("2", "q", "c")], True)
    found = squad_metrics.score(split, [Answer("", 0.0, 1.0, "town"), Answer("", 0.0, 2.0, "lake")])
    assert (found["f1"], found["has_answer_f1"], found["no_answer_f1"]) == (50.0, 0.0, 100.0)
    assert found["best_f1"] == 100.0
    assert 1.0 <= found["best_f1_threshold"] < 2.0


# ---- reading -------------------------------------------------


def squad_file(path, context="mary lived in paris .", start=14, impossible=False):
    entries = [{"id": "1", "question": "where ?", "answers": [{"text": "paris", "answer_start": start}]}]
    if impossible:
        entries.append({"id": "2", "question": "who ?", "answers": [], "is_impossible": True})
    path.write_text(
        json.dumps({"data": [{"title": "t", "paragraphs": [{"context": context, "qas": entries}]}]}), "utf-8"
    )
    return path


def test_published_files(tmp_path):
    for version, train, dev in (("squad", "train-v1.1", "dev-v1.1"), ("squad_v2", "train-v2.0", "dev-v2.0")):
        for name in (train, dev):
            squad_file(tmp_path / f"{name}.json", impossible=version == "squad_v2")
        data = load_squad(version, tmp_path)
        assert data.splits["train"].questions[0].answers == ("paris",)
        assert len(data.splits["validation"]) == (2 if version == "squad_v2" else 1)


@pytest.mark.parametrize(
    ("version", "changes", "message"),
    [
        ("squad", {"start": 3}, r"bad\.json, row 1 \(id 1\), column 'answers': at 3 the context reads"),
        ("squad", {"context": "", "start": 0}, r"bad\.json, row 1 \(id 1\), column 'context': the text is ''"),
        ("squad", {"impossible": True}, r"bad\.json, row 2 \(id 2\), column 'answers': no answer"),
    ],
)
def test_bad_questions(tmp_path, version, changes, message):
    good, bad = squad_file(tmp_path / "good.json"), squad_file(tmp_path / "bad.json", **changes)
    with pytest.raises(DataError, match=message) as error:
        load_squad(version, files={"train": str(good), "validation": str(bad)})
    assert "\n" not in str(error.value)


def test_answering_one_question(tokenizer):
    set_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=24,
    )  # fmt: skip
    model = BertForQuestionAnswering(config)
    context = " ".join(["mary lived in paris ."] * 10)
    found = answer_question(model, tokenizer, "where ?", context)
    assert found.text
    assert found.text in context
