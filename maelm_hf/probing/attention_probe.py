# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""The attention probe: model and images (or texts) in, report out."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm.auto import tqdm

from .attention import Grid, fourier_log_amplitude, rollout_step, token_norm_quantiles
from .attention_capture import capture_attention_calls
from .attention_layout import Given, LayerLayout, find_layout
from .attention_maps import AttentionMaps, ReadyMaps
from .attention_overlays import Overlays
from .attention_report import NORM_QUANTILES, AttentionReport
from .attention_statistics import AttentionStatistics, MeanAndSpread
from .capture import capture_hidden_states
from .data import ProbeData, open_data
from .forward import as_it_is_probed, run
from .images import image_preparation, pixels_of
from .inputs import Budget, ProbeBatch, image_batches, ready_batches, text_batches
from .loading import ProbedModel, load_model, load_processor, take_tower
from .processes import all_notes, from_every_process
from .settings import check_counts, environment

logger = logging.getLogger(__name__)

_BLOCK = re.compile(r".*\d(?=\.|$)")  # the part of a module's name up to its last number: "encoder.layer.3"
_HIDDEN_NUMBERS = (*(f"token_norm_{name}" for name in NORM_QUANTILES), "fourier_log_amplitude")


def probe_attention(
    model: nn.Module | str | Path,
    images: Any = None,
    processor: Any = None,
    *,
    grid: Grid | None = None,
    prefix_tokens: int | None = None,
    patch_size: float | tuple[float, float] | None = None,
    column: str | None = None,
    max_images: int | None = None,
    batch_size: int = 16,
    overlay_images: int = 4,
    random_init: bool = False,
    seed: int = 0,
    revision: str | None = None,
    trust_remote_code: bool = False,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    progress: bool = True,
) -> AttentionReport:
    """Are a Vision Transformer's heads all looking at the same place? Every number, layer by layer and head by head.

    The model runs as it was loaded, in eval mode, and is left as it was. ViT-MAE is run unmasked and unshuffled, a
    model with a vision tower (CLIP, SigLIP) by that tower. Text encoders are probed along the sequence, without
    padding.

    Under ``torch.distributed`` every process calls it with the same arguments and gets the same numbers.

    Args:
        model: any module, a Hub id, a folder, or ``timm/NAME``.
        images: a folder, a data set or its name, PIL images, arrays, prepared tensors, or batches of them; or texts.
        processor: the image processor, transform or tokenizer; ``None`` loads the one of a named model. Without one,
            pictures are resized and normalised in the usual way (a note says so) and float tensors are taken as they
            are.
        grid: (rows, columns) of the patches; ``None`` finds it from the patch embedding or the config and the input's
            size.
        prefix_tokens: tokens before the patches (CLS, distillation, registers); ``None`` finds it.
        patch_size: pixels a patch; ``None`` finds it.
        column: of a data set.
        max_images: stop after so many images (or texts).
        batch_size: images in a forward pass.
        overlay_images: of so many images, maps and centres are kept to be drawn on the image.
        random_init: probe the same architecture with fresh weights, for the numbers without training (transformers).
        seed: of the pairs of queries in the pairwise divergence, and of ``random_init``.
        revision, trust_remote_code, dtype, device: see :func:`maelm_hf.probing.loading.load_model`.
        progress: show a progress bar.

    Raises:
        FileNotFoundError: a model or data set that is not there.
        ValueError: no attention in the model, a grid that does not match the tokens (both numbers named), images of
            mixed sizes, no images, or NaN in a layer, which is named.
    """
    if images is None:
        raise ValueError("images is missing: pass a folder, a data set, images, prepared tensors, or texts")
    check_counts(max_images=max_images, batch_size=batch_size, overlay_images=overlay_images, seed=seed)
    check_counts(prefix_tokens=prefix_tokens)
    notes: list[str] = []
    if hasattr(model, "_orig_mod"):
        notes.append("The model is compiled; it is probed uncompiled, because a compiled model hides its functions.")
        model = model._orig_mod
    probed = load_model(model, revision=revision, trust_remote_code=trust_remote_code, dtype=dtype, device=device)
    if random_init:
        _forget_training(probed, seed)
    data = open_data(images, column, probed)
    take_tower(probed, data.modality())
    notes += probed.notes
    world = dist.get_world_size() if dist.is_initialized() else 1
    budget = Budget(rank=dist.get_rank() if world > 1 else 0, world=world)
    loading = {"revision": revision, "trust_remote_code": trust_remote_code}
    batches = _batches(probed, data, processor, batch_size, max_images, budget, notes, loading)
    measurement = _Measurement(probed, Given(grid, prefix_tokens, patch_size), overlay_images, seed, notes)
    total = None if data.kind == "batches" else data.length  # of batches only the number of batches may be known
    total = total if max_images is None or total is None else min(max_images, total)
    with as_it_is_probed(probed.module), tqdm(total=total, unit="image", disable=not progress) as bar:
        for batch in batches:
            measurement.add(batch.to(probed.device, probed.dtype))
            bar.update(len(batch.index) * (1 if data.already_sharded else world))
        layers = measurement.results()
    if data.skipped:
        notes.append(f"{len(data.skipped)} files could not be read and were skipped: {'; '.join(data.skipped[:20])}.")
    notes = all_notes(notes)
    for note in notes:
        logger.info(note)
    settings = {
        "model": probed.name,
        "revision": probed.revision,
        "data": data.description,
        "column": column,
        "images": int(layers[0]["images"]),
        "max_images": max_images,
        "batch_size": batch_size,
        "layers": [layer["layer_name"] for layer in layers],
        "grid": list(measurement.layouts[0].grid or ()),
        "prefix_tokens": measurement.layouts[0].prefix_tokens,
        "patch_size_pixels": list(measurement.layouts[0].pixels or ()),
        "seed": seed,
        **environment(probed),
    }
    return AttentionReport.from_layers(layers, settings, measurement.overlays.tensors(), notes)


