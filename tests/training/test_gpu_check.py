"""The script for a GPU, to its end, at toy size on a CPU."""

import json
import os
import subprocess
import sys

import pytest
import torch
from pretraining_helpers import ROOT
from typer.testing import CliRunner

from training.gpu_check import app


def check(*arguments: str, home) -> subprocess.CompletedProcess:
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "HOME": str(home)}  # own cache
    return subprocess.run(
        [sys.executable, "-m", "training.gpu_check", *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=280,
    )


def test_training_is_killed_goes_on_and_learns(tmp_path):
    out = tmp_path / "report"
    done = check("--device", "cpu", "--seconds", "5", "--benchmark-seconds", "0", "--out", str(out), home=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads((out / "gpu_check.json").read_text())
    training = report["training"]
    assert report["hardware"]
    assert report["date"]
    assert training["training_loss"]["last steps"] < training["training_loss"]["first steps"]
    assert training["resumed_from_step"] < training["killed_at_step"] < training["steps"]
    assert training["repeated_steps"] == training["killed_at_step"] - training["resumed_from_step"]
    assert training["largest_difference_of_loss"] == 0  # on a CPU
    assert "tokens a second" in done.stdout
    assert sorted(path.name for path in out.iterdir()) == ["gpu_check.json", "loss.png"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path):
    result = CliRunner().invoke(app, ["--out", str(tmp_path / "report")])
    assert result.exit_code == 2
    assert "no GPU here" in result.output
    assert not (tmp_path / "report").exists()
