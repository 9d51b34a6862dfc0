# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Hidden states by hooks, against ``output_hidden_states`` of stock models built small from their configs."""

import importlib.util

import pytest
import torch
import transformers
from torch import nn

from maelm_hf.probing import capture_hidden_states
from maelm_hf.probing.capture import find_blocks

TEXT = {
    "vocab_size": 65,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}

# family -> (model class, config class, options, whether its last hidden state is normalised once more)
FAMILIES = {
    "BERT": ("BertModel", "BertConfig", TEXT, False),
    "RoBERTa": ("RobertaModel", "RobertaConfig", TEXT, False),
    "ModernBERT": ("ModernBertModel", "ModernBertConfig", TEXT | {"cls_token_id": 1, "sep_token_id": 2}, True),
    "MPNet": ("MPNetModel", "MPNetConfig", TEXT, False),
    "DistilBERT": (
        "DistilBertModel",
        "DistilBertConfig",
        {"vocab_size": 65, "dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 64, "max_position_embeddings": 40},
        False,
    ),
    "ELECTRA": ("ElectraModel", "ElectraConfig", TEXT | {"embedding_size": 16}, False),
    "DeBERTa-v2": (
        "DebertaV2Model",
        "DebertaV2Config",
        TEXT | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 8},
        False,
    ),
    "ESM": (
        "EsmModel",
        "EsmConfig",
        TEXT | {"mask_token_id": 3, "position_embedding_type": "rotary", "token_dropout": True},
        True,
    ),
    "GPT-2": (
        "GPT2Model",
        "GPT2Config",
        {"vocab_size": 65, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 40}
        | {"bos_token_id": 1, "eos_token_id": 2},
        True,
    ),
    "Llama": ("LlamaModel", "LlamaConfig", TEXT | {"num_key_value_heads": 2}, True),
    "ViT": ("ViTModel", "ViTConfig", VISION | {"image_size": 32, "patch_size": 8}, True),
    "DINOv2": ("Dinov2Model", "Dinov2Config", VISION | {"image_size": 28, "patch_size": 14}, True),
}


def build(family):
    model_name, config_name, options, _ = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, config_name)(**options)
    return getattr(transformers, model_name)(config).eval()


def inputs_of(model):
    generator = torch.Generator().manual_seed(0)
    if model.main_input_name == "pixel_values":
        size = model.config.image_size
        return {"pixel_values": torch.randn(3, 3, size, size, generator=generator)}
    ids = torch.randint(5, 65, (3, 12), generator=generator)
    mask = torch.ones(3, 12, dtype=torch.long)
    mask[1, 7:] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


@torch.no_grad()
def capture(model, inputs, layers=None):
    captured = {}
    with capture_hidden_states(model, lambda name, hidden: captured.__setitem__(name, hidden.clone()), layers) as seen:
        output = model(**inputs)
    return captured, dict(seen), output


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_are_the_models_own_hidden_states(family):
    model, normalised_again = build(family), FAMILIES[family][3]
    inputs = inputs_of(model)
    captured, seen, output = capture(model, inputs)
    with torch.no_grad():
        expected = model(**inputs, output_hidden_states=True).hidden_states
    assert len(expected) == 4
    blocks = ["block output"] * 3
    assert list(seen.values()) == ["embeddings", *blocks, *["final norm"] * normalised_again]
    states = list(captured.values())
    for mine, theirs in zip(states[:3], expected[:3], strict=True):
        assert torch.equal(mine, theirs)
    # hidden_states[-1] is the normalised one in text models and the last block's own output in vision models.
    is_vision = model.main_input_name == "pixel_values"
    assert torch.equal(states[3] if is_vision else states[-1], expected[-1])
    assert torch.equal(states[-1], output.last_hidden_state)
    if normalised_again:
        assert not torch.allclose(states[-2], states[-1])


@pytest.mark.parametrize("family", ["BERT", "GPT-2"])
def test_nothing_is_left_behind_even_after_an_error(family):
    model = build(family)

    def hooks():
        return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())

    before = hooks()
    with pytest.raises(RuntimeError, match="stop"), capture_hidden_states(model, lambda *_: None):
        raise RuntimeError("stop")
    assert hooks() == before


def test_layers_seen_one_at_a_time_in_order():
    names = []
    model = build("BERT")
    with torch.no_grad(), capture_hidden_states(model, lambda name, hidden: names.append(name)):
        model(**inputs_of(model))
        model(**inputs_of(model))
    assert names == 2 * ["embeddings", *(f"encoder.layer.{k}" for k in range(3))]


def test_shared_block_is_counted():
    config = transformers.AlbertConfig(**TEXT, embedding_size=16)
    model = transformers.AlbertModel(config, add_pooling_layer=False).eval()
    captured, _, _ = capture(model, inputs_of(model))
    block = "encoder.albert_layer_groups.0"
    assert list(captured) == ["embeddings", block, f"{block}#2", f"{block}#3"]


def test_named_layers_of_a_bare_module_and_near_matches():
    model = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 2))
    captured = {}
    with capture_hidden_states(model, captured.__setitem__, ["0", "2"]) as seen:
        out = model(torch.ones(5, 4))
    assert captured["0"].shape == (5, 6)
    assert captured["2"] is out
    assert set(seen.values()) == {"named layer"}
    bert = build("BERT")
    with pytest.raises(ValueError, match=r"no layer 'encoder.layers.1'.*encoder\.layer\.1"):
        capture_hidden_states(bert, captured.__setitem__, ["encoder.layers.1"]).__enter__()
    with pytest.raises(ValueError, match="name the layers"):
        find_blocks(model)


@pytest.mark.skipif(importlib.util.find_spec("timm") is None, reason="timm is not installed")
def test_timm_model():
    import timm

    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=3, num_classes=0).eval()
    images = torch.randn(2, 3, 32, 32)
    captured = {}
    with torch.no_grad(), capture_hidden_states(model, captured.__setitem__) as seen:
        features = model.forward_features(images)
        captured.clear()
        model(images)
    assert list(seen) == ["embeddings", "blocks.0", "blocks.1", "blocks.2", "norm"]
    assert torch.equal(captured["norm"], features)
