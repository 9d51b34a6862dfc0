# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Where a probe's inputs come from: texts, images or ready batches, out of whatever the caller has."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

if TYPE_CHECKING:
    from .loading import ProbedModel

TEXT_SUFFIXES = frozenset({".txt", ".text", ".md"})
TABLE_FORMATS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
IMAGE_SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"})


@dataclass
class ProbeData:
    """Inputs of one kind.

    Attributes:
        kind: ``texts`` (str), ``images`` (PIL, arrays, tensors: one image each) or ``batches`` (what the model takes).
        items: they are read once, lazily.
        description: names the source in the report's settings.
        length: the number of items where it is known without reading them.
        already_sharded: every process holds a part of its own, so none may be skipped.
        skipped: files that could not be read, filled while ``items`` is read.
    """

    kind: Literal["texts", "images", "batches"]
    items: Iterable[Any]
    description: str
    length: int | None = None
    already_sharded: bool = False
    skipped: list[str] = field(default_factory=list)

    def modality(self) -> str | None:
        """``texts`` or ``images``: what the model's input is, also of ready batches; None where a batch holds both."""
        if self.kind != "batches":
            return self.kind
        first, self.items = _peek(self.items, self.description)
        inputs = first[0] if isinstance(first, (tuple, list)) else first
        has_ids = isinstance(inputs, Mapping) and "input_ids" in inputs
        has_pixels = not isinstance(inputs, Mapping) or "pixel_values" in inputs
        return {(True, False): "texts", (False, True): "images"}.get((has_ids, has_pixels))


def open_data(data: Any, column: str | None = None, model: ProbedModel | None = None) -> ProbeData:
    """Find out what ``data`` is.

    Args:
        data: a text file (one text a line), a JSON, CSV or Parquet file, a folder of text files or of images, a folder
            or name of a ``datasets`` data set (``name[:config[:split]]``), a loaded data set, texts, images, or an
            iterable of ready batches (mappings of tensors, tensors, or tuples whose first entry is the input).
        column: the column of a table or data set; ``None`` takes ``text`` or ``image``, whichever exists.
        model: what the data is for. A float tensor (3, 128, 64) may be an image or three sequences of vectors: it is an
            image unless the model starts on vectors of this width.

    Raises:
        FileNotFoundError: a path or data set that is not there.
        ValueError: an empty source, or a column that does not exist.
        TypeError: something that holds neither texts, images nor batches.
    """
    if isinstance(data, (str, Path)):
        return _open_path(str(data), column)
    if type(data).__module__.startswith("datasets."):
        return _open_dataset(data, column, description=_dataset_name(data))
    if not isinstance(data, Iterable) or isinstance(data, (bytes, Mapping)):
        raise TypeError(
            f"data must be a path, a data set name, texts, images or an iterable of batches, got {type(data).__name__}"
        )
    if isinstance(data, torch.Tensor):
        data = [data]
    length = len(data) if hasattr(data, "__len__") else None
    first, items = _peek(data, f"data ({type(data).__name__})")
    sharded = type(data).__module__.startswith("accelerate.")
    kind = _kind_of(first)
    if kind == "rows":
        chosen = _choose_column(first, column)
        kind = _kind_of(first[chosen])
        items = (row[chosen] for row in items)
    elif isinstance(first, torch.Tensor) and first.is_floating_point() and model is not None:
        kind = "batches" if model.takes_features(first.shape[-1]) else kind
    return ProbeData(kind, items, f"{type(data).__name__} of {kind}", length, sharded)


