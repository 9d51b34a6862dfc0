# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""The accumulator behind the rank probe.

Everything is read off sums over tokens h (dim): their count, sum h, and sum h h^T. Sums add up over batches, processes
and machines, so the result is exact for any amount of data at a memory of O(dim^2).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from ._metric import Metric
from .spectrum import (
    alpha_req,
    alpha_req_fit_range,
    condition_number,
    effective_rank,
    entropy_effective_rank,
    interpolated_effective_rank,
    participation_ratio,
    rankme,
    stable_rank,
)

__all__ = [
    "RepresentationMoments",
    "alpha_req",
    "alpha_req_fit_range",
    "condition_number",
    "effective_rank",
    "entropy_effective_rank",
    "interpolated_effective_rank",
    "participation_ratio",
    "rankme",
    "spectrum_numbers",
    "stable_rank",
]

# sum h h^T is symmetric: only strips of _PANEL rows, from the diagonal on, are computed and kept (58 % at dim 768).
_PANEL = 128
# Token norms are counted in bins of equal ratio (0.7 %) between 2^-32 and 2^32; quantiles are interpolated in a bin.
_NORM_BINS, _NORM_LOG2_RANGE = 6400, 32.0
NORM_QUANTILES = (0.01, 0.25, 0.5, 0.75, 0.99)
TAUS, POWERS = (0.8, 0.9, 0.95, 0.99), (1, 2)


