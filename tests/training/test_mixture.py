"""Mixtures: shares as asked, every document in its turn, and a resume as exact as without one."""

import json
from collections import Counter
from itertools import islice, takewhile

import datasets
import numpy as np
import pytest
import torch
import yaml
from pretraining_helpers import log_of, tiny_recipe, weights_of, write_corpus

from maelm_hf import DataCollatorForMaeLm
from training import pretrain
from training.blocks import Blocks
from training.data import BatchOrder, Cursor, IndexedSteps
from training.evaluation import HeldOut
from training.mixture import MixedBlocks
from training.pretrain import run
from training.recipe import RecipeError, load_recipe, recipe_from_dict
from training.text import prepare_text

SIZES = (2000, 300, 5000)
SHARES = (0.5, 0.3, 0.2)


def synthetic(size: int, source: int) -> Blocks:
    """Blocks of random lengths; token 0 of each tells its source, token 1 its place there."""
    lengths = np.random.default_rng(source).integers(3 + 5 * source, 65, size=size).astype(np.int32)
    rows = datasets.Dataset.from_dict({"input_ids": [[source, place] for place in range(size)]})
    return Blocks(rows.with_format("numpy"), lengths, int(lengths.sum()))


@pytest.fixture(scope="module")
def parts():
    return [synthetic(size, source) for source, size in enumerate(SIZES)]


@pytest.fixture(scope="module")
def mixed(parts):
    return MixedBlocks(parts, SHARES, seed=7)


def recipe_with(**data):
    return recipe_from_dict({"output_dir": "none", "max_steps": 1, "seed": 7, "data": {"max_length": 64} | data})


def blocks_of_epochs(order: BatchOrder, epochs: int) -> list[np.ndarray]:
    found = [[] for _ in range(epochs)]
    for cursor, _, batch in takewhile(lambda plan: plan[0].epoch < epochs, order.batches(Cursor())):
        found[cursor.epoch] += batch
    return [np.concatenate(batches) for batches in found]