def _open_path(source: str, column: str | None) -> ProbeData:
    path = Path(source).expanduser()
    if path.is_file():
        if path.suffix.lower() in TABLE_FORMATS:
            options = {"sep": "\t"} if path.suffix.lower() == ".tsv" else {}
            table = _load_dataset(TABLE_FORMATS[path.suffix.lower()], data_files=str(path), split="train", **options)
            return _open_dataset(table, column, description=source)
        if path.suffix.lower() in IMAGE_SUFFIXES:
            return _image_files([path], source)
        return _text_files([path], source)
    if path.is_dir():
        if (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file():
            return _open_dataset(_datasets().load_from_disk(str(path)), column, description=source)
        files = sorted(file for file in path.rglob("*") if file.is_file())
        images = [file for file in files if file.suffix.lower() in IMAGE_SUFFIXES]
        texts = [file for file in files if file.suffix.lower() in TEXT_SUFFIXES]
        if images:
            return _image_files(images, source)
        if texts:
            return _text_files(texts, source)
        raise ValueError(f"folder {source} holds no image and no text file ({', '.join(sorted(TEXT_SUFFIXES))})")
    name, _, rest = source.partition(":")
    config, _, split = rest.partition(":")
    try:
        data = _load_dataset(name, config or None, split=split or "train", streaming=True)
    except (OSError, ValueError) as error:  # the datasets library has no single error for "not there"
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise FileNotFoundError(
            f"data {source!r} is neither a file or folder here nor a data set that could be loaded: {first_line}"
        ) from error
    return _open_dataset(data, column, description=source)


def _text_files(paths: list[Path], description: str) -> ProbeData:
    def lines() -> Iterator[str]:
        for path in paths:
            with path.open(encoding="utf-8", errors="replace") as file:
                yield from (line.strip() for line in file if line.strip())

    _, items = _peek(lines(), description)
    return ProbeData("texts", items, description)


def _image_files(paths: list[Path], description: str) -> ProbeData:
    from PIL import Image, UnidentifiedImageError

    def images() -> Iterator[Any]:
        for path in paths:
            try:
                with Image.open(path) as image:
                    converted = image.convert("RGB")
            except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
                data.skipped.append(f"{path} ({error})")
                continue
            yield converted

    data = ProbeData("images", images(), description, len(paths))
    return data


def _open_dataset(data: Any, column: str | None, description: str) -> ProbeData:
    if isinstance(data, Mapping):  # DatasetDict: one split has to be chosen
        if len(data) != 1:
            raise ValueError(f"data {description} has the splits {sorted(data)}: choose one, as in name::{min(data)}")
        (data,) = data.values()
    length = len(data) if hasattr(data, "__len__") else None
    first, rows = _peek(data, f"data {description}")
    if _kind_of(first) == "batches":
        return ProbeData("batches", rows, description, length)
    chosen = _choose_column(first, column)
    return ProbeData(_kind_of(first[chosen]), (row[chosen] for row in rows), description, length)


def _choose_column(row: Mapping[str, Any], column: str | None) -> str:
    candidates = [column] if column else ["text", "image", "img"]
    for candidate in candidates:
        if candidate in row:
            return candidate
    wanted = f"column {column!r}" if column else "a column named text or image"
    raise ValueError(f"the data has no {wanted}: it has {sorted(row)}; name one with column=")


def _kind_of(item: Any) -> Any:
    """``texts``, ``images``, ``batches``, or ``rows`` for a mapping that still needs a column."""
    if isinstance(item, str):
        return "texts"
    if isinstance(item, Mapping):
        values = list(item.values())
        return "batches" if any(isinstance(value, torch.Tensor) and value.ndim > 1 for value in values) else "rows"
    if type(item).__module__.startswith("PIL."):
        return "images"
    if isinstance(item, np.ndarray) and item.ndim in (2, 3):
        return "images"
    if isinstance(item, torch.Tensor):
        is_image = item.ndim == 3 and (item.shape[0] in (1, 3) or item.dtype == torch.uint8)
        return "images" if is_image else "batches"
    if isinstance(item, (tuple, list)) and item and isinstance(item[0], torch.Tensor):
        return "batches"
    raise TypeError(f"data holds {type(item).__name__}: expected texts, images or batches of tensors")


def _peek(items: Iterable[Any], name: str) -> tuple[Any, Iterator[Any]]:
    iterator = iter(items)
    try:
        first = next(iterator)
    except StopIteration:
        raise ValueError(f"{name} is empty: the probe needs at least one item") from None
    return first, itertools.chain([first], iterator)


def _dataset_name(data: Any) -> str:
    info = getattr(data, "info", None)
    name = getattr(info, "dataset_name", None) or type(data).__name__
    split = getattr(data, "split", None)
    return f"{name}::{split}" if split else str(name)


def _datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ImportError("this data needs the datasets library: pip install 'maelm-hf[train]'") from error
    return datasets


def _load_dataset(*args: Any, **kwargs: Any) -> Any:
    return _datasets().load_dataset(*args, **kwargs)
