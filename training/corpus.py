# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Where text comes from: the docstrings of what is installed, text files, or `datasets`.

Every source becomes a `datasets.Dataset` with one column ``text``, one document a row, memory-mapped from an Arrow file
in the cache, together with a digest of its text. Documents are held out of training by the hash of their text, so the
split does not depend on order, and equal documents are never on both sides.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import os
import subprocess
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # reading docstrings in parallel starts this module often: heavy imports stay inside functions
    import datasets

    from .recipe import CorpusSection

MINIMUM_DOCSTRING = 201  # characters
_HASH_RANGE = 2**32


class CorpusError(ValueError):
    """A source that cannot be read; the message says why and what to do."""


@dataclass(frozen=True)
class Corpus:
    """Documents on disk.

    Attributes:
        documents: memory-mapped, one column ``text``.
        digest: SHA-256 of the documents in order. A streamed source is never read as a whole: for local files, a digest
            of their paths, sizes and times and of the column read; for a Hub name None.
        description: one line for people.
    """

    documents: datasets.Dataset | datasets.IterableDataset
    digest: str | None
    description: str


def load_corpus(section: CorpusSection, cache_dir: Path) -> Corpus:
    """Reads the source named by the recipe, through the cache.

    Raises:
        CorpusError: the source does not exist, has no such column, or is empty.
    """
    if section.source.split(":")[0] == "docstrings":
        only = tuple(section.source.split(":")[1].split(",")) if ":" in section.source else ()
        packages = installed_packages()
        key = _digest_of({"docstrings": packages, "only": only, "python": sys.version, "minimum": MINIMUM_DOCSTRING})
        about = f"docstrings of the standard library and of {len(packages)} installed packages"
        if only:
            about = f"docstrings of {', '.join(only)}"
        return _cached(key, cache_dir, lambda: docstrings(only), about)
    path = Path(section.source).expanduser()
    files = _text_files(path)
    if files:
        if section.streaming:
            raise CorpusError(f"corpus.streaming is for `datasets` sources; {path} is read from disk anyway.")
        listing = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        about = f"{len(files)} text file{'s' if len(files) > 1 else ''} of {path}"
        return _cached(_digest_of({"files": listing}), cache_dir, lambda: text_documents(files), about)
    return _load_datasets(section, path, cache_dir)