class TestShares:
    @pytest.mark.parametrize("data", [{"batch_size": 16}, {"batch_tokens": 900}, {"batch_size": 16, "packing": True}])
    def test_an_epoch_has_the_asked_tokens_of_every_source(self, parts, mixed, data):
        order = BatchOrder(recipe_with(length_window=8, **data), mixed.lengths, mixed)
        everything = sum(part.tokens for part in parts)
        for numbers in blocks_of_epochs(order, 3):
            assert len(np.unique(numbers)) == len(numbers) == len(mixed)
            sources, lengths = mixed.source_of(numbers), mixed.lengths[numbers]
            for source, (part, share) in enumerate(zip(parts, SHARES, strict=True)):
                tokens = lengths[sources == source].sum()
                # Whole passes are exact. What is left is a sample without replacement, of which the sum has this
                # standard deviation; and blocks come whole.
                rest, size = (sources == source).sum() % len(part), len(part)
                deviation = part.lengths.std() * np.sqrt(rest * (1 - rest / size))
                assert abs(tokens - share * everything) <= 5 * deviation + part.lengths.mean() / 2

    def test_any_stretch_of_batches_has_about_the_shares(self, mixed):
        order = BatchOrder(recipe_with(batch_size=16, length_window=8), mixed.lengths, mixed)
        expected = np.array(mixed.counts) / len(mixed)
        for window in range(order.windows):
            blocks = np.concatenate([np.concatenate(batch) for batch in order.window(1, window)])
            got = np.bincount(mixed.source_of(blocks), minlength=3) / len(blocks)
            assert (np.abs(got - expected) < 5 * np.sqrt(expected * (1 - expected) / len(blocks))).all()

    def test_no_block_is_ahead_of_another_of_its_source(self, mixed):
        """After any number of epochs, whatever part of a source an epoch takes."""
        order = BatchOrder(recipe_with(batch_size=64), mixed.lengths, mixed)
        drawn = Counter()
        for numbers in blocks_of_epochs(order, 9):
            drawn.update((numbers % mixed.total).tolist())
            times = np.array([drawn[block] for block in range(mixed.total)])
            for source in range(3):
                of_source = times[mixed.source_of(np.arange(mixed.total)) == source]
                assert of_source.max() - of_source.min() <= 1
        assert times.min() >= 1

    def test_what_an_epoch_takes_of_a_source_is_spread_over_it(self, mixed):
        """Not its beginning: sources are often sorted."""
        (numbers,) = blocks_of_epochs(BatchOrder(recipe_with(batch_size=64), mixed.lengths, mixed), 1)
        places = numbers[mixed.source_of(numbers) == 2] % mixed.total - sum(SIZES[:2])
        assert len(places) < SIZES[2] / 2
        # The mean of a sample without replacement, to 5 standard errors of a sample with it.
        assert abs(places.mean() - SIZES[2] / 2) < 5 * SIZES[2] / np.sqrt(12 * len(places))

    def test_blocks_are_read_from_their_source_in_the_asked_order(self, parts, mixed):
        numbers = np.array([2300, 5, 2299, 2000, 7299, mixed.total + 5, 2 * mixed.total + 2100])
        expected = [(2, 0), (0, 5), (1, 299), (1, 0), (2, 4999), (0, 5), (1, 100)]
        assert [tuple(row.tolist()) for row in mixed.input_ids(numbers)] == expected
        assert mixed.source_of(numbers).tolist() == [source for source, _ in expected]
        assert mixed.lengths[numbers].tolist() == [parts[source].lengths[place] for source, place in expected]

    def test_continues_from_any_cursor(self, mixed):
        order = BatchOrder(recipe_with(batch_size=16, length_window=8), mixed.lengths, mixed)
        batches = list(islice(order.batches(Cursor()), 1100))
        assert batches[-1][0].epoch == 2
        for number in (0, 7, 454, 455, 460, 1099):
            again = BatchOrder(recipe_with(batch_size=16, length_window=8), mixed.lengths, mixed)
            cursor, following, batch = next(again.batches(batches[number][0]))
            assert (cursor, following) == batches[number][:2]
            assert all(map(np.array_equal, batch, batches[number][2]))

    def test_memory_is_that_of_the_draws(self):
        """A hundred million blocks a source: only what is asked for is computed."""
        lengths = np.broadcast_to(np.int32(50), 10**8)
        parts = [Blocks(lengths, lengths, 50 * 10**8) for _ in range(2)]
        mixed = MixedBlocks(parts, (0.9, 0.1), seed=1)
        numbers = mixed.draw(np.arange(0, len(mixed), len(mixed) // 1000), epoch=10**6)
        share = (mixed.source_of(numbers) == 0).mean()
        assert share == pytest.approx(0.9, abs=0.01)
        assert (numbers >= 0).all()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixture")
    write_corpus(folder / "corpus.txt")
    rows = [{"body": f"a record of {number} " + "names and numbers " * (number % 4)} for number in range(50)]
    (folder / "records.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def mixture_recipe(folder, name, sources=None, **changes):
    values = tiny_recipe(folder, name, **changes)
    values["corpus"] = {
        "held_out_share": 0.15,
        "mixture": sources
        or [
            {"source": str(folder / "corpus.txt"), "weight": 3},
            {"source": str(folder / "records.jsonl"), "text_column": "body", "weight": 1.0},
        ],
    }
    return recipe_from_dict(values)


class Interruption(Exception):
    pass


class TestRun:
    def test_resumes_exactly_and_names_its_sources(self, folder, monkeypatch, capsys):
        summary = run(mixture_recipe(folder, "whole"))
        rows = log_of(folder / "whole")
        assert rows[-1]["epoch"] >= 1  # both epochs are tested
        for step, workers in ((4, 0), (17, 2)):
            with monkeypatch.context() as patch:
                write = pretrain.RunLog.write

                def write_and_break(self, row, step=step, write=write):
                    write(self, row)
                    if self.path.name == "log.jsonl" and row["step"] == step:
                        raise Interruption

                patch.setattr(pretrain.RunLog, "write", write_and_break)
                with pytest.raises(Interruption):
                    run(mixture_recipe(folder, "broken", data__num_workers=workers))
        again = run(mixture_recipe(folder, "broken"))
        assert log_of(folder / "broken") == rows
        expected, got = weights_of(folder / "whole"), weights_of(folder / "broken")
        assert all(torch.equal(expected[name], got[name]) for name in expected)

        names = [str(folder / "corpus.txt"), str(folder / "records.jsonl")]
        assert again.sources == summary.sources
        assert list(summary.sources) == names
        assert [summary.sources[name]["share"] for name in names] == [0.75, 0.25]
        for name in names:
            assert summary.sources[name]["tokens"] == sum(row["tokens_by_source"][name] for row in rows)
            assert name in summary.corpus
        assert sum(source["tokens"] for source in summary.sources.values()) == summary.tokens
        # Steps of two epochs, the second one cut: 24 batches of about 8 blocks are a sample of 192.
        assert summary.sources[names[0]]["share_of_tokens"] == pytest.approx(0.75, abs=5 * np.sqrt(0.75 * 0.25 / 192))
        printed = capsys.readouterr()
        assert all(f"mixture: {name}: an epoch draws" in printed.out for name in names)

        last = json.loads((folder / "whole" / "evaluations.jsonl").read_text().splitlines()[-1])
        assert list(last["sources"]) == names
        for key in ("loss", "accuracy"):
            first, second = (last["sources"][name][key] for name in names)
            assert last[key] == pytest.approx(0.75 * first + 0.25 * second)
        assert summary.sources[names[1]]["held_out_loss"] == last["sources"][names[1]]["loss"]

    def test_one_source_alone_is_no_mixture(self, folder):
        run(mixture_recipe(folder, "alone", [{"source": str(folder / "corpus.txt"), "weight": 7}]))
        run(recipe_from_dict(tiny_recipe(folder, "plain")))
        without = [
            {key: value for key, value in row.items() if key != "tokens_by_source"} for row in log_of(folder / "alone")
        ]
        assert without == log_of(folder / "plain")
        evaluations = [(folder / name / "evaluations.jsonl").read_text() for name in ("alone", "plain")]
        assert evaluations[0] == evaluations[1]
        expected, got = weights_of(folder / "plain"), weights_of(folder / "alone")
        assert all(torch.equal(expected[name], got[name]) for name in expected)

    def test_a_block_that_comes_again_in_an_epoch_is_masked_anew(self, folder):
        sources = [
            {"source": str(folder / "corpus.txt"), "weight": 1},
            {"source": str(folder / "records.jsonl"), "text_column": "body", "weight": 9},
        ]
        recipe = mixture_recipe(folder, "repeated", sources)
        text = prepare_text(recipe, say=lambda _: None)
        assert text.training.counts[1] > 2 * len(text.training.parts[1])
        collator = DataCollatorForMaeLm(text.tokenizer, seed=3)
        data = IndexedSteps(recipe, text.training, collator, rank=0, world_size=1, micro_batch_tokens=4096)
        masks = {}
        for step in takewhile(lambda step: step.cursor.epoch == 0, data.steps(Cursor(), 0, pin=False)):
            (batch,) = step.micro_batches
            for ids, labels, attended in zip(
                batch["input_ids"], batch["labels"], batch["attention_mask"].bool(), strict=True
            ):
                block = torch.where(labels == -100, ids, labels)[attended]
                masks.setdefault(tuple(block.tolist()), []).append(tuple((labels != -100)[attended].tolist()))
        several = [found for found in masks.values() if len(found) > 2]
        assert len(several) > 20
        assert np.mean([len(set(found)) > 1 for found in several]) > 0.9

    def test_sources_are_tokenized_once_alone_and_mixed(self, folder):
        """With a tokenizer that is given, so that the source's text alone decides."""
        recipe = mixture_recipe(folder, "cached")
        prepare_text(recipe, say=lambda _: None).tokenizer.save_pretrained(folder / "tokenizer")
        before = {}
        for sources in (
            [{"source": str(folder / "corpus.txt")}],
            [{"source": str(folder / "corpus.txt")}, {"source": str(folder / "records.jsonl"), "text_column": "body"}],
            [{"source": str(folder / "records.jsonl"), "text_column": "body"}],
        ):
            recipe = mixture_recipe(folder, "cached", sources, tokenizer__path=str(folder / "tokenizer"))
            recipe.cache_dir = str(folder / "another-cache")
            prepare_text(recipe, say=lambda _: None)
            files = {path: path.stat().st_mtime_ns for path in (folder / "another-cache").glob("blocks-*/blocks.json")}
            assert before.items() <= files.items()
            before = files
        assert len(before) == 4  # training and held-out blocks of two sources


class TestRefusals:
    def load(self, folder, mixture, *more):
        path = folder / "refused.yaml"
        values = tiny_recipe(folder)
        del values["corpus"]["source"]
        path.write_text(yaml.safe_dump(values))
        return load_recipe(path, ["--mixture", mixture, *more])

    def test_from_the_command_line(self, folder):
        recipe = self.load(folder, "[{source: docstrings, weight: 2}, {source: books.txt}]")
        assert [(source.source, source.weight) for source in recipe.corpus.mixture] == [
            ("docstrings", 2.0),
            ("books.txt", 1.0),
        ]
        recipe.save(folder / "saved.yaml")
        assert load_recipe(folder / "saved.yaml") == recipe

    @pytest.mark.parametrize(
        ("mixture", "more", "words"),
        [
            ("[{source: a.txt, weight: 0}, {source: b.txt}]", (), "weight of a.txt must be positive, got 0"),
            ("[{source: a.txt, weight: -1}]", (), "weight of a.txt must be positive, got -1"),
            ("[{source: a.txt, weight: .inf}]", (), "must be positive, got inf"),
            ("[{source: a.txt, weight: .nan}]", (), "must be positive, got nan"),
            ("[{source: a.txt, weight: much}]", (), "corpus.mixture.0.weight must be a number, got 'much'"),
            ("[{source: a.txt}, {source: b.txt, wieght: 2}]", (), r"corpus.mixture.1.wieght \(did you mean weight"),
            ("[{weight: 2}]", (), "lacks corpus.mixture.0.source"),
            ("a.txt", (), "corpus.mixture must be of type list, got 'a.txt'"),
            ("[a.txt]", (), "corpus.mixture.0 must be a section of keys, got 'a.txt'"),
            ("[{source: a.txt}, {source: a.txt}]", (), "names a.txt twice: name it once, with the sum"),
            ("[{source: a.txt}]", ("--corpus.source", "b.txt"), "corpus.source is for a corpus without mixture"),
            ("[{source: a.txt}]", ("--streaming", "true"), "a stream has none: set corpus.streaming false"),
        ],
    )
    def test_errors_name_the_key(self, folder, mixture, more, words):
        with pytest.raises(RecipeError, match=words):
            self.load(folder, mixture, *more)

    def test_a_source_without_held_out_documents_is_named(self, folder):
        (folder / "short.txt").write_text("one document\n")
        sources = [{"source": str(folder / "corpus.txt")}, {"source": str(folder / "short.txt")}]
        with pytest.raises(
            RecipeError, match=r"there are no \S+ documents .*short.txt.*: change corpus.held_out_share"
        ):
            run(mixture_recipe(folder, "unheld", sources))

    def test_fewer_held_out_blocks_of_a_source_than_processes(self, folder):
        recipe = mixture_recipe(folder, "many", evaluation_blocks=6)
        text = prepare_text(recipe, say=lambda _: None)
        collator = DataCollatorForMaeLm(text.tokenizer, seed=3)
        assert len(HeldOut(recipe, text, collator, rank=0, world_size=3, micro_batch_tokens=128).steps()) == 2
        with pytest.raises(RecipeError, match=r"corpus.txt gives 3 held-out blocks to 4 processes: raise"):
            HeldOut(recipe, text, collator, rank=0, world_size=4, micro_batch_tokens=128)

    def test_other_weights_in_the_same_folder(self, folder):
        run(mixture_recipe(folder, "weights", max_steps=5))
        sources = [
            {"source": str(folder / "corpus.txt"), "weight": 2},
            {"source": str(folder / "records.jsonl"), "text_column": "body", "weight": 1},
        ]
        with pytest.raises(RecipeError, match=r"another recipe: corpus.mixture .*use another output_dir"):
            run(mixture_recipe(folder, "weights", sources, max_steps=5))
