# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""The exported encoder in tools that know BERT and nothing of this package (`pip install 'maelm-hf[export]'`)."""

import pytest
import torch
from hub_helpers import TEXT, padded_batch, tiny_model
from transformers import AutoModel

from maelm_hf.hub import export_native

REASON = "needs pip install 'maelm-hf[export]'"


@pytest.fixture
def model():
    return tiny_model(relative_position_buckets=0)


@pytest.fixture
def exported(model, tokenizer, tmp_path):
    return export_native(model, tmp_path / "bert", tokenizer=tokenizer)


def test_sentence_transformers_embeds_with_it(model, tokenizer, exported):
    sentence_transformers = pytest.importorskip("sentence_transformers", reason=REASON)
    embeddings = sentence_transformers.SentenceTransformer(str(exported), device="cpu").encode(TEXT)
    batch = tokenizer(TEXT, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = model.encoder(**batch).last_hidden_state
    weights = batch["attention_mask"][..., None]
    mean = (states * weights).sum(1) / weights.sum(1)
    assert abs(torch.from_numpy(embeddings) - mean).max() < 1e-5


def test_onnx_of_transformers_own_exporter_equals_it_at_any_batch_and_length(model, exported, tmp_path):
    pytest.importorskip("onnxscript", reason=REASON)
    onnxruntime = pytest.importorskip("onnxruntime", reason=REASON)
    from transformers.exporters import OnnxConfig, OnnxExporter

    stock = AutoModel.from_pretrained(exported)
    export = OnnxExporter().export(stock, padded_batch(), config=OnnxConfig(dynamic=True))
    export.save_pretrained(tmp_path / "onnx")

    session = onnxruntime.InferenceSession(str(tmp_path / "onnx" / "model.onnx"), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    for lengths in [(40, 17, 1), (9,), (3, 64, 30, 12, 64)]:
        batch = padded_batch(seed=1, lengths=lengths)
        outputs = session.run(None, {name: tensor.numpy() for name, tensor in batch.items()})
        theirs = torch.from_numpy(dict(zip(names, outputs, strict=True))["last_hidden_state"])
        with torch.no_grad():
            ours = model.encoder(**batch).last_hidden_state
        assert (ours - theirs)[batch["attention_mask"].bool()].abs().max() < 1e-5
