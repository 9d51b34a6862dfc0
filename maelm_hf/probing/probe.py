# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""The rank probe: model and data in, report out."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm.auto import tqdm

from .capture import capture_hidden_states
from .data import ProbeData, open_data
from .forward import as_it_is_probed, run
from .images import image_preparation
from .inputs import Budget, Masking, ProbeBatch, image_batches, ready_batches, text_batches
from .loading import ProbedModel, load_model, load_processor, take_tower
from .processes import all_notes
from .rank import RepresentationMoments
from .rank_report import RankReport
from .rank_table import MASK, REAL, UNMASKED, Moments, moments_of_every_process
from .settings import check_counts, environment
from .spectrum import effective_rank


def probe_rank(
    model: nn.Module | str | Path,
    processor: Any = None,
    data: Any = None,
    mask_ratio: float = 0.15,
    *,
    column: str | None = None,
    max_tokens: int | None = None,
    max_length: int | None = None,
    batch_size: int = 32,
    layers: Sequence[str] | None = None,
    tau: float = 0.9,
    power: float = 1,
    centred: bool = False,
    seed: int = 0,
    blocks: int = 8,
    revision: str | None = None,
    trust_remote_code: bool = False,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    progress: bool = True,
) -> RankReport:
    """How many of its dimensions does an encoder use, layer by layer?

    Populations of a text model with a mask token: *unmasked* (the real tokens of clean input), *masked/all*,
    *masked/real* and *masked/[MASK]* (all, the real and the mask tokens of the same input with ``mask_ratio`` of its
    tokens masked). The rank deficiency of Meng et al. (ICLR 2024) is rank(masked/all) - rank(unmasked). Other models
    have *unmasked* alone, and the report says why. Special tokens count, padding never does. Of a model with two towers
    (CLIP, SigLIP) the one that takes the data is probed.

    Under ``torch.distributed`` every process calls it with the same arguments and gets the same report; batches are
    dealt out between them (not those of an accelerate data loader, which deals them out itself).

    Args:
        model: any module, a Hub id, a folder, or ``timm/NAME``. A module keeps its weights, mode and device,
            and the random state is as before.
        processor: the tokenizer, image processor or transform; ``None`` loads the one that belongs to a named model.
            Without one, pictures are resized and normalised in the usual way (a note says so) and float tensors are
            taken as they are.
        data: what :func:`maelm_hf.probing.data.open_data` takes: texts, a file, a data set, images, ready batches ...
        mask_ratio: share of a sequence's tokens that is masked; 0 leaves the masked populations out.
        column: of a table or data set.
        max_tokens: stop after the sequence that reaches it.
        max_length: cut sequences at this many tokens, or where the model's limit is lower, there.
        batch_size: sequences in a forward pass.
        layers: module names; ``None`` takes the embeddings, every block, and the final norm where there is one.
        tau, power, centred: of the effective rank that the table and the figures lead with.
        seed: of the masks and of the intervals.
        blocks: see :class:`RepresentationMoments`.
        revision, trust_remote_code, dtype, device: see :func:`maelm_hf.probing.loading.load_model`.
        progress: show a progress bar.

    Raises:
        FileNotFoundError: a model or data set that is not there.
        ValueError: arguments out of range, no tokens, a tokenizer that does not fit the model, a layer that does not
            exist, or NaN or infinity in a layer, which is named.
    """
    check_rank_arguments(mask_ratio, tau, power)
    check_counts(max_tokens=max_tokens, max_length=max_length, batch_size=batch_size, seed=seed, blocks=blocks)
    if data is None:
        raise ValueError("data is missing: pass texts, a file, a data set, images or batches")
    probed = load_model(model, revision=revision, trust_remote_code=trust_remote_code, dtype=dtype, device=device)
    opened = open_data(data, column, probed)
    take_tower(probed, opened.modality())
    loading = {"revision": revision, "trust_remote_code": trust_remote_code}
    if processor is None and opened.kind == "texts" and probed.source is not None:
        processor = load_processor(probed, **loading)
    if processor is None and opened.kind == "texts":
        raise ValueError("processor is missing: texts need the model's tokenizer")
    notes = list(probed.notes)
    masking = masking_for(probed, processor, opened.kind, mask_ratio, seed, notes)
    world = dist.get_world_size() if dist.is_initialized() else 1
    budget = Budget(max_tokens, dist.get_rank() if world > 1 else 0, world)
    cut = [0]

    def told(count: int) -> None:
        cut[0] += count

    if opened.kind == "texts":
        batches = text_batches(
            opened,
            processor,
            probed,
            batch_size=batch_size,
            max_length=max_length,
            masking=masking,
            budget=budget,
            told=told,
        )
    elif opened.kind == "images":
        prepare = image_preparation(probed, processor, opened, notes=notes, **loading)
        batches = image_batches(opened, prepare, batch_size=batch_size, budget=budget)
    else:
        batches = ready_batches(opened, masking, budget)
    with _progress(opened, max_tokens, enabled=progress and budget.rank == 0) as bar:
        moments, positions = accumulate(probed.module, batches, layers=layers, blocks=blocks, on_batch=bar)
    if cut[0]:
        notes.append(f"{cut[0]} sequences were longer than the model takes and were cut.")
    notes += [f"Skipped a file that could not be read: {name}." for name in opened.skipped]
    settings = {
        "model": probed.name,
        "revision": probed.revision,
        "data": opened.description,
        "column": column,
        "max_tokens": max_tokens,
        "max_length": max_length,
        "batch_size": batch_size,
        "layers": list(layers) if layers is not None else None,
        "mask_ratio": mask_ratio if masking else 0,
        "seed": seed,
        "tau": tau,
        "power": power,
        "centred": centred,
        "blocks": blocks,
        **environment(probed),
    }
    moments, positions = moments_of_every_process(moments, positions, blocks=blocks, device=probed.device)
    report = RankReport.from_moments(moments, positions, settings, all_notes(notes))
    thin = [row for row in report.rows if row["tokens"] < row["dim"]]
    if thin:
        warnings.warn(
            f"{thin[0]['tokens']} {thin[0]['population']} tokens for {thin[0]['dim']} dimensions: they bound the rank, "
            "probe more",
            stacklevel=2,
        )
    return report


