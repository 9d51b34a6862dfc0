# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""What must not be published: files that look like secrets, caches, pickles or the state of a training run."""

import re
from collections.abc import Collection, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

# Patterns of single path components, in lower case -> what such a file is.
NAMES = {
    "a secret": (
        ".env",
        ".env.*",
        "*.pem",
        "*.key",
        "*.p12",
        "*.pfx",
        "*.kdbx",
        "id_rsa*",
        "id_ecdsa*",
        "id_ed25519*",
        ".netrc",
        "_netrc",
        ".npmrc",
        ".pypirc",
        ".git-credentials",
        ".htpasswd",
        ".aws",
        ".ssh",
        ".gnupg",
        "credentials",
        "credentials.*",
        "secrets",
        "secrets.*",
        "token",
        "token.txt",
        "stored_tokens",
    ),
    "a cache or a leftover": (
        "__pycache__",
        "*.pyc",
        ".git",
        ".cache",
        ".ipynb_checkpoints",
        ".pytest_cache",
        ".ruff_cache",
        ".mypy_cache",
        ".venv",
        "node_modules",
        "wandb",
        "events.out.tfevents.*",
        ".ds_store",
        "thumbs.db",
        "*.lock",
        "*.incomplete",
        "*.tmp",
        "*.part",
        "*.swp",
        "*~",
        ".unfinished-*",
    ),
    "the state of a training run": (
        "optimizer.*",
        "scheduler.*",
        "scaler.*",
        "rng_state*",
        "random_states_*",
        "training_args.bin",
        "global_step*",
        "*.distcp",
        "checkpoint-*",
    ),
    "a pickle, which runs code when it is read": (
        "*.bin",
        "*.pt",
        "*.pth",
        "*.ckpt",
        "*.pkl",
        "*.pickle",
        "*.joblib",
        "*.dill",
    ),
}
SECRETS = {
    "a Hugging Face token": rb"\bhf_[A-Za-z0-9]{30,}\b",
    "a private key": rb"-----BEGIN [A-Z ]*PRIVATE KEY-----",
    "an AWS key": rb"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    "a GitHub token": rb"\b(?:gh[pousr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{60,})\b",
    "a Google key": rb"\bAIza[0-9A-Za-z_-]{35}\b",
    "a Slack token": rb"\bxox[abeprs]-[0-9A-Za-z-]{20,}",
    "an API key": rb"\bsk-(?:[a-z]+-)*[A-Za-z0-9]{32,}\b",
}
_SECRETS = {what: re.compile(pattern) for what, pattern in SECRETS.items()}
CHUNK, OVERLAP = 1 << 20, 1 << 10  # bytes; what is looked for is shorter than the overlap


def find_unsafe_files(folder: Path, token: str | None = None, left_out: Collection[str] = ()) -> list[str]:
    """
    One line for each file below `folder` that must not be published: its path and what it looks like.

    Args:
        folder: Is searched to its last subfolder; whole folders that are caches are named once.
        token: The Hub token in use, which no file may contain.
        left_out: Names in `folder` itself that are known, and not published anyway.
    """
    return list(_unsafe(folder, folder, token, left_out))


def _unsafe(root: Path, folder: Path, token: str | None, left_out: Collection[str] = ()) -> Iterator[str]:
    for path in sorted(folder.iterdir()):
        if path.name in left_out:
            continue
        what = _what_name_says(path.name)
        if what is None and path.is_file():
            what = _what_content_says(path, token)
        if what is not None:
            yield f"{path.relative_to(root).as_posix()} ({what})"
        elif path.is_dir():
            yield from _unsafe(root, path, token)


def _what_name_says(name: str) -> str | None:
    name = name.lower()
    for what, patterns in NAMES.items():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            return what
    return None


def _what_content_says(path: Path, token: str | None) -> str | None:
    """Tensors are searched for the token in use alone: their bytes are any, and would match a pattern by chance."""
    patterns = {} if path.suffix == ".safetensors" else _SECRETS
    secret = token.encode() if token else None
    tail = b""
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            data = tail + chunk
            if secret and secret in data:
                return "holds the Hub token in use"
            for what, pattern in patterns.items():
                if pattern.search(data):
                    return f"holds {what}"
            tail = data[-OVERLAP:]
    return None


def refuse_unsafe_files(folder: Path, token: str | None = None, left_out: Collection[str] = ()) -> None:
    """
    Raises:
        ValueError: There are files that must not be published; it names each.
    """
    if found := find_unsafe_files(folder, token, left_out):
        raise ValueError(
            f"{folder} is not published because of {len(found)} file{'s' * (len(found) > 1)} in it: {', '.join(found)}"
            "; move them out, or publish the loaded model and its tokenizer instead of the folder"
        )
