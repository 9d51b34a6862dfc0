# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""MAE-LM on an encoder of the loopback Hub (hub_server.py): of a private repository, and of one of its branches."""

from hub_helpers import VOCABULARY
from hub_server import HubServer, Repo, User
from transformers import BertConfig, BertForMaskedLM

# Made up; of no service.
TOKEN = "hf_" + "Q7w" * 11

ADAPT = """
import json, sys
from maelm_hf import MaeLmForMaskedLM
token, found = sys.argv[1], {}
for revision in ("main", "v1"):
    model = MaeLmForMaskedLM.from_encoder("me/bert", revision=revision, token=token)
    words = model.encoder.backbone.embeddings.word_embeddings.weight
    head = model.lm_head.dense.bias
    found[revision] = [words[0, 0].item(), head[0].item(), model.config.mask_token_id]
    assert token not in model.config.to_json_string()
print(json.dumps(found))
"""


def test_revision_and_token_reach_config_tokenizer_encoder_and_head(tokenizer, run_python, tmp_path):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    with HubServer({TOKEN: User("me")}) as hub:
        hub.repos["me/bert"] = repo = Repo(private=True)
        for number, branch in enumerate(["main", "v1"], start=1):
            bert = BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, max_position_embeddings=16, **sizes))
            bert.bert.embeddings.word_embeddings.weight.data[0, 0] = number
            bert.cls.predictions.transform.dense.bias.data[0] = 10 * number
            bert.save_pretrained(tmp_path / branch)
            tokenizer.save_pretrained(tmp_path / branch)
            files = {}
            for path in (tmp_path / branch).iterdir():
                digest = f"{branch}-{path.name}"
                hub.blobs[digest] = path.read_bytes()
                files[path.name] = ("regular", digest)
            repo.commit(branch, files, branch)
        online = {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
        found = run_python(ADAPT, TOKEN, package=True, **online)
    assert found == {
        "main": [1.0, 10.0, tokenizer.mask_token_id],
        "v1": [2.0, 20.0, tokenizer.mask_token_id],
    }
