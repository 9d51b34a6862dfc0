# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""MAE-LM in NumPy (float64), one sequence at a time, on weights in the authors' layout: the independent reference.

Written from the published description: the encoder sees the kept tokens alone, at their own positions; the decoder sees
the whole sequence, in order, with the [MASK] row where a token is hidden.
"""

import math

import numpy as np


def gelu(x):
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def layer_norm(x, weights, name, eps):
    centred = x - x.mean(-1, keepdims=True)
    return (
        centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * weights[f"{name}.weight"]
        + weights[f"{name}.bias"]
    )


def linear(x, weights, name):
    return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)


def bucket(distance, buckets, max_distance):
    half = buckets // 2
    exact = half // 2
    n = abs(distance)
    if n < exact:
        magnitude = n
    else:
        magnitude = min(
            half - 1, exact + math.ceil(math.log(n / exact) / math.log((max_distance - 1) / exact) * (half - 1 - exact))
        )
    return magnitude * (1 if distance > 0 else -1) + half - 1


def attention_layer(x, weights, name, heads, bias, eps):
    length, size = x.shape
    q, k, v = (
        linear(x, weights, f"{name}.self_attn.{part}_proj").reshape(length, heads, size // heads).transpose(1, 0, 2)
        for part in "qkv"
    )
    scores = q @ k.transpose(0, 2, 1) / math.sqrt(size // heads)  # (heads, queries, keys)
    if bias is not None:
        scores = scores + bias
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = ((scores / scores.sum(-1, keepdims=True)) @ v).transpose(1, 0, 2).reshape(length, size)
    x = layer_norm(
        x + linear(mixed, weights, f"{name}.self_attn.out_proj"), weights, f"{name}.self_attn_layer_norm", eps
    )
    inner = linear(gelu(linear(x, weights, f"{name}.fc1")), weights, f"{name}.fc2")
    return layer_norm(x + inner, weights, f"{name}.final_layer_norm", eps)


def encode(ids, positions, weights, config):
    """ids and positions (length,) -> (length, size)."""
    stem, eps = "encoder.sentence_encoder", config["layer_norm_eps"]
    x = weights[f"{stem}.embed_tokens.weight"][ids] + weights[f"{stem}.embed_positions.weight"][positions]
    x = layer_norm(x, weights, f"{stem}.emb_layer_norm", eps)
    bias = None
    if config["relative_position_buckets"]:
        table = weights[f"{stem}.relative_attention_bias.weight"]
        sizes = config["relative_position_buckets"], config["relative_position_max_distance"]
        bias = np.array([[table[bucket(int(k) - int(q), *sizes)] for k in positions] for q in positions])
        bias = bias.transpose(2, 0, 1)  # (heads, queries, keys)
    for layer in range(config["num_hidden_layers"]):
        x = attention_layer(x, weights, f"{stem}.layers.{layer}", config["num_attention_heads"], bias, eps)
    return x


def masked_logits(ids, hidden, weights, config):
    """ids (length,) with hidden (length,) bool -> logits of the hidden tokens (hidden, vocabulary)."""
    positions = np.arange(len(ids))
    embeddings = weights["encoder.sentence_encoder.embed_tokens.weight"]
    x = np.empty((len(ids), config["hidden_size"]))
    x[hidden] = embeddings[config["mask_token_id"]]
    if not hidden.all():
        x[~hidden] = encode(ids[~hidden], positions[~hidden], weights, config)
    if config["decoder_hidden_size"] != config["hidden_size"]:
        x = linear(x, weights, "encoder_to_decoder")
    stem, eps = "gen_decoder.sentence_encoder", config["layer_norm_eps"]
    x = layer_norm(x + weights[f"{stem}.embed_positions.weight"][positions], weights, f"{stem}.emb_layer_norm", eps)
    for layer in range(config["decoder_num_hidden_layers"]):
        x = attention_layer(x, weights, f"{stem}.layers.{layer}", config["decoder_num_attention_heads"], None, eps)
    x = layer_norm(
        gelu(linear(x[hidden], weights, "gen_decoder.lm_head.dense")), weights, "gen_decoder.lm_head.layer_norm", eps
    )
    if "gen_decoder.lm_head.embed_linear.weight" in weights:
        x = linear(x, weights, "gen_decoder.lm_head.embed_linear")
    return x @ embeddings.T + weights["gen_decoder.lm_head.bias"]


def official_weights(config, seed):
    """Random weights in the authors' layout, large enough that every part matters."""
    generator = np.random.default_rng(seed)
    size, width = config["hidden_size"], config["decoder_hidden_size"]
    weights = {}

    def matrix(name, *shape, scale=0.3):
        weights[name] = generator.normal(0, scale, shape)

    def module(name, rows, columns):
        matrix(f"{name}.weight", rows, columns)
        matrix(f"{name}.bias", rows)

    def norm(name, length):
        weights[f"{name}.weight"] = 1 + generator.normal(0, 0.2, length)
        matrix(f"{name}.bias", length)

    for stem, dim, inner, layers in (
        ("encoder", size, config["intermediate_size"], config["num_hidden_layers"]),
        ("gen_decoder", width, config["decoder_intermediate_size"], config["decoder_num_hidden_layers"]),
    ):
        stem = f"{stem}.sentence_encoder"
        matrix(f"{stem}.embed_positions.weight", config["max_position_embeddings"], dim)
        norm(f"{stem}.emb_layer_norm", dim)
        for layer in range(layers):
            name = f"{stem}.layers.{layer}"
            for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
                module(f"{name}.self_attn.{part}", dim, dim)
            norm(f"{name}.self_attn_layer_norm", dim)
            module(f"{name}.fc1", inner, dim)
            module(f"{name}.fc2", dim, inner)
            norm(f"{name}.final_layer_norm", dim)
    matrix("encoder.sentence_encoder.embed_tokens.weight", config["vocab_size"], size)
    weights["gen_decoder.lm_head.weight"] = weights["encoder.sentence_encoder.embed_tokens.weight"]
    weights["gen_decoder.sentence_encoder.embed_tokens.weight"] = weights[
        "encoder.sentence_encoder.embed_tokens.weight"
    ]
    if config["relative_position_buckets"]:
        matrix(
            "encoder.sentence_encoder.relative_attention_bias.weight",
            config["relative_position_buckets"],
            config["num_attention_heads"],
            scale=1.0,
        )
    if width != size:
        module("encoder_to_decoder", width, size)
        matrix("gen_decoder.lm_head.embed_linear.weight", size, width)
    module("gen_decoder.lm_head.dense", width, width)
    norm("gen_decoder.lm_head.layer_norm", width)
    matrix("gen_decoder.lm_head.bias", config["vocab_size"])
    return weights
