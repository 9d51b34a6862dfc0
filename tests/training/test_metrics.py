"""Metrics against their formulas in NumPy, and against `evaluate` where the Hub answers."""

import numpy as np
import pytest

from training.metrics import GLUE_METRIC, Metrics, entity_spans, hub_answers

draw = np.random.default_rng(3)
predicted_ids, gold_ids = draw.integers(0, 2, 200), draw.integers(0, 2, 200)
scores, targets = draw.normal(size=200), draw.integers(0, 11, 200) / 2


def counts():
    pairs = [((predicted_ids == p) & (gold_ids == g)).sum() for p, g in ((1, 1), (1, 0), (0, 1), (0, 0))]
    return [float(n) for n in pairs]


def ranks(values):
    """Average ranks, from the definition: values below, plus half of the equal ones."""
    return np.array([(values < v).sum() + ((values == v).sum() + 1) / 2 for v in values])


def pearson(x, y):
    x, y = x - x.mean(), y - y.mean()
    return (x @ y) / np.sqrt((x @ x) * (y @ y))


def test_class_metrics_follow_their_formulas():
    tp, fp, fn, tn = counts()
    found = Metrics(("accuracy", "f1", "matthews_correlation", "macro_f1"), "sklearn")(predicted_ids, gold_ids)
    f1, other = 2 * tp / (2 * tp + fp + fn), 2 * tn / (2 * tn + fn + fp)
    mcc = (tp * tn - fp * fn) / np.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    expected = {"accuracy": (tp + tn) / 200, "f1": f1, "matthews_correlation": mcc, "macro_f1": (f1 + other) / 2}
    assert found == pytest.approx(expected, abs=1e-9)


def test_correlations_follow_their_formulas_with_ties():
    found = Metrics(("pearson", "spearmanr"), "sklearn")(scores, targets)
    expected = {"pearson": pearson(scores, targets), "spearmanr": pearson(ranks(scores), ranks(targets))}
    assert found == pytest.approx(expected, abs=1e-9)


def test_a_constant_prediction_correlates_with_nothing():
    assert Metrics(("pearson", "spearmanr"), "sklearn")(np.ones(4), np.arange(4)) == {"pearson": 0.0, "spearmanr": 0.0}


@pytest.mark.parametrize(
    ("tags", "spans"),
    [
        (["B-PER", "I-PER", "O", "B-LOC"], {("PER", 0, 2), ("LOC", 3, 4)}),
        (["B-PER", "B-PER"], {("PER", 0, 1), ("PER", 1, 2)}),
        (["I-PER", "I-LOC", "I-LOC"], {("PER", 0, 1), ("LOC", 1, 3)}),
        (["O", "O"], set()),
    ],
)
def test_entity_spans(tags, spans):
    assert entity_spans(tags) == spans


def test_entity_scores_count_exact_spans_over_all_sentences():
    gold = [["B-PER", "I-PER", "O"], ["B-LOC", "O", "B-LOC"]]
    predicted = [["B-PER", "I-PER", "B-LOC"], ["B-LOC", "I-LOC", "O"]]
    # gold 3 spans, predicted 3, one exact: precision 1/3, recall 1/3
    found = Metrics(("entity_f1",), "sklearn")(predicted, gold)
    assert found == pytest.approx({"entity_f1": 1 / 3, "entity_precision": 1 / 3, "entity_recall": 1 / 3})


def test_the_backend_and_its_reason_are_named(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub_answers.cache_clear()
    try:
        metrics = Metrics(("accuracy",))
        assert metrics.backend == "sklearn"
        assert "HF_HUB_OFFLINE" in metrics.reason
        with pytest.raises(RuntimeError, match="backend='sklearn'"):
            Metrics(("accuracy",), "evaluate")
    finally:
        hub_answers.cache_clear()


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="unknown metric 'bleu'"):
        Metrics(("bleu",))


@pytest.mark.parametrize("task", GLUE_METRIC)
def test_both_backends_agree(task):
    if not hub_answers()[0]:
        pytest.skip(f"`evaluate` needs the Hub: {hub_answers()[1]}")
    values = (scores, targets) if task == "stsb" else (predicted_ids, gold_ids)
    offline, online = (Metrics(GLUE_METRIC[task], backend, task)(*values) for backend in ("sklearn", "evaluate"))
    assert offline == pytest.approx(online, abs=1e-9)
