# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""The README's Python snippets run as they stand, and the files it names exist."""

import re
from pathlib import Path

import pytest
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

from maelm_hf import MaeLmConfig, MaeLmForMaskedLM

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A folder with what `make demo` leaves, of a model that was not trained, and the released checkpoints."""
    folder = tmp_path_factory.mktemp("readme")
    specials = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator([README], vocab_size=600, special_tokens=specials, show_progress=False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=trained._tokenizer,
        **dict(zip(["bos_token", "pad_token", "eos_token", "unk_token", "mask_token"], specials, strict=True)),
    )
    config = MaeLmConfig(
        vocab_size=len(tokenizer),
        mask_token_id=tokenizer.mask_token_id,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=128,
        decoder_num_hidden_layers=1,
        relative_position_buckets=0,
    )
    final = folder / "runs/demo/mae-lm/final"
    MaeLmForMaskedLM(config).save_pretrained(final)
    tokenizer.save_pretrained(final)
    (folder / "model_cards").symlink_to(ROOT / "model_cards")
    return folder


@pytest.mark.parametrize("snippet", SNIPPETS, ids=[snippet.strip().splitlines()[-1][:40] for snippet in SNIPPETS])
def test_snippet_runs(snippet, checkpoint, monkeypatch):
    monkeypatch.chdir(checkpoint)
    exec(compile(snippet, "README.md", "exec"), {"__name__": "__readme__"})


def test_named_files_exist():
    images = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", README)
    paths = re.findall(r"`((?:maelm_hf|training|model_cards|results|tests)/[\w./-]*)`", README)
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if not link.startswith("http")]
    assert images
    for path in images + paths + links:
        assert (ROOT / path).exists(), path
