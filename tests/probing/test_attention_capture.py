# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Maps are what the models' own eager attention computes, whatever they run with; and nothing is left behind."""

import math

import pytest
import torch
import torch.nn.functional as F
import transformers
from attention_models import FAMILIES, SPELLINGS, SoftmaxViT, build, keep_order, pixels, sharpened
from torch import nn

from maelm_hf.probing.attention_capture import capture_attention


def captured(model: nn.Module, *args, **kwargs) -> dict[str, torch.Tensor]:
    maps = {}
    with torch.no_grad(), capture_attention(model, lambda name, value: maps.__setitem__(name, value)):
        model(*args, **kwargs)
    return maps


def hooks_of(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_maps_are_those_of_the_models_own_eager_attention(family, implementation):
    images = pixels()
    eager, model = build(family, "eager"), build(family, implementation)
    extra = keep_order(model, images)
    with torch.no_grad():
        expected = eager(images, output_attentions=True, **extra).attentions
    assert len(expected) == 2
    found = captured(model, images, **extra)
    pooling = {name: maps for name, maps in found.items() if maps.shape[2] == 1}
    assert len(pooling) == (family == "siglip")  # its pooling head attends too, with one query
    found = {name: maps for name, maps in found.items() if name not in pooling}
    assert len(found) == 2
    assert all("0" in first and "1" in second for first, second in [tuple(found)])
    for maps, reference in zip(found.values(), expected, strict=True):
        assert maps.dtype == torch.float32
        torch.testing.assert_close(maps, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_not_changed_by_the_capture(family):
    model = build(family)
    images = pixels()
    extra = keep_order(model, images)
    with torch.no_grad():
        before = model(images, **extra).last_hidden_state
        with capture_attention(model, lambda name, maps: maps.zero_()):
            during = model(images, **extra).last_hidden_state
        after = model(images, **extra).last_hidden_state
    # A map of an eager softmax is the model's own tensor; the default is fused, so zeroing one reaches nothing.
    assert torch.equal(before, during)
    assert torch.equal(before, after)
    assert hooks_of(model) == 0
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("attend", SPELLINGS, ids=lambda spelling: spelling.__name__)
def test_hand_written_attention(attend):
    torch.manual_seed(0)
    model = SoftmaxViT(attend).eval()
    inputs = []
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    found = captured(model, pixels())
    assert list(found) == ["layers.0", "layers.1"]
    for layer, tokens, maps in zip(model.layers, inputs, found.values(), strict=True):
        torch.testing.assert_close(maps, layer.expected(tokens).detach(), rtol=1e-4, atol=1e-6)


def test_single_head_attention_of_three_dimensions():
    class Layer(nn.Module):
        def forward(self, tokens):
            return (tokens @ tokens.mT).softmax(-1) @ tokens

    tokens = torch.randn(2, 5, 4)
    maps = captured(Layer(), tokens)[""]
    assert maps.shape == (2, 1, 5, 5)
    torch.testing.assert_close(maps[:, 0], torch.softmax(tokens @ tokens.mT, -1))


def test_a_softmax_that_weights_no_tokens_is_no_attention():
    class Other(nn.Module):
        def __init__(self):
            super().__init__()
            self.codebook = nn.Parameter(torch.randn(1, 6, 4))
            self.gate = nn.Linear(4, 3)
            self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, tokens):
            codes = (tokens @ self.codebook.mT).softmax(-1) @ self.codebook  # soft look-up in a parameter
            gates = self.gate(tokens).softmax(-1)  # (batch, tokens, experts)
            outputs = torch.stack([expert(tokens) for expert in self.experts], dim=2)
            mixed = torch.einsum("bte,bted->btd", gates, outputs)
            over_channels = tokens.softmax(1).mean(1)
            return (codes + mixed).mean(1).softmax(-1) @ torch.randn(4, 2) + over_channels[:, :2]

    assert captured(Other(), torch.randn(2, 5, 4)) == {}


def test_attention_dropout_does_not_touch_the_maps():
    model = SoftmaxViT(SPELLINGS[0]).train()
    for maps in captured(model, pixels()).values():
        torch.testing.assert_close(maps.sum(-1), torch.ones(maps.shape[:-1]))


def test_dropout_of_fused_and_multi_head_attention_does_not_touch_the_maps():
    for model, inputs in (
        (SoftmaxViT(SPELLINGS[-1]).train(), pixels()),
        (
            nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 16, dropout=0.5, batch_first=True), 1),
            torch.randn(2, 5, 16),
        ),
    ):
        maps = next(iter(captured(model, inputs).values()))
        torch.testing.assert_close(maps.sum(-1), torch.ones(maps.shape[:-1]))


class Fused(nn.Module):
    def forward(self, q, k, v, **options):
        return F.scaled_dot_product_attention(q, k, v, **options)


