# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""A small vocabulary, texts made of it, and small stock models."""

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from maelm_hf._torchvision import make_torchvision_importable

make_torchvision_importable()  # a spawned process imports this module and no conftest

from transformers import BertConfig, BertModel, PreTrainedTokenizerFast  # noqa: E402

WORDS = tuple(f"w{number}" for number in range(60))
SPECIALS = ("[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]")
VOCAB_SIZE = len(SPECIALS) + len(WORDS)


def word_tokenizer(**options) -> PreTrainedTokenizerFast:
    """One id a word; [CLS] before and [SEP] after a text."""
    vocab = {token: number for number, token in enumerate(SPECIALS + WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [("[CLS]", vocab["[CLS]"]), ("[SEP]", vocab["[SEP]"])]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    names = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", **(names | options))


def random_texts(count: int, shortest: int = 4, longest: int = 20, seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, rng.integers(shortest, longest + 1))) for _ in range(count)]


def small_bert(seed: int = 0, **options) -> BertModel:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = BertConfig(vocab_size=VOCAB_SIZE, max_position_embeddings=40, initializer_range=0.3, **(sizes | options))
    return BertModel(config, add_pooling_layer=False)
