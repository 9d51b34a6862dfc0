# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""What the attention probe costs: time against the bare forward pass and against the usual way, and peak memory.

The usual way is `output_attentions=True` under eager attention, every map turned into a NumPy array, and
the same numbers computed there. It is timed twice: once with as many pairs of queries for the Jensen-Shannon
divergence as the probe draws, everything vectorised, and once with all pairs, as the number is defined; that takes so
long that a single image is timed. Times are medians of turns in one process, memory is measured in processes of its
own.

    python -m training.benchmark attention
"""

import functools
import json
import multiprocessing
import platform
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
import psutil
import torch
import typer
from torch import nn

from maelm_hf._torchvision import make_torchvision_importable

make_torchvision_importable()
from transformers import Dinov2Config, Dinov2Model  # noqa: E402

from maelm_hf.probing import probe_attention  # noqa: E402

SMALL = {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6}
LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}


def build(sizes: dict, implementation: str, image_size: int) -> nn.Module:
    torch.manual_seed(0)
    config = Dinov2Config(**sizes, patch_size=14, image_size=image_size, attn_implementation=implementation)
    return Dinov2Model(config).eval()


def bare(model: nn.Module, batches: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for batch in batches:
            model(batch)


def probe(model: nn.Module, batches: list[torch.Tensor]) -> None:
    probe_attention(model, batches, overlay_images=0, progress=False)


def usual_way(model: nn.Module, batches: list[torch.Tensor]) -> None:
    """All maps of a batch at once, then NumPy: mean and deviation over images of every number, per layer and head."""
    collected = []
    for batch in batches:
        with torch.no_grad():
            output = model(batch, output_attentions=True, output_hidden_states=True)
        side = batch.shape[-1] // 14
        numbers, rolled = [], None
        for maps, hidden in zip(output.attentions, output.hidden_states[1:], strict=True):
            array = maps.numpy()
            step = (array.mean(axis=1) + np.eye(array.shape[-1], dtype=array.dtype)) / 2
            rolled = step if rolled is None else step @ rolled
            of_rollout = numpy_numbers(rolled[:, None], side)[:, :, :4]
            numbers.append((numpy_numbers(array, side), of_rollout, numpy_hidden(hidden.numpy(), side)))
        collected.append(numbers)
    for layer in range(len(collected[0])):
        for kind in range(3):
            values = np.concatenate([numbers[layer][kind] for numbers in collected])
            values.mean(axis=0), values.std(axis=0)


def numpy_numbers(array: np.ndarray, side: int) -> np.ndarray:
    """The probe's numbers of every map, vectorised: (images, heads, 9)."""
    patches = array[..., 1:, 1:]
    mass = patches.sum(-1, keepdims=True)
    weights = patches / np.maximum(mass, 1e-12)
    positions = np.stack(np.meshgrid(np.arange(side), np.arange(side), indexing="ij"), -1).reshape(-1, 2)
    positions = positions.astype(array.dtype)
    distances = np.linalg.norm(positions[:, None] - positions[None], axis=-1).astype(array.dtype)
    centers = weights @ positions
    diversity = centers.var(axis=-2).sum(-1)
    distance = (weights * distances).sum((-1, -2)) / len(positions)
    row_entropy = numpy_entropy(weights)
    entropy = row_entropy.mean(-1)
    key_entropy = numpy_entropy(weights.mean(-2))
    information = (key_entropy - entropy) / np.sqrt(np.log(len(positions)) * np.maximum(key_entropy, 1e-12))
    order = np.random.default_rng(0).permutation(len(positions))
    first, second = np.split(order[: len(order) // 2 * 2], 2)
    mixture = numpy_entropy((weights[..., first, :] + weights[..., second, :]) / 2)
    divergence = (mixture - (row_entropy[..., first] + row_entropy[..., second]) / 2).mean(-1)
    unit = weights / np.linalg.norm(weights, axis=-1, keepdims=True)
    count = len(positions)
    cosine = 1 - ((unit.sum(-2) ** 2).sum(-1) - count) / (count * (count - 1))
    flat = weights.reshape(*weights.shape[:2], -1)
    flat = flat / np.linalg.norm(flat, axis=-1, keepdims=True)
    redundancy = ((flat @ flat.transpose(0, 2, 1)).sum(-1) - 1) / max(1, weights.shape[1] - 1)
    prefix = 1 - mass[..., 0].mean(-1)
    left_out = (mass[..., 0] < 1e-6).mean(-1)
    return np.stack(
        [diversity, distance, entropy, information, divergence, cosine, redundancy, prefix, left_out], axis=-1
    )


def all_pairs(model: nn.Module, image: torch.Tensor) -> None:
    """The mean Jensen-Shannon divergence over all pairs of queries, of every head and layer, in NumPy."""
    with torch.no_grad():
        attentions = model(image, output_attentions=True).attentions
    for maps in attentions:
        for head in maps[0].numpy():
            weights = head[1:, 1:] / head[1:, 1:].sum(-1, keepdims=True)
            row_entropy, total = numpy_entropy(weights), 0.0
            for query in range(len(weights) - 1):
                mixture = numpy_entropy((weights[query] + weights[query + 1 :]) / 2)
                total += (mixture - (row_entropy[query] + row_entropy[query + 1 :]) / 2).sum()


def numpy_entropy(weights: np.ndarray) -> np.ndarray:
    return -(weights * np.log(np.where(weights > 0, weights, 1))).sum(-1)


def numpy_hidden(hidden: np.ndarray, side: int) -> np.ndarray:
    norms = np.linalg.norm(hidden[:, 1:], axis=-1)
    quantiles = np.quantile(norms, (0.05, 0.5, 0.95, 1.0), axis=-1).T
    spectrum = np.abs(np.fft.fft2(hidden[:, 1:].reshape(len(hidden), side, side, -1), axes=(1, 2)))
    log_amplitude = np.log(np.maximum(spectrum, 1e-12))
    fourier = (log_amplitude[:, side // 2, side // 2] - log_amplitude[:, 0, 0]).mean(-1)
    return np.concatenate([quantiles, fourier[:, None]], axis=-1)


def seconds(function: Callable[[], None]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


@contextmanager
def peak_memory():
    """Yields a list that ends up with the largest resident size above the one at the start, in MiB."""
    process, result, done = psutil.Process(), [], threading.Event()
    start = process.memory_info().rss
    peak = [start]

    def watch() -> None:
        while not done.wait(0.002):
            peak[0] = max(peak[0], process.memory_info().rss)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield result
    finally:
        done.set()
        thread.join()
        result.append((max(peak[0], process.memory_info().rss) - start) / 2**20)


def memory_of(way: str, sizes: dict, image_size: int, batch: int, queue) -> None:
    """In a process of its own: peak memory above the loaded model, and the size of one layer's maps, both in MiB."""
    implementation = "eager" if way == USUAL else "sdpa"
    model = build(sizes, implementation, image_size)
    images = [torch.randn(batch, 3, image_size, image_size)]
    bare(build({**SMALL, "num_hidden_layers": 1}, implementation, 28), [torch.randn(1, 3, 28, 28)])  # lazy set-up
    with peak_memory() as peak:
        RUNS[way](model, images)
    queue.put(peak[0])


def in_a_process(way: str, sizes: dict, image_size: int, batch: int) -> float:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=memory_of, args=(way, sizes, image_size, batch, queue))
    process.start()
    peak = queue.get()
    process.join()
    return peak


def attention(
    images: Annotated[int, typer.Option(help="Images of 224 px through a ViT-S/14.")] = 64,
    batch_size: Annotated[int, typer.Option(help="Images in a batch.")] = 16,
    repeats: Annotated[int, typer.Option(help="Timed runs; the median is shown.")] = 3,
    large: Annotated[bool, typer.Option(help="Measure the memory of a ViT-L/14 at 518 px too.")] = True,
    out: Annotated[Path, typer.Option(help="Folder for the JSON and CSV.")] = Path("benchmarks"),
) -> None:
    """The attention probe: time over the forward pass and against output_attentions with NumPy; peak memory."""
    rows = timed_ways(images, batch_size, repeats)
    cases = [("ViT-S/14, 224 px", SMALL, 224, batch_size)]
    if large:
        cases.append(("ViT-L/14, 518 px", LARGE, 518, 1))
    for label, sizes, size, batch in cases:
        for way in RUNS:
            rows.append(
                {"way": way, "model": label, "images": batch, "peak_mib": in_a_process(way, sizes, size, batch)}
            )
        maps = batch * sizes["num_attention_heads"] * ((size // 14) ** 2 + 1) ** 2 * 4 / 2**20
        rows.append({"way": "(one layer's maps)", "model": label, "images": batch, "peak_mib": maps})
    settings = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads",
        "dtype": "float32",
        "torch": torch.__version__,
        "repeats": repeats,
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "attention.json").write_text(json.dumps({"settings": settings, "rows": rows}, indent=1) + "\n")
    frame = pd.DataFrame(rows)
    frame.to_csv(out / "attention.csv", index=False, float_format="%.4g")
    print(frame.to_string(index=False, na_rep="", float_format="%.4g"))
    print(f"{settings}\nPeak memory is above the loaded model. Written to {out / 'attention.json'} and .csv")


def timed_ways(images: int, batch_size: int, repeats: int) -> list[dict]:
    """A row a way: seconds for all images, and how many times that of the bare forward pass and of the probe."""
    batches = list(torch.randn(images, 3, 224, 224).split(batch_size))
    fused, eager = build(SMALL, "sdpa", 224), build(SMALL, "eager", 224)
    ways = {way: functools.partial(run, eager if way == USUAL else fused, batches) for way, run in RUNS.items()}
    for function in ways.values():
        function()
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, function in ways.items():
            times[name].append(seconds(function))
    median = {name: statistics.median(values) for name, values in times.items()}
    pairs = seconds(lambda: all_pairs(eager, batches[0][:1])) * images
    median[f"{USUAL}, all pairs of queries (from one image)"] = median[USUAL] + pairs
    return [
        {
            "way": name,
            "model": "ViT-S/14, 224 px",
            "images": images,
            "seconds": value,
            "of_forward": value / median[BARE],
            "of_probe": value / median[PROBE],
        }
        for name, value in median.items()
    ]


BARE, PROBE, USUAL = "bare sdpa forward", "probe_attention, all numbers", "output_attentions, eager, NumPy"
RUNS = {BARE: bare, PROBE: probe, USUAL: usual_way}


if __name__ == "__main__":
    typer.run(attention)