def reference_maps(q, k, mask=None, scale=None, causal=False):
    """By the formula, in float64."""
    q, k = q.double(), k.double()
    if k.shape[1] != q.shape[1]:
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    logits = torch.einsum("bhqd,bhkd->bhqk", q, k) * (scale or 1 / math.sqrt(q.shape[-1]))
    if causal:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    if mask is not None and mask.dtype == torch.bool:
        logits = torch.where(mask, logits, -math.inf)
    elif mask is not None:
        logits = logits + mask
    weights = (logits - logits.amax(-1, keepdim=True)).exp().nan_to_num(0)
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)


def random_qkv(queries=6, keys=6, heads=4, key_heads=4, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, heads, queries, 8), (2, key_heads, keys, 8), (2, key_heads, keys, 8))
    return [(2 * torch.randn(shape, generator=generator)).to(dtype) for shape in shapes]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale": 0.5},
        {"is_causal": True},
        {"attn_mask": torch.rand(2, 1, 6, 6, generator=torch.Generator().manual_seed(1)) > 0.4},
        {"attn_mask": torch.randn(4, 6, 6, generator=torch.Generator().manual_seed(1))},
        {"attn_mask": torch.zeros(6, 6).masked_fill(torch.rand(6, 6) < 0.3, -math.inf).fill_diagonal_(0)},
        {"attn_mask": (torch.arange(6) != 2)[:, None].expand(6, 6)},  # a query without any key
    ],
    ids=["plain", "scale", "causal", "bool mask", "relative bias", "float mask", "empty row"],
)
def test_fused_attention_arguments(options):
    q, k, v = random_qkv()
    found = captured(Fused(), q, k, v, **options)[""]
    expected = reference_maps(q, k, options.get("attn_mask"), options.get("scale"), options.get("is_causal", False))
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-6)
    # The maps explain the output: the same sum over values.
    torch.testing.assert_close(found @ v, Fused()(q, k, v, **options), rtol=1e-4, atol=1e-5)


def test_grouped_queries_and_cross_attention():
    q, k, v = random_qkv(queries=3, keys=5, heads=4, key_heads=2)
    found = captured(Fused(), q, k, v, enable_gqa=True)[""]
    assert found.shape == (2, 4, 3, 5)
    torch.testing.assert_close(found.double(), reference_maps(q, k), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    q, k, v = random_qkv(dtype=dtype)
    found = captured(Fused(), q, k, v)[""]
    assert found.dtype == torch.float32
    # Against the same half-precision inputs: bf16 arithmetic would be off by 1e-2.
    torch.testing.assert_close(found.double(), reference_maps(q, k), rtol=1e-4, atol=1e-6)

    class Eager(nn.Module):
        def forward(self, q, k, v):
            return (q @ k.mT).softmax(-1) @ v

    found = captured(Eager(), q, k, v)[""]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.softmax((q @ k.mT).float(), -1))


def test_autocast_around_the_model_does_not_reach_the_maps():
    q, k, v = random_qkv()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = captured(Fused(), q, k, v)[""]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), reference_maps(q, k), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_multi_head_attention_module(dtype):
    torch.manual_seed(0)
    model = sharpened(nn.MultiheadAttention(16, 4, batch_first=True)).eval().to(dtype)
    tokens = torch.randn(2, 5, 16, dtype=dtype)
    padding = torch.tensor([[False] * 5, [False, False, False, True, True]])
    found = captured(model, tokens, tokens, tokens, key_padding_mask=padding, need_weights=False)[""]
    reference = model.float()(
        tokens.float(), tokens.float(), tokens.float(), key_padding_mask=padding, average_attn_weights=False
    )
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, reference[1].detach(), rtol=1e-4, atol=1e-6)


