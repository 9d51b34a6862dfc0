"""Tokens, blocks and the order of batches."""

import tracemalloc
from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from pretraining_helpers import tiny_recipe
from transformers import AutoTokenizer

from maelm_hf import DataCollatorForMaeLm
from training.blocks import BlockCutter, load_blocks
from training.corpus import load_corpus
from training.data import BatchOrder, Cursor, IndexedSteps, StepDataset, evaluation_step
from training.permutation import permuted
from training.recipe import Recipe, RecipeError, recipe_from_dict
from training.tokenizer import load_tokenizer, special_tokens_around, tokenizer_digest, train_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def text(folder):
    recipe = recipe_from_dict(tiny_recipe(folder))
    corpus = load_corpus(recipe.corpus, folder / "cache")
    tokenizer = load_tokenizer(recipe, [corpus], [1.0], folder / "cache")
    blocks = [load_blocks(recipe, corpus, tokenizer, folder / "cache", held_out=flag) for flag in (False, True)]
    return corpus, tokenizer, *blocks


def recipe_with(**data) -> Recipe:
    return recipe_from_dict({"output_dir": "none", "max_steps": 1, "seed": 7, "data": {"max_length": 64} | data})


class TestTokenizer:
    def test_loads_through_auto_with_roberta_specials(self, folder, text):
        tokenizer = text[1]
        tokenizer.save_pretrained(folder / "saved")
        loaded = AutoTokenizer.from_pretrained(folder / "saved")
        assert loaded.convert_tokens_to_ids(["<s>", "<pad>", "</s>", "<unk>", "<mask>"]) == [0, 1, 2, 3, 4]
        assert loaded("a word")["input_ids"] == tokenizer("a word")["input_ids"]
        assert (loaded.bos_token_id, loaded.cls_token_id) == (0, 0)
        assert (loaded.eos_token_id, loaded.sep_token_id) == (2, 2)
        assert tokenizer_digest(loaded) == tokenizer_digest(tokenizer)
        assert special_tokens_around(loaded) == ([0], [2])

    def test_any_text_survives(self, text):
        tokenizer = text[1]
        sample = "naïve façade — 漢字 🙂\ttab\n  spaces"
        ids = tokenizer(sample, add_special_tokens=False)["input_ids"]
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == sample

    def test_one_that_another_run_finished_first_is_left_alone(self, folder, text, tmp_path, monkeypatch):
        recipe, inodes = recipe_from_dict(tiny_recipe(folder)), []

        def train_while_another_run_does(*arguments):
            monkeypatch.undo()
            load_tokenizer(recipe, [text[0]], [1.0], tmp_path)
            inodes.extend(path.stat().st_ino for path in sorted(tmp_path.rglob("*")))
            return train_tokenizer(*arguments)

        monkeypatch.setattr("training.tokenizer.train_tokenizer", train_while_another_run_does)
        tokenizer = load_tokenizer(recipe, [text[0]], [1.0], tmp_path)
        assert tokenizer_digest(tokenizer) == tokenizer_digest(text[1])
        assert inodes == [path.stat().st_ino for path in sorted(tmp_path.rglob("*"))]

    def test_the_mask_takes_the_space_before_it(self, text):
        tokenizer = text[1]
        masked, bare = tokenizer("the <mask> sees")["input_ids"], tokenizer("the sees")["input_ids"]
        assert [token for token in masked if token != tokenizer.mask_token_id] == bare

    def test_digest_differs_by_vocabulary(self):
        words = ["the encoder sees tokens"] * 20
        small, large = (train_tokenizer(iter([words]), size, 32) for size in (265, 275))
        assert tokenizer_digest(small) != tokenizer_digest(large)

    def test_one_without_mask_is_refused(self, folder, text):
        tokenizer = AutoTokenizer.from_pretrained(folder / "saved")
        tokenizer.mask_token = None
        tokenizer.save_pretrained(folder / "no-mask")
        recipe = recipe_from_dict(tiny_recipe(folder, tokenizer__path=str(folder / "no-mask")))
        with pytest.raises(RecipeError, match="mask_token"):
            load_tokenizer(recipe, [text[0]], [1.0], folder / "cache")


