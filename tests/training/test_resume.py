"""A run that is killed and continued is, bit for bit, the run that was not."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.commands.config import config_args
from pretraining_helpers import ROOT, log_of, start, tiny_recipe, weights_of

from training.launch import asked_for_processes, check_processes
from training.recipe import RecipeError

# Kills itself right after the log's row of a step, or in the middle of writing a checkpoint.
KILL_AFTER_STEP = """
write = monitoring.RunLog.write
def write_and_die(self, row):
    write(self, row)
    if self.path.name == "log.jsonl" and row["step"] == {step}:
        os.kill(os.getpid(), signal.SIGKILL)
monitoring.RunLog.write = write_and_die
"""
KILL_WHILE_SAVING = """
sync = checkpoint._sync
def sync_or_die(path):
    if "step-{step:09d}" in str(path) and path.name == "optimizer.safetensors":
        os.kill(os.getpid(), signal.SIGKILL)
    sync(path)
checkpoint._sync = sync_or_die
"""


def finish(process) -> str:
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    return output


def killed(process) -> str:
    output, _ = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL, output
    return output


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def uninterrupted(folder) -> Path:
    finish(start(tiny_recipe(folder, "uninterrupted")))
    return folder / "uninterrupted"


def test_killed_at_every_kind_of_moment(folder, uninterrupted):
    rows = log_of(uninterrupted)
    boundary = next(row["step"] for row in rows if row["epoch"] == 1) - 1  # the first epoch's last step
    assert 6 < boundary < 14, "the corpus of this test should make epochs of about ten steps"
    recipe = tiny_recipe(folder, "killed")
    with_workers = tiny_recipe(folder, "killed", data__num_workers=2)

    killed(start(recipe, before=KILL_AFTER_STEP.format(step=7)))  # in the middle of the first epoch
    assert [row["step"] for row in log_of(folder / "killed")] == list(range(1, 8))
    output = killed(start(with_workers, before=KILL_AFTER_STEP.format(step=boundary)))
    assert "continuing from" in output
    assert "step-000000005" in output
    killed(start(recipe, before=KILL_WHILE_SAVING.format(step=20)))  # in the second epoch
    assert not (folder / "killed" / "checkpoints" / "step-000000020").exists()
    killed(start(recipe, before=KILL_AFTER_STEP.format(step=22)))
    finish(start(with_workers))

    assert log_of(folder / "killed") == rows  # samples, masks, losses, rates, norms; no step lost or repeated
    assert [row["step"] for row in rows] == list(range(1, 25))
    expected, got = weights_of(uninterrupted), weights_of(folder / "killed")
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[name], got[name]) for name in expected)
    assert (folder / "killed" / "evaluations.jsonl").read_text() == (uninterrupted / "evaluations.jsonl").read_text()


def test_killed_from_outside(folder, uninterrupted):
    """At whatever moment the signal comes."""
    recipe = tiny_recipe(folder, "outside")
    process = start(recipe)
    log = folder / "outside" / "log.jsonl"
    deadline = time.monotonic() + 100
    while not (log.exists() and len(log.read_text().splitlines()) >= 6):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.kill()
    process.communicate()
    finish(start(recipe))
    assert log_of(folder / "outside") == log_of(uninterrupted)
    expected, got = weights_of(uninterrupted), weights_of(folder / "outside")
    assert all(torch.equal(expected[name], got[name]) for name in expected)


def test_two_processes_agree_with_one(folder, uninterrupted):
    """Dropout draws other noise in every process, and Muon's bf16 iterations enlarge rounding: both are off here."""
    exact = {"model__hidden_dropout_prob": 0.0, "model__attention_probs_dropout_prob": 0.0, "max_steps": 12}
    exact["optimizer__name"] = "adamw"
    alone = start(tiny_recipe(folder, "alone", **exact))
    finish(alone)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    (folder / "together.yaml").write_text(yaml.safe_dump(tiny_recipe(folder, "together", **exact)))
    command = ["accelerate.commands.launch", "--cpu", "--num_processes", "2", "--main_process_port", str(port)]
    outcome = subprocess.run(
        [sys.executable, "-m", *command, "-m", "training.pretrain", str(folder / "together.yaml")],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    state = json.loads((folder / "together" / "checkpoints" / "step-000000012" / "state.json").read_text())
    assert state["num_processes"] == 2
    one, two = log_of(folder / "alone"), log_of(folder / "together")
    assert len(one) == len(two) == 12
    for row, other in zip(one, two, strict=True):
        assert (row["hidden_tokens"], row["tokens"]) == (other["hidden_tokens"], other["tokens"])
        assert other["loss"] == pytest.approx(row["loss"], rel=1e-5)
        assert other["grad_norm"] == pytest.approx(row["grad_norm"], rel=1e-5)
    assert one[0]["loss"] == pytest.approx(two[0]["loss"], rel=1e-6)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells of a parent's end on Linux alone")
def test_sigterm_to_the_launcher_saves_in_all_processes(folder):
    """`accelerate launch` ends at once and passes nothing on; the processes end within a step all the same."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    endless = tiny_recipe(folder, "endless", max_steps=10**6, checkpoint_every=10**6, evaluate_every=10**6)
    (folder / "endless.yaml").write_text(yaml.safe_dump(endless))
    command = ["accelerate.commands.launch", "--cpu", "--num_processes", "2", "--main_process_port", str(port)]
    launcher = subprocess.Popen(
        [sys.executable, "-m", *command, "-m", "training.pretrain", str(folder / "endless.yaml")],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    log = folder / "endless" / "log.jsonl"
    deadline = time.monotonic() + 100
    while not (log.exists() and len(log.read_text().splitlines()) >= 3):
        assert launcher.poll() is None, launcher.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    launcher.terminate()
    output, _ = launcher.communicate(timeout=100)  # until the last of the processes has closed it
    last = len(log.read_text().splitlines())
    assert output.count(f"stopped by SIGTERM after step {last}; the same command continues.") == 2, output
    assert (folder / "endless" / "checkpoints" / f"step-{last:09d}").is_dir()
    assert json.loads((folder / "endless" / "summary.json").read_text())["steps"] == last


def test_only_what_accelerate_did_not_start_is_started():
    asked = ["python", "accelerate", "launch", "--cpu", "--num_processes", "2", "-m", "training.pretrain"]
    alone = {"ACCELERATE_USE_CPU": "True", "MASTER_ADDR": "127.0.0.1"}
    assert asked_for_processes(alone, asked) == 2
    assert asked_for_processes(alone, ["accelerate", "launch", "--num_processes=3"]) == 3
    assert asked_for_processes(alone | {"LOCAL_RANK": "0"}, asked) == 0  # one of them
    assert asked_for_processes({"ACCELERATE_USE_CPU": "True"}, asked) == 0  # one was asked for
    assert asked_for_processes({"MASTER_ADDR": "127.0.0.1"}, asked) == 0  # on a GPU
    assert asked_for_processes(alone, ["bash"]) == 0


def test_processes_that_do_not_know_of_each_other_are_refused():
    check_processes({}, 1)
    check_processes({"WORLD_SIZE": "2"}, 2)
    with pytest.raises(RecipeError, match="2 processes were started, and Accelerate sees 1: start them by"):
        check_processes({"WORLD_SIZE": "2"}, 1)


def test_the_count_of_an_accelerate_config_file(tmp_path, monkeypatch):
    alone = {"ACCELERATE_USE_CPU": "True", "MASTER_ADDR": "127.0.0.1"}
    config = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_CPU", "use_cpu": True}
    file, several = tmp_path / "two.yaml", tmp_path / "machines.yaml"
    file.write_text(yaml.safe_dump(config | {"num_processes": 2, "num_machines": 1}))
    several.write_text(yaml.safe_dump(config | {"num_processes": 4, "num_machines": 2}))
    launch = ["python", "accelerate", "launch"]
    assert asked_for_processes(alone, [*launch, "--config_file", str(file), "-m", "training.pretrain"]) == 2
    assert asked_for_processes(alone, [*launch, f"--config-file={file}", "--num_processes", "3"]) == 3
    monkeypatch.setattr(config_args, "default_config_file", str(file))
    assert asked_for_processes(alone, launch) == 2
    with pytest.raises(RecipeError, match="how many is not said: --num_processes N"):
        asked_for_processes(alone, [*launch, "--cpu"])  # which makes Accelerate leave the default file unread
    with pytest.raises(RecipeError, match="several machines: use torchrun"):
        asked_for_processes(alone, [*launch, "--config_file", str(several)])
