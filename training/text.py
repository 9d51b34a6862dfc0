# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""The text of a run: corpus, tokenizer, and blocks for training and evaluation."""

from __future__ import annotations

import copy
import dataclasses
import errno
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from .blocks import Blocks, load_blocks
from .corpus import Corpus, CorpusError, load_corpus
from .mixture import MixedBlocks
from .recipe import Recipe
from .streaming import held_out_blocks
from .tokenizer import load_tokenizer, tokenizer_digest

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


@dataclass(frozen=True)
class Source:
    """One source of text: its share of the tokens trained on (1 without a mixture) and its held-out blocks."""

    name: str
    share: float
    held_out: Blocks


@dataclass(frozen=True)
class Text:
    """The text of a run, ready for batches.

    Attributes:
        description: of the corpus, one line for people.
        corpora: one, or those of a mixture.
        training: blocks of all sources; None where they are streamed.
        sources: one, or those of a mixture.
        digests: of corpus (None: cannot be checked) and tokenizer.
        tokenizer_as_loaded: the one to save; every call leaves its padding and truncation behind in the other.
    """

    description: str
    corpora: list[Corpus]
    tokenizer: PreTrainedTokenizerBase
    training: Blocks | MixedBlocks | None
    sources: list[Source]
    digests: dict[str, str | None]
    tokenizer_as_loaded: PreTrainedTokenizerBase


def prepare_text(recipe: Recipe, say: Callable[[str], None]) -> Text:
    """Corpora, tokenizer and blocks, each from the cache where it has been made before.

    Raises:
        CorpusError, RecipeError: of the sources; or the cache has no room.
    """
    cache = Path(recipe.cache_dir).expanduser()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        return _prepare(recipe, cache, say)
    except (OSError, ValueError) as error:
        # `datasets` closes its file where a write fails, and then fails by writing the rest.
        causes = [error, error.__context__]
        full = [cause.errno for cause in causes if isinstance(cause, OSError) and cause.errno in _NO_ROOM]
        if not full:
            raise
        raise CorpusError(
            f"the cache {cache} could not be written ({os.strerror(full[0])}): make room, or set cache_dir; what is "
            "finished in it is kept."
        ) from error


def _prepare(recipe: Recipe, cache: Path, say: Callable[[str], None]) -> Text:
    names, shares, corpora = load_corpora(recipe, cache)
    described = [f"{share:.1%} {corpus.description}" for share, corpus in zip(shares, corpora, strict=True)]
    description = "mixture: " + "; ".join(described) if recipe.corpus.mixture else corpora[0].description
    say(f"corpus: {description}")
    digest = corpora[0].digest
    if digest is None:
        say("corpus: a stream of the Hub is not checked: should its text change, a resumed run would not notice")
    if len(corpora) > 1:
        digest = hashlib.sha256(json.dumps([corpus.digest for corpus in corpora]).encode()).hexdigest()

    tokenizer = load_tokenizer(recipe, corpora, shares, cache)
    as_loaded = copy.deepcopy(tokenizer)
    if recipe.corpus.streaming:
        held_out = [held_out_blocks(recipe, corpora[0].documents, tokenizer)]
        training, size = None, "streamed text"
    else:
        parts, held_out = (
            [load_blocks(recipe, corpus, tokenizer, cache, held_out=flag) for corpus in corpora]
            for flag in (False, True)
        )
        training = MixedBlocks(parts, shares, recipe.seed) if recipe.corpus.mixture else parts[0]
        size = f"{len(training):,} training blocks{' an epoch' if recipe.corpus.mixture else ''}"
        if recipe.corpus.mixture:
            for name, part, count in zip(names, parts, training.counts, strict=True):
                say(f"mixture: {name}: an epoch draws {count:,} blocks of its {len(part):,}")
    say(f"text: {size}, {sum(map(len, held_out)):,} blocks held out, vocabulary of {len(tokenizer):,}")
    sources = [Source(*source) for source in zip(names, shares, held_out, strict=True)]
    digests = {"corpus": digest, "tokenizer": tokenizer_digest(tokenizer)}
    return Text(description, corpora, tokenizer, training, sources, digests, as_loaded)


def load_corpora(recipe: Recipe, cache: Path) -> tuple[list[str], list[float], list[Corpus]]:
    """Names, shares of the tokens, and documents of the sources."""
    section = recipe.corpus
    if not section.mixture:
        return [section.source], [1.0], [load_corpus(section, cache)]
    total = sum(source.weight for source in section.mixture)
    corpora = []
    for source in section.mixture:
        of_source = {key: getattr(source, key) for key in ("source", "config", "split", "text_column")}
        corpora.append(load_corpus(dataclasses.replace(section, mixture=[], **of_source), cache))
    return [source.name for source in section.mixture], [source.weight / total for source in section.mixture], corpora
