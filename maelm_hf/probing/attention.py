# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Numbers read off an attention map, one formula a function.

A map is post-softmax, queries by keys, and every function takes any leading dimensions: ``(..., queries, keys)`` in,
``(...)`` out. Tokens are ``prefix_tokens`` tokens without a place (CLS, distillation, registers) and then the patches
of a grid of ``(rows, columns)``, row by row; ``grid=None`` takes the tokens as a sequence (text), whose distances are
counted in tokens. The prefix is dropped from queries and keys and the rows are renormalised; what was dropped is
:func:`attention_prefix_mass`. A query with (next to) nothing on the patches has no place to look at and is left out;
where all queries are such, every number is 0. Half-precision maps are computed in float32.
:class:`AttentionStatistics` gives all of it in one pass over many images.

Sources: Huang, Wen, Chi & Liang, ICLR 2025 (arXiv 2403.02233) for the diversity; Park et al., ICLR 2023 (arXiv
2305.00729) for the normalised mutual information and the Fourier number; Raghu et al., NeurIPS 2021 (arXiv
2108.08810) for the distance; Abnar & Zuidema, ACL 2020 (arXiv 2005.00928) for the rollout.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

# A query that gives the patches less than this share of its attention is left out of patch-level numbers.
SMALLEST_PATCH_MASS = 1e-6

Grid = tuple[int, int]


def grid_positions(grid: Grid, patch_size: float | tuple[float, float] = 1.0) -> Tensor:
    """Row and column of every patch, row by row: (patches, 2) float32, in patches or, given their size, pixels."""
    height, width = grid
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    scale = torch.tensor(patch_size if isinstance(patch_size, (tuple, list)) else (patch_size, patch_size))
    return torch.stack([rows.flatten(), columns.flatten()], dim=-1).float() * scale.float()


def grid_variance(grid: Grid) -> float:
    """Mean squared distance of a grid's patches to its centre, in grid units: the diversity of the identity map."""
    return sum(side**2 - 1 for side in grid) / 12


def entropy(probabilities: Tensor) -> Tensor:
    """-sum p ln p over the last dimension, 0 ln 0 = 0, without an epsilon in the logarithm."""
    return -torch.xlogy(probabilities, probabilities).sum(dim=-1)


def attention_centers(
    maps: Tensor,
    grid: Grid | None = None,
    prefix_tokens: int = 0,
    *,
    patch_size: float | tuple[float, float] | None = None,
) -> Tensor:
    """Where each patch looks on average: c_q = sum_k A_qk xy_k.

    Args:
        maps: (..., queries, keys), post-softmax.
        grid: (rows, columns) of the patches, or None for a sequence.
        prefix_tokens: how many tokens come before the patches.
        patch_size: pixels a patch (or (height, width)); without it the unit is one patch.

    Returns:
        (..., patches, 2): row and column.

    Raises:
        ValueError: maps that are not maps (NaN, negative), or a grid that does not match the tokens.
    """
    weights, _, grid = _patch_maps(maps, grid, prefix_tokens)
    return weights @ _positions_like(weights, grid, patch_size)


def attention_diversity(
    maps: Tensor,
    grid: Grid | None = None,
    prefix_tokens: int = 0,
    *,
    patch_size: float | tuple[float, float] | None = None,
) -> Tensor:
    """Do different patches attend to different areas? The spread of the centres of attention over the queries.

    ``mean_q |c_q - mean_q c|^2`` with ``c_q`` of :func:`attention_centers`. 0 when all patches look at one area (the
    collapse that contrastive training drives to); the variance of the grid itself, :func:`grid_variance`, when each
    looks at its own place. The measure follows the purpose and the wording of Huang, Wen, Chi & Liang (ICLR 2025,
    arXiv 2403.02233), whose own text was not at hand when this was written: compare trends with theirs, not absolute
    values.

    Args and errors as in :func:`attention_centers`. Returns (...), in squared grid units, or squared pixels given a
    patch size.
    """
    weights, kept, grid = _patch_maps(maps, grid, prefix_tokens)
    centers = weights @ _positions_like(weights, grid, patch_size)
    mean = _mean_over_queries(centers.mT, kept.unsqueeze(-2))
    return _mean_over_queries((centers - mean.unsqueeze(-2)).square().sum(dim=-1), kept)


