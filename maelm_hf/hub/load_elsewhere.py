# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""A script: loads a folder as a stranger would, in a process that cannot import maelm_hf, without network.

    python -P load_elsewhere.py FOLDER SUBFOLDER OUTPUT

It imports nothing of the package, and writes to the folder OUTPUT what the model computes for a fixed batch
(`states.safetensors`) and what was loaded (`loaded.json`).
"""

import json
import os
import sys
from pathlib import Path

BATCH, LENGTH = 2, 12


class MaelmIsMissing:
    """An import hook, first in line, for which the package does not exist."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "maelm_hf":
            raise ImportError("maelm_hf is not installed here")


def fixed_batch(config):
    """Ids of no special token, (2, 12), the second row padded."""
    import torch

    special = {
        getattr(config, name, None) for name in ("mask_token_id", "pad_token_id", "bos_token_id", "eos_token_id")
    }
    ids = [token for token in range(config.vocab_size) if token not in special] or [0]
    length = min(LENGTH, config.max_position_embeddings)
    input_ids = torch.tensor(
        [[ids[(7 * row + 3 * column) % len(ids)] for column in range(length)] for row in range(BATCH)]
    )
    attention_mask = torch.ones_like(input_ids)
    attention_mask[1, length // 2 :] = 0
    return {"input_ids": input_ids, "attention_mask": attention_mask}


def real_states(encoder, config):
    """Last hidden states at the real tokens of the fixed batch, (tokens, size), float32."""
    import torch

    batch = fixed_batch(config)
    with torch.no_grad():
        states = encoder.eval()(**batch).last_hidden_state
    return states[batch["attention_mask"].bool()].float()


def main(folder: str, subfolder: str, output: str) -> None:
    sys.meta_path.insert(0, MaelmIsMissing())
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers
    from safetensors.torch import save_file

    config_dict = json.loads((Path(folder) / subfolder / "config.json").read_text(encoding="utf-8"))
    auto_map = config_dict.get("auto_map", {})
    # The folder's code is this package's own two files: publish writes them, and checks that they are.
    where = {"subfolder": subfolder, "trust_remote_code": bool(auto_map)}
    config = transformers.AutoConfig.from_pretrained(folder, **where)
    names = sorted(name for name in auto_map if name.startswith("AutoModel")) or ["AutoModel"]
    if getattr(config, "mask_token_id", None) is None:  # without [MASK] there is nothing to pretrain
        names = [name for name in names if name not in ("AutoModelForMaskedLM", "AutoModelForPreTraining")]
    loaded = {}
    for name in names:
        model, info = getattr(transformers, name).from_pretrained(
            folder, dtype="auto", use_safetensors=True, output_loading_info=True, **where
        )
        loaded[name] = {"class": type(model).__name__, "missing": sorted(info["missing_keys"])}
        if name == "AutoModel":
            save_file({"states": real_states(model, config)}, str(Path(output) / "states.safetensors"))
    if (Path(folder) / subfolder / "tokenizer_config.json").is_file():
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **where)
        loaded["AutoTokenizer"] = {"class": type(tokenizer).__name__, "size": len(tokenizer)}
    (Path(output) / "loaded.json").write_text(json.dumps(loaded), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
