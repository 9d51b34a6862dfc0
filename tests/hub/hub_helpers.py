# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Tiny models and batches that the tests of the Hub share."""

import torch

from maelm_hf import MaeLmConfig, MaeLmForMaskedLM

TEXT = [
    "the encoder never sees the mask token",
    "a shallow decoder predicts every hidden token of the sentence",
    "we publish the weights, the code and the card",
    "rank of the representations, layer by layer",
]
VOCABULARY = 300


def tiny_config(**settings) -> MaeLmConfig:
    defaults = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
        "decoder_num_hidden_layers": 1,
        "mask_token_id": 4,
        # Large enough that a wrong or missing weight shows in the output.
        "initializer_range": 0.2,
    }
    return MaeLmConfig(**defaults | settings)


def tiny_model(model_class=MaeLmForMaskedLM, seed: int = 0, **settings):
    """A model whose every parameter, biases and norms included, is random."""
    torch.manual_seed(seed)
    model = model_class(tiny_config(**settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def padded_batch(seed: int = 0, lengths: tuple[int, ...] = (40, 17, 1)) -> dict[str, torch.Tensor]:
    """Random ids without [MASK] or padding ids, padded on the right with id 1."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, VOCABULARY, (len(lengths), max(lengths)), generator=generator)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return {"input_ids": ids.masked_fill(~mask, 1), "attention_mask": mask.long()}
