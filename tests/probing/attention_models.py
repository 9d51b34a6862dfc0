# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Tiny models of every family, random weights, for the tests of the attention probe."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
import transformers
from torch import nn

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 32,
    "patch_size": 8,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
}
# family: (config class, model class, extra settings, prefix tokens)
FAMILIES: dict[str, tuple[str, str, dict, int]] = {
    "vit": ("ViTConfig", "ViTModel", {}, 1),
    "deit": ("DeiTConfig", "DeiTModel", {}, 2),
    "vit_mae": ("ViTMAEConfig", "ViTMAEModel", {"mask_ratio": 0.75}, 1),
    "vit_msn": ("ViTMSNConfig", "ViTMSNModel", {}, 1),
    "dinov2": ("Dinov2Config", "Dinov2Model", {}, 1),
    "dinov2_registers": ("Dinov2WithRegistersConfig", "Dinov2WithRegistersModel", {"num_register_tokens": 3}, 4),
    "dinov3": ("DINOv3ViTConfig", "DINOv3ViTModel", {"num_register_tokens": 3}, 4),
    "beit": ("BeitConfig", "BeitModel", {"use_relative_position_bias": True}, 1),
    "beit_shared": ("BeitConfig", "BeitModel", {"use_shared_relative_position_bias": True}, 1),
    "data2vec": ("Data2VecVisionConfig", "Data2VecVisionModel", {"use_relative_position_bias": True}, 1),
    "clip": ("CLIPVisionConfig", "CLIPVisionModel", {}, 1),
    "siglip": ("SiglipVisionConfig", "SiglipVisionModel", {}, 0),
    "ijepa": ("IJepaConfig", "IJepaModel", {}, 0),
}


def build(family: str, implementation: str = "sdpa", **changes) -> nn.Module:
    """A tiny model of a family in eval mode, with larger attention logits than at init so that maps are not flat."""
    config_class, model_class, extra, _ = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**{**SIZES, **extra, **changes}, attn_implementation=implementation)
    return sharpened(getattr(transformers, model_class)(config)).eval()


def sharpened(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("query", "q_proj", "key", "k_proj", "qkv", "in_proj")):
                parameter.mul_(12)
            if "relative_position_bias_table" in name:
                parameter.copy_(torch.randn_like(parameter))
    return model


def pixels(batch: int = 2, height: int = 32, width: int = 32, seed: int = 0) -> torch.Tensor:
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(seed))


def keep_order(model: nn.Module, images: torch.Tensor) -> dict:
    """What ViT-MAE needs to see all patches in their places."""
    if getattr(model.config, "model_type", "") != "vit_mae":
        return {}
    patches = (images.shape[-2] // model.config.patch_size) * (images.shape[-1] // model.config.patch_size)
    return {"noise": torch.arange(patches).float().expand(len(images), -1)}


class SoftmaxViT(nn.Module):
    """A ViT as written by hand: patches cut by unfold, attention by a softmax in one of several spellings."""

    def __init__(self, attend: Callable, heads: int = 2, patch_size: int = 8, width: int = 16):
        super().__init__()
        self.patch_size, self.heads = patch_size, heads
        self.embed = nn.Linear(3 * patch_size**2, width)
        self.cls_token = nn.Parameter(torch.randn(1, 1, width))
        self.layers = nn.ModuleList(SoftmaxBlock(attend, heads, width) for _ in range(2))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        patches = F.unfold(images, self.patch_size, stride=self.patch_size).mT
        tokens = torch.cat([self.cls_token.expand(len(images), -1, -1), self.embed(patches)], dim=1)
        for layer in self.layers:
            tokens = layer(tokens)
        return tokens


class SoftmaxBlock(nn.Module):
    def __init__(self, attend: Callable, heads: int, width: int):
        super().__init__()
        self.attend, self.heads = attend, heads
        self.qkv = nn.Linear(width, 3 * width)
        self.dropout = nn.Dropout(0.5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (3 * self.qkv(tokens)).chunk(3, dim=-1)
        )
        return tokens + self.attend(q, k, v, self.dropout).transpose(1, 2).flatten(2)

    def expected(self, tokens: torch.Tensor) -> torch.Tensor:
        """The maps (batch, heads, tokens, tokens), by the formula."""
        q, k, _ = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (3 * self.qkv(tokens)).chunk(3, dim=-1)
        )
        logits = torch.einsum("bhqd,bhkd->bhqk", q, k) / q.shape[-1] ** 0.5
        return logits.exp() / logits.exp().sum(-1, keepdim=True)


def by_matmul(q, k, v, dropout):
    return dropout((q @ k.mT / q.shape[-1] ** 0.5).softmax(dim=-1)) @ v


def by_einsum(q, k, v, dropout):
    maps = F.softmax(torch.einsum("bhid,bhjd->bhij", q, k) * q.shape[-1] ** -0.5, dim=3)
    return torch.einsum("b h i j, b h j d -> b h i d", dropout(maps), v)


def by_bmm(q, k, v, dropout):
    """Three dimensions: batch and heads folded."""
    folded = [part.flatten(0, 1) for part in (q, k, v)]
    maps = torch.softmax(torch.bmm(folded[0], folded[1].transpose(1, 2)) / q.shape[-1] ** 0.5, -1)
    return torch.bmm(dropout(maps), folded[2]).unflatten(0, q.shape[:2])


def by_transposed_product(q, k, v, dropout):
    maps = nn.Softmax(dim=-1)(q @ k.mT / q.shape[-1] ** 0.5)
    return (v.mT @ dropout(maps).transpose(-1, -2)).mT


def by_keywords(q, k, v, dropout):
    """Every operand by keyword, the second of the product first."""
    maps = torch.softmax(input=q @ k.mT / q.shape[-1] ** 0.5, dim=-1)
    return torch.matmul(other=v, input=F.dropout(input=maps, p=dropout.p, training=dropout.training))


def by_baddbmm_keywords(q, k, v, dropout):
    folded = [part.flatten(0, 1) for part in (q, k, v)]
    maps = (folded[0] @ folded[1].mT / q.shape[-1] ** 0.5).softmax(dim=-1)
    added = torch.baddbmm(batch2=folded[2], batch1=dropout(maps), input=torch.zeros_like(folded[2]))
    return added.unflatten(0, q.shape[:2])


def by_fused_attention(q, k, v, dropout):
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout.p if dropout.training else 0.0)


SPELLINGS = (
    by_matmul,
    by_einsum,
    by_bmm,
    by_transposed_product,
    by_keywords,
    by_baddbmm_keywords,
    by_fused_attention,
)
