# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""What the command lines of this folder share: the console, and help texts that keep their examples line by line."""

import re
import sys

from rich.console import Console

console = Console(width=None if sys.stdout.isatty() else 160)


def help_text(docstring: str) -> str:
    """A module's docstring as click's help: indented blocks are not rewrapped, double backquotes and single ones go."""
    paragraphs = re.split(r"\n\n", docstring.strip())
    return "\n\n".join(f"\b\n{part}" if part.startswith("    ") else part for part in paragraphs).replace("`", "")


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A table as Markdown."""
    lines = ["| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows]]
    return "\n".join(lines) + "\n"
