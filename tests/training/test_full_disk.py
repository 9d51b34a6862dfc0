"""A full disk costs lines, figures and checkpoints, each of which is said to be missing, but never the run.

The disk is one whose files the operating system limits (RLIMIT_FSIZE): writes are cut short, then refused.
"""

import errno
import json
import os
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import pytest
from accelerate.tracking import GeneralTracker
from pretraining_helpers import log_of, start, tiny_recipe

from training import pretrain
from training.checkpoint import CheckpointError
from training.corpus import CorpusError
from training.monitoring import RunLog, read_log, try_to_write
from training.pretrain import run
from training.recipe import recipe_from_dict
from training.text import prepare_text

resource = pytest.importorskip("resource", reason="limits of file sizes are POSIX's")


@contextmanager
def files_of_at_most(size: int):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class TestRunLog:
    def test_lines_wait_for_room_and_keep_their_order(self, tmp_path):
        said = []
        log = RunLog(tmp_path / "log.jsonl", 0, said.append)
        log.write({"step": 1, "loss": 4.0})
        with files_of_at_most(log.path.stat().st_size + 10):  # room for a part of the next line
            log.write({"step": 2, "loss": 3.0})
            assert [row["step"] for row in read_log(log.path)] == [1]
            log.write({"step": 3, "loss": 2.0})
            assert log.path.read_bytes().endswith(b"}\n")  # no half line, which would end the log for its readers
        assert len(said) == 1
        assert "log.jsonl could not be written (File too large). Training goes on" in said[0]
        log.write({"step": 4, "loss": 1.0})
        log.close()
        assert [row["step"] for row in read_log(log.path)] == [1, 2, 3, 4]
        assert len(said) == 1

    def test_what_never_found_room_is_counted_at_the_end(self, tmp_path):
        said = []
        log = RunLog(tmp_path / "log.jsonl", 0, said.append)
        with files_of_at_most(0):
            for step in (1, 2, 3):
                log.write({"step": step})
            log.close()
        assert "lacks its last 3 lines" in said[-1]
        assert read_log(log.path) == []

    def test_a_log_that_cannot_be_opened_is_an_error_in_one_line(self, tmp_path):
        path = tmp_path / "log.jsonl"
        path.write_text('{"step": 1}\n{"step": 2}\n')
        with (
            files_of_at_most(3),
            pytest.raises(CheckpointError, match=r"log.jsonl cannot be written \(File too large\): make room"),
        ):
            RunLog(path, 1)
        assert [row["step"] for row in read_log(path)] == [1, 2]  # it is as it was


class TestTryToWrite:
    def test_what_was_there_stays(self, tmp_path):
        path, said = tmp_path / "summary.json", []
        try_to_write(path, lambda path: path.write_text("old"), said.append)
        with files_of_at_most(10):
            try_to_write(path, lambda path: path.write_text("new " * 100), said.append)
        assert path.read_text() == "old"
        assert said == [f"warning: {path} could not be written (File too large). The run goes on."]
        assert os.listdir(tmp_path) == ["summary.json"]
        try_to_write(path, lambda path: path.write_text("new"), said.append)
        assert path.read_text() == "new"

    def test_folders_too(self, tmp_path):
        def write(folder, size):
            folder.mkdir()
            (folder / "report.csv").write_text("x" * size)

        path, said = tmp_path / "step-000000005", []
        try_to_write(path, lambda folder: write(folder, 5), said.append)
        with files_of_at_most(10):
            try_to_write(path, lambda folder: write(folder, 500), said.append)
        assert (path / "report.csv").read_text() == "xxxxx"
        assert len(said) == 1
        assert os.listdir(tmp_path) == ["step-000000005"]


@pytest.mark.parametrize("size", [500, 7000])  # less than the documents and less than their tokens take
def test_a_cache_without_room_is_an_error_in_one_line(tmp_path, size):
    recipe = recipe_from_dict(tiny_recipe(tmp_path, tokenizer__path=str(tmp_path / "tokenizer")))
    recipe.tokenizer.path = None
    prepare_text(recipe, say=lambda _: None).tokenizer.save_pretrained(tmp_path / "tokenizer")
    recipe.tokenizer.path, recipe.cache_dir = str(tmp_path / "tokenizer"), str(tmp_path / "another-cache")
    with (
        files_of_at_most(size),
        pytest.raises(CorpusError, match=r"another-cache could not be written \(File too large"),
    ):
        prepare_text(recipe, say=lambda _: None)
    assert len(prepare_text(recipe, say=lambda _: None).training) > 20


def test_a_run_ends_well_on_a_disk_that_is_full_from_step_7_on(tmp_path):
    """All but the final model, for which there is room again."""
    fill_up = (
        "import resource\n"
        "hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]\n"
        "def limit(size):\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))\n"
        "step, write_model = pretrain.Pretraining.step, pretrain.Pretraining._write_model\n"
        "def step_on_a_full_disk(self, data):\n"
        "    if self.progress.step + 1 == 7:\n"
        "        limit(os.path.getsize(self.log.path) + 100)\n"
        "    return step(self, data)\n"
        "def write_model_somehow(self, folder, weights):\n"
        "    before = resource.getrlimit(resource.RLIMIT_FSIZE)[0]\n"
        "    if folder.name == 'final':\n"
        "        limit(hard)\n"
        "    try:\n"
        "        write_model(self, folder, weights)\n"
        "    finally:\n"
        "        limit(before)\n"
        "pretrain.Pretraining.step = step_on_a_full_disk\n"
        "pretrain.Pretraining._write_model = write_model_somehow\n"
    )
    process = start(tiny_recipe(tmp_path, max_steps=12), before=fill_up)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    warnings = [line[line.index("warning: ") :] for line in output.splitlines() if "warning: " in line]
    assert "Traceback" not in output
    subjects = ["log.jsonl could", "step 10 could", "step 12 could", "log.jsonl lacks its last 6 lines", "loss.png"]
    assert len(warnings) == len(subjects), warnings
    assert all(subject in warning for subject, warning in zip(subjects, warnings, strict=True)), warnings
    run_folder = tmp_path / "run"
    assert [row["step"] for row in log_of(run_folder)] == list(range(1, 7))
    assert [row["step"] for row in read_log(run_folder / "evaluations.jsonl")] == [12]
    assert sorted(path.name for path in (run_folder / "checkpoints").iterdir()) == ["step-000000000", "step-000000005"]
    assert json.loads((run_folder / "summary.json").read_text())["steps"] == 12  # it is small enough
    assert json.loads((run_folder / "final" / "config.json").read_text())["model_type"] == "maelm"


def test_a_tracker_that_cannot_write_is_said_once(tmp_path, monkeypatch, capsys):
    class FullTracker(GeneralTracker):
        name = "full"
        requires_logging_directory = False
        tracker = None
        calls: ClassVar[list] = []

        def store_init_configuration(self, values):
            pass

        def log(self, values, step=None, **_):
            self.calls.append(step)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(pretrain, "tracker_of", lambda recipe: FullTracker())
    assert run(recipe_from_dict(tiny_recipe(tmp_path, max_steps=5))).finished
    captured = capsys.readouterr()
    assert (captured.out + captured.err).count("the tracker cannot write (No space left on device)") == 1
    assert len(FullTracker.calls) > 5
    assert Path(tmp_path, "run", "final").is_dir()
