"""Encoding, batches of like length, and padding."""

import numpy as np
import pytest
import torch
from finetuning_toys import toy_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from training.encoding import Encoded, LengthGroupedBatches, PadToLongest, encode_texts, encode_words
from training.tabular import Split

LENGTHS = np.random.default_rng(0).integers(3, 60, 1003)


def order(seed, epoch, batch=16):
    sampler = LengthGroupedBatches(LENGTHS, batch, seed)
    sampler.set_epoch(epoch)
    return list(sampler)


def test_every_example_once_an_epoch():
    for epoch in range(3):
        assert sorted(order(7, epoch)) == list(range(len(LENGTHS)))


def test_order_is_a_function_of_seed_and_epoch():
    assert order(7, 1) == order(7, 1)
    assert order(7, 1) != order(7, 2)
    assert order(7, 1) != order(8, 1)
    sampler = LengthGroupedBatches(LENGTHS, 16, 7)
    assert [list(sampler), list(sampler)] == [order(7, 0), order(7, 1)]


def padded(indices, batch=16):
    lengths = LENGTHS[indices]
    return sum(len(part) * part.max() for part in np.split(lengths, range(batch, len(lengths), batch)))


def test_batches_hold_like_lengths_in_no_order_of_length():
    grouped, shuffled = order(0, 0), np.random.default_rng(1).permutation(len(LENGTHS))
    assert padded(grouped) < 1.1 * LENGTHS.sum() < 1.5 * LENGTHS.sum() < padded(shuffled)
    means = LENGTHS[grouped][: 16 * 50].reshape(50, 16).mean(1)
    assert abs(np.corrcoef(means, np.arange(50))[0, 1]) < 0.5


def test_padding_matches_the_tokenizer():
    tokenizer = toy_tokenizer()
    texts = ["the dog sleeps", "john lived in the old town and mary wrote"]
    encoded = encode_texts(Split("s", texts=texts, labels=[1, 0]), tokenizer, 32)
    batch = PadToLongest(tokenizer)(encoded.examples)
    reference = tokenizer(texts, padding="longest", return_tensors="pt")
    for name, values in reference.items():
        assert torch.equal(batch[name], values)
    assert batch["labels"].tolist() == [1, 0]
    assert PadToLongest(tokenizer, multiple=8)(encoded.examples)["input_ids"].shape == (2, 16)


def test_a_tokenizer_without_padding_is_refused():
    tokenizer = toy_tokenizer()
    tokenizer.pad_token = None
    with pytest.raises(ValueError, match="no pad token"):
        PadToLongest(tokenizer)


def test_longest_first_leads_back():
    encoded = Encoded([{"input_ids": [0] * n} for n in (3, 9, 5)])
    by_length, positions = encoded.longest_first()
    assert by_length.lengths.tolist() == [9, 5, 3]
    assert positions.tolist() == [1, 2, 0]


@pytest.mark.parametrize("prefix", [False, True])
def test_words_of_a_list_are_those_of_running_text(prefix):
    """A byte-level BPE, as RoBERTa's: trained on text, where all words but the first carry a space."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    backend.train_from_iterator(["the cat sat on the mat"] * 9, trainers.BpeTrainer(vocab_size=400))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>")
    words = ["the", "cat", "sat", "on", "the", "mat"]
    split = Split("toy", words=[words, ["cat"]], labels=[[0, 1, 2, 3, 4, 5], [1]])
    encoded = encode_words(split, tokenizer, 64)
    assert encoded[0]["input_ids"] == tokenizer(" ".join(words))["input_ids"]
    assert [label for label in encoded[0]["labels"] if label != -100] == [0, 1, 2, 3, 4, 5]
    assert encoded[1]["input_ids"] == tokenizer("cat")["input_ids"]


def test_every_word_is_tagged_once_across_windows():
    tokenizer = toy_tokenizer()
    words = ["mary", "zzzz", "wrote", "qqq", "and", "john", "xyxyxyx", "sleeps", "in", "paris"]
    tags = list(range(len(words)))
    encoded = encode_words(Split("s", words=[words, ["the"]], labels=[tags, [42]]), tokenizer, 10)
    assert len(encoded) > 2
    kept = [label for example in encoded.examples for label in example["labels"] if label >= 0]
    assert kept == [*tags, 42]
    first = tokenizer.convert_ids_to_tokens(encoded[0]["input_ids"])
    assert first[:6] == ["[CLS]", "mary", "z", "##z", "##z", "##z"]
    assert encoded[0]["labels"][:6] == [-100, 0, 1, -100, -100, -100]
