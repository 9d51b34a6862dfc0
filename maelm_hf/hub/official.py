# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Weights of the authors' fairseq code (yumeng5/MAE-LM), in its parameter names, into `MaeLmForMaskedLM`."""

from collections.abc import Mapping

import torch

from ..configuration_maelm import MaeLmConfig
from ..modeling_maelm import MaeLmForMaskedLM, relative_position_bucket

EMBEDDINGS = "encoder.embeddings.word_embeddings.weight"
RELATIVE_BIAS = "encoder.relative_position_bias.bias.weight"
LAYER_PARTS = {
    "self_attn.q_proj": "attention.query",
    "self_attn.k_proj": "attention.key",
    "self_attn.v_proj": "attention.value",
    "self_attn.out_proj": "attention.output",
    "self_attn_layer_norm": "attention_norm",
    "fc1": "intermediate",
    "fc2": "output",
    "final_layer_norm": "output_norm",
}
# The embedding matrix once more, as the decoder's own table, which reads the [MASK] row of the encoder's.
REPEATED = {"gen_decoder.sentence_encoder.embed_tokens.weight"}


def official_names(config: MaeLmConfig) -> dict[str, str]:
    """Official parameter name -> ours, for a model of this config."""
    names = {
        "encoder.sentence_encoder.embed_tokens.weight": EMBEDDINGS,
        "encoder.sentence_encoder.embed_positions.weight": "encoder.embeddings.position_embeddings.weight",
        "gen_decoder.sentence_encoder.embed_positions.weight": "decoder.position_embeddings.weight",
        "gen_decoder.lm_head.weight": "lm_head.output.weight",
        "gen_decoder.lm_head.bias": "lm_head.output.bias",
    }
    modules = {
        "encoder.sentence_encoder.emb_layer_norm": "encoder.embeddings.layer_norm",
        "gen_decoder.sentence_encoder.emb_layer_norm": "decoder.layer_norm",
        "gen_decoder.lm_head.dense": "lm_head.dense",
        "gen_decoder.lm_head.layer_norm": "lm_head.layer_norm",
    }
    for side, ours, layers in (
        ("encoder", "encoder", config.num_hidden_layers),
        ("gen_decoder", "decoder", config.decoder_num_hidden_layers),
    ):
        for layer in range(layers):
            for part, our_part in LAYER_PARTS.items():
                modules[f"{side}.sentence_encoder.layers.{layer}.{part}"] = f"{ours}.layers.{layer}.{our_part}"
    if config.decoder_hidden_size != config.hidden_size:
        modules["encoder_to_decoder"] = "decoder.input_projection"
        names["gen_decoder.lm_head.embed_linear.weight"] = "lm_head.output_projection.weight"
    if config.relative_position_buckets:
        names["encoder.sentence_encoder.relative_attention_bias.weight"] = RELATIVE_BIAS
    for official, ours in modules.items():
        for kind in ("weight", "bias"):
            names[f"{official}.{kind}"] = f"{ours}.{kind}"
    return names


def convert_official_state_dict(state_dict: Mapping[str, torch.Tensor], **config) -> MaeLmForMaskedLM:
    """
    A `MaeLmForMaskedLM`, in float32 and eval mode, that holds the weights of a checkpoint of the authors' code.

    Args:
        state_dict: Parameter name to tensor, in the official layout (`encoder.sentence_encoder...`, `gen_decoder...`).
        **config: `MaeLmConfig`'s names, the sizes among them: a checkpoint does not tell its heads or its padding id.

    Raises:
        ValueError: Where keys are missing or unknown, or a tensor has another shape than the config says; it lists all.
    """
    model = MaeLmForMaskedLM(MaeLmConfig(**config))
    names, expected = official_names(model.config), model.state_dict()
    problems = [f"missing {name}" for name in names.keys() - state_dict.keys()]
    problems += [f"unknown {name}" for name in state_dict.keys() - names.keys() - REPEATED]
    problems += [
        f"{name} has shape {tuple(state_dict[name].shape)}, the config gives {tuple(expected[ours].shape)}"
        for name, ours in names.items()
        if name in state_dict and state_dict[name].shape != expected[ours].shape
    ]
    if problems:
        raise ValueError("the state dict does not fit the config: " + "; ".join(sorted(problems)))
    converted = {ours: state_dict[name].float() for name, ours in names.items()}
    if model.config.tie_word_embeddings and not torch.equal(converted["lm_head.output.weight"], converted[EMBEDDINGS]):
        raise ValueError(
            "gen_decoder.lm_head.weight differs from the embedding matrix it should be; pass tie_word_embeddings=False "
            "to keep both"
        )
    if RELATIVE_BIAS in converted:
        converted[RELATIVE_BIAS] = _shift_buckets(converted[RELATIVE_BIAS], model.config)
    model.load_state_dict(converted)
    return model.eval()


def _shift_buckets(table: torch.Tensor, config: MaeLmConfig) -> torch.Tensor:
    """
    The official table counts buckets from the furthest that its positions reach, ours from the furthest there is; they
    differ only where `max_position_embeddings` is too short to reach the last bucket.
    """
    half = config.relative_position_buckets // 2
    furthest = torch.tensor(config.max_position_embeddings - 1)
    buckets = config.relative_position_buckets, config.relative_position_max_distance
    reached = int(relative_position_bucket(furthest, *buckets)) - (half - 1)
    shift, used = half - 1 - reached, 2 * reached + 1
    shifted = torch.zeros_like(table)
    shifted[shift : shift + used] = table[:used]
    return shifted
