"""Checkpoints are whole or absent, and read only if they are what was written."""

import errno
import os
from pathlib import Path

import pytest

from training import checkpoint as module
from training.checkpoint import CheckpointError, find_checkpoint, save_checkpoint


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
