# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Which attention kernel trains a model fastest here: measured on the task's own batches, because it depends on shape
and machine.

On a CPU sdpa with dropout takes its slow math path and often loses to eager attention; on a GPU it is usually the
other way round.
"""

import time
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from maelm_hf.modeling_maelm import has_local_layers

CANDIDATES = ("sdpa", "eager")
ON_CUDA = ("flash_attention_2",)  # where its package is installed
REPEATS = 3
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def choose_attention(model: PreTrainedModel, batches: Sequence[dict], precision: str = "fp32") -> tuple[str, str]:
    """The fastest of sdpa and eager for one training step over `batches`, and the reason in words.

    On CUDA flash attention takes part where it is installed, for training in bf16 or fp16 of a model that it can run.
    Each kernel runs every batch forward and backward, under autocast where `precision` is bf16 or fp16, once to warm up
    and three times timed, in turns; the best time counts. The model keeps its weights, gradients are cleared, and the
    random state is put back.
    """
    before, was_training, device = model.config._attn_implementation, model.training, next(model.parameters()).device
    seconds: dict[str, float] = {}
    too_large: list[str] = []
    half = device.type == "cuda" and precision in AUTOCAST
    candidates = CANDIDATES + (ON_CUDA if half and takes_flash(model, batches) else ())
    model.train()
    with torch.random.fork_rng():
        for _ in range(1 + REPEATS):
            for kernel in [name for name in candidates if name not in too_large]:
                try:
                    model.set_attn_implementation(kernel)
                except (ValueError, ImportError):
                    continue  # this architecture has no such kernel
                try:
                    elapsed = _step_seconds(model, batches, device, precision)
                except torch.OutOfMemoryError:  # eager keeps whole maps, where the others do not
                    model.zero_grad(set_to_none=True)
                    seconds.pop(kernel, None)
                    too_large.append(kernel)
                    continue
                warm_up = kernel not in seconds
                seconds[kernel] = float("inf") if warm_up else min(seconds[kernel], elapsed)
    model.set_attn_implementation(before)
    model.train(was_training)
    if not seconds and too_large:
        raise torch.OutOfMemoryError(f"{', '.join(too_large)}: none fits into memory; make the micro-batch smaller")
    if not seconds:
        return before, f"attention {before}: the only kernel this architecture has"
    best = min(seconds, key=seconds.__getitem__)
    measured = ", ".join(
        f"{kernel} {value * 1000:.0f} ms" for kernel, value in sorted(seconds.items(), key=lambda kv: kv[1])
    )
    measured += "".join(f", {kernel} out of memory" for kernel in too_large)
    return (
        best,
        f"attention {best}: fastest over {len(batches)} training batches on {device.type} in {precision} ({measured})",
    )


def takes_flash(model: PreTrainedModel, batches: Sequence[dict]) -> bool:
    """Whether the model would train with flash attention, and not refuse it."""
    backbone = getattr(model.config, "backbone_config", None)
    if backbone is None:
        return not getattr(model.config, "relative_position_buckets", 0)
    packed = any("document_ids" in batch for batch in batches)
    return not packed and not has_local_layers(backbone)


def _step_seconds(model: PreTrainedModel, batches: Sequence[dict], device: torch.device, precision: str) -> float:
    dtype = AUTOCAST.get(precision)
    start = time.perf_counter()
    for batch in batches:
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
            loss = model(**{name: value.to(device) for name, value in batch.items()}).loss
        loss.backward()
        model.zero_grad(set_to_none=True)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
