# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""How sure is a number read off a spectrum? Has it settled, and what is its interval?"""

from __future__ import annotations

import math
from statistics import NormalDist

import torch
from torch import Tensor

SETTLED_TOLERANCE = 0.02
LEVEL = 0.95
_RESAMPLES = 4000
FEWEST_BLOCKS = 4


def is_settled(value: float, half: float, tokens: int, dim: int) -> bool:
    """Whether doubling the tokens moved the number by 2 % or less (an integer by one step or less).

    Finite samples bias a rank low by a share that falls as 1 / tokens, so the last doubling moved it by about as much
    as is still missing. Below two tokens a dimension half of the tokens cannot even span the space: never settled.
    """
    if tokens < 2 * dim or not (math.isfinite(value) and math.isfinite(half)):
        return False
    step = 1 if isinstance(value, int) else 0
    return abs(value - half) <= max(step, SETTLED_TOLERANCE * abs(value))


def pseudo_values(full: float, left_out: Tensor, counts: Tensor) -> Tensor:
    """Jackknife pseudo-values (blocks,) of a number: their mean weighted by ``counts`` is the bias-corrected number.

    The delete-a-group jackknife for groups of unequal size: Busing, Meijer & Van der Leeden, "Delete-m jackknife for
    unequal m" (Statistics and Computing 1999).

    Args:
        full: the number over everything.
        left_out: (blocks,) the number over everything but one block.
        counts: (blocks,) tokens of each block.
    """
    inverse_share = counts.sum() / counts
    return inverse_share * full - (inverse_share - 1) * left_out


def block_bootstrap_interval(pseudo: Tensor, counts: Tensor, seed: int, level: float = LEVEL) -> tuple[float, float]:
    """Bootstrap interval of a number: blocks of sequences are drawn with replacement, their pseudo-values averaged.

    Averaging pseudo-values instead of solving for each draw's eigenvalues makes 4,000 draws cheap and takes out the
    number's bias of order 1 / tokens. So few blocks make a percentile interval too short: the percentiles are moved
    outwards to those of a t interval (the expanded percentile interval of Hesterberg, "What teachers should know about
    the bootstrap", The American Statistician 2015). (NaN, NaN) below four blocks or with an empty one.

    Args:
        pseudo: (blocks,) of :func:`pseudo_values`.
        counts: (blocks,) tokens of each block.
    """
    blocks = len(pseudo)
    if blocks < FEWEST_BLOCKS or (counts == 0).any() or not pseudo.isfinite().all():
        return math.nan, math.nan
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(blocks, (_RESAMPLES, blocks), generator=generator)
    weights = counts[drawn]
    means = (pseudo[drawn] * weights).sum(1) / weights.sum(1)
    expanded = math.sqrt(blocks / (blocks - 1)) * student_t_quantile(0.5 + level / 2, blocks - 1)
    outside = NormalDist().cdf(-expanded)
    low, high = torch.quantile(means, torch.tensor([outside, 1 - outside], dtype=means.dtype)).tolist()
    return low, high


def student_t_quantile(probability: float, degrees: int) -> float:
    """Quantile of Student's t, by bisection of its distribution function (closed form for whole degrees of freedom:
    Abramowitz & Stegun 26.7.3 and 26.7.4).
    """

    def distribution(t: float) -> float:
        angle = math.atan(t / math.sqrt(degrees))
        cosine, odd = math.cos(angle), degrees % 2
        term = total = cosine if odd else 1.0
        for k in range(2 + odd, degrees - 1 + odd, 2):
            term *= cosine**2 * (k - 1) / k
            total += term
        total = 0.0 if degrees == 1 else total * math.sin(angle)
        inside = 2 / math.pi * (angle + total) if odd else total
        return 0.5 + inside / 2

    low, high = -1e6, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if distribution(middle) < probability else (low, middle)
    return (low + high) / 2