def check_rank_arguments(mask_ratio: float, tau: float, power: float) -> None:
    """Refuse what is no share, tau or power, before the model runs."""
    if not 0 <= mask_ratio < 1:
        raise ValueError(f"mask_ratio={mask_ratio!r} must be in [0, 1): 0.15 is usual, 0 masks nothing")
    effective_rank(torch.ones(1), tau, power)


@torch.no_grad()
def accumulate(
    module: nn.Module,
    batches: Iterable[ProbeBatch],
    *,
    layers: Sequence[str] | None = None,
    blocks: int = 8,
    on_batch: Callable[[ProbeBatch], None] | None = None,
) -> tuple[Moments, dict[str, str]]:
    """Run the model over the batches and add up every layer's moments; also returns what each layer is.

    The module is in eval mode meanwhile; its modes and the random state are as before afterwards, also after an error.
    """
    probed = ProbedModel(module, type(module).__name__)
    mask_share = encoder_mask_fraction(module)
    moments: dict[tuple[str, str], RepresentationMoments] = {}
    # For the forward pass that runs: which tokens each population counts, and which ones enter the model (None: all).
    populations: dict[str, Tensor | None] = {}
    entering: Tensor | None = None
    index = torch.empty(0)

    def on_hidden(layer: str, hidden: Tensor) -> None:
        for population, counted in populations.items():
            if counted is not None and counted.shape != hidden.shape[:-1]:
                raise ValueError(
                    f"layer {layer} gives {tuple(hidden.shape)} for {tuple(counted.shape)} tokens: "
                    "choose layers= that keep the tokens"
                )
            if counted is not None and entering is not None:
                counted = counted & entering
            key = (layer, population)
            if key not in moments:
                name = f"layer {layer}, {population} tokens"
                moments[key] = RepresentationMoments(hidden.shape[-1], blocks=blocks, name=name).to(hidden.device)
            moments[key].update(hidden.flatten(1, -2) if hidden.ndim > 3 else hidden, counted, index)

    with as_it_is_probed(module), capture_hidden_states(module, on_hidden, layers) as positions:
        for batch in batches:
            batch, index = batch.to(probed.device, probed.dtype), batch.index
            populations = {UNMASKED: batch.counted}
            inputs, entering = without_dropped_masks(module, batch.inputs)
            run(module, inputs)
            if batch.masked_ids is not None:
                populations = {REAL: batch.counted & ~batch.is_mask}
                if mask_share > 0:
                    populations[MASK] = batch.counted & batch.is_mask
                inputs, entering = without_dropped_masks(module, {**batch.inputs, "input_ids": batch.masked_ids})
                run(module, inputs)
            if on_batch is not None:
                on_batch(batch)
    return moments, dict(positions)


