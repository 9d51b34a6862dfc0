# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""The wheel, as a user gets it: built, unpacked and imported where neither this checkout nor `training` can be seen."""

import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    (path,) = folder.glob("maelm_hf-*.whl")
    return path


def test_wheel_holds_the_package_alone(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert "maelm_hf/py.typed" in names
    assert "maelm_hf/modeling_maelm.py" in names
    tops = {name.split("/")[0] for name in names}
    assert tops == {"maelm_hf", next(top for top in tops if top.endswith(".dist-info"))}
    # Every module of the checkout is in it, and nothing that is not tracked there.
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "maelm_hf").rglob("*.py")}
    assert modules == {name for name in names if name.endswith(".py")}


def test_wheel_imports_in_a_clean_environment(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    # -S leaves out the .pth file that points at this checkout, -I the working folder and the environment's paths.
    script = f"""
import sys
sys.path[:0] = [{str(tmp_path / "installed")!r}]
sys.path.append({sysconfig.get_paths()["purelib"]!r})
import maelm_hf, maelm_hf.cli, maelm_hf.hub, maelm_hf.probing
print(maelm_hf.__file__)
print(maelm_hf.MaeLmModel(maelm_hf.MaeLmConfig(vocab_size=9, hidden_size=8, num_attention_heads=2, intermediate_size=8,
    num_hidden_layers=1)).config.model_type)
try:
    import training
except ModuleNotFoundError as error:
    print(error)
"""
    command = [sys.executable, "-S", "-I", "-c", script]
    lines = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path).stdout.splitlines()
    assert lines[0].startswith(str(tmp_path / "installed"))
    assert lines[1] == "maelm"
    assert lines[2] == "No module named 'training'"


def test_requirements_are_ranges_not_pins():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = project["dependencies"] + [
        name for extra in project["optional-dependencies"].values() for name in extra
    ]
    assert [requirement for requirement in requirements if "==" in requirement] == []
    names = {requirement.split(">")[0] for requirement in project["dependencies"]}
    assert {"torch", "transformers", "huggingface-hub", "safetensors", "torchmetrics", "typer"} <= names
    assert {"accelerate", "datasets", "evaluate", "tokenizers"} <= {
        requirement.split(">")[0] for requirement in project["optional-dependencies"]["train"]
    }
