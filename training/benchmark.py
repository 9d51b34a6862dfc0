# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Speed and memory, side by side with what people use today, in one run: ``python -m training.benchmark NAME``."""

import typer

from training.benchmark_attention import attention
from training.benchmark_data import memory, packing
from training.benchmark_finetune import finetune
from training.benchmark_pretrain import pretrain
from training.benchmark_probe import probe

app = typer.Typer(no_args_is_help=True, add_completion=False)
app.command("attention")(attention)
app.command("finetune")(finetune)
app.command("memory")(memory)
app.command("packing")(packing)
app.command("pretrain")(pretrain)
app.command("probe")(probe)


@app.callback()
def benchmark() -> None:
    """Each command prints a table and writes it as JSON and CSV, with date, hardware, dtype and settings."""


if __name__ == "__main__":
    app()
