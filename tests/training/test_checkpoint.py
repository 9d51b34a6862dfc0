"""Checkpoints are whole or absent, and read only if they are what was written."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from training import checkpoint as module
from training.checkpoint import CheckpointError, find_checkpoint, save_checkpoint

ROOT = Path(__file__).resolve().parents[2]


def write(folder: Path) -> None:
    (folder / "weights.bin").write_bytes(bytes(range(256)) * 40)
    (folder / "nested").mkdir()
    (folder / "nested" / "state.json").write_text("{}")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def folder(tmp_path) -> Path:
    for step in (5, 10):
        save_checkpoint(tmp_path, step, write, keep=3)
    return tmp_path


def test_the_newest_is_found_and_old_ones_go(folder):
    refused = []
    assert find_checkpoint(folder, refused.append).name == "step-000000010"
    save_checkpoint(folder, 15, write, keep=2)
    assert names(folder) == ["step-000000010", "step-000000015"]
    assert refused == []
    assert find_checkpoint(folder / "elsewhere", refused.append) is None


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: (path / "weights.bin").write_bytes(b"short"), "weights.bin has 5 bytes"),
        (lambda path: (path / "nested" / "state.json").unlink(), "nested/state.json is missing"),
        (lambda path: (path / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda path: (path / "manifest.json").write_text("{"), "manifest.json is missing or damaged"),
        (lambda path: flip_a_bit(path / "weights.bin"), "weights.bin was altered"),
    ],
)
def test_a_damaged_one_is_refused_by_name_and_the_one_before_is_used(folder, damage, words):
    damage(folder / "step-000000010")
    refused = []
    assert find_checkpoint(folder, refused.append).name == "step-000000005"
    assert len(refused) == 1
    assert "step-000000010" in refused[0]
    assert words in refused[0]


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[1000] ^= 1
    path.write_bytes(data)


def test_a_full_disk_keeps_the_previous_one_and_says_so(folder):
    def fill_the_disk(unfinished: Path) -> None:
        (unfinished / "weights.bin").write_bytes(b"some")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(CheckpointError, match=r"step 15 could not be written \(No space left.*step-000000010 is kept"):
        save_checkpoint(folder, 15, fill_the_disk, keep=2)
    assert names(folder) == ["step-000000005", "step-000000010"]
    assert find_checkpoint(folder, pytest.fail).name == "step-000000010"


def test_a_disk_that_is_really_full(tmp_path):
    """A process that may write files of 64 kB only: safetensors says so by an error of its own."""
    script = (
        "import resource, sys, torch\n"
        "from pathlib import Path\n"
        "from safetensors.torch import save_file\n"
        "from training.checkpoint import CheckpointError, save_checkpoint\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))\n"
        "def write(folder, size):\n"
        "    save_file({'weights': torch.zeros(size)}, folder / 'model.safetensors')\n"
        "folder = Path(sys.argv[1])\n"
        "save_checkpoint(folder, 1, lambda unfinished: write(unfinished, 10), keep=2)\n"
        "try:\n"
        "    save_checkpoint(folder, 2, lambda unfinished: write(unfinished, 2**20), keep=2)\n"
        "except CheckpointError as error:\n"
        "    print(error)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    outcome = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stdout.count("\n") == 1
    assert "the checkpoint of step 2 could not be written" in outcome.stdout
    assert "File too large" in outcome.stdout
    assert "step-000000001 is kept" in outcome.stdout
    assert names(tmp_path) == ["step-000000001"]


def test_the_one_just_written_stays_whatever_lies_beside_it(tmp_path):
    save_checkpoint(tmp_path, 200, write, keep=1)
    flip_a_bit(tmp_path / "step-000000200" / "weights.bin")
    assert save_checkpoint(tmp_path, 100, write, keep=1).is_dir()
    assert save_checkpoint(tmp_path, 150, write, keep=1).is_dir()
    assert names(tmp_path) == ["step-000000150", "step-000000200"]


def test_refused_ones_are_set_aside_and_count_no_more(folder):
    for _ in range(2):  # the second time the name beside is taken
        flip_a_bit(folder / "step-000000010" / "weights.bin")
        assert find_checkpoint(folder, lambda _: None).name == "step-000000005"
        assert names(folder) == ["refused-step-000000010", "step-000000005"]
        save_checkpoint(folder, 10, write, keep=2)
    assert find_checkpoint(folder, pytest.fail).name == "step-000000010"


def test_where_all_are_damaged_none_is_set_aside(folder):
    for path in folder.iterdir():
        flip_a_bit(path / "weights.bin")
    refused = []
    assert find_checkpoint(folder, refused.append) is None
    assert len(refused) == 2
    assert names(folder) == ["step-000000005", "step-000000010"]


def test_what_a_kill_left_behind_is_no_checkpoint_and_is_removed(folder):
    """The state of the folder after a kill between the writing and the renaming."""
    leftover = folder / f"{module._UNFINISHED}step-000000015"
    leftover.mkdir()
    write(leftover)
    assert find_checkpoint(folder, pytest.fail).name == "step-000000010"
    save_checkpoint(folder, 15, write, keep=2)
    assert names(folder) == ["step-000000010", "step-000000015"]


def test_everything_is_on_the_disk_before_the_name_appears(tmp_path, monkeypatch):
    synced, replace = [], os.replace
    fsync = os.fsync

    def record(descriptor):
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def replace_after_sync(source, target):
        files = {str(path) for path in Path(source).rglob("*")}
        assert files <= set(synced)
        replace(source, target)

    if not Path("/proc/self/fd").exists():
        pytest.skip("needs /proc to name what was synced")
    monkeypatch.setattr(os, "fsync", record)
    monkeypatch.setattr(os, "replace", replace_after_sync)
    save_checkpoint(tmp_path, 1, write, keep=1)
    assert synced[-1] == str(tmp_path)
