# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Numbers read off a spectrum. ``singular_values`` are (..., dim), largest first; the results are (...), plain numbers
where there is one spectrum. A spectrum of zeros has rank 0 and no shape: the other numbers are NaN.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

# Shares are compared with tau up to rounding: 9 of 10 equal values hold a share of 0.9, whatever a running sum says.
_ROUNDING = 1e-12


def effective_rank(singular_values: Tensor, tau: float = 0.9, power: float = 1) -> int | Tensor:
    """The smallest k whose k largest ``singular_values ** power`` hold a share ``tau`` of their sum.

    Meng et al., "Representation Deficiency in Masked Language Modeling" (ICLR 2024), at ``tau=0.9``; power 1 and 2
    (energy) are both in use.

    Raises:
        ValueError: ``tau`` outside (0, 1], ``power`` not positive, or values that are no spectrum.
    """
    shares = _cumulative_shares(singular_values, tau, power)
    ranks = (shares < tau - _ROUNDING).sum(-1) + 1
    return _plain(torch.where(shares[..., -1].isnan(), 0, ranks))


def interpolated_effective_rank(singular_values: Tensor, tau: float = 0.9, power: float = 1) -> float | Tensor:
    """:func:`effective_rank` without its steps: the running share is joined by straight lines, so that
    ``rank - 1 < interpolated <= rank``. Intervals are made on it, since resampling a step function says nothing.
    """
    shares = _cumulative_shares(singular_values, tau, power)
    below = (shares < tau - _ROUNDING).sum(-1, keepdim=True).clamp(max=shares.shape[-1] - 1)
    padded = torch.nn.functional.pad(shares, (1, 0))
    start, end = padded.gather(-1, below), padded.gather(-1, below + 1)
    return _plain((below + (tau - start) / (end - start)).squeeze(-1))


def entropy_effective_rank(singular_values: Tensor) -> float | Tensor:
    """exp of the entropy (nats) of ``singular_values / sum``: Roy & Vetterli, "The effective rank" (EUSIPCO 2007)."""
    values = _checked(singular_values)
    shares = values / values.sum(-1, keepdim=True)
    return _plain(torch.exp(torch.special.entr(shares).sum(-1)))


def rankme(singular_values: Tensor, eps: float = 1e-7) -> float | Tensor:
    """RankMe: the entropy effective rank of shares to which ``eps`` was added, renormalised, of the *raw* spectrum.

    Garrido et al., "RankMe" (ICML 2023), equation 1.
    """
    values = _checked(singular_values)
    shares = values / values.sum(-1, keepdim=True) + eps
    return _plain(torch.exp(torch.special.entr(shares / shares.sum(-1, keepdim=True)).sum(-1)))


def stable_rank(singular_values: Tensor) -> float | Tensor:
    """Squared Frobenius norm over squared spectral norm. A mean offset drives it to 1; on the centred spectrum it is
    NESum (He & Ozay, "Exploring the gap between collapsed and whitened features", ICML 2022).
    """
    energies = _checked(singular_values) ** 2
    return _plain(energies.sum(-1) / energies[..., 0])


def participation_ratio(singular_values: Tensor) -> float | Tensor:
    """(sum of lambda)^2 / sum of lambda^2 with lambda = singular_values^2."""
    energies = _checked(singular_values) ** 2
    return _plain(energies.sum(-1) ** 2 / (energies**2).sum(-1))


def condition_number(singular_values: Tensor) -> float | Tensor:
    """Largest over smallest singular value; infinite for a singular matrix."""
    values = _checked(singular_values)
    return _plain(values[..., 0] / values[..., -1])


def alpha_req_fit_range(dim: int) -> tuple[int, int]:
    """The eigenvalue ranks (first, last; from 1) that :func:`alpha_req` fits: 11 to 100 from 200 dimensions on, as the
    head of a spectrum is no power law; ``dim / 16`` to ``dim / 2`` below.
    """
    return (11, 100) if dim >= 200 else (max(1, dim // 16), max(2, dim // 2))


def alpha_req(singular_values: Tensor, fit_range: tuple[int, int] | None = None) -> float | Tensor:
    """Decay exponent alpha of the eigenvalues, lambda_i ~ i^-alpha: minus the least-squares slope of ln lambda_i over
    ln i for i in ``fit_range`` (first, last). Meant for the *centred* spectrum.

    Agrawal et al., "alpha-ReQ" (NeurIPS 2022). NaN where an eigenvalue in the range is 0.
    """
    values = _checked(singular_values)
    first, last = fit_range or alpha_req_fit_range(values.shape[-1])
    if not 1 <= first < last <= values.shape[-1]:
        raise ValueError(f"fit_range {(first, last)} must lie in 1 ... {values.shape[-1]}, the first below the last")
    x = torch.arange(first, last + 1, dtype=values.dtype, device=values.device).log()
    y = 2 * values[..., first - 1 : last].log()
    x = x - x.mean()
    slope = (x * y).sum(-1) / (x * x).sum()
    return _plain(torch.where(slope.isfinite(), -slope, math.nan))


def _cumulative_shares(singular_values: Tensor, tau: float, power: float) -> Tensor:
    if not 0 < tau <= 1:
        raise ValueError(f"tau={tau!r} must be in (0, 1]: the share of the spectrum to hold")
    if not power > 0:
        raise ValueError(f"power={power!r} must be positive: 1 (singular values) and 2 (energies) are in use")
    values = _checked(singular_values) ** power
    return values.cumsum(-1) / values.sum(-1, keepdim=True)


def _checked(singular_values: Tensor) -> Tensor:
    if not isinstance(singular_values, Tensor):
        singular_values = torch.from_numpy(np.asarray(singular_values, dtype=np.float64))
    if singular_values.ndim == 0 or singular_values.shape[-1] == 0:
        raise ValueError(f"singular_values have shape {tuple(singular_values.shape)}: expected (..., dim), dim >= 1")
    values = singular_values.to(torch.float32 if singular_values.device.type == "mps" else torch.float64)
    if not values.isfinite().all() or (values < 0).any():
        raise ValueError("singular_values must be finite and not negative")
    if (values.diff(dim=-1) > 0).any():
        raise ValueError("singular_values must come largest first: sort them in descending order")
    return values


def _plain(result: Tensor) -> Tensor | int | float:
    return result.item() if result.ndim == 0 else result
