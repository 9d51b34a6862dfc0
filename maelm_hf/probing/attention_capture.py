# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads attention maps out of any torch model while it runs, whatever attention implementation it was loaded with.

`output_attentions=True` gives nothing under the default fused attention, and switching a model to eager changes it. A
:class:`torch.overrides.TorchFunctionMode` sees every torch function that Python code calls: there the maps are
computed a second time from queries and keys, handed over and dropped, while the model runs as it always does.

What counts as attention:

- every call of `F.scaled_dot_product_attention`;
- every call of `F.multi_head_attention_forward`, i.e. `nn.MultiheadAttention` and `nn.TransformerEncoder` (whose fast
  path switches itself off under a mode);
- a softmax over the last of three or more dimensions whose result then weights something in a matrix product (`@`,
  `matmul`, `bmm`, `baddbmm`, `einsum`) with a computed tensor of three or more dimensions. Between the two it may
  pass through anything that keeps its number of elements (dropout, a cast, a view, a head mask, head mixing). Class
  probabilities, the gates of a mixture of experts and soft codebook look-ups (a product with a parameter) are no
  attention by this rule.

Not seen are fused kernels outside torch's own functions (flash-attn, xformers, flex_attention) and a softmax written
out by hand: modules that look like attention, ran, and gave no map are named by :meth:`AttentionCapture.unseen`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from .attention_maps import AttentionMaps, ProductMaps, ReadyMaps

_SOFTMAX = frozenset({F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax})
_PRODUCTS = frozenset(
    {torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, torch.bmm, Tensor.bmm, torch.einsum}
)
_ADDED_PRODUCTS = frozenset({torch.baddbmm, Tensor.baddbmm})
_FIRST_OPERANDS = ("input", "batch1")  # of the products' keywords, in order; the others name the last operand
_LOOKS_LIKE_ATTENTION = re.compile(r"attention|attn|mhsa", re.IGNORECASE)


class AttentionCapture:
    """What :func:`capture_attention` yields: which layers were seen so far, and which were not."""

    def __init__(self, model: nn.Module):
        self._modules = dict(model.named_modules())
        self.seen: list[str] = []
        self._ran: set[str] = set()

    def unseen(self) -> list[str]:
        """Modules whose class is called attention and that ran, where neither they nor a part or parent gave a map."""
        emitting = {name.partition("#")[0] for name in self.seen}
        silent: list[str] = []
        for name, module in self._modules.items():  # parents come before their parts
            called_attention = _LOOKS_LIKE_ATTENTION.search(type(module).__name__) and name in self._ran
            if called_attention and not any(_related(name, other) for other in (*emitting, *silent)):
                silent.append(name)
        return silent


@contextlib.contextmanager
def capture_attention(model: nn.Module, on_map: Callable[[str, Tensor], None]) -> Iterator[AttentionCapture]:
    """While open, every attention map that `model` computes is handed to `on_map(layer_name, maps)` and dropped.

    Args:
        model: any torch module. It is not changed: what its forward returns is bit for bit what it returns without
            the capture, and hooks are gone afterwards, also after an exception. A compiled model runs uncompiled
            while the capture is open. Of `nn.TransformerEncoder` this holds for its ordinary path: the fast path,
            which is off under the capture, rounds otherwise and returns zeros for padded tokens, which are ordinary
            values here.
        on_map: called with the name of the innermost module that ran the attention, as in `model.named_modules()` (a
            second call of the same module within one forward pass is "NAME#2"), and maps (batch, heads,
            queries, keys) in float32, after the softmax and before any dropout, without gradient. Windowed models
            give (batch x windows, heads, window^2, window^2). It must not run `model`, nor change the maps in place:
            they may be the very tensor that an eager model goes on with.

    Yields:
        An :class:`AttentionCapture`, whose `unseen()` names the attention modules that gave no map.

    Example:
        >>> entropies = {}
        >>> with capture_attention(model, lambda name, maps: entropies.update({name: attention_entropy(maps).mean()})):
        ...     model(pixel_values)
    """
    with capture_attention_calls(model, lambda name, maps: on_map(name, maps.full())) as capture:
        yield capture


