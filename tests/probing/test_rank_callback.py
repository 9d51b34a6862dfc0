# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""The rank probe inside a Trainer run: it reports, and changes nothing."""

import csv

import pytest
import torch
from attention_models import build, pixels
from rank_toys import VOCAB_SIZE, random_texts, small_bert, word_tokenizer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from maelm_hf.probing import RankProbeCallback, TrainingProbe, probe_attention, probe_rank

TEXTS = random_texts(30, seed=5)


class Tracker(TrainerCallback):
    """What a tracker would receive."""

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append((state.global_step, dict(logs)))


def trained(folder, *, probed, every=2, steps=5, save_steps=500, resume=None):
    set_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    # Dropout draws from the random state in every step: a single draw too many would show.
    model = BertForMaskedLM(BertConfig(vocab_size=VOCAB_SIZE, max_position_embeddings=40, **sizes))
    tokenizer, tracker = word_tokenizer(), Tracker()
    arguments = TrainingArguments(
        folder,
        max_steps=steps,
        save_steps=save_steps,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        seed=1,
    )
    data = [dict(tokenizer(text)) for text in random_texts(40)]
    trainer = Trainer(
        model,
        arguments,
        data_collator=DataCollatorForLanguageModeling(tokenizer),
        train_dataset=data,
        processing_class=tokenizer,
        callbacks=[tracker],
    )
    if probed:
        RankProbeCallback.attach(trainer, TEXTS, every=every, max_tokens=200)
    trainer.train(resume_from_checkpoint=resume)
    return model, tracker


def test_run_with_and_without_it_is_bit_identical(tmp_path):
    plain, _ = trained(tmp_path / "plain", probed=False)
    probed, tracker = trained(tmp_path / "probed", probed=True)
    for (name, one), (_, other) in zip(plain.state_dict().items(), probed.state_dict().items(), strict=True):
        assert torch.equal(one, other), name
    steps = [step for step, logs in tracker.logs if "rank/unmasked/encoder.layer.1" in logs]
    assert steps == [0, 2, 4, 5]


def test_numbers_are_those_of_probe_rank(tmp_path):
    model, tracker = trained(tmp_path / "run", probed=True, every=5)
    report = probe_rank(model, word_tokenizer(), TEXTS, max_tokens=200, progress=False)
    last = next(logs for step, logs in reversed(tracker.logs) if "rank/unmasked/embeddings" in logs)
    expected = {f"rank/{row['population']}/{row['layer']}": row["effective_rank"] for row in report.rows}
    assert {name: last[name] for name in expected} == expected
    with (tmp_path / "run" / "rank_probe.csv").open(encoding="utf-8") as file:
        written = list(csv.DictReader(file))
    assert sorted({int(row["step"]) for row in written}) == [0, 5]
    final = {
        f"rank/{row['population']}/{row['layer']}": int(row["effective_rank"]) for row in written[-len(expected) :]
    }
    assert final == expected
    assert float(written[0]["seconds"]) > 0


def test_csv_continues_where_it_stopped(tmp_path):
    model, _ = trained(tmp_path / "run", probed=False, steps=1)
    path = tmp_path / "rank.csv"
    for step in (1, 2):
        TrainingProbe(word_tokenizer(), TEXTS, max_tokens=100, csv_path=path).measure(model, step)
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [line.split(",")[0] for line in lines].count("step") == 1
    assert {line.split(",")[0] for line in lines[1:]} == {"1", "2"}


def measured_steps(path):
    with path.open(encoding="utf-8") as file:
        rows = [(int(row["step"]), row["layer"], row["population"]) for row in csv.DictReader(file)]
    assert len(set(rows)) == len(rows)  # no step twice
    return sorted({step for step, *_ in rows})


def test_a_run_that_resumes_earlier_drops_the_rows_it_measures_again(tmp_path):
    path = tmp_path / "run" / "rank_probe.csv"
    trained(tmp_path / "run", probed=True, steps=5, save_steps=2)
    assert measured_steps(path) == [0, 2, 4, 5]
    trained(tmp_path / "run", probed=True, steps=6, resume=str(tmp_path / "run" / "checkpoint-2"))
    assert measured_steps(path) == [0, 2, 4, 6]
    trained(tmp_path / "run", probed=True, steps=3)  # begins anew in the same folder
    assert measured_steps(path) == [0, 2, 3]


def test_a_file_that_is_no_rank_csv_is_left_alone(tmp_path):
    path = tmp_path / "rank.csv"
    path.write_text("a,b\n1,2\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"has the columns \['a', 'b'\]"):
        TrainingProbe(word_tokenizer(), TEXTS, csv_path=path).forget_later(0)
    assert path.read_text(encoding="utf-8") == "a,b\n1,2\n"


def test_a_sharded_model_is_refused_with_the_way_out(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        model, vit = fully_shard(small_bert(), mesh=mesh), fully_shard(build("vit"), mesh=mesh)
        for refused in (
            lambda: probe_rank(model, word_tokenizer(), TEXTS, progress=False),
            lambda: TrainingProbe(word_tokenizer(), TEXTS).measure(model, 0),
            lambda: probe_attention(vit, pixels(), progress=False),
        ):
            with pytest.raises(ValueError, match=r"is sharded.*save a checkpoint and probe that folder") as caught:
                refused()
            assert "\n" not in str(caught.value)
    finally:
        torch.distributed.destroy_process_group()


def test_bad_interval_and_missing_tokenizer(tmp_path):
    with pytest.raises(ValueError, match="every=0"):
        RankProbeCallback(TrainingProbe(word_tokenizer(), TEXTS), every=0)
    for options in ({"batch_size": 0}, {"max_tokens": 0}, {"mask_ratio": 1.0}, {"tau": 2.0}):
        ((name, value),) = options.items()
        with pytest.raises(ValueError, match=f"{name}={value}"):
            TrainingProbe(word_tokenizer(), TEXTS, **options)
    model, _ = trained(tmp_path / "run", probed=False, steps=1)
    trainer = Trainer(model, TrainingArguments(tmp_path / "other", report_to=[], use_cpu=True))
    with pytest.raises(ValueError, match="tokenizer is missing"):
        RankProbeCallback.attach(trainer, TEXTS)