class TestBlocks:
    def test_every_document_is_on_one_side_whole_and_cut(self, folder, text):
        corpus, tokenizer, training, held_out = text
        assert len(held_out) > 3
        assert (training.lengths <= 32).all()
        for blocks in (training, held_out):
            rows = blocks.input_ids(np.arange(len(blocks)))
            assert [len(row) for row in rows] == blocks.lengths.tolist()
            assert all(row[0] == 0 and row[-1] == 2 for row in rows)
        # Joining the pieces gives all documents back.
        pieces = [row[1:-1] for blocks in (training, held_out) for row in blocks.input_ids(np.arange(len(blocks)))]
        joined = tokenizer.decode(np.concatenate(pieces).tolist())
        assert Counter(joined) == Counter("".join(row["text"] for row in corpus.documents))

    def test_no_block_crosses_documents(self, text):
        cutter = BlockCutter(text[1], max_length=8, held_out_share=1e-9, held_out=False)
        texts = ["the encoder sees", "a decoder predicts those hidden behind masks and more and more of it"]
        by_document = cutter.cut(texts)
        for document, blocks in zip(texts, by_document, strict=True):
            assert "".join(text[1].decode(block[1:-1]) for block in blocks) == document
        assert cutter({"text": texts})["input_ids"] == by_document[0] + by_document[1]

    def test_text_that_spells_special_tokens_is_text(self, text):
        tokenizer = text[1]
        cutter = BlockCutter(tokenizer, max_length=64, held_out_share=1e-9, held_out=False)
        (block,) = cutter({"text": ["use <mask> and </s> here"]})["input_ids"]
        assert not set(block[1:-1]) & set(tokenizer.all_special_ids)
        assert tokenizer.decode(block[1:-1]) == "use <mask> and </s> here"

    def test_several_processes_make_the_same_blocks(self, folder, text):
        corpus, tokenizer, training, _ = text
        recipe = recipe_from_dict(tiny_recipe(folder, data__preprocessing_workers=2))
        parallel = load_blocks(recipe, corpus, tokenizer, folder / "other-cache", held_out=False)
        assert np.array_equal(parallel.lengths, training.lengths)
        for row, other in zip(*(b.input_ids(np.arange(len(b))) for b in (parallel, training)), strict=True):
            assert np.array_equal(row, other)

    def test_nothing_held_out(self, folder, text):
        recipe = recipe_from_dict(tiny_recipe(folder, corpus__held_out_share=1e-9))
        with pytest.raises(RecipeError, match="no held-out documents"):
            load_blocks(recipe, text[0], text[1], folder / "cache", held_out=True)

    def test_preparing_again_spares_what_another_run_has_mapped(self, folder, text, tmp_path):
        corpus, tokenizer, *_ = text
        recipe = recipe_from_dict(tiny_recipe(folder))
        mapped = load_blocks(recipe, corpus, tokenizer, tmp_path, held_out=False).lengths
        (path,) = tmp_path.glob("*/lengths.npy")
        before, note = path.stat().st_ino, path.with_name("blocks.json")
        note.unlink()  # as if the other run were not through with its preparation
        again = load_blocks(recipe, corpus, tokenizer, tmp_path, held_out=False).lengths
        assert path.stat().st_ino != before
        assert mapped.tolist() == again.tolist()
        assert sorted(file.name for file in path.parent.iterdir()) == ["blocks.arrow", "blocks.json", "lengths.npy"]