def is_held_out(text: str, share: float) -> bool:
    """Whether a document is held out: a function of its text alone."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=4).digest()
    return int.from_bytes(digest, "little") < share * _HASH_RANGE


# Docstrings


def installed_packages() -> list[str]:
    """``name==version`` of every installed distribution, sorted."""
    return sorted({f"{package.metadata['Name']}=={package.version}" for package in metadata.distributions()})


def docstrings(only: tuple[str, ...] = ()) -> Iterator[str]:
    """Unique docstrings longer than 200 characters of the standard library and of the installed packages.

    ``only`` restricts them to some top-level packages, ``stdlib`` being the standard library.
    Read with `ast` from the source files, never imported, in the order of paths and lines. The files are parsed by one
    process a core.
    """
    workers = os.cpu_count() or 1
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "training.corpus", "docstrings", str(worker), str(workers), *only],
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[1],
            text=True,
            encoding="utf-8",
        )
        for worker in range(workers)
    ]
    seen = set()
    try:
        # Files go round the workers, so reading the pipes round restores the order of files.
        lines = [process.stdout for process in processes]
        for number in range(len(source_files(only))):
            line = lines[number % workers].readline()
            if not line:
                raise CorpusError("a process that reads docstrings ended early; its message is above.")
            for text in json.loads(line):
                key = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
                if key not in seen:
                    seen.add(key)
                    yield text
    finally:
        for process in processes:
            process.stdout.close()
            process.wait()


def source_files(only: tuple[str, ...] = ()) -> list[Path]:
    """Python files of the standard library and of site-packages, in a fixed order.

    Raises:
        CorpusError: a name in ``only`` has none.
    """
    paths = sysconfig.get_paths()
    roots = list(dict.fromkeys(Path(paths[name]) for name in ("stdlib", "purelib", "platlib")))
    files, missing = [], set(only)
    for root in roots:
        found = []
        for folder, subfolders, names in os.walk(root):
            nested = {"__pycache__"} | ({"site-packages", "dist-packages"} if Path(folder) == roots[0] else set())
            subfolders[:] = [name for name in subfolders if name not in nested]
            found += [Path(folder, name) for name in names if name.endswith(".py")]
        relative = {file: file.relative_to(root) for file in found}
        if only:
            names = {
                file: "stdlib" if root == roots[0] else path.parts[0].removesuffix(".py")
                for file, path in relative.items()
            }
            found = [file for file in found if names[file] in only]
            missing -= {names[file] for file in found}
        files += sorted(found, key=lambda file: relative[file].as_posix())
    if missing:
        raise CorpusError(f"no Python files of {', '.join(sorted(missing))} are installed: name top-level packages.")
    return files


def docstrings_of_file(path: Path) -> list[str]:
    """The cleaned docstrings of a source file, in order of lines; none where Python cannot parse it."""
    try:
        source = path.read_text(encoding="utf-8")
        if '"""' not in source and "'''" not in source:
            return []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's code
            tree = ast.parse(source)
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return []
    found = []
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text is not None and len(text) >= MINIMUM_DOCSTRING:
                text = inspect.cleandoc(text)
                # Lone surrogates cannot be stored as UTF-8.
                text = text.encode("utf-8", "replace").decode("utf-8")
                if len(text) >= MINIMUM_DOCSTRING:
                    found.append(text)
        # Definitions sit in blocks; expressions, the bulk of a tree, are not entered.
        blocks = [getattr(node, name, []) for name in ("body", "handlers", "orelse", "finalbody")]
        children = [child for block in blocks if isinstance(block, list) for child in block]
        pending += [child for child in reversed(children) if isinstance(child, ast.stmt | ast.ExceptHandler)]
    return found


def _print_docstrings(worker: int, workers: int, only: tuple[str, ...] = ()) -> None:
    """One JSON line a file, for every file of this worker."""
    sys.stdout.reconfigure(encoding="utf-8")
    for path in source_files(only)[worker::workers]:
        print(json.dumps(docstrings_of_file(path)))


# Text files


def _text_files(path: Path) -> list[Path]:
    if path.is_file() and path.suffix not in (".json", ".jsonl", ".parquet", ".csv", ".arrow"):
        with path.open("rb") as file:
            if b"\0" in file.read(1 << 16):
                raise CorpusError(f"corpus.source {str(path)!r} is no text (it holds zero bytes): unpack or convert it")
        return [path]
    return sorted(file for file in path.rglob("*.txt") if file.is_file()) if path.is_dir() else []


def text_documents(files: Iterable[Path]) -> Iterator[str]:
    """Documents of text files, read line by line: those of one file are separated by blank lines.

    Of a file without a blank line every line is a document: it is how one-document-a-line corpora look.
    """
    for file in files:
        by_line = not _has_blank_line(file)
        lines: list[str] = []
        with file.open(encoding="utf-8", errors="replace") as stream:
            for line in stream:
                if line.strip():
                    lines.append(line.rstrip("\n"))
                if lines and (by_line or not line.strip()):
                    yield "\n".join(lines)
                    lines = []
        if lines:
            yield "\n".join(lines)


def _has_blank_line(file: Path) -> bool:
    with file.open(encoding="utf-8", errors="replace") as stream:
        return any(not line.strip() for line in stream)


# Hugging Face datasets


