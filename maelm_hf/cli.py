# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""The ``maelm`` command. What a user can put right ends in one line and exit code 2."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .cli_hub import register as register_hub_commands

if TYPE_CHECKING:
    import pandas as pd

# Tracebacks without local variables: one of them may be a token.
app = typer.Typer(
    no_args_is_help=True, help="MAE-LM encoders, and probes for any encoder.", pretty_exceptions_show_locals=False
)
probe_app = typer.Typer(no_args_is_help=True, help="What a model's representations and attention look like inside.")
app.add_typer(probe_app, name="probe")
register_hub_commands(app)

Model = Annotated[str, typer.Argument(help="Hub id, folder, or timm/NAME.")]
Out = Annotated[Path, typer.Option(help="Folder for the report: JSON, PNG, safetensors, report.html.")]
Revision = Annotated[str | None, typer.Option(help="Hub branch, tag or commit.")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, mps; the accelerator where there is one.")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; the checkpoint's own.")]


@probe_app.command("rank")
def probe_rank_command(
    model: Model,
    data: Annotated[str, typer.Option(help="File, folder, or data set as name[:config[:split]].")],
    out: Out,
    column: Annotated[str | None, typer.Option(help="Column of a table or data set; text or image.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Stop after so many tokens.")] = 1_000_000,
    max_length: Annotated[int | None, typer.Option(min=1, help="Cut sequences at so many tokens.")] = None,
    mask_ratio: Annotated[float, typer.Option(help="Share of the tokens to mask; 0 masks nothing.")] = 0.15,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences in a forward pass.")] = 32,
    layer: Annotated[list[str] | None, typer.Option(help="A module to read; repeat for more. All blocks.")] = None,
    tau: Annotated[float, typer.Option(help="Share of the spectrum that the effective rank holds.")] = 0.9,
    power: Annotated[float, typer.Option(help="1: singular values, 2: energies.")] = 1,
    centred: Annotated[bool, typer.Option("--centred", help="Subtract the mean first.")] = False,
    seed: Annotated[int, typer.Option(help="Of the masks and intervals.")] = 0,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """How many of its dimensions does an encoder use, layer by layer?"""
    from .probing import probe_rank

    first = start_processes()
    report = probe_rank(
        model,
        data=data,
        mask_ratio=mask_ratio,
        column=column,
        max_tokens=max_tokens,
        max_length=max_length,
        batch_size=batch_size,
        layers=layer,
        tau=tau,
        power=power,
        centred=centred,
        seed=seed,
        revision=revision,
        trust_remote_code=trust_remote_code,
        device=device,
        dtype=dtype,
    )
    if first:
        show(report, report.save(out))


@probe_app.command("attention")
def probe_attention_command(
    model: Model,
    images: Annotated[str, typer.Option(help="Folder of images, or data set as name[:config[:split]]; texts too.")],
    out: Out,
    column: Annotated[str | None, typer.Option(help="Column of a data set; image or text.")] = None,
    max_images: Annotated[int | None, typer.Option(min=1, help="Stop after so many images.")] = 1000,
    batch_size: Annotated[int, typer.Option(min=1, help="Images in a forward pass.")] = 16,
    grid: Annotated[tuple[int, int] | None, typer.Option(help="Rows and columns of patches; found.")] = None,
    prefix_tokens: Annotated[int | None, typer.Option(min=0, help="Tokens before the patches; found.")] = None,
    overlay_images: Annotated[int, typer.Option(min=0, help="Images that maps are drawn on.")] = 4,
    random_init: Annotated[bool, typer.Option("--random-init", help="Probe the same architecture untrained.")] = False,
    seed: Annotated[int, typer.Option(help="Of the pairs of queries, and of --random-init.")] = 0,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Are a Vision Transformer's heads all looking at the same place?"""
    from .probing import probe_attention

    first = start_processes()
    report = probe_attention(
        model,
        images,
        column=column,
        max_images=max_images,
        batch_size=batch_size,
        grid=grid,
        prefix_tokens=prefix_tokens,
        overlay_images=overlay_images,
        random_init=random_init,
        seed=seed,
        revision=revision,
        trust_remote_code=trust_remote_code,
        device=device,
        dtype=dtype,
        progress=first,
    )
    if first:
        show(report, report.save(out))


@probe_app.command("compare")
def compare_command(
    reports: Annotated[list[Path], typer.Argument(help="Two folders or more that a probe wrote.")],
    out: Out = Path("comparison"),
) -> None:
    """Several models on one axis."""
    from .probing import compare

    comparison = compare(reports)
    show(comparison, comparison.save(out))


def start_processes() -> bool:
    """Join the other processes of a launcher (accelerate, torchrun), if there are any; true in the first one."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return True
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    return dist.get_rank() == 0


def show(report: Any, folder: Path) -> None:
    """Print a report's title, summary and notes, and where it was written."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:  # a log file has no width of its own
        console = Console(width=120)
    console.print(table(report.summary(), title=report.title))
    for note in report.notes:
        console.print(f"note: {note}", style="yellow", markup=False, highlight=False)
    console.print(f"Written to {folder}: open {folder / 'report.html'}", markup=False, highlight=False, soft_wrap=True)


def table(frame: pd.DataFrame, title: str) -> Any:
    """A rich table of a data frame: numbers to the right, whole numbers whole."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    shown = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1))
    for name, dtype in frame.dtypes.items():
        is_number = dtype.kind in "ifb"
        shown.add_column(Text(str(name)), justify="right" if is_number else "left", no_wrap=not is_number)
    for row in frame.itertuples(index=False):
        shown.add_row(*(Text(_cell(value)) for value in row))
    return shown


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.4g}"
    return {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)


def main() -> None:
    """Entry point: errors that a user can put right end in one line and exit code 2."""
    try:
        app()
    except (OSError, ValueError, TypeError, ImportError) as error:
        if os.environ.get("MAELM_DEBUG"):
            raise
        line = " ".join(str(error).split()) or type(error).__name__
        print(f"error: {line}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
