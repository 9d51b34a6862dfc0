# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""What does the rank probe cost, against a bare forward pass and against the usual way?

The usual way: ``output_hidden_states=True``, keep every token of every layer, concatenate, ``torch.linalg.svdvals``.
Each way runs in a process of its own, so that its peak memory is its own.
"""

from __future__ import annotations

import json
import math
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer
from rich.console import Console
from transformers import BertConfig, BertModel

from maelm_hf.cli import table
from maelm_hf.probing.inputs import ProbeBatch
from maelm_hf.probing.probe import accumulate
from maelm_hf.probing.rank_report import RankReport
from maelm_hf.probing.settings import versions

SETTINGS = {"model": "BERT 12 x 768", "tau": 0.9, "power": 1, "centred": False, "seed": 0}


def probe(
    tokens: Annotated[int, typer.Option(help="Tokens for the comparison with the usual way.")] = 200_000,
    batch_size: Annotated[int, typer.Option(help="Sequences in a batch.")] = 32,
    length: Annotated[int, typer.Option(help="Tokens in a sequence.")] = 128,
    batches: Annotated[int, typer.Option(help="Batches in a timed run of the overhead.")] = 4,
    repeats: Annotated[int, typer.Option(help="Timed runs of the overhead; the median is shown.")] = 5,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    out: Annotated[Path, typer.Option(help="Folder for the JSON and CSV.")] = Path("benchmarks"),
) -> None:
    """The rank probe of a 12 x 768 encoder, all layers: overhead over the forward pass; time and memory at scale."""
    shape = {"batch_size": batch_size, "length": length, "device": device}
    overhead = _in_process("overhead", **shape, batches=batches, repeats=repeats)
    usual = _in_process("usual", **shape, tokens=tokens)
    ours = _in_process("ours", **shape, tokens=tokens)
    timed, many = f"{batches * batch_size * length:,}", f"{usual['tokens']:,}"
    rows = [
        _row("bare forward pass", timed, overhead["bare_s"]),
        _row("with the rank probe", timed, overhead["probe_s"], ratio=f"forward {overhead['ratio']:.2f} x"),
        _row("output_hidden_states, svdvals", many, usual["forward_s"], usual["after_s"], usual["peak_mb"]),
        _row("probe_rank: everything", many, ours["forward_s"], ours["after_s"], ours["peak_mb"])
        | {"against the above": _ratios(usual, ours, "after_s")},
        _row("probe_rank: singular values", many, ours["forward_s"], ours["spectra_s"], ours["peak_mb"])
        | {"against the above": _ratios(usual, ours, "spectra_s")},
    ]
    document = {
        "command": "python -m training.benchmark probe",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": _hardware(device),
        "dtype": "float32 model, float64 sums",
        "settings": {**shape, "tokens": tokens, "batches": batches, "repeats": repeats},
        "versions": versions(),
        "measured": {"overhead": overhead, "usual": usual, "ours": ours},
        "table": [{name: None if value != value else value for name, value in row.items()} for row in rows],
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "probe.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    frame = pd.DataFrame(rows)
    frame.to_csv(out / "probe.csv", index=False)
    console = Console(width=max(120, Console().width))
    console.print(table(frame, title=f"Rank probe, BERT 12 x 768, {document['hardware']}"))
    console.print(f"Written to {out / 'probe.json'} and {out / 'probe.csv'}")


def measure_overhead(batch_size: int, length: int, device: str, batches: int, repeats: int) -> dict[str, Any]:
    """Bare forward passes and probed ones in turn, so that a slow moment of the machine hits both."""
    model, inputs = _model(device), [_batch(number, batch_size, length, device) for number in range(batches)]

    def bare() -> None:
        with torch.no_grad():
            for batch in inputs:
                model(**batch.inputs)

    def probed() -> None:
        accumulate(model, inputs)

    bare()
    probed()
    runs = [(_timed(bare, device), _timed(probed, device)) for _ in range(repeats)]
    ratios = [with_probe / without for without, with_probe in runs]
    return {
        "bare_s": statistics.median(without for without, _ in runs),
        "probe_s": statistics.median(with_probe for _, with_probe in runs),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
    }


def measure_usual(batch_size: int, length: int, device: str, tokens: int) -> dict[str, Any]:
    """What a notebook does."""
    model, inputs = _model(device), _batches(tokens, batch_size, length, device)
    before = _peak_mb(device)
    kept: list[list[torch.Tensor]] = [[] for _ in range(model.config.num_hidden_layers + 1)]

    def forward() -> None:
        with torch.no_grad():
            for batch in inputs:
                states = model(**batch.inputs, output_hidden_states=True).hidden_states
                for layer, hidden in zip(kept, states, strict=True):
                    layer.append(hidden[batch.counted])

    def after() -> None:
        for layer in kept:
            torch.linalg.svdvals(torch.cat(layer))

    result = {"forward_s": _timed(forward, device), "after_s": _timed(after, device)}
    return result | {"tokens": len(inputs) * batch_size * length, "peak_mb": _peak_mb(device) - before}


def measure_ours(batch_size: int, length: int, device: str, tokens: int) -> dict[str, Any]:
    """The same tokens and layers through the probe."""
    model, inputs = _model(device), _batches(tokens, batch_size, length, device)
    before = _peak_mb(device)
    found: list[Any] = []
    forward_s = _timed(lambda: found.extend(accumulate(model, inputs)), device)
    moments, positions = found
    after_s = _timed(lambda: RankReport.from_moments(moments, positions, SETTINGS), device)
    result = {"tokens": len(inputs) * batch_size * length, "peak_mb": _peak_mb(device) - before}
    spectra_s = _timed(lambda: [sums.singular_values() for sums in moments.values()], device)
    return result | {"forward_s": forward_s, "after_s": after_s, "spectra_s": spectra_s}


def _model(device: str) -> BertModel:
    torch.manual_seed(0)
    model = BertModel(BertConfig(), add_pooling_layer=False).eval().to(device)
    with torch.no_grad():
        model(**_batch(0, 2, 16, device).inputs)  # kernels and buffers are made before anything is measured
    return model


def _batch(number: int, batch_size: int, length: int, device: str) -> ProbeBatch:
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(1000, 30_000, (batch_size, length), generator=generator).to(device)
    mask = torch.ones_like(ids)
    index = torch.arange(number * batch_size, (number + 1) * batch_size)
    return ProbeBatch({"input_ids": ids, "attention_mask": mask}, mask.bool(), index)


def _batches(tokens: int, batch_size: int, length: int, device: str) -> list[ProbeBatch]:
    return [_batch(number, batch_size, length, device) for number in range(-(-tokens // (batch_size * length)))]


def _timed(function: Any, device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    function()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def _peak_mb(device: str) -> float:
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def _in_process(name: str, **options: Any) -> dict[str, Any]:
    print(f"measuring: {name} ...", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "training.benchmark_probe", name, json.dumps(options)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def _row(
    way: str,
    tokens: str,
    forward_s: float,
    after_s: float = math.nan,
    peak_mb: float = math.nan,
    ratio: str = "",
) -> dict[str, Any]:
    numbers = {"forward (s)": round(forward_s, 2), "after (s)": round(after_s, 2), "peak (MiB)": round(peak_mb, 0)}
    return {"way": way, "tokens": tokens, **numbers, "against the above": ratio}


def _ratios(usual: dict[str, Any], ours: dict[str, Any], part: str) -> str:
    faster, memory = usual["after_s"] / ours[part], ours["peak_mb"] / usual["peak_mb"]
    return f"after {faster:.1f} x faster, memory {memory:.3f} x"


def _hardware(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        name = names[0] if names else name
    return f"{name}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"


if __name__ == "__main__":
    measurements = {"overhead": measure_overhead, "usual": measure_usual, "ours": measure_ours}
    print(json.dumps(measurements[sys.argv[1]](**json.loads(sys.argv[2]))))
