# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""``maelm publish``, ``maelm export`` and ``maelm convert``."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

Message = Annotated[str | None, typer.Option("--message", "-m", help="Of the commit.")]
DryRun = Annotated[Path | None, typer.Option(metavar="DIR", help="Write the folder to DIR and push nothing.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the ``maelm`` command."""
    app.command("publish")(publish_command)
    app.command("export")(export_command)
    app.command("convert")(convert_command)


def publish_command(
    model: Annotated[str, typer.Argument(help="Folder of a model, an export or a pretraining run; or a Hub id.")],
    repo_id: Annotated[str, typer.Argument(help="organisation/name.")],
    private: Annotated[
        bool | None, typer.Option("--private/--public", help="Of a new repository; the account's default.")
    ] = None,
    revision: Annotated[str | None, typer.Option("--revision", "--branch", help="Branch to push to.")] = None,
    subfolder: Annotated[str | None, typer.Option(help="Where in the repository the model goes.")] = None,
    steps: Annotated[
        bool, typer.Option("--steps", help="Of a run: also every step checkpoint, as branch step-N.")
    ] = False,
    new: Annotated[bool, typer.Option("--new", help="Stop where the repository exists already.")] = False,
    training_summary: Annotated[Path | None, typer.Option(help="summary.json of the run, for the card.")] = None,
    results: Annotated[Path | None, typer.Option(help="results.json of fine-tuning, for the card.")] = None,
    rank_report: Annotated[Path | None, typer.Option(help="Folder of a rank report, for the card.")] = None,
    license: Annotated[str | None, typer.Option(help="Of the weights, as the Hub names it: apache-2.0.")] = None,
    data_license: Annotated[str | None, typer.Option(help="Of the training data, in words.")] = None,
    language: Annotated[str | None, typer.Option(help="Of the training data, by its code: en.")] = None,
    token: Annotated[
        str | None, typer.Option(envvar="HF_TOKEN", show_envvar=True, help="By default that of `hf auth login`.")
    ] = None,
    message: Message = None,
    dry_run: DryRun = None,
) -> None:
    """Build a folder that loads without this package, prove it, and push it in one commit."""
    from .hub import publish, publish_steps
    from .hub.training_run import finished_model

    say_choices()
    common = {"private": private, "token": token, "license": license, "data_license": data_license}
    common |= {"subfolder": subfolder, "commit_message": message, "language": language}
    # A run that is not finished has checkpoints alone.
    if not steps or (finished_model(Path(model)) / "config.json").is_file():
        where = publish(
            model,
            repo_id,
            revision=revision,
            exist_ok=not new,
            training_summary=training_summary,
            results=results,
            rank_report=rank_report,
            dry_run=dry_run / "main" if dry_run is not None and steps else dry_run,
            **common,
        )
        report(where, dry_run is not None)
    if steps:
        for where in publish_steps(model, repo_id, dry_run=dry_run, **common).values():
            report(where, dry_run is not None)


def export_command(
    model: Annotated[str, typer.Argument(help="Folder of a model, or a Hub id.")],
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    to: Annotated[str, typer.Option(help="The stock architecture: bert, or that of the model's backbone.")] = "bert",
) -> None:
    """Write the encoder as a stock checkpoint, which loads with transformers alone."""
    from .hub import export_native

    say_choices()
    report(str(export_native(model, out, to)), True)


def convert_command(
    checkpoint: Annotated[Path, typer.Argument(help="The .pt file of the authors' fairseq code.")],
    out: Annotated[Path | None, typer.Argument(help="Folder to write; by default beside it, by its name.")] = None,
    dictionary: Annotated[
        Path | None, typer.Option("--dict", help="dict.txt of the vocabulary; by default the one beside it.")
    ] = None,
) -> None:
    """Read a fairseq checkpoint, running nothing in it, and write it as a model of this package."""
    from .hub.fairseq_checkpoint import convert_fairseq_checkpoint

    say_choices()
    out = checkpoint.with_suffix("") if out is None else out
    if out.exists() and any(out.iterdir()):
        raise FileExistsError(f"{out} exists and is not empty; name another folder")
    model, tokenizer = convert_fairseq_checkpoint(checkpoint, dictionary)
    model.save_pretrained(out)
    if tokenizer is not None:
        tokenizer.save_pretrained(out)
    report(str(out), True)


def say_choices() -> None:
    """Print what the package chooses by itself, and why."""
    logger = logging.getLogger("maelm_hf")
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
    logger.setLevel(logging.INFO)


def report(where: str, is_folder: bool) -> None:
    """The files of a folder, or the address of a commit."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not is_folder:
        console.print(f"Published: {where}", highlight=False, soft_wrap=True)
        return
    table = Table("file", "bytes", title=where)
    table.columns[1].justify = "right"
    for path in sorted(Path(where).rglob("*")):
        if path.is_file():
            table.add_row(path.relative_to(where).as_posix(), f"{path.stat().st_size:,}")
    console.print(table)
