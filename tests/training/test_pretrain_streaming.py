"""Streamed corpora: as exact as blocks on disk."""

import json
import shutil
from itertools import islice

import datasets
import pytest
import torch
from pretraining_helpers import log_of, tiny_recipe, weights_of, write_corpus

from maelm_hf import DataCollatorForMaeLm
from training import pretrain
from training.blocks import BlockCutter
from training.pretrain import run
from training.recipe import RecipeError, recipe_from_dict
from training.streaming import StreamedSteps
from training.text import prepare_text


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("streaming")
    lines = write_corpus(folder / "corpus.txt").read_text().splitlines()
    source = folder / "parquet"
    source.mkdir()
    for shard in range(3):
        rows = datasets.Dataset.from_dict({"text": lines[shard::3]})
        rows.to_parquet(source / f"train-{shard:05d}-of-00003.parquet")
    return folder


def streamed(folder, name, **changes):
    values = tiny_recipe(folder, name, corpus__streaming=True, **changes)
    values["corpus"]["source"] = str(folder / "parquet")
    return recipe_from_dict(values)


class Interruption(Exception):
    pass


def interrupt_after(monkeypatch, step: int) -> None:
    write = pretrain.RunLog.write

    def write_and_break(self, row):
        write(self, row)
        if self.path.name == "log.jsonl" and row["step"] == step:
            raise Interruption

    monkeypatch.setattr(pretrain.RunLog, "write", write_and_break)


@pytest.fixture(scope="module")
def uninterrupted(folder):
    run(streamed(folder, "whole"))
    return folder / "whole"


class TestStreaming:
    def test_resumes_exactly(self, folder, uninterrupted, monkeypatch):
        rows = log_of(uninterrupted)
        assert rows[-1]["epoch"] >= 1  # both passes are tested
        for step, workers in ((7, 1), (18, 0)):
            with monkeypatch.context() as patch:
                interrupt_after(patch, step)
                with pytest.raises(Interruption):
                    run(streamed(folder, "broken", data__num_workers=workers))
        run(streamed(folder, "broken"))
        assert log_of(folder / "broken") == rows
        expected, got = weights_of(uninterrupted), weights_of(folder / "broken")
        assert all(torch.equal(expected[name], got[name]) for name in expected)

    def steps(self, folder, batch_size=8, **process):
        recipe = streamed(folder, "steps", data__batch_size=batch_size)
        text = prepare_text(recipe, say=lambda _: None)
        settings = {"rank": 0, "world_size": 1, "micro_batch_tokens": 128} | process
        collator = DataCollatorForMaeLm(text.tokenizer, seed=3)
        return recipe, text, StreamedSteps(recipe, text.corpora[0].documents, text.tokenizer, collator, **settings)

    def test_every_block_once_a_pass_in_order(self, folder):
        recipe, text, data = self.steps(folder)
        cutter = BlockCutter(text.tokenizer, recipe.data.max_length, recipe.corpus.held_out_share, held_out=False)
        expected = [
            block for row in text.corpora[0].documents for block in cutter({"text": [row["text"]]})["input_ids"]
        ]
        blocks = [block for block, _ in islice(data._blocks(data.start), 2 * len(expected))]
        assert blocks == expected * 2

    @pytest.mark.parametrize("world_size", [2, 3])
    def test_processes_read_disjoint_shares(self, folder, world_size):
        *_, whole = self.steps(folder)
        one_pass = [block for block, cursor in islice(whole._blocks(whole.start), 200) if cursor.epoch == 0]
        shares = []
        for rank in range(world_size):
            *_, data = self.steps(folder, rank=rank, world_size=world_size, batch_size=2 * world_size)
            shares += [block for block, cursor in islice(data._blocks(data.start), 200) if cursor.epoch == 0]
        assert sorted(map(tuple, shares)) == sorted(map(tuple, one_pass))

    def test_masks_differ_from_pass_to_pass(self, folder):
        *_, data = self.steps(folder)
        steps = list(islice(data.steps(data.start, 0, pin=False), 30))
        samples = [sample for step in steps for sample in step.sample_index]
        assert len(set(samples)) == len(samples)

    @pytest.mark.parametrize("world_size", [3, 16])
    def test_a_batch_that_processes_cannot_share_evenly(self, folder, world_size):
        with pytest.raises(RecipeError, match=rf"batch_size 8 .* multiple of the {world_size} processes: set \d+"):
            self.steps(folder, world_size=world_size)

    def test_what_cannot_be_streamed(self, folder):
        with pytest.raises(RecipeError, match="cannot be packed"):
            run(streamed(folder, "packed", data__packing=True))

    def test_changed_local_files_are_refused(self, folder):
        source = folder / "changing"
        shutil.copytree(folder / "parquet", source)
        recipe = streamed(folder, "changing-run", max_steps=5)
        recipe.corpus.source = str(source)
        run(recipe)
        rows = datasets.Dataset.from_dict({"text": ["another text of another corpus"] * 40})
        rows.to_parquet(source / "train-00001-of-00003.parquet")
        with pytest.raises(RecipeError, match=r"the corpus is not the one that .* was begun with"):
            run(recipe)

    def test_a_tokenizer_for_each_text(self, folder):
        """Of two columns and of changed files: the description of the corpus is the same."""
        source = folder / "columns"
        source.mkdir()
        lines = [f"{letter * 3} {number}" for number in range(60) for letter in "ab"]

        def tokenizer(column, lines):
            rows = {"text": lines, "other": [line.upper() for line in lines]}
            datasets.Dataset.from_dict(rows).to_parquet(source / "train.parquet")
            recipe = streamed(folder, "columns-run", corpus__text_column=column)
            recipe.corpus.source = str(source)
            return prepare_text(recipe, say=lambda _: None).tokenizer.get_vocab()

        assert "aaa" in tokenizer("text", lines)
        assert "AAA" in tokenizer("other", lines)
        assert "ccc" in tokenizer("text", [line.replace("a", "c") for line in lines])

    def test_a_stream_that_cannot_be_checked_says_so(self, folder, monkeypatch):
        lines = (folder / "corpus.txt").read_text().splitlines()
        stream = datasets.Dataset.from_dict({"text": lines}).to_iterable_dataset()
        monkeypatch.setattr(datasets, "load_dataset", lambda *arguments, **options: stream)
        recipe, said = streamed(folder, "hub"), []
        recipe.corpus.source = "someone/some-text"
        assert prepare_text(recipe, say=said.append).digests["corpus"] is None
        assert any("not checked" in line for line in said)
        recipe.corpus.source = str(folder / "parquet")
        said.clear()
        prepare_text(recipe, say=said.append)
        assert not any("not checked" in line for line in said)

    def test_other_number_of_processes(self, folder, uninterrupted):
        copied = folder / "two"
        shutil.copytree(uninterrupted, copied)
        state = max((copied / "checkpoints").iterdir())
        values = json.loads((state / "state.json").read_text()) | {"num_processes": 2}
        (state / "state.json").write_text(json.dumps(values))
        manifest = json.loads((state / "manifest.json").read_text())
        del manifest["state.json"]
        (state / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(RecipeError, match="continue with 2, not 1"):
            run(streamed(folder, "two"))
