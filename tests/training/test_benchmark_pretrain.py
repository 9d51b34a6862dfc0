"""The pretraining benchmark: all arms read the same text, and its ratios are what they say."""

import pytest
import torch

from training.benchmark_arms import Arm, Setting, Trainee
from training.benchmark_pretrain import KEPT, STOCK, as_markdown, table


@pytest.fixture
def setting(tmp_path):
    sentences = [
        f"the {number} birds of the {number % 7}th tree sang {'and sang ' * (number % 9)}" for number in range(400)
    ]
    text = tmp_path / "birds.txt"
    text.write_text("\n\n".join(sentences))
    return Setting(
        layers=1,
        hidden_size=64,
        length=32,
        attention_dropout=0.1,
        batch_tokens=256,
        batches=2,
        device="cpu",
        corpus=str(text),
        cache_dir=str(tmp_path / "cache"),
    )


def test_all_models_read_the_same_batches_and_train(setting):
    arms = [Arm("a", "bert"), Arm("b", "modernbert"), Arm("c", "maelm"), Arm("d", "maelm", buckets=8)]
    trainees = [Trainee(arm, setting) for arm in arms]
    for trainee in trainees[1:]:
        for batch, other in zip(trainee.batches, trainees[0].batches, strict=True):
            for name in ("input_ids", "attention_mask", "labels"):
                assert torch.equal(batch.inputs[name], other.inputs[name])
    for trainee in trainees:
        before = next(trainee.model.parameters()).clone()
        assert trainee.step(1) > 0
        assert not torch.equal(before, next(trainee.model.parameters()))
        assert all(batch.tokens == batch.inputs["attention_mask"].sum() for batch in trainee.batches)


def test_layers_of_all_models_have_about_as_many_weights(setting):
    bert, modern, ours = (Trainee(Arm("", name), setting).model for name in ("bert", "modernbert", "maelm"))

    def weights(layer):
        return sum(parameter.numel() for parameter in layer.parameters() if parameter.ndim == 2)

    assert weights(bert.bert.encoder.layer[0]) == weights(ours.encoder.layers[0])
    assert weights(modern.model.layers[0]) == pytest.approx(weights(bert.bert.encoder.layer[0]), rel=0.05)


def test_the_stock_collator_pads_more_and_takes_about_as_many_tokens(setting):
    ours, stock = (Trainee(Arm("", "bert", stock_collator=flag), setting).batches for flag in (False, True))

    def padding(batches):
        return 1 - sum(batch.tokens for batch in batches) / sum(batch.inputs["input_ids"].numel() for batch in batches)

    assert padding(stock) > padding(ours)
    assert stock[0].tokens == pytest.approx(ours[0].tokens, rel=0.3)


def test_the_parts_cover_the_model(setting):
    parts = Trainee(Arm("", "maelm", buckets=8), setting).parts(0)
    assert set(parts) == {"embedding", "encoder layers", "decoder layers", "head and loss", "optimizer"}
    assert min(parts.values()) > 0


def test_speeds_and_ratios(setting):
    arms = (Arm(STOCK, "bert"), Arm(STOCK + KEPT, "bert", keeps_memory=True), Arm("ours", "maelm"))
    facts = [(100, 3e9, 125), (300, 7e9, 375)]  # tokens, operations, positions of the two batches
    started = [("eager", "", facts), ("eager", "", facts), ("sdpa", "", facts)]
    seconds = [[[4.0, 5.0, 9.0], [5.0, 5.0, 5.0]], [[2.0], [3.0]], [[1.0], [1.0]]]  # medians 5 + 5, 5, 2
    rows = table(arms, setting, started, seconds, [{}, {}, {"head and loss": 1.0}], peak=1e10)
    assert [row["tokens/s"] for row in rows] == [40, 80, 200]
    assert rows[2]["against stock BERT"] == 5
    assert rows[2]["against stock BERT" + KEPT] == 2.5
    assert rows[2]["share of peak"] == pytest.approx(0.5)
    assert rows[2]["padding"] == pytest.approx(0.2)
    assert "| ours | sdpa | 200 | 20.0% | 50% | 5.00 | 2.50 |" in as_markdown(rows)
