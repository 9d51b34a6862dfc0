# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Floating-point operations of pretraining, counted from a configuration.

As `torch.utils.flop_counter` counts: a product of (m, k) and (k, n) matrices takes 2 m k n operations, everything
element-wise (norms, softmax, activations, dropout, the look-up and addition of the relative-position bias) none. The
backward pass multiplies twice for every product of the forward pass, once for each factor.
"""

from __future__ import annotations

from dataclasses import dataclass

from maelm_hf import MaeLmConfig

from .recipe import Recipe

NEWTON_SCHULZ_STEPS = 5  # torch.optim.Muon's default


@dataclass(frozen=True)
class Row:
    """The tokens of a row of a batch, on average: all of them, and those that are hidden and predicted."""

    length: float
    hidden: float

    def seen_by_encoder(self, config: MaeLmConfig) -> float:
        """All tokens but the hidden ones that it does not keep (all of them for MAE-LM, none for plain MLM)."""
        return self.length - (1 - config.encoder_mask_fraction) * self.hidden


def full_row(recipe: Recipe) -> Row:
    """A row filled with one block of ``max_length`` tokens, two of which are special and, by default, never hidden."""
    length = recipe.data.max_length
    return Row(length, recipe.data.mask_ratio * (length if recipe.data.mask_special_tokens else length - 2))


@dataclass(frozen=True)
class Flops:
    """Operations of the forward pass, by part."""

    encoder: float
    decoder: float
    head: float

    @property
    def forward(self) -> float:
        return self.encoder + self.decoder + self.head

    @property
    def training(self) -> float:
        """Forward and backward."""
        return 3 * self.forward

    def executed(self, activation_checkpointing: bool) -> float:
        """``training``, and with activation checkpointing the layers' forward pass once more."""
        return self.training + (self.encoder + self.decoder if activation_checkpointing else 0)


def forward_flops(config: MaeLmConfig, row: Row) -> Flops:
    """Operations of one row's forward pass in training.

    Encoder, L layers over the s tokens it sees:  L (8 s d^2 + 4 s^2 d + 4 s d f).
    Decoder of D layers and width e over all n tokens, its last layer with queries for the h hidden ones alone:
    2 n d e (where e is not d)  +  (D - 1) (8 n e^2 + 4 n^2 e + 4 n e g)  +  4 h e^2 + 4 n e^2 + 4 h n e + 4 h e g.
    Head, for the hidden tokens:  2 h e^2  +  2 h e d (where e is not d)  +  2 h d V.
    d, f: hidden and intermediate size; e, g: the decoder's; V: the vocabulary.
    """
    size, seen = config.hidden_size, row.seen_by_encoder(config)
    encoder = config.num_hidden_layers * layer_flops(seen, size, config.intermediate_size)
    decoder, head_size = 0.0, size
    if config.decoder_num_hidden_layers:
        head_size, inner = config.decoder_hidden_size, config.decoder_intermediate_size
        decoder = (config.decoder_num_hidden_layers - 1) * layer_flops(row.length, head_size, inner)
        decoder += layer_flops(row.length, head_size, inner, queries=row.hidden)
        if head_size != size:
            decoder += 2 * row.length * size * head_size
    head = 2 * row.hidden * (head_size**2 + size * config.vocab_size)
    if head_size != size:
        head += 2 * row.hidden * head_size * size
    return Flops(encoder, decoder, head)


def layer_flops(tokens: float, size: int, inner: int, queries: float | None = None) -> float:
    """One layer's forward pass: keys and values of ``tokens`` tokens, everything else of ``queries`` (default: all).

    Query and output 4 q d^2, key and value 4 t d^2, scores and their product with the values 4 q t d, MLP 4 q d f.
    """
    queries = tokens if queries is None else queries
    return 4 * size * (queries * size + tokens * size + queries * tokens + queries * inner)


def muon_flops(shapes: list[tuple[int, int]]) -> float:
    """One step of Muon: five Newton-Schulz iterations on each matrix X of m by n, m <= n (Jordan et al. 2024).

    An iteration forms A = X X^T (2 m^2 n), A A (2 m^3) and its product with X (2 m^2 n). Every process does it all.
    """
    total = 0.0
    for shape in shapes:
        short, long = sorted(shape)
        total += NEWTON_SCHULZ_STEPS * (4 * short**2 * long + 2 * short**3)
    return total
