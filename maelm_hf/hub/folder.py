# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""What publishing and exporting share: a model and its tokenizer out of an object, a folder or a Hub name."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.utils import validate_repo_id
from transformers import PreTrainedTokenizerBase

from .. import modeling_maelm
from ..modeling_maelm import MaeLmPreTrainedModel

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.json"
# Every file that a tokenizer of transformers may write: copied byte for byte, as saving again could change them.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "spm.model",
    "sentencepiece.bpe.model",
)


def local_folder(source: str | Path, token: str | None = None) -> Path:
    """The folder of a saved model; a Hub name is downloaded (weights in safetensors only).

    Raises:
        FileNotFoundError: It is neither a folder with a `config.json` nor a Hub name.
    """
    path = Path(source)
    if path.is_dir():
        if not (path / CONFIG_FILE).is_file():
            raise FileNotFoundError(f"{path} holds no {CONFIG_FILE}: give a folder that save_pretrained wrote")
        return path
    name = str(source)
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise FileNotFoundError(f"{name!r} is neither a folder nor a Hub name (organisation/name)")
    validate_repo_id(name)
    unread = ["*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack"]
    return Path(snapshot_download(name, ignore_patterns=unread, token=token))


def read_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))


def load_maelm(folder: Path) -> MaeLmPreTrainedModel:
    """The model of a folder, as the class that saved it, in its own dtype and in eval mode.

    Raises:
        ValueError: The folder holds another kind of model, or its weights do not fill the class that saved it.
    """
    config = read_config(folder)
    if config.get("model_type") != "maelm":
        raise ValueError(f"{folder} holds a model of type {config.get('model_type')!r}, not 'maelm'")
    architecture = (config.get("architectures") or ["MaeLmModel"])[0]
    model_class = getattr(modeling_maelm, architecture, None)
    if architecture not in modeling_maelm.__all__ or model_class is None:
        raise ValueError(f"{folder / CONFIG_FILE} names {architecture!r}, which is no model of maelm_hf")
    model, info = model_class.from_pretrained(folder, dtype="auto", use_safetensors=True, output_loading_info=True)
    if info["missing_keys"]:
        raise ValueError(f"{folder} lacks weights of {architecture}: {', '.join(sorted(info['missing_keys']))}")
    return model.eval()


def write_tokenizer(tokenizer: PreTrainedTokenizerBase | None, source: Path | None, out_dir: Path) -> bool:
    """Writes the tokenizer into `out_dir`: the given one, else the files of `source`; whether there was one."""
    if tokenizer is not None:
        tokenizer.save_pretrained(out_dir)
        return True
    files = [source / name for name in TOKENIZER_FILES if (source / name).is_file()] if source else []
    for file in files:
        shutil.copyfile(file, out_dir / file.name)
    return bool(files)
