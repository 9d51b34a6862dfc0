# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""A tokenizer, and processes that know neither this package nor any network."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hub_helpers import TEXT, VOCABULARY
from toy_tokenizers import byte_level_tokenizer
from transformers import PreTrainedTokenizerFast


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_level_tokenizer(TEXT, VOCABULARY, model_max_length=64)


WITHOUT_PACKAGE = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "maelm_hf":
            raise ImportError("maelm_hf is not importable here")
sys.meta_path.insert(0, Blocked())
"""


class FreshPython:
    """Fresh processes, offline unless told otherwise, in a folder of their own and with a cache of their own."""

    def __init__(self, folder: Path):
        self.folder = folder
        (folder / "elsewhere").mkdir()

    def start(self, script: str, *arguments: str, package: bool = False, **environment: str) -> subprocess.Popen:
        env = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR") if name in os.environ}
        env |= {"HF_HOME": str(self.folder / "hf_home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [sys.executable, "-P", "-c", script if package else WITHOUT_PACKAGE + script, *arguments],
            cwd=self.folder / "elsewhere",
            env=env | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def output(self, script: str, *arguments: str, **options) -> tuple[str, str]:
        """What the script wrote to stdout and stderr, after it ended well."""
        process = self.start(script, *arguments, **options)
        try:
            stdout, stderr = process.communicate(timeout=150)
        finally:
            process.kill()
        assert process.returncode == 0, stderr[-4000:]
        return stdout, stderr

    def __call__(self, script: str, *arguments: str, **options) -> dict:
        """The line of JSON that the script printed last."""
        return json.loads(self.output(script, *arguments, **options)[0].strip().splitlines()[-1])


@pytest.fixture
def run_python(tmp_path):
    """Runs scripts in fresh processes to which the package is unknown, unless `package=True`."""
    return FreshPython(tmp_path)


@pytest.fixture(scope="session")
def golden() -> Path:
    folder = Path(__file__).resolve().parents[2] / "../shared/golden/official_tiny"
    if not folder.is_dir():
        pytest.skip("the golden batch of the official code is not here (../shared/golden/official_tiny)")
    return folder
