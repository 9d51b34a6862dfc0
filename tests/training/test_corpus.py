"""Text: what is read, in which order, and what is held out."""

import ast
import gzip
import inspect
import os
from pathlib import Path

import datasets
import pytest

from training.corpus import (
    CorpusError,
    docstrings_of_file,
    is_held_out,
    load_corpus,
    source_files,
    text_documents,
)
from training.recipe import CorpusSection

LONG = "A docstring of more than two hundred characters. " * 6


def texts(section, cache):
    corpus = load_corpus(section, cache)
    return [row["text"] for row in corpus.documents], corpus


class TestDocstrings:
    def test_every_kind_of_definition_in_order(self, tmp_path):
        path = tmp_path / "module.py"
        path.write_text(
            f'"""module {LONG}"""\n'
            "try:\n"
            "    import nothing\n"
            "except ImportError:\n"
            "    def fallback():\n"
            f'        """fallback {LONG}"""\n'
            "class A:\n"
            f'    """class\n\n    indented {LONG}"""\n'
            "    async def method(self):\n"
            f"        '''method {LONG}'''\n"
            "        def inner():\n"
            f'            """inner {LONG}"""\n'
            'def short():\n    """Too short."""\n'
            f'def not_a_docstring():\n    x = """{LONG}"""\n'
        )
        found = docstrings_of_file(path)
        assert [text.split()[0] for text in found] == ["module", "fallback", "class", "method", "inner"]
        assert "\nindented" in found[2]

    def test_agrees_with_a_walk_over_the_whole_tree(self):
        path = inspect.getsourcefile(datasets.arrow_dataset)
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        with open(path, encoding="utf-8") as stream:
            tree = ast.parse(stream.read())
        expected = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)]
        expected = [text for text in expected if text is not None and len(text) > 200]
        assert len(expected) > 50
        assert sorted(docstrings_of_file(Path(path))) == sorted(expected)

    def test_code_that_does_not_parse_is_passed_over(self, tmp_path):
        broken, binary = tmp_path / "broken.py", tmp_path / "binary.py"
        broken.write_text(f'"""{LONG}"""\ndef f(:\n')
        binary.write_bytes(b'"""\xff\xfe"""')
        assert docstrings_of_file(broken) == docstrings_of_file(binary) == []

    def test_standard_library_and_packages_each_once(self):
        files = source_files()
        assert len(files) == len(set(files))
        assert any(path.name == "argparse.py" for path in files)
        assert any("transformers" in path.parts for path in files)
        assert files == source_files()

    def test_the_corpus_is_their_unique_docstrings_in_order(self, tmp_path):
        """Of a few real packages: the whole is minutes of work on a slow machine."""
        found, corpus = texts(CorpusSection(source="docstrings:accelerate,torchmetrics"), tmp_path / "cache")
        files = source_files(("accelerate", "torchmetrics"))
        assert {name for path in files for name in path.parts} >= {"accelerate", "torchmetrics"}
        assert not any("transformers" in path.parts for path in files)
        every = [text for path in files for text in docstrings_of_file(path)]
        assert found == list(dict.fromkeys(every))
        assert len(every) > len(found) > 100  # some are there twice
        again = load_corpus(CorpusSection(source="docstrings:accelerate,torchmetrics"), tmp_path / "other-cache")
        assert again.digest == corpus.digest

    def test_the_standard_library_alone(self):
        files = source_files(("stdlib",))
        assert any(path.name == "argparse.py" for path in files)
        assert not any("site-packages" in path.parts for path in files)

    def test_a_package_that_is_not_there(self, tmp_path):
        with pytest.raises(CorpusError, match="no Python files of no_such_package"):
            load_corpus(CorpusSection(source="docstrings:no_such_package"), tmp_path / "cache")


