"""Small things the fine-tuning tests share: a word tokenizer, a tiny BERT, and rows that a tiny model can learn."""

import json
import random
from pathlib import Path

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast, set_seed

TEXT = """good fine great warm bad poor cold awful the a film song meal was is very not who what where in of and town
lake john mary paris lived wrote runs eats dog cat barks sleeps big old café naïve über 東京 北 . , ?"""
WORDS = TEXT.split()
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def toy_tokenizer(max_length: int = 64) -> PreTrainedTokenizerFast:
    """BERT's layout over a few whole words; letters stand for what is not in the list."""
    letters = [prefix + letter for letter in "abcdefghijklmnopqrstuvwxyz0123456789" for prefix in ("", "##")]
    vocabulary = {token: number for number, token in enumerate(dict.fromkeys([*SPECIALS, *WORDS, *letters]))}
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
    )
    names = {
        "unk_token": "[UNK]",
        "pad_token": "[PAD]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "mask_token": "[MASK]",
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=max_length,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        **names,
    )


def save_toy_model(folder: Path, seed: int = 0) -> Path:
    """A 2-layer BERT of width 32 with its tokenizer, as `save_pretrained` leaves it."""
    tokenizer = toy_tokenizer()
    set_seed(seed)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        initializer_range=0.2,
        max_position_embeddings=64,
    )
    BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def opinions(count: int, seed: int) -> list[dict]:
    """`{"text", "label"}` rows whose label follows from one word."""
    draw = random.Random(seed)
    rows = []
    for number in range(count):
        label = ("bad", "good")[number % 2]
        word = draw.choice({"good": ["good", "fine", "great", "warm"], "bad": ["bad", "poor", "cold", "awful"]}[label])
        filler = " and the dog sleeps" * draw.randrange(3)
        rows.append({"text": f"the {draw.choice(['film', 'song', 'meal'])} was very {word}{filler} .", "label": label})
    return rows


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    return path
