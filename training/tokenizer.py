# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of a run: an existing one, or a byte-level BPE trained on the corpus."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import datasets
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from .corpus import Corpus, is_held_out
from .recipe import Recipe, RecipeError

# RoBERTa's, in RoBERTa's order: ids 0 to 4.
SPECIAL_TOKENS = {
    "bos": AddedToken("<s>", normalized=False, special=True),
    "pad": AddedToken("<pad>", normalized=False, special=True),
    "eos": AddedToken("</s>", normalized=False, special=True),
    "unk": AddedToken("<unk>", normalized=False, special=True),
    # With the space before it, as the tokens it stands for: "the <mask>" is ["the", "<mask>"].
    "mask": AddedToken("<mask>", normalized=False, special=True, lstrip=True),
}
_BATCH = 1000  # documents handed to the trainer at once


def load_tokenizer(
    recipe: Recipe, corpora: Sequence[Corpus], shares: Sequence[float], cache_dir: Path
) -> PreTrainedTokenizerBase:
    """The tokenizer the recipe names, or one trained on the training documents (through the cache).

    ``shares`` of its text are taken from the corpora, or all of one that has less.

    Raises:
        RecipeError: there is no such tokenizer, or it has no [MASK] or no padding token.
    """
    section = recipe.tokenizer
    if section.path is not None:
        try:
            tokenizer = AutoTokenizer.from_pretrained(section.path, trust_remote_code=recipe.trust_remote_code)
        except (OSError, ValueError) as error:
            raise RecipeError(
                f"tokenizer.path {section.path!r} is neither a tokenizer's folder nor its Hub name: "
                f"{' '.join(str(error).split())}"
            ) from None
        if tokenizer.mask_token is None and section.add_mask_token:
            tokenizer.add_special_tokens({"mask_token": "[MASK]"})
        if tokenizer.mask_token is None:
            raise RecipeError(
                f"tokenizer.path {section.path}: it has no mask_token; --tokenizer.add_mask_token true adds [MASK]."
            )
        if tokenizer.pad_token is None:
            raise RecipeError(f"tokenizer.path {section.path}: it has no pad_token; add one and save it again.")
        return tokenizer

    contents = [corpus.digest or [corpus.description, recipe.corpus.text_column] for corpus in corpora]
    key = [
        contents[0] if len(contents) == 1 else [contents, list(shares)],
        recipe.corpus.held_out_share,
        section.vocab_size,
        section.training_bytes,
    ]
    folder = cache_dir / f"tokenizer-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]}"
    if not (folder / "tokenizer.json").is_file():
        texts = [
            _training_texts(corpus.documents, recipe.corpus.held_out_share, math.ceil(share * section.training_bytes))
            for corpus, share in zip(corpora, shares, strict=True)
        ]
        tokenizer = train_tokenizer(chain(*texts), section.vocab_size, recipe.data.max_length)
        unfinished = folder.with_name(f"{folder.name}.{os.getpid()}.unfinished")
        tokenizer.save_pretrained(unfinished)
        if (folder / "tokenizer.json").is_file():  # another run was first with the same one, and may be reading it
            shutil.rmtree(unfinished)
        else:
            shutil.rmtree(folder, ignore_errors=True)  # what is left of one whose files were cleaned away
            os.replace(unfinished, folder)
    return AutoTokenizer.from_pretrained(folder, model_max_length=recipe.data.max_length)


def train_tokenizer(texts: Iterator[list[str]], vocab_size: int, max_length: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE with RoBERTa's special tokens and template ``<s> text </s>``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = list(SPECIAL_TOKENS.values())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    bos, eos = (SPECIAL_TOKENS[role].content for role in ("bos", "eos"))
    tokenizer.post_processor = processors.RobertaProcessing(
        (eos, tokenizer.token_to_id(eos)), (bos, tokenizer.token_to_id(bos)), trim_offsets=True, add_prefix_space=False
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=max_length,
        cls_token=bos,
        sep_token=eos,
        **{f"{role}_token": token for role, token in SPECIAL_TOKENS.items()},
    )


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of what decides how text becomes ids."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    model = json.loads(backend.to_str()) if backend is not None else tokenizer.get_vocab()
    if backend is not None:  # padding and truncation are settings of the last call
        model |= {"padding": None, "truncation": None}
    facts = [model, tokenizer.all_special_tokens]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def special_tokens_around(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """The ids the tokenizer puts before and after a single text."""
    text = "a"
    bare, full = (tokenizer(text, add_special_tokens=flag)["input_ids"] for flag in (False, True))
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return full[:start], full[start + len(bare) :]
    raise RecipeError("the tokenizer changes a text when it adds special tokens: it cannot be used for pretraining.")


def _training_texts(documents, held_out_share: float, training_bytes: int) -> Iterator[list[str]]:
    """Training documents in batches, evenly spread over the corpus, until there are ``training_bytes``.

    A streamed corpus has no size to spread over: its beginning is taken.
    """
    if isinstance(documents, datasets.Dataset):
        stride = max(1, documents.data.nbytes // training_bytes)
        documents = documents.select(range(0, len(documents), stride))
    batch, size = [], 0
    for row in documents:
        if is_held_out(row["text"], held_out_share):
            continue
        batch.append(row["text"])
        size += len(row["text"].encode())
        if size >= training_bytes:
            break
        if len(batch) == _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch
