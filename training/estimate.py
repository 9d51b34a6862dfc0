# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""What a recipe costs, without training it: nothing is downloaded, no text is read, the model has no weights.

    python -m training.pretrain training/recipes/base.yaml --estimate --devices 8 --device h100 --utilisation 0.4
    python -m training.estimate training/recipes/base.yaml training/recipes/large++.yaml --devices 8 64 --markdown

Prints parameters, operations a token, hours at the stated utilisation, memory and network traffic of a process, and the
size of a checkpoint. The options of a recipe (--section.key value) may follow.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from rich.table import Table
from transformers import AutoTokenizer

from maelm_hf import MaeLmConfig, MaeLmForMaskedLM

from .choices import choose_precision, cpu_micro_batch, fitting_micro_batch, measure_peak
from .console import console, help_text, markdown
from .flops import Flops, forward_flops, full_row, muon_flops
from .memory import (
    Arithmetic,
    Memory,
    Parameters,
    activation_bytes,
    checkpoint_bytes,
    count_parameters,
    ddp_memory,
    ddp_traffic,
    fsdp_memory,
    fsdp_traffic,
)
from .monitoring import hardware
from .recipe import Recipe, RecipeError, load_recipe
from .start import model_config

# The ids that a tokenizer trained by training/tokenizer.py gives them.
_TOKEN_IDS = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "mask_token_id": 4}


@dataclass(frozen=True)
class Device:
    """One processor: operations a second of dense matrix products at best, and bytes of memory."""

    name: str
    half: float  # in bf16 and fp16, accumulated in fp32
    full: float  # in fp32, without TF32
    memory: float
    on_cpu: bool = False


def _device(name: str, half: float, full: float, gigabytes: float) -> Device:
    return Device(name, half * 1e12, full * 1e12, gigabytes * 1e9)


# The makers' data sheets, TFLOP/s without sparsity (sheets that give "with sparsity" are halved).
DEVICES = {
    "a100": _device("A100 80 GB", 312, 19.5, 80),  # NVIDIA A100 Tensor Core GPU data sheet, 2021
    "a100-40gb": _device("A100 40 GB", 312, 19.5, 40),
    "h100": _device("H100 SXM", 989, 67, 80),  # NVIDIA H100 Tensor Core GPU data sheet, 2023
    "h200": _device("H200 SXM", 989, 67, 141),  # NVIDIA H200 Tensor Core GPU data sheet, 2024
    "l40s": _device("L40S", 362, 91.6, 48),  # NVIDIA L40S data sheet, 2023
    "l4": _device("L4", 121, 30.3, 24),  # NVIDIA L4 data sheet, 2023
    "rtx4090": _device("RTX 4090", 165, 82.6, 24),  # NVIDIA Ada GPU Architecture white paper, appendix A, 2022
    "mi300x": _device("MI300X", 1307, 163.4, 192),  # AMD Instinct MI300X data sheet, 2023
}


def measured_device() -> Device:
    """This machine: a GPU if torch sees one, by the best of a few matrix products in bf16 and in fp32."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    half, full = (measure_peak(device, precision).value for precision in ("bf16", "fp32"))
    name = hardware(device, 1).removesuffix(", 1 process")
    if device.type == "cuda":
        return Device(name, half, full, torch.cuda.get_device_properties(device).total_memory)
    threads = torch.get_num_threads()
    name += f", {threads} thread{'s' if threads > 1 else ''}"
    return Device(name, half, full, psutil.virtual_memory().total, on_cpu=True)


@dataclass(frozen=True)
class Estimate:
    """What a recipe costs on ``processes`` devices, one process each. Memory and traffic in bytes."""

    recipe: Recipe
    config: MaeLmConfig
    parameters: Parameters
    flops: Flops  # of one token
    executed: float  # forward, backward and recomputation, of one token
    mlm_training: float  # forward and backward of the MLM twin, of one token
    tokens_a_step: float
    optimizer_flops: float  # a step, on each process
    device: Device
    peak: float
    processes: int
    utilisation: float
    precision: str
    attention: str
    rows: int  # of a micro-batch
    micro_batches: int
    ddp: Memory
    fsdp: Memory
    ddp_traffic: float
    fsdp_traffic: float
    checkpoint: int

    @property
    def tokens(self) -> float:
        return self.tokens_a_step * self.recipe.max_steps

    @property
    def step_seconds(self) -> float:
        a_process = self.tokens_a_step * self.executed / self.processes + self.optimizer_flops
        return a_process / (self.peak * self.utilisation)

    @property
    def hours(self) -> float:
        return self.step_seconds * self.recipe.max_steps / 3600


def estimate(recipe: Recipe, device: Device, processes: int, utilisation: float) -> Estimate:
    """Counts everything for full blocks of ``max_length`` tokens.

    Raises:
        RecipeError: the tokenizer's size is not known here, or a step has fewer rows than there are processes.
    """
    config = model_config(recipe, vocabulary_size(recipe), _TOKEN_IDS)
    with torch.device("meta"):
        model = MaeLmForMaskedLM(config)
    parameters = count_parameters(model, recipe.optimizer)
    row = full_row(recipe)
    flops = forward_flops(config, row)
    twin = forward_flops(_mlm(config), row)

    precision = _precision(recipe, device)
    attention = recipe.attention
    if attention == "auto":
        attention = "eager" if device.on_cpu else "sdpa"
    arithmetic = Arithmetic(precision != "fp32", scores_kept=attention == "eager", on_cpu=device.on_cpu)
    rows, micro_batches = _micro_batch(recipe, config, parameters, arithmetic, device, processes)
    activations = rows * activation_bytes(config, row, arithmetic, recipe.activation_checkpointing)
    tokens_a_step = recipe.data.batch_tokens or recipe.data.batch_size * recipe.data.max_length
    return Estimate(
        recipe=recipe,
        config=config,
        parameters=parameters,
        flops=Flops(*(part / row.length for part in (flops.encoder, flops.decoder, flops.head))),
        executed=flops.executed(recipe.activation_checkpointing) / row.length,
        mlm_training=twin.training / row.length,
        tokens_a_step=tokens_a_step,
        optimizer_flops=muon_flops(parameters.muon),
        device=device,
        peak=device.full if precision == "fp32" else device.half,
        processes=processes,
        utilisation=utilisation,
        precision=precision,
        attention=attention,
        rows=rows,
        micro_batches=micro_batches,
        ddp=ddp_memory(parameters, arithmetic, processes, activations),
        fsdp=fsdp_memory(parameters, arithmetic, processes, micro_batches, activations),
        ddp_traffic=ddp_traffic(parameters, processes),
        fsdp_traffic=fsdp_traffic(parameters, processes, micro_batches),
        checkpoint=checkpoint_bytes(parameters),
    )


def vocabulary_size(recipe: Recipe) -> int:
    """The tokenizer's size, without a download: as the recipe wants it, or of an existing one that is on this disk."""
    path = recipe.tokenizer.path
    if path is None:
        return recipe.tokenizer.vocab_size
    try:
        return len(AutoTokenizer.from_pretrained(path, local_files_only=True))
    except (OSError, ValueError):
        raise RecipeError(
            f"tokenizer.path {path!r} is not on this disk, and an estimate downloads nothing: give its size by "
            "--tokenizer.path null --tokenizer.vocab_size N."
        ) from None


def _mlm(config: MaeLmConfig) -> MaeLmConfig:
    return MaeLmConfig(**(config.to_dict() | {"encoder_mask_fraction": 1.0, "decoder_num_hidden_layers": 0}))


def _precision(recipe: Recipe, device: Device) -> str:
    if recipe.precision != "auto":
        return recipe.precision
    return choose_precision(torch.device("cpu")).value if device.on_cpu else "bf16"


def _micro_batch(
    recipe: Recipe, config: MaeLmConfig, parameters: Parameters, arithmetic: Arithmetic, device: Device, processes: int
) -> tuple[int, int]:
    """Rows of the largest micro-batch, and micro-batches a step."""
    batch = recipe.data.batch_size or recipe.data.batch_tokens // recipe.data.max_length
    if batch < processes:
        raise RecipeError(
            f"a step has {batch} rows of {recipe.data.max_length} tokens for {processes} devices: raise the batch or "
            "give fewer devices."
        )
    fitting = recipe.data.micro_batch_size
    if fitting == "auto" and device.on_cpu:
        fitting = cpu_micro_batch(recipe)
    elif fitting == "auto":
        fitting, _ = fitting_micro_batch(recipe, config, arithmetic, device.memory - 4 * parameters.total)
    rows = -(-batch // processes)
    micro_batches = -(-rows // fitting)
    return -(-rows // micro_batches), micro_batches


def describe(found: Estimate) -> list[tuple[str, str]]:
    """The lines of the table, a label and a value each; a label without value begins a part."""
    parameters, config, flops, recipe = found.parameters, found.config, found.flops, found.recipe
    decoder = "no decoder (MLM)"
    if config.decoder_num_hidden_layers:
        decoder = f"decoder {config.decoder_num_hidden_layers} x {config.decoder_hidden_size}"
    forward = {"encoder": flops.encoder, "decoder": flops.decoder, "head": flops.head}
    return [
        ("Model", ""),
        ("encoder and decoder", f"{config.num_hidden_layers} x {config.hidden_size}, {decoder}"),
        ("parameters", f"{parameters.total / 1e6:,.1f} M"),
        ("- embedding (tied to the output)", f"{parameters.embedding / 1e6:,.1f} M"),
        ("- encoder layers", f"{parameters.encoder / 1e6:,.1f} M"),
        ("- decoder", f"{parameters.decoder / 1e6:,.1f} M"),
        ("- head", f"{parameters.head / 1e6:,.1f} M"),
        ("Operations a token", ""),
        *((f"forward, {name}", f"{value / 1e6:,.1f} MFLOP") for name, value in forward.items()),
        ("forward", f"{flops.forward / 1e6:,.1f} MFLOP"),
        ("training", f"{flops.training / 1e6:,.1f} MFLOP"),
        ("training against the MLM twin", f"{flops.training / found.mlm_training:.2f} x"),
        (
            "training, layers recomputed",
            f"{found.executed / 1e6:,.1f} MFLOP" if recipe.activation_checkpointing else "no recomputation",
        ),
        ("Time", ""),
        ("steps", f"{recipe.max_steps:,}"),
        ("tokens a step", f"{found.tokens_a_step:,.0f}"),
        ("tokens", f"{found.tokens / 1e9:,.2f} G"),
        ("devices", f"{found.processes} x {found.device.name}"),
        ("peak of a device", f"{_number(found.peak / 1e12)} TFLOP/s ({found.precision})"),
        ("utilisation (assumed)", f"{found.utilisation:.0%}"),
        ("tokens a second", f"{found.tokens_a_step / found.step_seconds:,.0f}"),
        ("hours", _number(found.hours)),
        ("device-hours", _number(found.hours * found.processes)),
        ("Memory of a process", ""),
        ("micro-batch", f"{found.rows} x {recipe.data.max_length} tokens, {found.micro_batches} a step"),
        ("weights", _size(found.ddp.weights)),
        ("gradients", _size(found.ddp.gradients)),
        ("optimizer", f"{_size(found.ddp.optimizer)} ({recipe.optimizer.name})"),
        ("half-precision copies of matrices", _size(found.ddp.casts)),
        ("DDP's buckets", _size(found.ddp.buckets)),
        ("activations", f"{_size(found.ddp.activations)} ({found.attention})"),
        ("held by the C library", _size(found.ddp.held)),
        ("all, DDP", _fitting(found.ddp, found.device)),
        ("all, FSDP2", _fitting(found.fsdp, found.device)),
        ("Network, sent by a process in a step", ""),
        ("DDP", _size(found.ddp_traffic)),
        ("FSDP2", _size(found.fsdp_traffic)),
        ("Disk", ""),
        ("a checkpoint", _size(found.checkpoint)),
    ]


ASSUMPTIONS = (
    "Full blocks: every row holds max_length tokens. An operation is one addition or multiplication in a matrix "
    "product, as torch counts. Utilisation is a share of the device's peak, of all operations that are executed. "
    "Memory is the peak of a step that accumulates gradients, without the CUDA context and fragmentation; each process "
    "receives as much as it sends. 1 GB is 10^9 bytes."
)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _size(size: float) -> str:
    if size == 0:
        return "0"
    return f"{size / 1e9:,.2f} GB" if size >= 1e8 else f"{size / 1e6:,.1f} MB"


def _fitting(memory: Memory, device: Device) -> str:
    return _size(memory.total) + ("" if memory.total <= device.memory else f" (more than {_size(device.memory)})")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m training.pretrain RECIPE --estimate",
        description=help_text(__doc__).replace("\b\n", ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("recipes", nargs="+", metavar="RECIPE", help="recipe files, first")
    parser.add_argument("--devices", nargs="+", type=int, default=[8], help="how many, one process each (default: 8)")
    parser.add_argument(
        "--device",
        default="h100",
        choices=[*DEVICES, "measured"],
        help="whose peak (default: h100); measured: this machine's, by matrix products",
    )
    parser.add_argument(
        "--utilisation", type=float, default=0.4, help="share of the peak that training reaches (default: 0.4)"
    )
    parser.add_argument("--markdown", action="store_true", help="print Markdown")
    # What is no option here is the recipe's, and checked by it.
    options, overrides = parser.parse_known_args(arguments)
    if not 0 < options.utilisation <= 1:
        parser.error(f"--utilisation must be above 0 and at most 1, got {options.utilisation}")
    if min(options.devices) < 1:
        parser.error(f"--devices must be at least 1, got {min(options.devices)}")
    try:
        device = measured_device() if options.device == "measured" else DEVICES[options.device]
        columns = {}
        for path in options.recipes:
            for count in options.devices:
                found = estimate(load_recipe(path, overrides), device, count, options.utilisation)
                columns[f"{Path(path).stem}, {count} device{'s' if count > 1 else ''}"] = describe(found)
    except RecipeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    show(columns, options.markdown)
    return 0


def show(columns: dict[str, list[tuple[str, str]]], as_markdown: bool) -> None:
    """Prints the estimates side by side."""
    labels = [label for label, _ in next(iter(columns.values()))]
    rows = [[label, *(lines[number][1] for lines in columns.values())] for number, label in enumerate(labels)]
    if as_markdown:
        rows = [[f"**{label}**" if not any(values) else label, *values] for label, *values in rows]
        print(markdown(["", *columns], rows) + "\n" + ASSUMPTIONS)
        return
    table = Table(title="Estimate; nothing was trained", caption=ASSUMPTIONS, caption_justify="left")
    table.add_column("")
    for name in columns:
        table.add_column(name, justify="right")
    for label, *values in rows:
        if not any(values):
            table.add_section()
            table.add_row(f"[bold]{label}[/bold]")
        else:
            table.add_row(label, *values)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