def attention_distance(
    maps: Tensor,
    grid: Grid | None = None,
    prefix_tokens: int = 0,
    *,
    patch_size: float | tuple[float, float] | None = None,
) -> Tensor:
    """How far a patch looks: mean_q sum_k A_qk |xy_q - xy_k| (Raghu et al. 2021).

    Args and errors as in :func:`attention_centers`. Returns (...), in grid units, or pixels given a patch size.
    """
    weights, kept, grid = _patch_maps(maps, grid, prefix_tokens)
    positions = _positions_like(weights, grid, patch_size)
    return _mean_over_queries((weights * torch.cdist(positions, positions)).sum(dim=-1), kept)


def attention_entropy(
    maps: Tensor, grid: Grid | None = None, prefix_tokens: int = 0, *, normalized: bool = False
) -> Tensor:
    """How wide a patch looks: mean_q -sum_k A_qk ln A_qk, in nats, or as the share of its maximum ln(patches).

    Args and errors as in :func:`attention_centers`. Returns (...).
    """
    weights, kept, _ = _patch_maps(maps, grid, prefix_tokens)
    value = _mean_over_queries(entropy(weights), kept)
    return value / max_entropy(weights.shape[-1]) if normalized else value


def attention_mutual_information(maps: Tensor, grid: Grid | None = None, prefix_tokens: int = 0) -> Tensor:
    """How much the query says about where it looks: I(q; k) / sqrt(H(q) H(k)), with p(q) uniform (Park et al. 2023).

    About 0 for uniform maps, 1 for the identity. With all attention on one key H(k) is 0: the number is 0 by
    definition.

    Args and errors as in :func:`attention_centers`. Returns (...), in [0, 1].
    """
    weights, kept, _ = _patch_maps(maps, grid, prefix_tokens)
    key_entropy = entropy(_mean_over_queries(weights.mT, kept.unsqueeze(-2)))
    conditional = _mean_over_queries(entropy(weights), kept)
    return normalized_mutual_information(key_entropy, conditional, kept.sum(dim=-1))


def normalized_mutual_information(key_entropy: Tensor, conditional_entropy: Tensor, queries: Tensor) -> Tensor:
    """(H(k) - H(k|q)) / sqrt(ln(queries) H(k)), 0 where H(k) or ln(queries) is 0."""
    information = (key_entropy - conditional_entropy).clamp(min=0)  # rounding may leave -1e-7
    scale = (queries.clamp(min=1).log().to(key_entropy.dtype) * key_entropy.clamp(min=0)).sqrt()
    defined = scale > 1e-6
    return torch.where(defined, information / scale.where(defined, torch.ones_like(scale)), torch.zeros_like(scale))


