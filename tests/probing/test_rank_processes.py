# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Two real processes give the numbers of one."""

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from attention_models import build, pixels
from rank_toys import random_texts, small_bert, word_tokenizer

from maelm_hf.probing import RankReport, RepresentationMoments, probe_attention, probe_rank

pytestmark = pytest.mark.usefixtures("one_thread")  # as each of the two processes


def tokens():
    return torch.randn(30, 7, 12, generator=torch.Generator().manual_seed(0))


def in_one_process(rank, rendezvous, results):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    try:
        results[rank] = worker(rank)
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def of_two_processes(tmp_path_factory):
    """What the worker returns in each of two processes."""
    rendezvous = tmp_path_factory.mktemp("processes") / "rendezvous"
    with mp.Manager() as manager:
        results = manager.dict()
        context = mp.get_context("spawn")
        processes = [context.Process(target=in_one_process, args=(rank, rendezvous, results)) for rank in range(2)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        assert [process.exitcode for process in processes] == [0, 0]
        return results[0], results[1]


def metric_worker(rank):
    def gather(*_args, **_kwargs):
        raise AssertionError("the matrices of all processes were gathered on every one")

    torch.manual_seed(0)
    full, empty = RepresentationMoments(12), RepresentationMoments(12)
    index = torch.arange(30)
    full.update(tokens()[rank::2], index=index[rank::2])
    if rank == 0:
        empty.update(tokens())  # the other process sees nothing, and computes all the same
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_gather", gather)
        patch.setattr(dist, "all_gather_object", gather)
        numbers, of_empty = full.compute(), empty.compute()
    local = full.tokens
    full.update(tokens()[:3], index=index[:3])  # computing leaves each process with its own sums
    return numbers, of_empty, local, full.tokens


def reports():
    """Of many batches, and of a single one, which leaves the second of two processes with none."""
    return [
        probe_rank(small_bert(), word_tokenizer(), random_texts(50), progress=False, **options)
        for options in ({"max_tokens": 400, "batch_size": 4}, {"max_tokens": 400, "batch_size": 64})
    ]


def padded_batch(lengths):
    ids = torch.randint(5, 60, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()}


def attention_reports():
    """Of images in three batches and in one, and of texts where only the second process meets padding."""
    images = [probe_attention(build("vit"), pixels(5).unbind(0), batch_size=size, progress=False) for size in (2, 8)]
    texts = [padded_batch([7, 7]), padded_batch([9, 4]), padded_batch([5, 5])]
    return [*images, probe_attention(small_bert(), texts, progress=False)]


def worker(rank):
    saved_tokens = lambda report: {key: sums.tokens for key, sums in report.moments().items()}  # noqa: E731
    ranks = [(report.rows, report.notes, saved_tokens(report)) for report in reports()]
    return metric_worker(rank), ranks, [(report.rows, report.notes) for report in attention_reports()]


def rows_agree(rows, expected):
    assert len(rows) == len(expected)
    for row, reference in zip(rows, expected, strict=True):
        assert row.keys() == reference.keys()
        for name, value in reference.items():
            if isinstance(value, str):
                assert row[name] == value
            # A singular direction (LayerNorm leaves one) is rounding, and so is what divides by it.
            elif not name.startswith("condition_number"):
                assert row[name] == pytest.approx(value, rel=1e-6, abs=1e-6, nan_ok=True), name


def test_metric_sums_over_processes_by_all_reduce(of_two_processes):
    first, second = (metric for metric, *_ in of_two_processes)
    alone = RepresentationMoments(12)
    alone.update(tokens())
    expected = alone.compute()
    for numbers, empty, local, after in (first, second):
        assert numbers == pytest.approx(expected, rel=1e-9)
        assert empty == pytest.approx(expected, rel=1e-9)
        assert local == 15 * 7
        assert after == 18 * 7
    assert first[0] == second[0]


def test_report_of_two_processes_is_that_of_one_also_where_one_gets_no_batch(of_two_processes):
    for first, second, alone in zip(*(ranks for _, ranks, _ in of_two_processes), reports(), strict=True):
        for rows, notes, saved_tokens in (first, second):
            rows_agree(rows, alone.rows)
            assert notes == alone.notes
            # What is saved are the sums of all processes, or a merge would count half of the data.
            tokens = {(row["layer"], row["population"]): row["tokens"] for row in alone.rows}
            assert saved_tokens == {key: count for key, count in tokens.items() if key[1] != "masked/all"}


def test_attention_of_two_processes_is_that_of_one(of_two_processes):
    alone = attention_reports()
    for first, second, report in zip(*(attention for *_, attention in of_two_processes), alone, strict=True):
        for rows, notes in (first, second):
            rows_agree(rows, report.rows)
            assert notes == report.notes
    assert "There is no rollout: sequences of a batch differ in length." in alone[2].notes
    assert not any("no rollout" in note for note in alone[0].notes)


def test_streaming_data_under_accelerate_launch(tmp_path):
    model, tokenizer = small_bert(), word_tokenizer()
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    lines = [json.dumps({"text": text}) for text in random_texts(60)]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    options = ["--data", str(tmp_path / "texts.jsonl"), "--max-tokens", "500", "--batch-size", "4", "--device", "cpu"]
    command = ["maelm_hf.cli", "probe", "rank", str(tmp_path / "model"), *options, "--out"]
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "-m"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    for prefix, name in (([sys.executable, "-m"], "one"), (launch, "two")):
        subprocess.run([*prefix, *command, str(tmp_path / name)], env=environment, check=True, timeout=240)
    one, two = RankReport.load(tmp_path / "one"), RankReport.load(tmp_path / "two")
    rows_agree(two.rows, one.rows)
    assert one.rows[0]["tokens"] >= 500
