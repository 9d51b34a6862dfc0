# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads hidden states out of any torch model by hooks: each layer's output is handed on while the model runs, none is
kept.

A layer list is the model's stack of equal blocks. *embeddings* is what its first block gets, a block's name stands for
what it returns. Where the model normalises the last block's output once more (GPT-2, Llama, ViT, ModernBERT ...), that
is one layer more, *final norm*: it is the model's ``last_hidden_state`` and must not be mixed with the blocks' outputs.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

EMBEDDINGS, BLOCK, FINAL_NORM, NAMED = "embeddings", "block output", "final norm", "named layer"

OnHidden = Callable[[str, Tensor], None]


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The model's stack of blocks by name: of the outermost lists of equal modules, the one with most parameters.

    Raises:
        ValueError: no such list; name the layers yourself.
    """
    lists: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in lists)
        if not inside and _is_stack(module):
            lists[name] = module
    if not lists:
        raise ValueError(f"{type(model).__name__} has no list of equal blocks: name the layers to read with layers=")
    name = max(lists, key=lambda key: sum(parameter.numel() for parameter in lists[key].parameters()))
    return {f"{name}.{child}": module for child, module in lists[name].named_children()}


def find_layers(model: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    """The modules of these names.

    Raises:
        ValueError: a name that does not exist, with those that come near.
    """
    modules = dict(model.named_modules())
    for name in names:
        if name not in modules or not name:
            near = difflib.get_close_matches(name, modules, n=3, cutoff=0.5)
            hint = (
                f"near matches: {', '.join(near)}"
                if near
                else f"the outermost are {list(dict(model.named_children()))}"
            )
            raise ValueError(f"{type(model).__name__} has no layer {name!r}: {hint}")
    return {name: modules[name] for name in names}


@contextmanager
def capture_hidden_states(
    model: nn.Module, on_hidden: OnHidden, layers: Sequence[str] | None = None
) -> Iterator[dict[str, str]]:
    """While it is open, every forward pass hands each layer's hidden states to ``on_hidden``, in order.

    Args:
        model: any module; nothing in it is changed, the hooks go when the block is left, also by an exception.
        on_hidden: called as ``on_hidden(layer_name, hidden)``, hidden (batch, tokens, dim) as the layer returned it,
            attached to the graph if there is one. A block that runs again in one pass (ALBERT) is counted: ``name#2``.
        layers: names as in ``model.named_modules()``; ``None`` takes the embeddings, every block and the final norm.

    Yields:
        Layer name to what it is (``embeddings``, ``block output``, ``final norm``, ``named layer``), in order of call.
    """
    seen: dict[str, str] = {}
    calls: dict[str, int] = {}
    last_block: list[Tensor] = []

    def hand_on(name: str, position: str, hidden: Tensor) -> None:
        calls[name] = calls.get(name, 0) + 1
        label = name if calls[name] == 1 else f"{name}#{calls[name]}"
        seen.setdefault(label, position)
        on_hidden(label, hidden)

    def start(_module: nn.Module, _args: Any, _kwargs: Any) -> None:
        calls.clear()
        last_block.clear()

    def before_first_block(_module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if EMBEDDINGS not in calls:
            hand_on(EMBEDDINGS, EMBEDDINGS, _first_tensor(args or kwargs, EMBEDDINGS))

    def after_block(name: str, position: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            hidden = _first_tensor(output, name)
            last_block[:] = [hidden]
            hand_on(name, position, hidden)

        return hook

    def after_norm(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            # The final norm is the one outside the blocks that takes what the last block returned, and all of it.
            if last_block and args and _same_tensor(args[0], last_block[0]):
                hand_on(name, FINAL_NORM, _first_tensor(output, name))

        return hook

    blocks = find_blocks(model) if layers is None else find_layers(model, layers)
    handles = [model.register_forward_pre_hook(start, with_kwargs=True)]
    try:
        position = BLOCK if layers is None else NAMED
        if layers is None:
            first = next(iter(blocks.values()))
            handles.append(first.register_forward_pre_hook(before_first_block, with_kwargs=True))
        for name, module in blocks.items():
            handles.append(module.register_forward_hook(after_block(name, position)))
        if layers is None:
            for name, module in model.named_modules():
                in_block = any(name.startswith(f"{block}.") for block in blocks)
                if not in_block and "norm" in type(module).__name__.lower():
                    handles.append(module.register_forward_hook(after_norm(name)))
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _is_stack(module: nn.Module) -> bool:
    children = dict(module.named_children())
    return (
        isinstance(module, (nn.ModuleList, nn.Sequential))
        and bool(children)
        and all(name.isdigit() for name in children)
        and len({type(child) for child in children.values()}) == 1
        and all(any(True for _ in child.children()) for child in children.values())
        and any(True for _ in module.parameters())
    )


def _first_tensor(value: Any, name: str) -> Tensor:
    """A layer returns a tensor, or a tuple or mapping whose first tensor is the hidden state."""
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (tuple, list)) else [value]
    for item in items:
        if isinstance(item, Tensor) and item.is_floating_point() and item.ndim >= 2:
            return item
    raise ValueError(
        f"layer {name} gives {type(value).__name__} without a tensor of hidden states: choose other layers"
    )


def _same_tensor(one: Any, other: Tensor) -> bool:
    return isinstance(one, Tensor) and one.shape == other.shape and one.data_ptr() == other.data_ptr()
