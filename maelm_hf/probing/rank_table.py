# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""From moments to the rank report's table: every number of every layer and population, its value at half of the tokens,
intervals for the headline numbers, and the rank deficiency.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .processes import from_every_process
from .rank import RepresentationMoments
from .resampling import FEWEST_BLOCKS, block_bootstrap_interval, is_settled, pseudo_values
from .spectrum import alpha_req_fit_range, effective_rank, entropy_effective_rank, interpolated_effective_rank

UNMASKED, MASKED, REAL, MASK = "unmasked", "masked/all", "masked/real", "masked/[MASK]"
POPULATIONS = (UNMASKED, MASKED, REAL, MASK)

# Moments are saved in two halves: enough for every number and its settled flag after a merge, a quarter of the size.
SAVED_BLOCKS = 2

Moments = Mapping[tuple[str, str], RepresentationMoments]  # (layer, population)
Settings = Mapping[str, Any]
Row = dict[str, Any]

# Columns that lead the table, so that every row has them, and in this order.
COLUMNS = (
    "effective_rank",
    "effective_rank_low",
    "effective_rank_high",
    "entropy_effective_rank",
    "entropy_effective_rank_low",
    "entropy_effective_rank_high",
    "deficiency",
    "deficiency_low",
    "deficiency_high",
    "subspace_dim",
    "mask_energy_outside",
    "real_energy_outside",
    "principal_angle_median",
    "principal_angle_max",
)


def moments_of_every_process(
    moments: Moments, positions: Mapping[str, str], *, blocks: int, device: torch.device
) -> tuple[Moments, dict[str, str]]:
    """The same layers and populations on every process, in the same order, with zeros where this one saw none.

    Sums meet by collectives: a process that got no batch has to take part in them all the same.
    """
    everyone = from_every_process((dict(positions), {key: sums.dim for key, sums in moments.items()}))
    layers: dict[str, str] = {}
    dims: dict[tuple[str, str], int] = {}
    for their_layers, their_dims in everyone:
        layers |= their_layers
        dims |= their_dims
    agreed = {
        key: moments[key] if key in moments else RepresentationMoments(dim, blocks=blocks).to(device)
        for key, dim in dims.items()
    }
    return agreed, layers


def rank_table(
    moments: Moments, positions: Mapping[str, str], settings: Settings
) -> tuple[list[Row], dict[str, Tensor]]:
    """The table's rows; each row's singular values as ``raw/<layer>/<population>`` and ``centred/...``, and the sums
    they were read off as ``moments/<layer>/<population>/<sum>``.

    Over several processes every one has to call it, with the same layers and populations, and all get the same.
    """
    rows: list[Row] = []
    tensors: dict[str, Tensor] = {}
    with _one_thread_each() as pool:
        for number, (layer, position) in enumerate(positions.items()):
            with ExitStack() as synced:
                of_layer = {population: sums for (name, population), sums in moments.items() if name == layer}
                for sums in of_layer.values():
                    synced.enter_context(sums.sync_context())
                populations = with_masked_all(of_layer)
                measured = {name: _measure(sums, settings, pool) for name, sums in populations.items()}
                for name, sums in populations.items():
                    one = measured[name]
                    row = {"layer_index": number, "layer": layer, "position": position, "population": name}
                    row |= {"tokens": sums.tokens, "dim": sums.dim, "tokens_per_dim": sums.tokens / sums.dim}
                    row |= dict.fromkeys(COLUMNS, math.nan)
                    if one.ranks is not None:
                        row |= _intervals(one, sums.dim, settings["seed"])
                    if name == MASKED:
                        row |= _deficiency(measured, settings["seed"])
                    if name == MASK and REAL in populations:
                        row |= _containment(populations[REAL], sums, settings)
                    row["alpha_req_fit_range"] = "{}-{}".format(*alpha_req_fit_range(sums.dim))
                    rows.append(row | _with_halves(one, sums.tokens, sums.dim))
                    tensors[f"raw/{layer}/{name}"], tensors[f"centred/{layer}/{name}"] = one.raw, one.centred
                for name, sums in of_layer.items():
                    kept = sums.joined(SAVED_BLOCKS if sums.blocks % SAVED_BLOCKS == 0 else 1)
                    tensors |= {f"moments/{layer}/{name}/{key}": value for key, value in kept.metric_state.items()}
    return rows, tensors


def with_masked_all(populations: Mapping[str, RepresentationMoments]) -> dict[str, RepresentationMoments]:
    """In the order of reports, without empty ones; masked/all is masked/real and masked/[MASK] together."""
    found = {name: sums for name, sums in populations.items() if sums.tokens}
    parts = [found[name] for name in (REAL, MASK) if name in found]
    if parts:
        everything = RepresentationMoments(parts[0].dim, blocks=parts[0].blocks, name=parts[0].name)
        found[MASKED] = everything.to(parts[0].device).merge(*parts)
    return {name: found[name] for name in POPULATIONS if name in found}


@dataclass
class _Measured:
    """One layer and population.

    Attributes:
        raw, centred: singular values (dim,) of everything.
        numbers, half_numbers: off everything, and off half of the blocks (empty without a second half).
        counts: (blocks,) tokens.
        ranks, entropies: (blocks,) pseudo-values of the headline numbers; None where there are too few blocks.
    """

    raw: Tensor
    centred: Tensor
    numbers: Row
    half_numbers: Row
    counts: Tensor
    ranks: Tensor | None = None
    entropies: Tensor | None = None


