# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""The text of a run: corpus, tokenizer, and blocks for training and evaluation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from .blocks import Blocks, load_blocks
from .corpus import Corpus, load_corpus
from .recipe import Recipe
from .streaming import held_out_blocks
from .tokenizer import load_tokenizer, tokenizer_digest


@dataclass(frozen=True)
class Text:
    """The text of a run, ready for batches."""

    corpus: Corpus
    tokenizer: PreTrainedTokenizerBase
    training: Blocks | None  # None: streamed
    held_out: Blocks
    digests: dict[str, str | None]


def prepare_text(recipe: Recipe, say: Callable[[str], None]) -> Text:
    """Corpus, tokenizer and blocks, each from the cache where it has been made before."""
    cache = Path(recipe.cache_dir).expanduser()
    cache.mkdir(parents=True, exist_ok=True)
    corpus = load_corpus(recipe.corpus, cache)
    say(f"corpus: {corpus.description}")
    if corpus.digest is None:
        say("corpus: a stream of the Hub is not checked: should its text change, a resumed run would not notice")
    tokenizer = load_tokenizer(recipe, corpus, cache)
    if recipe.corpus.streaming:
        training, held_out = None, held_out_blocks(recipe, corpus.documents, tokenizer)
    else:
        training, held_out = (load_blocks(recipe, corpus, tokenizer, cache, held_out=flag) for flag in (False, True))
    size = "streamed text" if training is None else f"{len(training):,} training blocks"
    say(f"text: {size}, {len(held_out):,} blocks held out, vocabulary of {len(tokenizer):,}")
    digests = {"corpus": corpus.digest, "tokenizer": tokenizer_digest(tokenizer)}
    return Text(corpus, tokenizer, training, held_out, digests)
