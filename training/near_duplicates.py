# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Near-duplicate documents by MinHash and banding (Broder 1997; Leskovec, Rajaraman, Ullman, "Mining of Massive
Datasets", ch. 3).

A document is the set of its 5-word shingles. Under a random hash the smallest value over a set agrees between two
sets with a probability equal to their Jaccard similarity, so the share of agreeing minima among 128 hashes estimates
it. Candidates are found by 16 bands of 8 minima: two documents of similarity s meet in a band with probability 1 - (1
- s^8)^16, .95 at s = .8 and .06 at s = .5.
"""

import hashlib
import re
from collections import defaultdict

import numpy as np

HASHES, BANDS = 128, 16
SHINGLE = 5
THRESHOLD = 0.8
BLOCK = 4096  # shingles hashed at a time: 128 x 4096 x 8 bytes stay in the cache


class NearDuplicates:
    """Takes documents one by one and says of each whether an earlier, kept one is nearly the same.

    Args:
        threshold: estimated Jaccard similarity of word 5-gram sets from which a document counts as a duplicate.
    """

    def __init__(self, threshold: float = THRESHOLD, seed: int = 0) -> None:
        if not 0 < threshold <= 1:
            raise ValueError(f"threshold must be above 0 and at most 1, got {threshold}")
        draw = np.random.default_rng(seed)
        # Multiply-shift hashing: odd multipliers, the high 32 bits of the product kept.
        self._factors = draw.integers(0, 2**63, (HASHES, 1), dtype=np.uint64) * np.uint64(2) + np.uint64(1)
        self._offsets = draw.integers(0, 2**63, (HASHES, 1), dtype=np.uint64)
        self._mix = np.array(
            [0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x27D4EB2F165667C5, 1], np.uint64
        )
        self._words: dict[str, int] = {}
        self._buckets: list[dict[bytes, list[int]]] = [defaultdict(list) for _ in range(BANDS)]
        self._signatures: list[np.ndarray] = []
        self.threshold = threshold

    def signature(self, text: str) -> np.ndarray:
        """The (128) smallest hash values of the text's shingles. A text of fewer than 5 words is one shingle."""
        words = self._words
        ids = np.array([words.get(word) or self._learn(word) for word in re.findall(r"\w+", text.lower())], np.uint64)
        if len(ids) < SHINGLE:
            ids = np.concatenate([ids, np.zeros(SHINGLE - len(ids), np.uint64)])
        count = len(ids) - SHINGLE + 1
        shingles = np.zeros(count, np.uint64)
        for place, factor in enumerate(self._mix):
            shingles += (ids[place : place + count] ^ (shingles >> np.uint64(29))) * factor
        shingles = np.unique(shingles)
        minima = np.full(HASHES, np.iinfo(np.uint32).max, np.uint32)
        for start in range(0, len(shingles), BLOCK):
            hashed = (self._factors * shingles[start : start + BLOCK] + self._offsets) >> np.uint64(
                32
            )  # (hashes, block)
            np.minimum(minima, hashed.min(axis=1).astype(np.uint32), out=minima)
        return minima

    def _learn(self, word: str) -> int:
        value = int.from_bytes(hashlib.blake2b(word.encode("utf-8", "replace"), digest_size=8).digest(), "little") or 1
        self._words[word] = value
        return value

    def seen(self, text: str) -> bool:
        """True where a kept document is nearly the same; otherwise the text is kept."""
        signature = self.signature(text)
        bands = [band.tobytes() for band in signature.reshape(BANDS, -1)]
        candidates = {
            number for bucket, band in zip(self._buckets, bands, strict=True) for number in bucket.get(band, ())
        }
        for number in candidates:
            if (self._signatures[number] == signature).mean() >= self.threshold:
                return True
        for bucket, band in zip(self._buckets, bands, strict=True):
            bucket[band].append(len(self._signatures))
        self._signatures.append(signature)
        return False