class TestPermutation:
    @pytest.mark.parametrize("size", [1, 2, 3, 5, 64, 1000, 4097])
    def test_is_one(self, size):
        for epoch in range(3):
            values = permuted(np.arange(size), size, seed=1, epoch=epoch)
            assert sorted(values.tolist()) == list(range(size))

    def test_needs_no_more_than_what_is_asked(self):
        some = permuted(np.array([0, 17, 10**11]), 10**12, seed=1, epoch=0)
        assert ((some >= 0) & (some < 10**12)).all()
        assert permuted(np.array([17]), 10**12, seed=1, epoch=0)[0] == some[1]

    def test_looks_random(self):
        size = 3000
        values = permuted(np.arange(size), size, seed=1, epoch=0)
        assert not np.array_equal(values, permuted(np.arange(size), size, seed=2, epoch=0))
        assert not np.array_equal(values, permuted(np.arange(size), size, seed=1, epoch=1))
        # Uncorrelated with the order and between neighbours: 5 standard errors of a random permutation.
        assert abs(np.corrcoef(values, np.arange(size))[0, 1]) < 5 / np.sqrt(size)
        assert abs(np.corrcoef(values[1:], values[:-1])[0, 1]) < 5 / np.sqrt(size)
        fixed_points = (values == np.arange(size)).sum()
        assert fixed_points < 8  # Poisson with mean 1


class TestOrder:
    lengths = np.random.default_rng(0).integers(3, 65, size=4003).astype(np.int32)

    @pytest.mark.parametrize("data", [{"batch_size": 16}, {"batch_tokens": 600}])
    def test_every_block_once_an_epoch_in_batches_of_like_lengths(self, data):
        order = BatchOrder(recipe_with(length_window=24, **data), self.lengths)
        epochs: dict[int, list] = {}
        for cursor, _, batch in order.batches(Cursor()):
            if cursor.epoch == 2:
                break
            epochs.setdefault(cursor.epoch, []).append(np.concatenate(batch))
        assert [sorted(np.concatenate(batches)) for batches in epochs.values()] == [list(range(4003))] * 2
        assert not np.array_equal(np.concatenate(epochs[0]), np.concatenate(epochs[1]))
        if "batch_size" in data:
            sizes = [len(batch) for batch in epochs[0]]
            assert Counter(sizes).most_common(1)[0][0] == 16
            assert min(sizes) > 8
        else:
            tokens = [self.lengths[batch].sum() for batch in epochs[0]]
            assert np.median(tokens) == pytest.approx(600, abs=64)
            assert min(tokens) > 300
            assert max(tokens) < 900
        padded = sum(self.lengths[batch].max() * len(batch) for batch in epochs[0])
        assert padded < 1.15 * self.lengths.sum()
        in_order = np.array_split(np.random.default_rng(1).permutation(4003), 250)
        assert padded < 0.7 * sum(self.lengths[batch].max() * len(batch) for batch in in_order)

    def test_continues_from_any_cursor(self):
        order = BatchOrder(recipe_with(batch_size=16, length_window=24), self.lengths)
        batches = list(islice(order.batches(Cursor()), 520))  # into the third epoch
        assert batches[-1][0].epoch == 2
        for number in (0, 5, 239, 240, 249, 250, 251, 400, 519):
            cursor, following, batch = next(order.batches(batches[number][0]))
            assert (cursor, following) == batches[number][:2]
            assert all(map(np.array_equal, batch, batches[number][2]))
            if number + 1 < len(batches):
                assert following == batches[number + 1][0]

    def test_fewer_blocks_than_a_batch(self):
        order = BatchOrder(recipe_with(batch_size=8000), self.lengths)
        (first, _, batch), (second, _, _) = islice(order.batches(Cursor()), 2)
        assert len(batch) == 4003
        assert (first.epoch, second.epoch) == (0, 1)


