# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Where a probe's inputs come from."""

import json

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from maelm_hf.probing.data import open_data

LINES = ["one two", "three", "four five six"]


def opened(*args):
    data = open_data(*args)
    return data.kind, list(data.items)


def test_text_sources_give_the_same_texts(tmp_path):
    (tmp_path / "a.txt").write_text("one two\n\nthree\n", encoding="utf-8")
    (tmp_path / "b.txt").write_text("four five six", encoding="utf-8")
    rows = [{"text": line, "other": 1} for line in LINES]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (tmp_path / "rows.csv").write_text("text,other\n" + "".join(f"{line},1\n" for line in LINES), encoding="utf-8")
    table = datasets.Dataset.from_list(rows)
    table.save_to_disk(tmp_path / "saved")
    table.to_parquet(tmp_path / "rows.parquet")
    sources = [
        LINES,
        iter(LINES),
        table,
        table.to_iterable_dataset(),
        datasets.DatasetDict(train=table),
        rows,
        tmp_path / "rows.jsonl",
        tmp_path / "rows.csv",
        tmp_path / "rows.parquet",
        tmp_path / "saved",
    ]
    for source in sources:
        assert opened(source) == ("texts", LINES), source
    only_texts = tmp_path / "folder"
    only_texts.mkdir()
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).rename(only_texts / name)
    assert opened(str(only_texts)) == ("texts", LINES)


def test_named_column_and_one_that_is_not_there():
    table = datasets.Dataset.from_list([{"body": line, "title": "t"} for line in LINES])
    assert opened(table, "body") == ("texts", LINES)
    with pytest.raises(ValueError, match=r"no column 'text'.*\['body', 'title'\]"):
        open_data(table, "text")
    with pytest.raises(ValueError, match="a column named text or image"):
        open_data(table)


def test_a_split_has_to_be_chosen():
    table = datasets.Dataset.from_list([{"text": "a"}])
    with pytest.raises(ValueError, match="splits"):
        open_data(datasets.DatasetDict(train=table, test=table))


def test_corrupt_images_are_named_and_skipped(tmp_path):
    for number in range(3):
        Image.new("RGB", (8 + number, 6)).save(tmp_path / f"{number}.png")
    (tmp_path / "1.png").write_bytes(b"no image")
    data = open_data(tmp_path)
    assert data.kind == "images"
    assert [image.size for image in data.items] == [(8, 6), (10, 6)]
    (skipped,) = data.skipped
    assert "1.png" in skipped


def test_images_and_batches_are_told_apart():
    pixels = np.zeros((5, 4, 3), dtype=np.uint8)
    assert opened([Image.fromarray(pixels)])[0] == "images"
    assert opened([pixels])[0] == "images"
    assert opened([torch.zeros(3, 4, 4)])[0] == "images"
    assert opened([torch.zeros(2, 3, 4, 4)])[0] == "batches"
    assert opened([(torch.zeros(2, 7), torch.zeros(2))])[0] == "batches"
    assert opened([{"input_ids": torch.zeros(2, 7, dtype=torch.long)}])[0] == "batches"


def test_folder_without_anything_to_read(tmp_path):
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="holds no image and no text file"):
        open_data(tmp_path)