@contextlib.contextmanager
def capture_attention_calls(
    model: nn.Module, on_call: Callable[[str, AttentionMaps], None]
) -> Iterator[AttentionCapture]:
    """:func:`capture_attention` for callers that want rows of the maps and not all of them at once."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    model = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    capture = AttentionCapture(model)
    running = _RunningModules(model, capture._ran)
    with running, torch.compiler.set_stance("force_eager"), _AttentionMode(running, capture, on_call):
        yield capture


class _RunningModules:
    """The stack of modules that are in their forward right now, kept by hooks."""

    def __init__(self, model: nn.Module, ran: set[str]):
        self._model, self._ran = model, ran
        self._handles: list = []
        self._stack: list[tuple[str, nn.Module]] = []
        self._calls: dict[str, int] = {}
        self.batch: int | None = None

    def __enter__(self) -> _RunningModules:
        for name, module in self._model.named_modules():
            self._handles.append(module.register_forward_pre_hook(self._entering(name), with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._leaving(name), always_call=True))
        return self

    def __exit__(self, *exception) -> None:
        for handle in self._handles:
            handle.remove()

    def _entering(self, name: str):
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            if not self._stack:  # a forward pass begins: its first tensor tells the batch
                tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.ndim > 1)
                first = next(tensors, None)
                self.batch = None if first is None else first.shape[0]
                self._calls.clear()
            self._stack.append((name, module))
            self._ran.add(name)

        return hook

    def _leaving(self, name: str):
        def hook(module: nn.Module, args: tuple, output) -> None:
            # A forward that raised in between may have left entries above this one.
            while self._stack and self._stack.pop()[1] is not module:
                pass

        return hook

    def layer_name(self) -> str:
        """The innermost running module, numbered when it attends for the second time in a forward pass."""
        name = self._stack[-1][0] if self._stack else ""
        self._calls[name] = self._calls.get(name, 0) + 1
        return name if self._calls[name] == 1 else f"{name}#{self._calls[name]}"


class _AttentionMode(TorchFunctionMode):
    """Sees the torch functions that the model calls. Off inside its own handler: what `on_call` does is not seen."""

    def __init__(self, running: _RunningModules, capture: AttentionCapture, on_call):
        self._running, self._capture, self._on_call = running, capture, on_call
        # Softmax results, and what became of them, until they weight something or are freed.
        self._candidates = WeakTensorKeyDictionary()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention:
            self._emit(_maps_of_fused_attention(*args, **kwargs, batch=self._running.batch))
            return function(*args, **kwargs)
        if function is F.multi_head_attention_forward:
            self._emit(ReadyMaps(_maps_of_multi_head_attention(args, kwargs), self._running.batch))
            return function(*args, **kwargs)
        result = function(*args, **kwargs)
        if function in _SOFTMAX:
            self._note_softmax(args, kwargs, result)
        elif len(self._candidates):
            self._follow(function, args, kwargs, result)
        return result

    def _emit(self, maps: AttentionMaps) -> None:
        name = self._running.layer_name()
        self._capture.seen.append(name)
        with torch.no_grad():
            self._on_call(name, maps)

    def _note_softmax(self, args: tuple, kwargs: dict, result: Tensor) -> None:
        logits = args[0] if args else kwargs["input"]
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        if result.ndim >= 3 and dim in (-1, result.ndim - 1):
            in_half = result.dtype in (torch.float16, torch.bfloat16)
            self._candidates[result] = _Softmax(result, logits if in_half else None)

    def _follow(self, function, args: tuple, kwargs: dict, result) -> None:
        operands = [value for value in _flat((*args, *_in_order(kwargs))) if isinstance(value, Tensor)]
        if function in _ADDED_PRODUCTS:
            operands = operands[1:]
        for operand in operands:
            softmax = self._candidates.get(operand)
            if softmax is None:
                continue
            if function in _PRODUCTS or function in _ADDED_PRODUCTS:
                equation = args[0] if function is torch.einsum else None
                if not softmax.emitted and softmax.weights(operand, operands, equation):
                    softmax.emitted = True
                    self._emit(ReadyMaps(softmax.maps, self._running.batch, softmax.logits))
            elif isinstance(result, Tensor) and result.numel() == operand.numel() and result is not operand:
                self._candidates[result] = softmax


class _Softmax:
    """A softmax that may turn out to be attention."""

    def __init__(self, maps: Tensor, logits: Tensor | None):
        self.maps, self.logits = maps.detach(), logits
        self.emitted = False

    def weights(self, operand: Tensor, operands: list[Tensor], equation: str | None) -> bool:
        """Whether in this product the rows of `operand` weight a computed tensor, summed over the keys."""
        if len(operands) != 2:
            return False
        on_the_left = operands[0] is operand
        values = operands[1 if on_the_left else 0]
        if values.ndim < 3 or isinstance(values, nn.Parameter):
            return False
        if equation is None:
            rows = operand if on_the_left else operand.mT  # values @ maps^T is the same sum, transposed
            return rows.shape[-2:] == self.maps.shape[-2:]
        inputs, _, result = equation.replace(" ", "").partition("->")
        of_operand, of_values = inputs.split(",") if on_the_left else reversed(inputs.split(","))
        query, key = of_operand[-2:]
        return bool(result) and key in of_values and key not in result and query not in of_values


def _maps_of_fused_attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False, *, batch=None
) -> ProductMaps:
    return ProductMaps(query, key, attn_mask, is_causal, scale, batch)


def _maps_of_multi_head_attention(args: tuple, kwargs: dict) -> Tensor:
    """The same call once more, in float32, without dropout, for its weights: (batch, heads, queries, keys)."""

    def widen(value):
        half = isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)
        return value.detach().float() if half else value

    args = [widen(value) for value in args]
    kwargs = {name: widen(value) for name, value in kwargs.items()}
    again = dict(zip(_MULTI_HEAD_ARGUMENTS, args, strict=False)) | kwargs
    again |= {"dropout_p": 0.0, "training": False, "need_weights": True, "average_attn_weights": False}
    with torch.no_grad(), torch.autocast(again["query"].device.type, enabled=False):
        maps = F.multi_head_attention_forward(**again)[1]
    return maps if maps.ndim == 4 else maps.unsqueeze(0)


_MULTI_HEAD_ARGUMENTS = F.multi_head_attention_forward.__code__.co_varnames[
    : F.multi_head_attention_forward.__code__.co_argcount
]


def _in_order(kwargs: dict) -> list:
    """Values of keyword arguments, the operands of a product in their order whatever the caller's; not ``out``."""
    places = {name: place for place, name in enumerate(_FIRST_OPERANDS)}
    names = sorted(kwargs, key=lambda name: places.get(name, len(places)))
    return [kwargs[name] for name in names if name != "out"]


def _flat(values) -> Iterator:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value


def _related(name: str, other: str) -> bool:
    """Whether one of two modules is the other or lies inside it; all lie inside the model, whose name is empty."""
    return "" in (name, other) or name == other or name.startswith(f"{other}.") or other.startswith(f"{name}.")
