# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""The architecture against the authors' code (golden batch) and against a NumPy reference on the authors' layout."""

import json
from pathlib import Path

import numpy as np
import pytest
import reference_maelm
import torch
from safetensors.torch import load_file

from maelm_hf.hub import convert_official_state_dict

GOLDEN = Path(__file__).resolve().parents[1] / "../shared/golden/official_tiny"

BASE = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 160,
    "relative_position_buckets": 32,
    "relative_position_max_distance": 64,
    "layer_norm_eps": 1e-5,
    "decoder_num_hidden_layers": 2,
    "decoder_hidden_size": 16,
    "decoder_intermediate_size": 40,
    "decoder_num_attention_heads": 4,
    "mask_token_id": 49,
}
VARIANTS = {
    "base": {},
    "narrow decoder": {"decoder_hidden_size": 12, "decoder_num_attention_heads": 3},
    "no relative bias": {"relative_position_buckets": 0},
    "few buckets": {"relative_position_buckets": 6, "relative_position_max_distance": 9},
    "buckets not a multiple of four": {"relative_position_buckets": 30, "relative_position_max_distance": 100},
    "one decoder layer": {"decoder_num_hidden_layers": 1},
}


def assert_close(value, reference):
    """To 2e-5 of the largest magnitude, at least of 1."""
    reference = torch.as_tensor(reference)
    bound = 2e-5 * max(1.0, reference.abs().max().item())
    assert (value.double() - reference.double()).abs().max().item() <= bound


@pytest.mark.skipif(not GOLDEN.exists(), reason="the authors' golden batch lies outside of the repository")
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_agrees_with_the_authors_code(attention):
    batch = load_file(GOLDEN / "batch.safetensors")
    config = json.loads((GOLDEN / "config.json").read_text())
    model = convert_official_state_dict(load_file(GOLDEN / "official_state_dict.safetensors"), **config)
    model.set_attn_implementation(attention)
    inputs = {key: batch[key] for key in ("attention_mask", "labels")}
    with torch.no_grad():
        output = model(input_ids=batch["masked_input_ids"], sparse_logits=True, **inputs)
        dense = model(input_ids=batch["masked_input_ids"], **inputs)
        kept = model.encoder(
            batch["encoder_input_ids"],
            attention_mask=batch["encoder_attention_mask"],
            position_ids=batch["encoder_position_ids"],
        ).last_hidden_state
        unmasked = model.encoder(batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
    assert_close(output.logits, batch["masked_logits"])
    assert_close(dense.logits[batch["labels"] != -100], batch["masked_logits"])
    assert_close(output.loss[None], batch["loss"])
    assert_close(dense.loss[None], batch["loss"])
    real = batch["encoder_attention_mask"].bool()
    assert_close(kept[real], batch["encoder_last_hidden_state"][real])
    real = batch["attention_mask"].bool()
    assert_close(unmasked[real], batch["encoder_last_hidden_state_unmasked_batch"][real])


@pytest.mark.parametrize("name", VARIANTS)
def test_agrees_with_numpy_on_the_authors_layout(name):
    config = BASE | VARIANTS[name]
    weights = reference_maelm.official_weights(config, seed=list(VARIANTS).index(name))
    generator = np.random.default_rng(7)
    lengths = [140, 9, 1]
    ids = [generator.integers(3, 49, length) for length in lengths]
    hidden = [generator.random(length) < 0.3 for length in lengths]
    hidden[1][0] = True  # a hidden first token
    hidden[2][0] = True  # and a row whose only token is hidden
    expected = np.concatenate(
        [reference_maelm.masked_logits(row, gone, weights, config) for row, gone in zip(ids, hidden, strict=True)]
    )

    model = convert_official_state_dict({name: torch.tensor(value) for name, value in weights.items()}, **config)
    input_ids = torch.ones(3, 140, dtype=torch.long)
    attention_mask = torch.zeros(3, 140, dtype=torch.long)
    labels = torch.full((3, 140), -100)
    for row, (tokens, gone) in enumerate(zip(ids, hidden, strict=True)):
        input_ids[row, : len(tokens)] = torch.tensor(np.where(gone, 49, tokens))
        attention_mask[row, : len(tokens)] = 1
        labels[row, : len(tokens)] = torch.tensor(np.where(gone, tokens, -100))
    with torch.no_grad():
        output = model(input_ids, attention_mask, labels=labels, sparse_logits=True)
        encoded = model.encoder(torch.tensor(ids[0])[None]).last_hidden_state[0]
    assert_close(output.logits, expected)
    assert_close(encoded, reference_maelm.encode(ids[0], np.arange(140), weights, config))
    log_probabilities = torch.log_softmax(torch.tensor(expected), dim=-1)
    assert_close(output.loss, -log_probabilities[torch.arange(len(expected)), labels[labels != -100]].mean())


def test_positions_too_few_for_the_last_bucket_shift_the_table_as_the_authors_do():
    """Their smallest bucket is that of the furthest distance there is, ours that of the furthest there could be."""
    config = BASE | {
        "max_position_embeddings": 20,
        "relative_position_buckets": 64,
        "relative_position_max_distance": 128,
    }
    weights = {key: torch.tensor(value) for key, value in reference_maelm.official_weights(config, seed=0).items()}
    table = weights["encoder.sentence_encoder.relative_attention_bias.weight"]
    model = convert_official_state_dict(weights, **config)
    bias = model.encoder.relative_position_bias(torch.arange(20)[None])[0]  # (heads, queries, keys)
    reached = reference_maelm.bucket(19, 64, 128) - 31
    for query, key in ((19, 0), (0, 19), (5, 5), (3, 9)):
        row = reference_maelm.bucket(key - query, 64, 128) - 31 + reached
        assert torch.allclose(bias[:, query, key].double(), table[row])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop("gen_decoder.lm_head.bias"), r"missing gen_decoder\.lm_head\.bias"),
        (lambda weights: weights.update(extra=torch.zeros(1)), "unknown extra"),
        (
            lambda weights: weights.update({"gen_decoder.lm_head.bias": torch.zeros(3)}),
            r"gen_decoder\.lm_head\.bias has shape \(3,\), the config gives \(50,\)",
        ),
        (
            lambda weights: weights.update({"gen_decoder.lm_head.weight": torch.zeros(50, 16)}),
            "tie_word_embeddings=False",
        ),
    ],
    ids=["missing", "unknown", "shape", "untied"],
)
def test_a_state_dict_that_does_not_fit_is_refused_by_name(change, message):
    weights = {key: torch.tensor(value) for key, value in reference_maelm.official_weights(BASE, seed=0).items()}
    change(weights)
    with pytest.raises(ValueError, match=message):
        convert_official_state_dict(weights, **BASE)


def test_untied_official_weights_stay_apart():
    weights = {key: torch.tensor(value) for key, value in reference_maelm.official_weights(BASE, seed=0).items()}
    weights["gen_decoder.lm_head.weight"] = torch.ones(50, 16)
    model = convert_official_state_dict(weights, **BASE, tie_word_embeddings=False)
    assert torch.equal(model.lm_head.output.weight, torch.ones(50, 16))
    assert not torch.equal(model.encoder.embeddings.word_embeddings.weight, torch.ones(50, 16))
