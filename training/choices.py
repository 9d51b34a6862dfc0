# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""What a recipe leaves to the machine: precision, micro-batch and attention kernel, each with its reason.

A choice is made once, printed, stored in the checkpoint, and kept on resume: a run must not change its arithmetic
midway.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch
from transformers import PreTrainedModel

from maelm_hf import MaeLmConfig

from .attention_choice import AUTOCAST, choose_attention
from .flops import full_row
from .memory import Arithmetic, activation_bytes
from .recipe import Recipe

_CPU_TOKENS = 16_384  # activations of a base-size model: a few GB
_GPU_SHARE = 0.6  # of the free memory, for activations


@dataclass(frozen=True)
class Choice:
    value: Any
    reason: str


class Choices:
    """Choices by name; those of a checkpoint are kept."""

    def __init__(self, say: Callable[[str], None], stored: dict[str, dict] | None = None):
        self._say = say
        self._choices = {name: Choice(**choice) for name, choice in (stored or {}).items()}
        self._kept = bool(stored)

    def make(self, name: str, given: Any, choose: Callable[[], Choice]) -> Any:
        """The value: the checkpoint's, or the recipe's, or, where that is "auto", a new one."""
        if name not in self._choices:
            self._choices[name] = choose() if given == "auto" else Choice(given, "the recipe says so")
        choice = self._choices[name]
        value = f"{choice.value:.3g}" if isinstance(choice.value, float) else choice.value
        self._say(f"{name}: {value} ({choice.reason}{'; kept from the checkpoint' if self._kept else ''})")
        return choice.value

    def as_dict(self) -> dict[str, dict]:
        return {name: asdict(choice) for name, choice in self._choices.items()}


def choose_precision(device: torch.device) -> Choice:
    """bf16 where matrix products are really faster in it."""
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return Choice("bf16", "this GPU multiplies in it")
        return Choice("fp32", "this GPU has no bf16")
    if device.type != "cpu":
        return Choice("fp32", f"bf16 autocast was not tried on {device.type}")
    seconds = {dtype: _matmul_seconds(dtype) for dtype in (torch.float32, torch.bfloat16)}
    ratio = seconds[torch.float32] / seconds[torch.bfloat16]
    return Choice("bf16" if ratio > 1.5 else "fp32", f"bf16 products are {ratio:.1f} times as fast as fp32 ones here")


def _matmul_seconds(dtype: torch.dtype, size: int = 512, repeats: int = 5) -> float:
    matrix = torch.ones(size, size, dtype=dtype)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        matrix @ matrix
        best = min(best, time.perf_counter() - start)
    return best


def measure_peak(device: torch.device, precision: str) -> Choice:
    """Operations a second of square matrix products in the run's precision: what its speed is compared with."""
    dtype, size = AUTOCAST.get(precision, torch.float32), 8192 if device.type == "cuda" else 1024
    peak = float(f"{_matmul_rate(device, dtype, size, torch.get_num_threads()):.3g}")
    return Choice(peak, f"operations a second, measured on {size} x {size} matrices in {precision}")


@cache
def _matmul_rate(device: torch.device, dtype: torch.dtype, size: int, threads: int, repeats: int = 5) -> float:
    """The best of a few; ``threads`` are part of the key of the cache."""
    matrix, best = torch.ones(size, size, dtype=dtype, device=device), float("inf")
    for _ in range(1 + repeats):
        start = time.perf_counter()
        (matrix @ matrix)[0, 0].item()  # waits for the device
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def choose_micro_batch(recipe: Recipe, model: PreTrainedModel, device: torch.device) -> Choice:
    """Sequences of ``max_length`` in a forward pass."""
    if device.type != "cuda":
        count = cpu_micro_batch(recipe)
        return Choice(count, f"about {_CPU_TOKENS:,} tokens a forward pass")
    precision = choose_precision(device).value if recipe.precision == "auto" else recipe.precision
    arithmetic = Arithmetic(autocast=precision != "fp32", scores_kept=model.config._attn_implementation == "eager")
    free, _ = torch.cuda.mem_get_info(device)
    count, a_row = fitting_micro_batch(recipe, model.config, arithmetic, free)
    reason = f"activations of about {a_row / 1e6:.0f} MB a sequence fill {_GPU_SHARE:.0%} of free memory"
    return Choice(count, reason)


def cpu_micro_batch(recipe: Recipe) -> int:
    return max(1, _CPU_TOKENS // recipe.data.max_length)


def fitting_micro_batch(recipe: Recipe, config: MaeLmConfig, arithmetic: Arithmetic, free: float) -> tuple[int, float]:
    """How many full rows fit into so many free bytes, with a margin; and the bytes of one."""
    a_row = activation_bytes(config, full_row(recipe), arithmetic, recipe.activation_checkpointing)
    return max(1, int(_GPU_SHARE * free / a_row)), a_row


def fastest_attention(model: PreTrainedModel, batch: dict[str, torch.Tensor], precision: str) -> Choice:
    """Measured on a micro-batch of the run, in its precision."""
    kernel, reason = choose_attention(model, [batch], precision)
    return Choice(kernel, reason.split(": ", 1)[1])


def autocast_of(precision: str, device: torch.device) -> Callable[[], AbstractContextManager]:
    if precision == "fp32":
        return nullcontext
    return lambda: torch.autocast(device.type, dtype=AUTOCAST[precision])
