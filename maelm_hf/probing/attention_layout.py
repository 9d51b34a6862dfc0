# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a layer are patches, and where each lies: read off one image's way through the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from .attention import Grid
from .attention_capture import AttentionCapture, capture_attention_calls

# Parameters that are one token each, by the names that ViTs of transformers, timm and torchvision give them.
_SINGLE_TOKENS = frozenset(
    {"cls_token", "class_token", "class_embedding", "dist_token", "distillation_token", "cls_embedding"}
)
_SEVERAL_TOKENS = frozenset({"register_tokens", "reg_token"})


@dataclass
class LayerLayout:
    """Where the tokens of one attention layer lie.

    Attributes:
        name: of the module that attends.
        heads: of the layer.
        grid: (rows, columns) of the patches, or of one window; None for a sequence.
        prefix_tokens: tokens before the patches.
        pixels: side of a patch in pixels, (height, width); None where there are no pixels.
        windowed: the maps are (batch x windows, ...).
        skipped: why the layer is not measured; None where it is.
    """

    name: str
    heads: int
    grid: Grid | None = None
    prefix_tokens: int = 0
    pixels: tuple[float, float] | None = None
    windowed: bool = False
    skipped: str | None = None


@dataclass
class Given:
    """What the caller said about the tokens."""

    grid: Grid | None = None
    prefix_tokens: int | None = None
    patch_size: float | tuple[float, float] | None = None


@dataclass
class _Seen:
    """What one image's forward pass showed."""

    calls: dict[str, tuple[int, int, int, int]] = field(default_factory=dict)  # layer: shape of its maps
    convolutions: list[tuple[Grid, tuple[int, int] | None]] = field(default_factory=list)  # output size, patch size
    image: tuple[int, int] | None = None  # height and width in pixels


def find_layout(
    model: nn.Module, run: Callable[[], Any], inputs: Mapping[str, Any] | Tensor, given: Given
) -> tuple[list[LayerLayout], list[str]]:
    """Run one image and see what attends to what.

    Args:
        model: the encoder, in eval mode.
        run: runs it on one image.
        inputs: what it runs on.
        given: what the caller knows better.

    Returns:
        A layout for each attention layer in the order in which they ran, and notes for the report.

    Raises:
        ValueError: no attention at all, or tokens that no grid explains (both numbers named).
    """
    seen = _Seen(image=_image_size(inputs))
    with (
        _watch_convolutions(model, seen),
        capture_attention_calls(model, lambda name, maps: seen.calls.__setitem__(name, maps.shape)) as capture,
    ):
        run()
    notes = _unseen_notes(model, capture)
    if not seen.calls:
        raise ValueError(
            f"{type(model).__name__} computed no attention that can be seen: the attention probe needs a model with "
            "softmax attention in torch's own functions"
            + (f"; not seen in {', '.join(capture.unseen()[:3])}" if notes else "")
        )
    square = [shape for shape in seen.calls.values() if shape[2] == shape[3]]
    tokens = max((shape[2] for shape in square if shape[0] == 1), default=None)
    if given.grid is None and seen.image is None:
        return [_sequence_layer(name, shape, given) for name, shape in seen.calls.items()], notes
    grid, pixels, prefix, how = _patches(model, seen, given, tokens)
    notes.append(how)
    layers = [_image_layer(model, name, shape, grid, prefix, pixels) for name, shape in seen.calls.items()]
    if all(layer.skipped for layer in layers):
        raise ValueError(f"{layers[0].name}: {layers[0].skipped}")
    notes += [f"Not measured: {layer.name}: {layer.skipped}." for layer in layers if layer.skipped]
    windowed = [layer for layer in layers if layer.windowed]
    if windowed:
        sizes = sorted({f"{layer.grid[0]} x {layer.grid[1]}" for layer in windowed})
        notes.append(
            f"Attention runs inside windows of {', '.join(sizes)} patches in {len(windowed)} layers: places, centres "
            "and distances are within a window, an image's number is the mean over its windows."
        )
    return layers, notes


def known_prefix(model: nn.Module) -> int | None:
    """Tokens that the model itself says it puts before the patches; None where it says nothing."""
    told = getattr(model, "num_prefix_tokens", None)  # timm
    if isinstance(told, int):
        return told
    count = 0
    for name, parameter in model.named_parameters():
        last = name.rpartition(".")[2]
        if last in _SINGLE_TOKENS:
            count += 1
        elif last in _SEVERAL_TOKENS:
            count += parameter.shape[-2]
    return count or None


