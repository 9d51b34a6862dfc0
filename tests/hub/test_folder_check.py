# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Secrets, caches, pickles and training state stop a publish, each file by its name; a model's own files do not."""

import shutil

import pytest
import torch
from hub_helpers import tiny_model
from safetensors.torch import save_file

from maelm_hf.hub import publish
from maelm_hf.hub.folder_check import find_unsafe_files

# Shaped like tokens, and made up: no service gave them out.
TOKEN = "hf_" + "aB3" * 11 + "x"
SECRET_TEXTS = {
    "a Hugging Face token": f'login(token="{TOKEN}")',
    "a private key": "-----BEGIN " + "OPENSSH PRIVATE KEY-----\nabc",
    "an AWS key": "key=AKIA" + "ABCDEFGH12345678",
    "a GitHub token": "ghp_" + "a1" * 18,
    "an API key": "OPENAI_API_KEY=sk-proj-" + "a1B2" * 10,
}


@pytest.fixture(scope="module")
def clean(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("clean")
    tiny_model().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text("Set HF_TOKEN, or log in with `hf auth login`; tokens begin with hf_.\n")
    (folder / "figures").mkdir()
    (folder / "figures" / "tokens.png").write_bytes(bytes(range(256)))
    return folder


def test_a_model_with_its_tokenizer_code_and_card_is_clean(clean):
    assert find_unsafe_files(clean, TOKEN) == []


@pytest.mark.parametrize(
    ("name", "what"),
    [
        (".env", "secret"),
        (".env.local", "secret"),
        ("server.pem", "secret"),
        ("sub/id_rsa", "secret"),
        ("sub/deep/.netrc", "secret"),
        (".ssh/config", "secret"),
        ("token", "secret"),
        ("__pycache__/modeling_maelm.cpython-311.pyc", "cache"),
        (".git/config", "cache"),
        (".cache/huggingface/upload.metadata", "cache"),
        ("sub/.ipynb_checkpoints/a.ipynb", "cache"),
        ("model.safetensors.lock", "cache"),
        ("events.out.tfevents.17", "cache"),
        ("optimizer.pt", "training run"),
        ("optimizer.safetensors", "training run"),
        ("checkpoint-500/model.safetensors", "training run"),
        ("rng_state_0.pth", "training run"),
        ("training_args.bin", "training run"),
        ("pytorch_model.bin", "pickle"),
        ("features.pkl", "pickle"),
    ],
)
def test_a_planted_file_is_named_with_what_it_looks_like(name, what, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("x")
    (found,) = find_unsafe_files(tmp_path)
    named, _, reason = found.partition(" (")
    assert name.startswith(named)
    assert what in reason


@pytest.mark.parametrize("what", SECRET_TEXTS)
def test_a_secret_inside_a_file_is_found_and_not_repeated(what, tmp_path):
    (tmp_path / "notes.md").write_text("x" * (1 << 20) + "\n" + SECRET_TEXTS[what])
    (found,) = find_unsafe_files(tmp_path)
    assert found == f"notes.md (holds {what})"


def test_the_token_in_use_is_found_across_the_edge_of_a_chunk_and_in_weights(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"x" * ((1 << 20) - 7) + b"a-token-of-any-shape" + b"y" * 100)
    save_file({"weight": torch.zeros(3)}, tmp_path / "b.safetensors", metadata={"note": "a-token-of-any-shape"})
    assert find_unsafe_files(tmp_path, "a-token-of-any-shape") == [
        "a.txt (holds the Hub token in use)",
        "b.safetensors (holds the Hub token in use)",
    ]
    assert find_unsafe_files(tmp_path) == []


def test_publish_stops_names_every_file_and_writes_nothing(clean, tmp_path, capfd, caplog):
    folder = shutil.copytree(clean, tmp_path / "ours")
    (folder / ".env").write_text("A=1")
    (folder / "optimizer.pt").write_text("x")
    (folder / "notes.md").write_text(f"my token is {TOKEN}")
    with pytest.raises(ValueError, match=r"3 files in it: \.env .*, notes\.md .*, optimizer\.pt") as raised:
        publish(folder, "org/tiny", token=TOKEN, dry_run=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    output = capfd.readouterr()
    assert TOKEN not in str(raised.value) + output.out + output.err + caplog.text
