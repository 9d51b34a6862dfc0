# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that are whole or absent: written beside, synced, renamed, and checked by SHA-256 when read."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

MANIFEST = "manifest.json"
# What writing raises on a full disk: safetensors wraps the operating system's error in its own.
WRITE_ERRORS = (OSError, SafetensorError)
_PREFIX, _UNFINISHED, _REFUSED = "step-", ".unfinished-", "refused-"
_CHUNK = 1 << 22


class CheckpointError(RuntimeError):
    """A checkpoint that does not hold what was written, or could not be written; the message names it."""


def save_checkpoint(folder: Path, step: int, write: Callable[[Path], None], keep: int) -> Path:
    """Writes the checkpoint of a step and removes all but ``keep``: this one and the newest of earlier steps.

    ``write`` fills an unfinished folder, which then gets the manifest of its files and, once everything is on the disk,
    its final name. A kill at any moment leaves either the whole checkpoint or none.

    Raises:
        CheckpointError: the disk is full or cannot be written; earlier checkpoints are untouched.
    """
    final = folder / f"{_PREFIX}{step:09d}"
    unfinished = folder / f"{_UNFINISHED}{final.name}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(f"{_UNFINISHED}*"):  # of a run that was killed while saving
            shutil.rmtree(leftover)
        unfinished.mkdir()
        write(unfinished)
        files = sorted(path for path in unfinished.rglob("*") if path.is_file())
        manifest = {
            path.relative_to(unfinished).as_posix(): {"size": path.stat().st_size, "sha256": _sha256(path)}
            for path in files
        }
        (unfinished / MANIFEST).write_text(json.dumps(manifest, indent=1))
        for path in [*files, unfinished / MANIFEST, *{path.parent for path in files}]:
            _sync(path)
        if final.exists():  # the same step again, after it was refused
            shutil.rmtree(final)
        os.replace(unfinished, final)
        _sync(folder)
    except WRITE_ERRORS as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        kept = newest_name(folder)
        raise CheckpointError(
            f"the checkpoint of step {step} could not be written ({reason(error)}); "
            + (f"{kept} is kept." if kept else "there is none yet.")
        ) from error
    # A later step's is of a course that was given up, and may be damaged: it takes no place of a good one.
    for old in [path for path in _checkpoints(folder) if path.name <= final.name][:-keep]:
        shutil.rmtree(old)
    return final


def reason(error: BaseException) -> str:
    """Why a write failed, without the path."""
    return getattr(error, "strerror", None) or " ".join(str(error).split())


def find_checkpoint(folder: Path, refused: Callable[[str], None]) -> Path | None:
    """The newest checkpoint whose files are what was written; None if there is none.

    Newer ones, which were refused, are set aside under another name, so that they count no more. Where all are
    refused, they keep their names.

    Args:
        refused: called with one line for every newer checkpoint that was not.
    """
    faulty: list[Path] = []
    for path in reversed(_checkpoints(folder)):
        fault = check(path)
        if fault is None:
            for other in faulty:
                _set_aside(other)
            return path
        faulty.append(path)
        refused(f"checkpoint {path} is refused: {fault}")
    return None


def check(path: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        entries = {name: (entry["size"], entry["sha256"]) for name, entry in manifest.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return f"{MANIFEST} is missing or damaged"
    for name, (size, digest) in entries.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes, {size} were written"
        if _sha256(file) != digest:
            return f"{name} was altered (its SHA-256 differs)"
    return None


def newest_name(folder: Path) -> str | None:
    """The newest checkpoint's path, unchecked, for messages."""
    found = _checkpoints(folder)
    return str(found[-1]) if found else None


def _set_aside(path: Path) -> None:
    aside = path.with_name(f"{_REFUSED}{path.name}")
    if aside.exists():  # the same step, refused before
        shutil.rmtree(aside)
    os.replace(path, aside)


def _checkpoints(folder: Path) -> list[Path]:
    """Oldest first."""
    return sorted(path for path in folder.glob(f"{_PREFIX}*") if path.is_dir()) if folder.is_dir() else []


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