def _patches(
    model: nn.Module, seen: _Seen, given: Given, tokens: int | None
) -> tuple[Grid, tuple[float, float] | None, int, str]:
    """Grid of the whole image, patch size, prefix tokens, and a sentence that says where they come from."""
    told = known_prefix(model) if given.prefix_tokens is None else given.prefix_tokens
    patch_size = _pair(given.patch_size)
    if given.grid is not None:
        prefix = (tokens - math.prod(given.grid) if told is None and tokens else told) or 0
        if patch_size is None and seen.image is not None:
            patch_size = (seen.image[0] / given.grid[0], seen.image[1] / given.grid[1])
        return given.grid, patch_size, max(0, prefix), f"Grid {_text(given.grid)} as given, {prefix} prefix tokens."
    candidates = [(grid, size, "the patch embedding's output") for grid, size in reversed(seen.convolutions)]
    configured = _configured_patch_size(model)
    if configured is not None:
        grid = (int(seen.image[0] // configured[0]), int(seen.image[1] // configured[1]))
        candidates.append((grid, configured, "the configured patch size and the input size"))
    for grid, size, source in candidates:
        prefix = (tokens or 0) - math.prod(grid)
        fits = prefix == told if told is not None else prefix in (0, 1)
        if tokens is not None and fits:
            guess = "" if told is not None or prefix == 0 else " (taken to come first)"
            pixels = patch_size or size or (seen.image[0] / grid[0], seen.image[1] / grid[1])
            return grid, pixels, prefix, f"Grid {_text(grid)} from {source}, {prefix} prefix tokens{guess}."
    windows = [shape for shape in seen.calls.values() if shape[0] > 1]
    if windows and candidates:  # every layer attends inside windows: only the finest grid is needed
        grid, size, source = max(candidates, key=lambda candidate: math.prod(candidate[0]))
        pixels = patch_size or size or (seen.image[0] / grid[0], seen.image[1] / grid[1])
        return grid, pixels, told or 0, f"Grid {_text(grid)} from {source}, {told or 0} prefix tokens."
    found = ", ".join(f"{_text(grid)} = {math.prod(grid)} patches ({source})" for grid, _, source in candidates)
    raise ValueError(
        f"the maps have {tokens} tokens, but the grid found is {found or 'none'}"
        f"{'' if told is None else f' with {told} prefix tokens'}: pass grid=(rows, columns) and prefix_tokens="
    )


def _image_layer(
    model: nn.Module,
    name: str,
    shape: tuple[int, int, int, int],
    grid: Grid,
    prefix: int,
    pixels: tuple[float, float] | None,
) -> LayerLayout:
    windows, heads, queries, keys = shape
    if queries != keys:
        return LayerLayout(
            name, heads, skipped=f"{queries} queries over {keys} keys are no map from patches to patches"
        )
    if windows == 1 and queries == math.prod(grid) + prefix:
        return LayerLayout(name, heads, grid, prefix, pixels)
    # A window, or a whole coarser stage of a hierarchical model.
    stage = next((s for s in range(6) if windows == 1 and (grid[0] >> s) * (grid[1] >> s) == queries), None)
    inside = (grid[0] >> stage, grid[1] >> stage) if stage is not None else _window_of(model, name, queries)
    if inside is None:
        expected = f"grid {_text(grid)} with {prefix} prefix tokens makes {math.prod(grid) + prefix} tokens"
        return LayerLayout(name, heads, skipped=f"{expected}, the maps have {queries}")
    # Padding to whole windows makes the token count a little too large: the nearest power of two is meant.
    halvings = round(math.log2(math.prod(grid) / (windows * queries)) / 2) if stage is None else stage
    scaled = None if pixels is None else (pixels[0] * 2**halvings, pixels[1] * 2**halvings)
    return LayerLayout(name, heads, inside, 0, scaled, windowed=windows > 1)


def _sequence_layer(name: str, shape: tuple[int, int, int, int], given: Given) -> LayerLayout:
    batch, heads, queries, keys = shape
    if queries != keys or batch != 1:
        return LayerLayout(name, heads, skipped=f"maps of shape {shape} are not from a sequence to itself")
    return LayerLayout(name, heads, None, given.prefix_tokens or 0)


def _window_of(model: nn.Module, name: str, tokens: int) -> Grid | None:
    """The `window_size` of the module or the nearest one around it, if it explains the tokens."""
    path = name.partition("#")[0]
    while True:
        module = model.get_submodule(path)
        size = _pair(getattr(module, "window_size", None))
        if size is not None and math.prod(size) == tokens:
            return size
        if not path:
            break
        path = path.rpartition(".")[0]
    size = _pair(getattr(getattr(model, "config", None), "window_size", None))
    return size if size is not None and math.prod(size) == tokens else None


@contextmanager
def _watch_convolutions(model: nn.Module, seen: _Seen) -> Iterator[None]:
    """Note what every 2-D convolution before the first attention returns: the last of them embeds the patches."""

    def hook(module: nn.Conv2d, args: tuple, output: Tensor) -> None:
        if not seen.calls and isinstance(output, Tensor) and output.ndim == 4:
            stride = tuple(module.stride)
            alone = stride if tuple(module.kernel_size) == stride and stride != (1, 1) else None
            seen.convolutions.append((tuple(output.shape[-2:]), alone))

    handles = [m.register_forward_hook(hook) for m in model.modules() if isinstance(m, nn.Conv2d)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _configured_patch_size(model: nn.Module) -> tuple[int, int] | None:
    config = getattr(model, "config", None)
    size = getattr(config, "patch_size", None)
    if size is None:
        sizes = (getattr(module, "patch_size", None) for module in model.modules())
        size = next((size for size in sizes if size is not None), None)
    return _pair(size)


def _pair(size: Any) -> Any:
    """A size as (height, width); None for what is no size."""
    if isinstance(size, (int, float)) and not isinstance(size, bool):
        return (size, size)
    if isinstance(size, (tuple, list)) and len(size) == 2 and all(isinstance(side, (int, float)) for side in size):
        return tuple(size)
    return None


def _image_size(inputs: Mapping[str, Any] | Tensor) -> tuple[int, int] | None:
    values = inputs.values() if isinstance(inputs, Mapping) else [inputs]
    for value in values:
        if isinstance(value, Tensor) and value.ndim == 4 and value.is_floating_point():
            return tuple(value.shape[-2:])
    return None


def _unseen_notes(model: nn.Module, capture: AttentionCapture) -> list[str]:
    unseen = capture.unseen()
    if not unseen:
        return []
    kind = type(model.get_submodule(unseen[0])).__name__
    names = ", ".join(unseen[:8]) + (f" and {len(unseen) - 8} more" if len(unseen) > 8 else "")
    return [
        f"No attention map was seen in {names} ({kind}): a fused kernel outside torch's own functions, or no softmax."
    ]


def _text(grid: Grid) -> str:
    return f"{grid[0]} x {grid[1]}"