class _Measurement:
    """Accumulates every number while batches run."""

    def __init__(self, probed: ProbedModel, given: Given, overlay_images: int, seed: int, notes: list[str]):
        self.model, self.given, self.seed, self.notes = probed, given, seed, notes
        self.layouts: list[LayerLayout] = []
        self._overlay_images = overlay_images
        self._statistics: dict[str, AttentionStatistics] = {}
        self._rollout: dict[str, AttentionStatistics] = {}
        self._hidden: dict[str, MeanAndSpread] = {}
        self._without_rollout: str | None = None  # why there is none
        self._rolled: Tensor | None = None  # (images, tokens, tokens): the rollout of the running batch so far

    def add(self, batch: ProbeBatch) -> None:
        if not self.layouts:
            self._look(batch)
        pixels = pixels_of(batch.inputs)
        images = len(batch.index)
        lengths = None if batch.counted is None or bool(batch.counted.all()) else batch.counted
        self._rolled = None
        self.overlays.start(pixels)

        def on_call(name: str, maps: AttentionMaps) -> None:
            layout = self._by_name.get(name)
            if layout is not None:
                self._add_layer(layout, maps, images, lengths)

        def on_hidden(block: str, hidden: Tensor) -> None:
            self._add_hidden(block, hidden, lengths)

        blocks = sorted({block for block in self._blocks.values() if "#" not in block})
        module = self.model.module
        with (
            torch.no_grad(),
            capture_hidden_states(module, on_hidden, blocks),
            capture_attention_calls(module, on_call),
        ):
            run(module, batch.inputs)
        self._rolled = None

    def _look(self, batch: ProbeBatch) -> None:
        """Find the layout from the first image (or text)."""
        first = _first_items(batch, 1).inputs
        with torch.no_grad():
            found, notes = find_layout(self.model.module, lambda: run(self.model.module, first), first, self.given)
        self.notes.extend(notes)
        layouts = [layout for layout in found if layout.skipped is None]
        if not layouts:
            raise ValueError(f"{found[0].name}: {found[0].skipped}")
        self._prepare(layouts)

    def _prepare(self, layouts: list[LayerLayout]) -> None:
        """Make the accumulators."""
        self.layouts = layouts
        self.overlays = Overlays(self._overlay_images, layouts)
        self._by_name = {layout.name: layout for layout in self.layouts}
        self._blocks = {layout.name: _block_of(layout.name) for layout in self.layouts if _block_of(layout.name)}
        if any(layout.windowed for layout in self.layouts):
            self._without_rollout = "attention runs inside windows"
        elif len({(layout.grid, layout.prefix_tokens) for layout in self.layouts}) > 1:
            self._without_rollout = "the layers have different grids"
        device = self.model.device
        for layout in self.layouts:
            options = {"grid": layout.grid, "prefix_tokens": layout.prefix_tokens, "seed": self.seed}
            self._statistics[layout.name] = AttentionStatistics(layout.heads, **options).to(device)
            if self._without_rollout is None:
                self._rollout[layout.name] = AttentionStatistics(1, **options).to(device)
            self._hidden[layout.name] = MeanAndSpread(_HIDDEN_NUMBERS).to(device)

    def _add_layer(self, layout: LayerLayout, maps: AttentionMaps, images: int, counted: Tensor | None) -> None:
        try:
            if counted is None:
                self._add_maps(layout, maps, maps.shape[0] // images if layout.windowed else 1)
            else:
                self._add_padded(layout, maps, counted)
        except ValueError as error:
            raise ValueError(f"{layout.name}: {error}") from error

    def _add_maps(self, layout: LayerLayout, maps: AttentionMaps, windows: int) -> None:
        step = None
        if self._without_rollout is None:
            step = torch.zeros(maps.shape[0], *maps.shape[2:], device=self.model.device)
            prefix = torch.arange(layout.prefix_tokens, device=self.model.device)
            step[:, : len(prefix)] = maps.rows(slice(None), prefix).mean(dim=1)
        kept = self.overlays.of_layer(layout, maps)

        def on_rows(which: slice, queries: Tensor, rows: Tensor) -> None:
            if step is not None:
                step[which, queries] = rows.mean(dim=1).to(step.dtype)
            kept.add(which, queries, rows)

        self._statistics[layout.name].update(maps, windows, on_rows)
        if step is not None:
            self._roll(layout, step)

    def _roll(self, layout: LayerLayout, step: Tensor) -> None:
        self._rolled = rollout_step(step) if self._rolled is None else rollout_step(step) @ self._rolled
        self._rollout[layout.name].update(ReadyMaps(self._rolled.unsqueeze(1), None))
        self.overlays.add_rollout(layout, self._rolled)

    def _add_padded(self, layout: LayerLayout, maps: AttentionMaps, counted: Tensor) -> None:
        """Sequences of different lengths, one by one and without their padding; the rollout needs whole batches."""
        self._without_rollout = "sequences of a batch differ in length"
        for number, real in enumerate(counted):
            tokens = real.nonzero().squeeze(-1)
            rows = maps.rows(slice(number, number + 1), tokens).index_select(-1, tokens)
            self._statistics[layout.name].update(rows)

    def _add_hidden(self, block: str, hidden: Tensor, counted: Tensor | None) -> None:
        for name, of_block in self._blocks.items():
            if of_block == block:
                layout = self._by_name[name]
                self._hidden[name].update(*_hidden_numbers(hidden, layout, counted))

    def _agree(self) -> set[tuple[str, str]]:
        """The same layers, and a rollout on every process or on none: sums meet by collectives.

        Returns (layer, number of its hidden states) for what any process has measured.
        """
        measured = {
            (layer, number)
            for layer, sums in self._hidden.items()
            for number, count in zip(_HIDDEN_NUMBERS, sums.count[:, 0].tolist(), strict=True)
            if count
        }
        everyone = from_every_process((self.layouts, self._without_rollout, measured))
        found = [layouts for layouts, _, _ in everyone if layouts]
        if not found:
            raise ValueError("images is empty: the probe needs at least one image that can be read")
        if any(layouts != found[0] for layouts in found):
            raise ValueError("the processes found different grids or layers: resize the images to one size")
        if not self.layouts:  # this process got no batch
            self._prepare(found[0])
        self._without_rollout = next((reason for _, reason, _ in everyone if reason), None)
        if self._without_rollout is not None:
            self.notes.append(f"There is no rollout: {self._without_rollout}.")
        return set().union(*(theirs for _, _, theirs in everyone))

    def results(self) -> list[dict[str, Any]]:
        """A dict a layer: its layout, and the numbers over all processes."""
        measured = self._agree()
        layers = []
        for layout in self.layouts:
            numbers = {name: value.cpu() for name, value in self._statistics[layout.name].compute().items()}
            hidden = self._hidden[layout.name].compute()
            rollout = {} if self._without_rollout else self._rollout[layout.name].compute()
            layers.append(
                {
                    "layer_name": layout.name or type(self.model.module).__name__,
                    "layout": layout,
                    "images": numbers.pop("images").max().item(),
                    "heads": numbers,
                    "hidden_layer": self._blocks.get(layout.name, ""),
                    "hidden": {name: value.cpu() for name, value in hidden.items()},
                    "hidden_present": {name: (layout.name, name) in measured for name in _HIDDEN_NUMBERS},
                    "rollout": {name: value.cpu() for name, value in rollout.items()},
                }
            )
        return layers


def _forget_training(probed: ProbedModel, seed: int) -> None:
    """Put the same architecture with random weights in the model's place."""
    if probed.config is None:
        raise ValueError(
            f"random_init needs a transformers model, {probed.name} is none: build it untrained and pass it"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        fresh = type(probed.module)(probed.config)
    probed.module = fresh.to(device=probed.device, dtype=probed.dtype).eval()
    probed.name = f"{probed.name}, random init"


def _batches(
    probed: ProbedModel,
    data: ProbeData,
    processor: Any,
    batch_size: int,
    max_images: int | None,
    budget: Budget,
    notes: list[str],
    loading: dict[str, Any],
) -> Iterator[ProbeBatch]:
    if data.kind == "batches":
        return _cut(ready_batches(data, None, budget), max_images)
    data.items = itertools.islice(data.items, max_images)
    if data.kind == "images":
        prepare = image_preparation(probed, processor, data, notes=notes, **loading)
        return image_batches(data, prepare, batch_size=batch_size, budget=budget)
    processor = processor or load_processor(probed, **loading)

    def cut(count: int) -> None:
        notes.append(f"{count} sequences were longer than the model takes and were cut.")

    return text_batches(
        data, processor, probed, batch_size=batch_size, max_length=None, masking=None, budget=budget, told=cut
    )


def _cut(batches: Iterator[ProbeBatch], most: int | None) -> Iterator[ProbeBatch]:
    seen = 0
    for batch in batches:
        if most is not None and seen >= most:
            return
        yield batch if most is None else _first_items(batch, most - seen)
        seen += len(batch.index)


def _first_items(batch: ProbeBatch, count: int) -> ProbeBatch:
    size = len(batch.index)

    def take(value: Any) -> Any:
        return value[:count] if isinstance(value, Tensor) and value.ndim and value.shape[0] == size else value

    inputs = batch.inputs
    inputs = {k: take(v) for k, v in inputs.items()} if isinstance(inputs, Mapping) else take(inputs)
    return ProbeBatch(inputs, None if batch.counted is None else batch.counted[:count], batch.index[:count])


def _block_of(name: str) -> str | None:
    """The block whose output is the layer's hidden state: `encoder.layer.3` of `encoder.layer.3.attention`."""
    path, _, call = name.partition("#")
    found = _BLOCK.match(path)
    return None if found is None else found[0] + (f"#{call}" if call else "")


def _hidden_numbers(hidden: Tensor, layout: LayerLayout, counted: Tensor | None) -> tuple[Tensor, Tensor]:
    """Norm quantiles and the Fourier number of a block's output: (images, 1, numbers), and which of them exist."""
    hidden = (
        hidden.flatten(1, -2) if hidden.ndim > 3 else hidden
    )  # timm's and torchvision's Swin: (images, h, w, width)
    if counted is not None:
        parts = [token_norm_quantiles(row[real].unsqueeze(0)) for row, real in zip(hidden, counted, strict=True)]
        quantiles = torch.cat(parts)
    else:
        quantiles = token_norm_quantiles(hidden, layout.prefix_tokens)
    on_grid = layout.grid is not None and hidden.shape[1] == layout.prefix_tokens + layout.grid[0] * layout.grid[1]
    if on_grid and not layout.windowed:
        fourier = fourier_log_amplitude(hidden, layout.grid, layout.prefix_tokens).unsqueeze(-1)
    else:
        fourier = torch.zeros_like(quantiles[:, :1])
    present = torch.ones(len(quantiles), quantiles.shape[1] + 1, device=hidden.device)
    present[:, -1] = float(on_grid and not layout.windowed)
    return torch.cat([quantiles, fourier], dim=-1).unsqueeze(1), present.unsqueeze(1)