class RepresentationMoments(Metric):
    """Sums over the tokens of one layer and population, from which every rank number is computed.

    The sums are float64 whatever dtype comes in and whatever ``.to(dtype)`` asks for (float32 on mps, which has no
    float64). They are in ``state_dict``. ``compute`` sums them over processes by all-reduce, so every process has to
    call it, also one that saw no token.

    Sequences are spread over ``blocks`` blocks with sums of their own: half of the blocks tell whether a number has
    settled, leaving one out at a time tells its sampling error. The sums over everything are the sums of the blocks.

    Args:
        dim: width of a token's representation.
        blocks: 8 gives intervals; 2 the settled flag only; 1 neither. Memory: about ``blocks * 0.6 * dim^2 * 8`` bytes.
        name: of the layer, for error messages.

    Example:
        >>> moments = RepresentationMoments(dim=2)
        >>> moments.update(torch.tensor([[[3.0, 0.0], [0.0, 4.0]]]))
        >>> moments.singular_values()
        tensor([4., 3.], dtype=torch.float64)
    """

    full_state_update = False
    is_differentiable = False
    higher_is_better = None

    count: Tensor
    first: Tensor
    second: Tensor
    unit: Tensor
    sequences: Tensor
    residual: Tensor
    cosine: Tensor
    norms: Tensor

    def __init__(self, dim: int, *, blocks: int = 8, name: str = "", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if dim < 1 or blocks < 1:
            raise ValueError(f"dim={dim} and blocks={blocks} must be at least 1")
        self.dim, self.blocks, self.name = dim, blocks, name
        self._next_index = 0
        packed = sum(height * width for _, height, width in _strips(dim))
        for state, shape in {
            "count": (blocks,),  # tokens
            "first": (blocks, dim),  # sum h
            "second": (blocks, packed),  # sum h h^T, strip by strip
            "unit": (blocks, dim),  # sum h / |h|
            "sequences": (blocks,),  # that hold two tokens or more
            "residual": (blocks,),  # sum over sequences of |H - 1 mean^T| / |H|
            "cosine": (blocks,),  # sum over sequences of the mean cosine between two different tokens
            "norms": (blocks, _NORM_BINS),  # histogram of log2 |h|
        }.items():
            self.add_state(state, torch.zeros(shape, dtype=torch.float64), dist_reduce_fx="sum", persistent=True)
            # torchmetrics keeps every default for reset(): one zero seen through strides, not a second matrix.
            self._defaults[state] = torch.zeros((), dtype=torch.float64).expand(shape)

    def update(self, hidden: Tensor, mask: Tensor | None = None, index: Tensor | None = None) -> None:
        """Add tokens.

        Args:
            hidden: (batch, tokens, dim), or (tokens, dim) for single vectors that belong to no sequence.
            mask: (batch, tokens) or (tokens,), true where a token counts; ``None`` counts all.
            index: (batch,) the sequence's number in the data, which decides its block; ``None`` counts on.

        Raises:
            ValueError: shapes that do not fit, or NaN or infinity in a token that counts; nothing is added then.
        """
        hidden, mask, index = self._checked(hidden, mask, index)
        row = mask.nonzero()[:, 0]  # (n,): the sequence of each token
        block = index[row] % self.blocks
        order = block.argsort(stable=True)
        tokens, row = hidden[mask][order], row[order]  # (n, dim): block by block
        if not tokens.isfinite().all():
            kind = "NaN" if tokens.isnan().any() else "infinity"
            raise ValueError(f"{self.name or 'hidden'}: {kind} in the representation of a token that counts")
        sizes = torch.bincount(block, minlength=self.blocks).tolist()
        for number, (part, rows) in enumerate(zip(tokens.split(sizes), row.split(sizes), strict=True)):
            if len(part):
                self._add(number, part.to(self.second.dtype), rows if hidden.shape[1] > 1 else None)

    def _add(self, block: int, tokens: Tensor, rows: Tensor | None) -> None:
        """Add the tokens (n, dim) of one block; ``rows`` (n,) ascending says which sequence each belongs to."""
        for strip, start, height in self._strips_of(self.second[block]):
            strip.addmm_(tokens[:, start : start + height].T, tokens[:, start:])
        norms = torch.linalg.vector_norm(tokens, dim=1)
        self.norms[block] += _norm_histogram(norms).to(self.norms.dtype)
        inverse = torch.where(norms > 0, 1 / norms, 0)
        if rows is None:
            self.first[block] += tokens.sum(0)
            self.unit[block] += inverse @ tokens
        else:
            _, sequence = torch.unique_consecutive(rows, return_inverse=True)
            member = torch.nn.functional.one_hot(sequence).T.to(tokens.dtype)  # (sequences, n)
            # Sums over each sequence as one product: no normalised copy of the tokens is made.
            sums, units = (torch.cat([member, member * inverse]) @ tokens).chunk(2)
            self.first[block] += sums.sum(0)
            self.unit[block] += units.sum(0)
            self._add_sequences(block, member, sums, units, norms)
        self.count[block] += len(tokens)

    def _add_sequences(self, block: int, member: Tensor, sums: Tensor, units: Tensor, norms: Tensor) -> None:
        size = member.sum(1)
        directed = member @ (norms > 0).to(member.dtype)  # a zero vector has no direction
        counted = directed >= 2
        energy = member @ norms**2  # |H|_F^2
        mean_energy = (sums**2).sum(1) / size  # |1 mean^T|_F^2
        residual = ((energy - mean_energy).clamp(min=0) / energy).sqrt()
        cosine = ((units**2).sum(1) - directed) / (directed * (directed - 1))
        self.sequences[block] += counted.sum()
        self.residual[block] += residual[counted].sum()
        self.cosine[block] += cosine[counted].sum()

    def compute(self) -> dict[str, float]:
        """Every number by name, over all processes; see :meth:`numbers`."""
        return self.numbers()

    def numbers(
        self, blocks: Sequence[int] | None = None, spectra: tuple[Tensor, Tensor] | None = None
    ) -> dict[str, float]:
        """The numbers by name, off this process's sums: :func:`spectrum_numbers`, cosines, residual, norm quantiles.

        Args:
            blocks: which blocks to read; ``None`` reads all.
            spectra: their raw and centred singular values where they are known already.
        """
        chosen = slice(None) if blocks is None else list(blocks)
        if not self.count[chosen].sum():
            raise ValueError(f"{self.name or 'moments'}: no token was added, so there is nothing to measure")
        raw, centred = spectra or (
            self.singular_values(blocks=blocks),
            self.singular_values(blocks=blocks, centred=True),
        )
        numbers = spectrum_numbers(raw, centred)
        norms = self.norms[chosen].sum(0)
        directed = norms[1:].sum().item()  # bin 0 holds the zero vectors, which have no direction
        squared = (self.unit[chosen].sum(0) ** 2).sum().item()
        sequences = self.sequences[chosen].sum().item()
        numbers["mean_cosine"] = (squared - directed) / (directed * (directed - 1)) if directed > 1 else math.nan
        for name, total in (("mean_cosine_in_sequence", self.cosine), ("oversmoothing_residual", self.residual)):
            numbers[name] = total[chosen].sum().item() / sequences if sequences else math.nan
        for quantile, value in zip(NORM_QUANTILES, _norm_quantiles(norms, NORM_QUANTILES), strict=True):
            numbers[f"token_norm_q{100 * quantile:02.0f}"] = value
        return numbers

    @property
    def tokens(self) -> int:
        """The number of tokens added."""
        return round(self.count.sum().item())

    def second_moment(self, *, centred: bool = False, blocks: Sequence[int] | None = None) -> Tensor:
        """sum h h^T (dim, dim), or with ``centred`` sum (h - mean)(h - mean)^T; over the ``blocks`` named, or all."""
        chosen = slice(None) if blocks is None else list(blocks)
        packed = self.second[chosen].sum(0)
        matrix = packed.new_empty(self.dim, self.dim)
        for strip, start, height in self._strips_of(packed):
            matrix[start : start + height, start:] = strip
            matrix[start:, start : start + height] = strip.T
        if centred:
            first, count = self.first[chosen].sum(0), self.count[chosen].sum()
            matrix -= torch.outer(first, first) / count.clamp(min=1)
        return matrix

    def singular_values(self, *, centred: bool = False, blocks: Sequence[int] | None = None) -> Tensor:
        """Singular values (dim,) of the matrix of tokens, largest first; float64, on the CPU for mps.

        Eigenvalues of the second moment carry rounding of ``dim * eps`` times the largest. Singular values below the
        square root of that (4e-7 of the largest at dim 768) cannot be told from 0, and are 0.
        """
        matrix = self.second_moment(centred=centred, blocks=blocks)
        count = round((self.count if blocks is None else self.count[list(blocks)]).sum().item())
        if matrix.device.type == "mps":
            matrix = matrix.cpu().double()
        values = torch.linalg.eigvalsh(matrix).flip(0).clamp(min=0).sqrt()
        values[max(0, count - centred) :] = 0  # fewer tokens than dimensions leave the rest empty
        values[values < math.sqrt(self.dim * torch.finfo(self.second.dtype).eps) * values[0]] = 0
        return values

    def merge(self, *others: Self | Mapping[str, Tensor]) -> Self:
        """Add the sums of other accumulators, or of their ``state_dict``, as saved by other machines; returns self."""
        for other in others:
            state = other.metric_state if isinstance(other, Metric) else dict(other)
            for name in self._defaults:
                mine = getattr(self, name)
                if name not in state or state[name].shape != mine.shape:
                    found = tuple(state[name].shape) if name in state else "nothing"
                    raise ValueError(
                        f"{name} has shape {tuple(mine.shape)} here and {found} there: merge equal dim and blocks"
                    )
            for name in self._defaults:
                getattr(self, name).add_(state[name].to(getattr(self, name)))
            self._changed()
        return self

    def _changed(self) -> None:
        """Tell torchmetrics that there are sums, and that what compute returned before is out of date."""
        self._update_count += 1
        self._computed = None

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._changed()

    def joined(self, blocks: int) -> RepresentationMoments:
        """A copy with fewer blocks, neighbours added up."""
        if self.blocks % blocks:
            raise ValueError(f"{self.blocks} blocks cannot be joined into {blocks}: choose a divisor")
        copy = RepresentationMoments(self.dim, blocks=blocks, name=self.name)
        for name in self._defaults:
            value = getattr(self, name).detach().cpu()
            setattr(copy, name, value.unflatten(0, (blocks, self.blocks // blocks)).sum(1))
        return copy

    def _strips_of(self, packed: Tensor) -> Iterator[tuple[Tensor, int, int]]:
        offset = 0
        for start, height, width in _strips(self.dim):
            yield packed[offset : offset + height * width].view(height, width), start, height
            offset += height * width

    def _checked(self, hidden: Tensor, mask: Tensor | None, index: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        if hidden.ndim not in (2, 3) or hidden.shape[-1] != self.dim:
            raise ValueError(
                f"{self.name or 'hidden'} has shape {tuple(hidden.shape)}: expected (batch, tokens, {self.dim})"
            )
        mask = torch.ones(hidden.shape[:-1], dtype=torch.bool) if mask is None else mask.bool()
        if mask.shape != hidden.shape[:-1]:
            raise ValueError(f"mask has shape {tuple(mask.shape)}, hidden {tuple(hidden.shape)}: they must agree")
        if hidden.ndim == 2:
            hidden, mask = hidden[:, None], mask[:, None]
        if index is None:
            index = torch.arange(self._next_index, self._next_index + len(hidden))
            self._next_index += len(hidden)
        if index.shape != (len(hidden),):
            raise ValueError(f"index has shape {tuple(index.shape)}: expected ({len(hidden)},), one number a sequence")
        device = self.second.device
        return hidden.detach().to(device), mask.to(device), index.to(device)

    def _sync_dist(self, dist_sync_fn: Any = None, process_group: Any | None = None) -> None:
        # The default gathers every process's matrices on every process; a sum needs no more room than its result.
        for name in self._defaults:
            dist.all_reduce(getattr(self, name), group=process_group or self.process_group)

    def _apply(self, fn: Any, exclude_state: Sequence[str] = "") -> Any:
        """Move the sums with ``.to(device)``, and keep their dtype whatever ``.to(dtype)``, ``half()`` ... ask for."""
        kept = {name: getattr(self, name) for name in self._defaults}
        defaults = dict(self._defaults)
        # fn sees one number: it names the device, and the matrices are not cast to the dtype and back.
        for name in self._defaults:
            self._defaults[name] = torch.zeros((), device=kept[name].device)
            setattr(self, name, torch.zeros((), device=kept[name].device))
        super()._apply(fn, exclude_state)
        for name, value in kept.items():
            device = getattr(self, name).device
            dtype = torch.float32 if device.type == "mps" else torch.float64
            self._defaults[name] = torch.zeros((), dtype=dtype, device=device).expand(defaults[name].shape)
            setattr(self, name, value.to(device=device, dtype=dtype))
        return self


def spectrum_numbers(raw: Tensor, centred: Tensor) -> dict[str, float]:
    """The numbers read off the raw and the centred singular values (dim,) of one layer, by name."""
    numbers: dict[str, float] = {}
    for label, values in (("raw", raw), ("centred", centred)):
        for tau in TAUS:
            for power in POWERS:
                numbers[f"effective_rank_{tau:.2f}_power{power}_{label}"] = effective_rank(values, tau, power)
        numbers[f"entropy_effective_rank_{label}"] = entropy_effective_rank(values)
        numbers[f"participation_ratio_{label}"] = participation_ratio(values)
        numbers[f"condition_number_{label}"] = condition_number(values)
    numbers["rankme"] = rankme(raw)
    numbers["stable_rank"] = stable_rank(raw)
    numbers["nesum"] = stable_rank(centred)
    numbers["alpha_req"] = alpha_req(centred) if len(centred) > 2 else math.nan
    return numbers


def _strips(dim: int) -> Iterator[tuple[int, int, int]]:
    """(first row, rows, columns) of the strips that hold the upper triangle."""
    for start in range(0, dim, _PANEL):
        yield start, min(_PANEL, dim - start), dim - start


def _norm_histogram(norms: Tensor) -> Tensor:
    position = (norms.log2() + _NORM_LOG2_RANGE) * (_NORM_BINS / (2 * _NORM_LOG2_RANGE))
    return torch.bincount(position.clamp(0, _NORM_BINS - 1).long(), minlength=_NORM_BINS)


def _norm_quantiles(histogram: Tensor, quantiles: Sequence[float]) -> list[float]:
    running = histogram.cpu().double().cumsum(0)
    values = []
    for quantile in quantiles:
        wanted = quantile * running[-1]
        bin_ = min(int(torch.searchsorted(running, wanted)), _NORM_BINS - 1)
        before = running[bin_ - 1] if bin_ else 0.0
        inside = float((wanted - before) / max(float(running[bin_] - before), 1.0))
        values.append(2 ** ((bin_ + inside) * (2 * _NORM_LOG2_RANGE / _NORM_BINS) - _NORM_LOG2_RANGE))
    return values