def _load_datasets(section: CorpusSection, path: Path, cache_dir: Path) -> Corpus:
    import datasets

    try:
        if path.is_dir() and (path / "state.json").is_file():
            documents = datasets.load_from_disk(str(path))
            if section.streaming:
                documents = documents.to_iterable_dataset()
        elif path.is_file():
            kind = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}[
                path.suffix
            ]
            documents = datasets.load_dataset(
                kind, data_files=str(path), split=section.split, streaming=section.streaming
            )
        else:
            documents = datasets.load_dataset(
                section.source, section.config, split=section.split, streaming=section.streaming
            )
    except (OSError, ValueError) as error:
        raise CorpusError(
            f"corpus.source {section.source!r} is no file or folder of text, and `datasets` cannot load it: "
            f"{str(error).splitlines()[0]}"
        ) from None
    columns = documents.column_names or list(next(iter(documents)))
    if section.text_column not in columns:
        raise CorpusError(f"corpus.text_column {section.text_column!r} is not in {section.source}: it has {columns}.")
    documents = documents.select_columns([section.text_column])
    if section.text_column != "text":
        documents = documents.rename_column(section.text_column, "text")
    about = f"`datasets` {section.source} {section.config or ''}".strip() + f", split {section.split}"
    if section.streaming:
        return Corpus(documents, _digest_of_files(path, section), description=f"{about}, streamed")
    if len(documents) == 0:
        raise CorpusError(f"{section.source} holds no documents.")
    note = cache_dir / f"digest-{documents._fingerprint}.json"
    if not note.is_file():
        _write_atomically(note, json.dumps({"digest": _digest_documents(row["text"] for row in documents)}))
    digest = json.loads(note.read_text())["digest"]
    return Corpus(documents, digest=digest, description=f"{about}, {len(documents):,} documents")


# The cache


def _cached(key: str, cache_dir: Path, read: Callable[[], Iterator[str]], about: str) -> Corpus:
    """Documents from the cache, or read now and written there: the Arrow file first, its description last."""
    import datasets
    from datasets.arrow_writer import ArrowWriter

    table, note = cache_dir / f"corpus-{key}.arrow", cache_dir / f"corpus-{key}.json"
    if not note.is_file():
        cache_dir.mkdir(parents=True, exist_ok=True)
        unfinished = table.with_suffix(f".{os.getpid()}.unfinished")
        features = datasets.Features({"text": datasets.Value("large_string")})
        count, characters = 0, 0

        def rows() -> Iterator[str]:
            nonlocal count, characters
            with ArrowWriter(path=str(unfinished), features=features) as writer:
                for text in read():
                    writer.write({"text": text})
                    count, characters = count + 1, characters + len(text)
                    yield text
                writer.finalize()

        digest = _digest_documents(rows())
        if count == 0:
            unfinished.unlink(missing_ok=True)
            raise CorpusError(f"{about}: no documents found.")
        os.replace(unfinished, table)
        _write_atomically(note, json.dumps({"digest": digest, "documents": count, "characters": characters}))
    facts = json.loads(note.read_text())
    size = f"{facts['documents']:,} documents, {facts['characters'] / 1e6:.1f} M characters"
    return Corpus(datasets.Dataset.from_file(str(table)), facts["digest"], f"{about}: {size}")


def _digest_documents(texts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise CorpusError(
                f"document {number} is {text!r}, no text: leave such rows out, or name another text_column"
            )
        data = text.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little"))  # so that documents cannot run into each other
        digest.update(data)
    return digest.hexdigest()


def _digest_of_files(path: Path, section: CorpusSection) -> str | None:
    """Of a file or folder that is not read; None where there is none."""
    if not path.exists():
        return None
    # Hidden files and those of `datasets`' own cache come and go beside the text.
    found = [path] if path.is_file() else sorted(path.rglob("*"))
    files = [file for file in found if file.is_file() and not file.name.startswith((".", "cache-"))]
    listing = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return _digest_of({"files": listing, "read": [section.config, section.split, section.text_column]})


def _digest_of(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _write_atomically(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    unfinished.write_text(text)
    os.replace(unfinished, path)


def _build(arguments: list[str]) -> None:
    from training.corpus_sources import app

    app(arguments, prog_name="python -m training.corpus build")


if __name__ == "__main__":
    if sys.argv[1:2] == ["docstrings"]:  # one of the processes that docstrings() starts
        _print_docstrings(int(sys.argv[2]), int(sys.argv[3]), tuple(sys.argv[4:]))
    else:
        _build(sys.argv[2:] if sys.argv[1:2] == ["build"] else ["--help"])