def test_memory_does_not_grow_with_the_corpus(tmp_path):
    """Peak of the allocations for the same number of batches of a hundred times as many blocks."""
    peaks = []
    for size in (10**6, 10**8):
        # A file of holes: no disk is needed for the lengths of a hundred million blocks.
        lengths = np.lib.format.open_memmap(tmp_path / f"{size}.npy", mode="w+", dtype=np.int32, shape=(size,))
        tracemalloc.start()
        order = BatchOrder(recipe_with(batch_size=128), lengths)
        for _ in islice(order.batches(Cursor(epoch=1, window=order.windows // 2)), 200):
            pass
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0]


class TestSteps:
    def dataset(self, text, **changes) -> StepDataset:
        settings = {"rank": 0, "world_size": 1, "micro_batch_tokens": 4 * 32} | changes
        return StepDataset(text[2], DataCollatorForMaeLm(text[1], seed=3), **settings)

    def order(self, text) -> BatchOrder:
        return BatchOrder(recipe_with(batch_size=8, length_window=3), text[2].lengths)

    def test_workers_and_restarts_change_nothing(self, text):
        recipe = recipe_with(batch_size=8, length_window=3)
        collator = DataCollatorForMaeLm(text[1], seed=3)
        data = IndexedSteps(recipe, text[2], collator, rank=0, world_size=1, micro_batch_tokens=128)

        def steps(workers, start=0, count=12):
            cursors = [cursor for cursor, _, _ in islice(data.order.batches(Cursor()), start + 1)]
            return list(islice(data.steps(cursors[start], workers, pin=False), count))

        expected, in_workers, restarted = steps(0), steps(2), steps(2, start=5, count=7)
        for got, reference in ((in_workers, expected), (restarted, expected[5:])):
            for step, other in zip(got, reference, strict=True):
                assert (step.cursor, step.following) == (other.cursor, other.following)
                assert step.sample_index == other.sample_index
                for batch, same in zip(step.micro_batches, other.micro_batches, strict=True):
                    assert batch.keys() == same.keys()
                    assert all(torch.equal(batch[name], same[name]) for name in batch)

    @pytest.mark.parametrize("world_size", [2, 3, 8])
    def test_processes_share_a_batch_with_the_same_masks(self, text, world_size):
        plan = next(self.order(text).batches(Cursor()))
        whole = rows_of(self.dataset(text)[plan])
        parts = [self.dataset(text, world_size=world_size, rank=rank)[plan] for rank in range(world_size)]
        assert len({len(part.micro_batches) for part in parts}) == 1
        assert sorted(row for part in parts for row in rows_of(part)) == sorted(whole)
        alone = self.dataset(text)[plan]
        assert sum(part.hidden_tokens for part in parts) == alone.hidden_tokens
        assert sum(part.tokens for part in parts) == alone.tokens

    def test_micro_batches_keep_to_the_limit(self, text):
        dataset = self.dataset(text, micro_batch_tokens=64)
        for plan in islice(self.order(text).batches(Cursor()), 10):
            step = dataset[plan]
            assert all(batch["input_ids"].numel() <= 64 + 32 for batch in step.micro_batches)
            assert sum(len(batch["input_ids"]) for batch in step.micro_batches) == len(plan[2])

    def test_more_processes_than_rows(self, text):
        plan = next(self.order(text).batches(Cursor()))
        with pytest.raises(RecipeError, match="100 processes"):
            self.dataset(text, world_size=100)[plan]

    def test_epochs_mask_differently_and_evaluation_always_alike(self, text):
        dataset = self.dataset(text)
        cursor, following, indices = next(self.order(text).batches(Cursor()))
        first, second = (rows_of(dataset.step(cursor, following, indices, epoch)) for epoch in (0, 1))
        assert first != second
        held_out = StepDataset(text[3], dataset.collator, rank=0, world_size=1, micro_batch_tokens=128)
        assert rows_of(evaluation_step(held_out, 5)) == rows_of(evaluation_step(held_out, 5))
        assert len(rows_of(evaluation_step(held_out, 5))) == 5
        assert len(rows_of(evaluation_step(held_out, 10**6))) == len(text[3])


def rows_of(step) -> list[tuple]:
    """Each row's ids and labels without padding."""
    return [
        (tuple(ids[attended].tolist()), tuple(labels[attended].tolist()))
        for batch in step.micro_batches
        for ids, labels, attended in zip(
            batch["input_ids"], batch["labels"], batch["attention_mask"].bool(), strict=True
        )
    ]
