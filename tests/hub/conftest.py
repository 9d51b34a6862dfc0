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
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with RoBERTa's special tokens, ids 0 to 4."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXT, trainer)
    backend.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=64,
        bos_token="<s>",
        cls_token="<s>",
        pad_token="<pad>",
        eos_token="</s>",
        sep_token="</s>",
        unk_token="<unk>",
        mask_token="<mask>",
    )


WITHOUT_PACKAGE = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "maelm_hf":
            raise ImportError("maelm_hf is not importable here")
sys.meta_path.insert(0, Blocked())
"""


@pytest.fixture
def run_python(tmp_path):
    """Runs a script in a fresh process, offline, in a folder of its own, with the package unknown unless asked for.

    The script prints one line of JSON last, which is returned.
    """

    def run(script: str, *arguments: str, package: bool = False, **environment: str) -> dict:
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir(exist_ok=True)
        env = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR") if name in os.environ}
        env |= {"HF_HOME": str(tmp_path / "hf_home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        code = script if package else WITHOUT_PACKAGE + script
        done = subprocess.run(
            [sys.executable, "-P", "-c", code, *arguments],
            cwd=elsewhere,
            env=env | environment,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout.strip().splitlines()[-1])

    return run


@pytest.fixture(scope="session")
def golden() -> Path:
    folder = Path(__file__).resolve().parents[2] / "../shared/golden/official_tiny"
    if not folder.is_dir():
        pytest.skip("the golden batch of the official code is not here (../shared/golden/official_tiny)")
    return folder