def attention_pairwise_diversity(
    maps: Tensor, grid: Grid | None = None, prefix_tokens: int = 0, *, pairs: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """How much two patches differ in where they look, whatever the places: mean over pairs of queries.

    Args:
        maps, grid, prefix_tokens: as in :func:`attention_centers`.
        pairs: (pairs, 2) indices of patches; None takes all pairs, which costs patches^3 a map.

    Returns:
        Jensen-Shannon divergence in nats (0 identical rows, ln 2 disjoint ones) and 1 - cosine (0 to 1), both (...).
    """
    weights, kept, _ = _patch_maps(maps, grid, prefix_tokens)
    if pairs is None:
        pairs = torch.combinations(torch.arange(weights.shape[-1]))
    jensen_shannon = torch.zeros(weights.shape[:-2], dtype=weights.dtype, device=weights.device)
    cosine_distance, counted = jensen_shannon.clone(), jensen_shannon.clone()
    row_entropy = entropy(weights)
    unit = torch.nn.functional.normalize(weights, dim=-1)
    for first, second in (block.unbind(dim=-1) for block in pairs.to(weights.device).split(1024)):
        both = kept[..., first] * kept[..., second]
        mixture = entropy((weights[..., first, :] + weights[..., second, :]) / 2)
        divergence = mixture - (row_entropy[..., first] + row_entropy[..., second]) / 2
        jensen_shannon += (divergence.clamp(min=0) * both).sum(dim=-1)
        cosine_distance += ((1 - (unit[..., first, :] * unit[..., second, :]).sum(dim=-1)) * both).sum(dim=-1)
        counted += both.sum(dim=-1)
    counted = counted.clamp(min=1)
    return jensen_shannon / counted, cosine_distance.clamp(min=0) / counted


def attention_head_redundancy(maps: Tensor, grid: Grid | None = None, prefix_tokens: int = 0) -> Tensor:
    """Is a head a copy of its neighbours? Mean cosine between its map and the other heads' maps.

    Args:
        maps: (..., heads, queries, keys).
        grid, prefix_tokens: as in :func:`attention_centers`.

    Returns:
        (..., heads), in [0, 1]; 0 for a single head.
    """
    if maps.ndim < 3:
        raise ValueError(f"maps has shape {tuple(maps.shape)}: head redundancy needs (..., heads, queries, keys)")
    weights, _, _ = _patch_maps(maps, grid, prefix_tokens)
    flat = weights.flatten(-2)
    return mean_cosine_with_others(flat @ flat.mT)


def mean_cosine_with_others(gram: Tensor) -> Tensor:
    """Mean over the other rows of the cosine, from a Gram matrix: (..., n, n) to (..., n)."""
    norm = gram.diagonal(dim1=-2, dim2=-1).clamp(min=torch.finfo(gram.dtype).tiny).sqrt()
    cosine = gram / (norm.unsqueeze(-1) * norm.unsqueeze(-2))
    off_diagonal = cosine.sum(dim=-1) - cosine.diagonal(dim1=-2, dim2=-1)
    return off_diagonal / max(1, gram.shape[-1] - 1)


def attention_prefix_mass(maps: Tensor, grid: Grid | None = None, prefix_tokens: int = 0) -> Tensor:
    """Share of the patches' attention that goes to the prefix (CLS, registers), mean over patches. Returns (...)."""
    maps, _ = _check_maps(maps, grid, prefix_tokens)
    rows = maps[..., prefix_tokens:, :]
    total = rows.sum(dim=-1).clamp(min=torch.finfo(rows.dtype).tiny)
    return (rows[..., :prefix_tokens].sum(dim=-1) / total).mean(dim=-1)


def attention_rollout(layers: Iterable[Tensor]) -> Tensor:
    """Attention from the last layer's tokens back to the input's, through the residual stream (Abnar & Zuidema 2020).

    The product of (A + I) / 2 over the layers, A averaged over heads, rows summing to 1.

    Args:
        layers: per layer, first to last, maps (..., heads, tokens, tokens).

    Returns:
        (..., tokens, tokens).
    """
    rollout = None
    for maps in layers:
        step = rollout_step(maps.float().mean(dim=-3))
        rollout = step if rollout is None else step @ rollout
    if rollout is None:
        raise ValueError("layers is empty: attention_rollout needs the maps of at least one layer")
    return rollout


def rollout_step(head_mean: Tensor) -> Tensor:
    """(A + I) / 2 with rows that sum to 1; (..., tokens, tokens)."""
    step = head_mean + torch.eye(head_mean.shape[-1], dtype=head_mean.dtype, device=head_mean.device)
    return step / step.sum(dim=-1, keepdim=True)


def token_norm_quantiles(hidden: Tensor, prefix_tokens: int = 0, quantiles: tuple[float, ...] = (0.05, 0.5, 0.95, 1.0)):
    """Quantiles of the patch tokens' Euclidean norms: (images, tokens, width) to (images, len(quantiles)).

    High-norm tokens (Darcet et al., ICLR 2024) show as a maximum far above the median; where "high" starts depends on
    the model.
    """
    norms = hidden[:, prefix_tokens:].float().norm(dim=-1)
    return torch.quantile(norms, torch.tensor(quantiles, device=norms.device), dim=-1).mT


def fourier_log_amplitude(hidden: Tensor, grid: Grid, prefix_tokens: int = 0) -> Tensor:
    """High against low frequencies of the token grid: (images, tokens, width) to (images,).

    Log-amplitude of the 2-D Fourier transform at the highest diagonal frequency (rows // 2, columns // 2) minus that
    at zero, natural logarithms averaged over channels (Park & Kim, ICLR 2022; Park et al. 2023). Very negative: the
    tokens are nearly all alike.
    """
    height, width = grid
    tokens = hidden[:, prefix_tokens:].float()
    if tokens.shape[1] != height * width:
        raise ValueError(f"grid {height} x {width} has {height * width} patches, the hidden states {tokens.shape[1]}")
    row, column = grid_positions(grid).to(tokens.device).unbind(dim=-1)
    # One coefficient needs one dot product a channel, not the whole transform.
    phase = 2 * math.pi * (row * (height // 2) / height + column * (width // 2) / width)
    waves = torch.stack([torch.ones_like(phase), phase.cos(), phase.sin()])  # (3, patches)
    constant, cosine, sine = (waves @ tokens).unbind(dim=1)  # (images, width) each
    tiny = torch.finfo(torch.float32).tiny
    highest = (cosine.square() + sine.square()).sqrt().clamp(min=tiny).log()
    return (highest - constant.abs().clamp(min=tiny).log()).mean(dim=-1)


def max_entropy(patches: int) -> float:
    """ln(patches); 1 for a single patch, whose entropy is 0 anyway."""
    return math.log(patches) if patches > 1 else 1.0


def _check_maps(maps: Tensor, grid: Grid | None, prefix_tokens: int) -> tuple[Tensor, Grid]:
    """Maps in float32 or float64, and the grid (1, patches) where none was given."""
    if not isinstance(maps, Tensor) or not maps.is_floating_point():
        raise TypeError(f"maps must be a floating-point tensor (..., queries, keys), got {type(maps).__name__}")
    if maps.ndim < 2 or maps.shape[-1] != maps.shape[-2]:
        raise ValueError(f"maps has shape {tuple(maps.shape)}: expected (..., tokens, tokens)")
    tokens = maps.shape[-1]
    if not isinstance(prefix_tokens, int) or not 0 <= prefix_tokens < tokens:
        raise ValueError(
            f"prefix_tokens={prefix_tokens!r} must be an int between 0 and {tokens - 1}: there are {tokens} tokens"
        )
    check_grid(grid, tokens, prefix_tokens)
    maps = maps if maps.dtype == torch.float64 else maps.float()
    smallest = maps.amin() if maps.numel() else maps.new_zeros(())
    if not torch.isfinite(maps).all():
        raise ValueError("maps holds NaN or inf: check the model's inputs and weights")
    if smallest < 0:
        raise ValueError(f"maps holds {smallest.item():.3g}, but a softmax is never negative: pass maps, not logits")
    return maps, grid or (1, tokens - prefix_tokens)


def check_grid(grid: Grid | None, tokens: int, prefix_tokens: int) -> None:
    """Raises a ValueError that names both numbers where the grid and the tokens do not match."""
    if grid is None:
        return
    if len(grid) != 2 or not all(isinstance(side, int) and side > 0 for side in grid):
        raise ValueError(f"grid={grid!r} must be two positive ints, (rows, columns)")
    expected = grid[0] * grid[1] + prefix_tokens
    if expected != tokens:
        raise ValueError(
            f"grid {grid[0]} x {grid[1]} with {prefix_tokens} prefix tokens makes {expected} tokens, "
            f"the maps have {tokens}: pass the grid=(rows, columns) and prefix_tokens that belong to these images"
        )


def _patch_maps(maps: Tensor, grid: Grid | None, prefix_tokens: int) -> tuple[Tensor, Tensor, Grid]:
    """Patch-to-patch attention with rows that sum to 1 (or are 0: left out), and which rows are kept, as 1.0 or 0.0."""
    maps, grid = _check_maps(maps, grid, prefix_tokens)
    rows = maps[..., prefix_tokens:, :]
    patches = rows[..., prefix_tokens:]
    mass = patches.sum(dim=-1)
    kept = (mass > SMALLEST_PATCH_MASS * rows.sum(dim=-1)).to(maps.dtype)
    scale = kept / torch.where(kept > 0, mass, torch.ones_like(mass))
    return patches * scale.unsqueeze(-1), kept, grid


def _positions_like(weights: Tensor, grid: Grid, patch_size: float | tuple[float, float] | None) -> Tensor:
    return grid_positions(grid, 1.0 if patch_size is None else patch_size).to(weights)


def _mean_over_queries(values: Tensor, kept: Tensor) -> Tensor:
    """Mean over the last dimension of the values that are kept; 0 where none is."""
    return (values * kept).sum(dim=-1) / kept.sum(dim=-1).clamp(min=1)