def _measure(sums: RepresentationMoments, settings: Settings, pool: ThreadPoolExecutor) -> _Measured:
    """Solve for the spectra of everything, of every other block, of all blocks but one; read the numbers off them."""
    counts, every = sums.count.cpu(), range(sums.blocks)
    half = list(every[::2])
    has_half = sums.blocks > 1 and counts[half].sum() > 0
    leaves_out = sums.blocks >= FEWEST_BLOCKS and bool((counts > 0).all())
    wanted: list[tuple[list[int] | None, bool]] = [(None, False), (None, True)]
    if has_half:
        wanted += [(half, False), (half, True)]
    if leaves_out:
        wanted += [([block for block in every if block != out], settings["centred"]) for out in every]
    solved = list(pool.map(lambda one: sums.singular_values(blocks=one[0], centred=one[1]).cpu(), wanted))
    raw, centred = solved[:2]
    numbers = _headline(raw, centred, settings) | sums.numbers(spectra=(raw, centred))
    measured = _Measured(raw, centred, numbers, {}, counts)
    if has_half:
        measured.half_numbers = _headline(*solved[2:4], settings) | sums.numbers(half, (solved[2], solved[3]))
    if leaves_out:
        left_out = torch.stack(solved[-sums.blocks :])
        full = centred if settings["centred"] else raw
        options = settings["tau"], settings["power"]
        measured.ranks = pseudo_values(
            interpolated_effective_rank(full, *options), interpolated_effective_rank(left_out, *options), counts
        )
        measured.entropies = pseudo_values(entropy_effective_rank(full), entropy_effective_rank(left_out), counts)
    return measured


def _headline(raw: Tensor, centred: Tensor, settings: Settings) -> Row:
    values = centred if settings["centred"] else raw
    return {
        "effective_rank": effective_rank(values, settings["tau"], settings["power"]),
        "entropy_effective_rank": entropy_effective_rank(values),
    }


def _intervals(measured: _Measured, dim: int, seed: int) -> Row:
    low, high = block_bootstrap_interval(measured.ranks, measured.counts, seed)
    entropy_low, entropy_high = block_bootstrap_interval(measured.entropies, measured.counts, seed)
    # The rank is the interpolated rank rounded up, so its interval is too.
    low, high = (bound if math.isnan(bound) else min(dim, max(1, math.ceil(bound))) for bound in (low, high))
    return {
        "effective_rank_low": low,
        "effective_rank_high": high,
        "entropy_effective_rank_low": entropy_low,
        "entropy_effective_rank_high": entropy_high,
    }


def _with_halves(measured: _Measured, tokens: int, dim: int) -> Row:
    """Every number, its value at half of the tokens, and whether it has settled."""
    row: Row = {}
    for name, value in measured.numbers.items():
        half = measured.half_numbers.get(name, math.nan)
        row |= {name: value, f"{name}_half": half, f"{name}_settled": is_settled(value, half, tokens, dim)}
    return row


def _deficiency(measured: Mapping[str, _Measured], seed: int) -> Row:
    """rank(masked/all) - rank(unmasked): the dimensions that the [MASK] tokens have to themselves."""
    clean, masked = measured[UNMASKED], measured[MASKED]
    low = high = math.nan
    if clean.ranks is not None and masked.ranks is not None:
        # A block holds the same sequences in both, so what they have in common cancels in the difference.
        low, high = block_bootstrap_interval(masked.ranks - clean.ranks, clean.counts, seed)
    difference = masked.numbers["effective_rank"] - clean.numbers["effective_rank"]
    return {"deficiency": difference, "deficiency_low": low, "deficiency_high": high}


def _containment(real: RepresentationMoments, mask: RepresentationMoments, settings: Settings) -> Row:
    """Is the row space of the [MASK] tokens inside that of the real ones (Theorem 2.2 of Meng et al. says: not)?

    Both spaces are spanned by the right singular vectors that the effective rank of the tokens as they are counts, k of
    them for real tokens: the theorem is about row spaces, so the mean stays in, whatever ``centred`` says.
    """
    real_energy, real_vectors = torch.linalg.eigh(real.second_moment().cpu().double())
    mask_energy, mask_vectors = torch.linalg.eigh(mask.second_moment().cpu().double())
    options = settings["tau"], settings["power"]
    k = effective_rank(real_energy.flip(0).clamp(min=0).sqrt(), *options)
    k_mask = effective_rank(mask_energy.flip(0).clamp(min=0).sqrt(), *options)
    inside, spanned = real_vectors[:, -k:], mask_vectors[:, -k_mask:]  # eigh sorts ascending
    captured = (inside.T @ mask.second_moment().cpu().double() @ inside).trace() / mask_energy.sum()
    cosines = torch.linalg.svdvals(inside.T @ spanned).clamp(max=1)
    angles = torch.rad2deg(torch.acos(cosines))
    return {
        "subspace_dim": k,
        "mask_energy_outside": max(0.0, 1 - captured.item()),
        "real_energy_outside": max(0.0, 1 - (real_energy[-k:].sum() / real_energy.sum()).item()),
        "principal_angle_median": angles.median().item(),
        "principal_angle_max": angles.max().item(),
    }


@contextmanager
def _one_thread_each() -> Iterator[ThreadPoolExecutor]:
    """Eigenvalues of matrices this small gain nothing from several threads: one matrix a thread instead."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads) as pool:
            yield pool
    finally:
        torch.set_num_threads(threads)