def test_transformer_encoder_whose_fast_path_would_hide_everything():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    model = sharpened(nn.TransformerEncoder(layer, 2)).eval()
    tokens = torch.randn(2, 5, 16)
    padding = torch.tensor([[False] * 5, [False, False, False, True, True]])
    found = captured(model, tokens, src_key_padding_mask=padding)
    assert list(found) == ["layers.0.self_attn", "layers.1.self_attn"]
    reference = model.layers[0].self_attn(tokens, tokens, tokens, key_padding_mask=padding, average_attn_weights=False)
    torch.testing.assert_close(found["layers.0.self_attn"], reference[1].detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("config", "model"),
    [("BertConfig", "BertModel"), ("MPNetConfig", "MPNetModel"), ("ModernBertConfig", "ModernBertModel")],
)
def test_text_encoders_with_padding(config, model):
    torch.manual_seed(0)
    model = sharpened(getattr(transformers, model)(getattr(transformers, config)(**SIZES_OF_TEXT))).eval()
    ids = torch.randint(5, 50, (2, 7), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1] * 7, [1, 1, 1, 1, 0, 0, 0]])
    found = captured(model, input_ids=ids, attention_mask=mask)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask, output_attentions=True).attentions
    for maps, reference in zip(found.values(), expected, strict=True):
        torch.testing.assert_close(maps[0], reference[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(maps[1, :, :4], reference[1, :, :4], rtol=1e-4, atol=1e-5)
        assert maps[1, :, :4, 4:].max() < 1e-6  # padding gets nothing


SIZES_OF_TEXT = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    **{f"{name}_token_id": number for number, name in enumerate(("pad", "bos", "eos", "cls", "sep"))},
}


def test_swin_windows_are_those_of_its_eager_attention():
    torch.manual_seed(0)
    config = transformers.SwinConfig(
        image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4
    )
    model = sharpened(transformers.SwinModel(config)).eval()
    found = list(captured(model, pixels()).values())
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(pixels(), output_attentions=True).attentions
    own = list(captured(model, pixels()).values())
    assert [tuple(maps.shape) for maps in found] == [(32, 2, 16, 16)] * 2 + [(8, 4, 16, 16)] * 2
    for maps, eager in zip(found, own, strict=True):
        torch.testing.assert_close(maps, eager, rtol=1e-4, atol=1e-5)
    for maps in expected:  # one a stage: the last block's
        assert any(maps.shape == other.shape and torch.allclose(maps, other, atol=1e-5) for other in found)


@pytest.mark.parametrize(
    "name", ["vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224", "swin_tiny_patch4_window7_224"]
)
def test_timm_with_fused_attention_on(name):
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    sizes = (
        {"depths": (1, 1), "num_heads": (2, 4), "embed_dim": 16}
        if "swin" in name
        else {"depth": 2, "embed_dim": 32, "num_heads": 4}
    )
    image = 56 if "swin" in name else 64
    model = sharpened(timm.create_model(name, img_size=image, num_classes=0, **sizes)).eval()
    attentions = [m for m in model.modules() if hasattr(m, "fused_attn")]
    assert attentions
    for module in attentions:
        module.fused_attn = True  # the default but for Swin
    fused = captured(model, pixels(height=image, width=image))
    assert all(module.fused_attn for module in attentions)
    for module in attentions:
        module.fused_attn = False
    plain = captured(model, pixels(height=image, width=image))
    assert list(fused) == list(plain)
    assert len(fused) == 2
    for maps, reference in zip(fused.values(), plain.values(), strict=True):
        torch.testing.assert_close(maps, reference, rtol=1e-4, atol=1e-6)


def test_torchvision_vit_and_swin():
    torchvision = pytest.importorskip("torchvision")
    torch.manual_seed(0)
    vit = torchvision.models.VisionTransformer(32, 8, 2, 4, 32, 48).eval()
    found = captured(vit, pixels())
    assert list(found) == [f"encoder.layers.encoder_layer_{i}.self_attention" for i in range(2)]
    assert all(maps.shape == (2, 4, 17, 17) for maps in found.values())
    swin = torchvision.models.SwinTransformer([2, 2], 16, [2, 2], [2, 4], [4, 4]).eval()
    assert [maps.shape for maps in captured(swin, pixels()).values()] == [(32, 2, 16, 16)] * 2 + [(8, 4, 16, 16)] * 2


def test_everything_is_restored_after_an_exception():
    model = build("vit").train()
    modes = [module.training for module in model.modules()]

    def fail(name, maps):
        raise RuntimeError(name)

    with pytest.raises(RuntimeError, match=r"layers\.0\.attention"), capture_attention(model, fail):
        model(pixels())
    assert hooks_of(model) == 0
    assert [module.training for module in model.modules()] == modes
    assert torch.overrides._len_torch_function_stack() == 0
    model.eval()
    assert list(captured(model, pixels())) == ["layers.0.attention", "layers.1.attention"]


def test_a_forward_that_fails_inside_the_capture_leaves_the_names_right():
    model = build("vit")
    names = []
    with torch.no_grad(), capture_attention(model, lambda name, maps: names.append(name)):
        with pytest.raises(ValueError, match="doesn't match model"):
            model(pixels(height=40, width=40))
        model(pixels())
    assert names == ["layers.0.attention", "layers.1.attention"]


def test_a_compiled_model_runs_uncompiled():
    model = build("vit")
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(pixels())
    found, reference = captured(compiled, pixels()), captured(model, pixels())
    assert list(found) == list(reference)
    for name, maps in found.items():
        assert torch.equal(maps, reference[name])


def test_a_layer_that_runs_twice_has_two_names():
    torch.manual_seed(0)
    config = transformers.AlbertConfig(**SIZES_OF_TEXT, embedding_size=16)
    found = captured(transformers.AlbertModel(config).eval(), torch.randint(5, 50, (2, 7)))
    first, second = found
    assert second == f"{first}#2"


def test_attention_that_cannot_be_seen_is_named():
    class HiddenAttention(nn.Module):
        def forward(self, tokens):
            weights = (tokens @ tokens.mT).exp()
            return weights / weights.sum(-1, keepdim=True) @ tokens

    model = nn.Sequential(HiddenAttention(), nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)).eval()
    with torch.no_grad(), capture_attention(model, lambda name, maps: None) as capture:
        model(torch.randn(2, 5, 4))
    assert capture.seen == ["1.self_attn"]
    assert capture.unseen() == ["0"]


def test_no_graph_is_kept():
    model = build("vit")
    maps = []
    with capture_attention(model, lambda name, value: maps.append(value)):
        model(pixels()).last_hidden_state.sum().backward()
    assert not any(value.requires_grad for value in maps)
    assert model.layers[0].attention.q_proj.weight.grad is not None
