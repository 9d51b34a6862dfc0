# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Several sources in one run, each with its share of the tokens, in an order that is a function of (seed, epoch)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from .blocks import Blocks
from .permutation import permuted


class MixedBlocks:
    """The blocks of several sources, drawn by their shares of the tokens; stands where :class:`Blocks` do.

    An epoch draws as many tokens as all sources together hold, and of these the asked share from each source, counted
    in its blocks of mean length and rounded to whole ones. A source that holds less than its share comes several times
    in an epoch; one that holds more comes in part (of which the tokens are those of a random sample), and goes on in
    the next epoch where it stopped. So at the end of every epoch no block of a source has been drawn more than once
    oftener than another of it. Within an epoch the draws of all sources are shuffled together.

    Blocks are numbered through the sources. The second time a block comes in an epoch its number is greater by the
    number of all blocks, the third time by twice that, and so on: masks are drawn by this number, and every time
    others. Nothing that grows with the corpus is held in memory.

    Args:
        parts: the blocks of every source.
        shares: of the tokens, positive; they add up to 1.
        seed: of the order in which a source is gone through.
    """

    def __init__(self, parts: Sequence[Blocks], shares: Sequence[float], seed: int):
        self.parts, self.seed = list(parts), seed
        tokens = sum(part.tokens for part in parts)
        self.counts = [  # blocks an epoch draws
            max(1, round(share * tokens * len(part) / part.tokens)) for part, share in zip(parts, shares, strict=True)
        ]
        self.total = sum(len(part) for part in parts)
        self._first = np.cumsum([0, *(len(part) for part in parts)])[:-1]
        self._ends = np.cumsum(self.counts)
        self.lengths = MixedLengths(self)

    def __len__(self) -> int:
        """Blocks an epoch draws."""
        return int(self._ends[-1])

    def draw(self, slots: np.ndarray, epoch: int) -> np.ndarray:
        """The blocks that the slots of an epoch, integers in range(len(self)), stand for."""
        slots = np.asarray(slots, dtype=np.int64)
        owners = np.searchsorted(self._ends, slots, side="right")
        numbers = np.empty_like(slots)
        for source in np.unique(owners).tolist():
            size, count = len(self.parts[source]), self.counts[source]
            mine = owners == source
            offsets = slots[mine] - (self._ends[source] - count)
            blocks = offsets % size
            if count % size:  # whole passes need no order: the slots come shuffled
                blocks = permuted((offsets + epoch * count) % size, size, seed=self.seed, epoch=0, source=source + 1)
            numbers[mine] = self._first[source] + blocks + offsets // size * self.total
        return numbers

    def source_of(self, numbers: np.ndarray) -> np.ndarray:
        """The source of every block."""
        return np.searchsorted(self._first, np.asarray(numbers) % self.total, side="right") - 1

    def by_source(self, numbers: np.ndarray) -> Iterator[tuple[Blocks, np.ndarray, np.ndarray]]:
        """A source's blocks, where in ``numbers`` they stand, and their indices in the source."""
        owners = self.source_of(numbers)
        for source in np.unique(owners).tolist():
            places = np.flatnonzero(owners == source)
            yield self.parts[source], places, np.asarray(numbers)[places] % self.total - self._first[source]

    def input_ids(self, numbers: np.ndarray) -> list[np.ndarray]:
        rows: list = [None] * len(numbers)
        for part, places, indices in self.by_source(numbers):
            for place, row in zip(places.tolist(), part.input_ids(indices), strict=True):
                rows[place] = row
        return rows


class MixedLengths:
    """The lengths of mixed blocks, looked up by number as in an array."""

    def __init__(self, blocks: MixedBlocks):
        self.blocks = blocks

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, numbers: np.ndarray) -> np.ndarray:
        lengths = np.empty(len(numbers), dtype=np.int32)
        for part, places, indices in self.blocks.by_source(numbers):
            lengths[places] = part.lengths[indices]
        return lengths

    def mean(self) -> float:
        """Of an epoch's draws."""
        pairs = list(zip(self.blocks.parts, self.blocks.counts, strict=True))
        return sum(count * part.tokens / len(part) for part, count in pairs) / len(self)
