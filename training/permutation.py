# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""A pseudo-random order of any number of items that is never held in memory."""

from __future__ import annotations

import numpy as np

from maelm_hf.masking import uniform_numbers

_FEISTEL_ROUNDS = 6


def permuted(indices: np.ndarray, size: int, *, seed: int, epoch: int, source: int = 0) -> np.ndarray:
    """Where a pseudo-random permutation of range(size) sends the indices.

    A Feistel network over the next power of four, walked again where it leaves the range (Black & Rogaway, "Ciphers
    with arbitrary finite domains", 2002).

    Args:
        indices: (n,) integers in range(size).
        seed, epoch, source: the key of the permutation; non-negative.
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    low = (np.uint64(1) << half) - np.uint64(1)
    numbers = uniform_numbers(_FEISTEL_ROUNDS, seed=seed, epoch=epoch, sample_index=source, document=1)
    keys = (numbers * 2.0**53).astype(np.uint64)

    def network(values: np.ndarray) -> np.ndarray:
        left, right = values >> half, values & low
        for key in keys:
            left, right = right, left ^ (_mixed(right + key) & low)
        return (left << half) | right

    values = network(np.asarray(indices, dtype=np.uint64))
    while (outside := values >= np.uint64(size)).any():
        values[outside] = network(values[outside])
    return values.astype(np.int64)


def _mixed(values: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64 (Steele, Lea & Flood 2014)."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