def encoder_mask_fraction(module: nn.Module) -> float:
    """The share of the [MASK] tokens that enter the encoder: 1 for a plain model, less where the config says so."""
    config = getattr(module, "config", None)
    if getattr(config, "mask_token_id", None) is None:  # then [MASK] is a token like any other to it
        return 1.0
    return float(getattr(config, "encoder_mask_fraction", 1.0))


def without_dropped_masks(
    module: nn.Module, inputs: Mapping[str, Any] | Tensor
) -> tuple[Mapping[str, Any] | Tensor, Tensor | None]:
    """The inputs such that the encoder sees no more of [MASK] than it did in training, and which tokens enter it.

    MaeLmModel drops [MASK] tokens itself. Its stock form attends to them, unless they are padding: no token sees them
    then, and the others keep their positions.

    Returns:
        The inputs, and (batch, tokens) bool; None where all tokens enter.
    """
    if not isinstance(inputs, Mapping) or "input_ids" not in inputs or encoder_mask_fraction(module) == 1:
        return inputs, None
    ids, attended = inputs["input_ids"], inputs.get("attention_mask")
    if hasattr(module, "dropped_masks"):
        positions = inputs.get("position_ids")
        positions = torch.arange(ids.shape[1], device=ids.device)[None] if positions is None else positions
        attended = None if attended is None else attended.bool()
        return inputs, ~module.dropped_masks(ids, attended, positions, inputs.get("document_ids"))
    dropped = ids == module.config.mask_token_id
    attended = torch.ones_like(ids) if attended is None else attended
    return {**inputs, "attention_mask": attended.masked_fill(dropped, 0)}, ~dropped


def masking_for(
    model: ProbedModel, processor: Any, kind: str, mask_ratio: float, seed: int, notes: list[str]
) -> Masking | None:
    """How the masked populations are made, or None and the reason in ``notes``."""
    tokenizer = processor if hasattr(processor, "all_special_ids") else None
    from_config = getattr(model.config, "mask_token_id", None)
    mask_token_id = getattr(tokenizer, "mask_token_id", None)
    if None not in (from_config, mask_token_id) and from_config != mask_token_id:
        raise ValueError(
            f"tokenizer has mask_token_id {mask_token_id}, the model's config {from_config}: "
            "pass the tokenizer that belongs to the model"
        )
    if mask_ratio == 0:
        notes.append("Nothing was masked (mask_ratio 0): there is the unmasked population only.")
        return None
    if tokenizer is None or mask_token_id is None:
        reason = (
            "images have no mask token"
            if kind == "images"
            else "no tokenizer was given"
            if tokenizer is None
            else "the tokenizer has no mask token"
        )
        notes.append(f"There is the unmasked population only: {reason}.")
        return None
    fraction = encoder_mask_fraction(model.module)
    if fraction < 1 and not hasattr(model.module, "dropped_masks"):
        if fraction > 0:
            notes.append(
                f"There is the unmasked population only: the encoder was trained on a share {fraction} of the [MASK] "
                "tokens, and in its stock form it cannot tell which ones; probe the MAE-LM checkpoint."
            )
            return None
        notes.append(
            "[MASK] tokens are hidden from this stock model, as they were in training (encoder_mask_fraction 0)."
        )
    return Masking(mask_ratio, mask_token_id, sorted(tokenizer.all_special_ids), seed)


@contextmanager
def _progress(data: ProbeData, max_tokens: int | None, *, enabled: bool) -> Iterator[Callable[[ProbeBatch], None]]:
    """A bar over tokens where their number is given, else over the items of the data."""
    total = max_tokens or data.length
    with tqdm(total=total, unit="tok" if max_tokens else "seq", desc="probe", disable=not enabled) as bar:
        world = dist.get_world_size() if dist.is_initialized() else 1
        yield lambda batch: bar.update((batch.tokens if max_tokens else len(batch.index)) * world)