class TestTextFiles:
    def test_documents_are_separated_by_blank_lines(self, tmp_path):
        path = tmp_path / "book.txt"
        path.write_text("one\ntwo\n\n\nthree\n   \nfour")
        assert list(text_documents([path])) == ["one\ntwo", "three", "four"]

    def test_without_blank_lines_a_line_is_a_document(self, tmp_path):
        path = tmp_path / "lines.txt"
        path.write_text("one\ntwo\nthree\n")
        assert list(text_documents([path])) == ["one", "two", "three"]

    def test_folder_in_order_of_names(self, tmp_path):
        folder = tmp_path / "texts"
        (folder / "b").mkdir(parents=True)
        (folder / "b" / "2.txt").write_text("second")
        (folder / "1.txt").write_text("first")
        (folder / "note.md").write_text("no text")
        found, corpus = texts(CorpusSection(source=str(folder)), tmp_path / "cache")
        assert found == ["first", "second"]
        assert "2 text files" in corpus.description

    def test_the_digest_follows_the_text(self, tmp_path):
        path = tmp_path / "a.txt"
        path.write_text("one\ntwo\n")
        first = load_corpus(CorpusSection(source=str(path)), tmp_path / "cache").digest
        path.write_text("one\ntwo.\n")
        changed = load_corpus(CorpusSection(source=str(path)), tmp_path / "cache").digest
        path.write_text("onet\nwo\n")  # the same letters, cut elsewhere
        recut = load_corpus(CorpusSection(source=str(path)), tmp_path / "cache").digest
        assert len({first, changed, recut}) == 3

    def test_empty(self, tmp_path):
        (tmp_path / "a.txt").write_text("\n \n")
        with pytest.raises(CorpusError, match="no documents"):
            load_corpus(CorpusSection(source=str(tmp_path / "a.txt")), tmp_path / "cache")

    def test_packed_text_is_refused(self, tmp_path):
        path = tmp_path / "a.txt.gz"
        path.write_bytes(gzip.compress(LONG.encode()))
        with pytest.raises(CorpusError, match=r"a\.txt\.gz' is no text"):
            load_corpus(CorpusSection(source=str(path)), tmp_path / "cache")


class TestDatasets:
    rows = ("one", "two", "three")

    @pytest.mark.parametrize("kind", ["disk", "jsonl", "parquet", "folder"])
    @pytest.mark.parametrize("streaming", [False, True])
    def test_local(self, tmp_path, kind, streaming):
        table = datasets.Dataset.from_dict({"body": self.rows, "other": [1, 2, 3]})
        source = tmp_path / {"jsonl": "rows.jsonl", "parquet": "rows.parquet"}.get(kind, "data")
        if kind == "disk":
            table.save_to_disk(source)
        elif kind == "jsonl":
            table.to_json(source)
        elif kind == "parquet":
            table.to_parquet(source)
        else:
            source.mkdir()
            table.to_parquet(source / "train-00000-of-00001.parquet")
        section = CorpusSection(source=str(source), text_column="body", streaming=streaming)
        found, corpus = texts(section, tmp_path / "cache")
        assert tuple(found) == self.rows
        assert corpus.digest is not None
        if kind == "parquet" and streaming:  # nothing but a digest tells what is read, and when it was written
            other = CorpusSection(source=str(source), text_column="other", streaming=True)
            assert load_corpus(other, tmp_path / "cache").digest != corpus.digest
            assert load_corpus(section, tmp_path / "cache").digest == corpus.digest
            os.utime(source, ns=(0, 0))
            assert load_corpus(section, tmp_path / "cache").digest != corpus.digest

    def test_missing_column(self, tmp_path):
        datasets.Dataset.from_dict({"body": self.rows}).to_json(tmp_path / "rows.jsonl")
        with pytest.raises(CorpusError, match=r"text_column 'text'.*body"):
            load_corpus(CorpusSection(source=str(tmp_path / "rows.jsonl")), tmp_path / "cache")

    def test_a_row_without_text(self, tmp_path):
        datasets.Dataset.from_dict({"text": ["one", None]}).to_parquet(tmp_path / "rows.parquet")
        with pytest.raises(CorpusError, match="document 1 is None, no text"):
            load_corpus(CorpusSection(source=str(tmp_path / "rows.parquet")), tmp_path / "cache")

    def test_no_such_source(self, tmp_path, monkeypatch):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
        with pytest.raises(CorpusError, match="no file or folder of text"):
            load_corpus(CorpusSection(source="no/such-dataset"), tmp_path / "cache")


def test_held_out_share():
    numbers = [is_held_out(f"document {number}", 0.1) for number in range(20_000)]
    assert sum(numbers) / len(numbers) == pytest.approx(0.1, abs=0.01)
    # A larger share keeps what a smaller one held out.
    assert all(is_held_out(f"document {number}", 0.2) for number, held in enumerate(numbers[:500]) if held)
