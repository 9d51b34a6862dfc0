# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""A report as one HTML page that opens offline: styles and figures are inside it."""

from __future__ import annotations

import base64
import html
import io
import json
from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

_STYLE = """
.maelm { font: 15px/1.5 system-ui, sans-serif; color: #1f2933; max-width: 1100px; margin: 0 auto; padding: 1rem }
.maelm h1 { font-size: 1.5rem } .maelm h2 { font-size: 1.15rem; margin-top: 2rem }
.maelm img { max-width: 100%; height: auto }
.maelm .scroll { overflow-x: auto; max-height: 32rem }
.maelm table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums }
.maelm th, .maelm td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid #e4e7eb; white-space: nowrap }
.maelm th { position: sticky; top: 0; background: #f5f7fa; text-align: right }
.maelm ul.notes { background: #fffbea; border-left: 4px solid #f0b429; padding: .5rem 1rem .5rem 2rem }
.maelm pre { background: #f5f7fa; padding: .75rem; overflow-x: auto; font-size: 12px }
"""


def render_page(
    title: str,
    tables: dict[str, pd.DataFrame],
    figures: dict[str, Figure],
    settings: dict[str, Any],
    notes: Sequence[str],
    *,
    fragment: bool = False,
) -> str:
    """The page, or with ``fragment=True`` the part of it that a notebook shows."""
    parts = [f"<style>{_STYLE}</style>", '<div class="maelm">', f"<h1>{html.escape(title)}</h1>"]
    if notes:
        items = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
        parts.append(f'<ul class="notes">{items}</ul>')
    for name, figure in figures.items():
        alt = html.escape(name.replace("_", " "))
        parts.append(f'<img alt="{alt}" src="data:image/png;base64,{_png(figure)}">')
    for name, frame in tables.items():
        heading = f"<h2>{html.escape(name)}</h2>" if name else ""
        parts.append(f'{heading}<div class="scroll">{_table(frame)}</div>')
    shown = html.escape(json.dumps(settings, indent=1, ensure_ascii=False, default=str))
    parts.append(f"<details><summary>Settings</summary><pre>{shown}</pre></details></div>")
    body = "\n".join(parts)
    if fragment:
        return body
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n{body}\n</body></html>\n'


def _png(figure: Figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def _table(frame: pd.DataFrame) -> str:
    return frame.to_html(index=False, border=0, na_rep="", float_format=lambda value: f"{value:.4g}")
