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
from rank_toys import random_texts, small_bert, word_tokenizer

from maelm_hf.probing import RankReport, RepresentationMoments, probe_rank


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

    dist.all_gather = dist.all_gather_object = gather
    torch.manual_seed(0)
    full, half, empty = (RepresentationMoments(12) for _ in range(3))
    index = torch.arange(30)
    full.update(tokens()[rank::2], index=index[rank::2])
    if rank == 0:
        empty.update(tokens())  # the other process sees nothing, and computes all the same
    half.update(tokens()[rank::2], index=index[rank::2])
    numbers = full.compute()
    local = full.tokens
    full.update(tokens()[:3], index=index[:3])  # computing leaves each process with its own sums
    return numbers, empty.compute(), local, full.tokens


def report_rows():
    report = probe_rank(small_bert(), word_tokenizer(), random_texts(50), max_tokens=400, batch_size=4, progress=False)
    return report.rows


def worker(rank):
    return metric_worker(rank), report_rows()


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
    first, second = (metric for metric, _ in of_two_processes)
    alone = RepresentationMoments(12)
    alone.update(tokens())
    expected = alone.compute()
    for numbers, empty, local, after in (first, second):
        assert numbers == pytest.approx(expected, rel=1e-9)
        assert empty == pytest.approx(expected, rel=1e-9)
        assert local == 15 * 7
        assert after == 18 * 7
    assert first[0] == second[0]


def test_report_of_two_processes_is_that_of_one(of_two_processes):
    first, second = (rows for _, rows in of_two_processes)
    rows_agree(first, report_rows())
    rows_agree(second, first)


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
