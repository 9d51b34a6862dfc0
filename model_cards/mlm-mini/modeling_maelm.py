# Copyright 2026 The maelm_hf authors. All rights reserved.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""PyTorch MAE-LM: an encoder that never sees [MASK], and the shallow decoder that pretrains it.

Meng et al., "Representation Deficiency in Masked Language Modeling", ICLR 2024 (arXiv 2302.02060).

Indices: a `*_index` tensor of shape (batch, width) holds positions of its row, -1 where a row has fewer of them.
"""

import copy
import math
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.activations import ACT2FN
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutput,
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.processing_utils import Unpack
from transformers.utils import ModelOutput, TransformersKwargs, auto_docstring, logging
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .configuration_maelm import MaeLmConfig

logger = logging.get_logger(__name__)


# --- indices ----------------------------------------------------------------------------------------------------------


def take(values: torch.Tensor, index: torch.Tensor, fill: int | float) -> torch.Tensor:
    """values (batch, length) or (batch, length, size) at index (batch, width); `fill` where the index is -1."""
    present = index >= 0
    index = index.clamp(min=0)
    if values.dim() == 3:
        index, present = index[..., None].expand(-1, -1, values.shape[-1]), present[..., None]
    return values.gather(1, index).masked_fill(~present, fill)


def put(values: torch.Tensor, index: torch.Tensor, length: int) -> torch.Tensor:
    """The reverse of `take`: values (batch, width, size) at their positions in (batch, length, size), else zero."""
    # Entries without a position go to one extra slot that is cut off: a -1 must not overwrite a real position.
    index = torch.where(index >= 0, index, length)[..., None].expand_as(values)
    return values.new_zeros(values.shape[0], length + 1, values.shape[2]).scatter(1, index, values)[:, :length]


def positions_where(condition: torch.Tensor, width: int) -> torch.Tensor:
    """The positions at which condition (batch, length) holds, in order: (batch, width), -1 past the last one."""
    order = condition.byte().argsort(dim=1, descending=True, stable=True)[:, :width]
    count = condition.sum(dim=1, keepdim=True)
    return order.masked_fill(torch.arange(order.shape[1], device=order.device) >= count, -1)


def hash_31_bits(values: torch.Tensor) -> torch.Tensor:
    """A well-mixed 31-bit hash of non-negative int64 values below 2^31; no product leaves the range of int64."""
    values = ((values ^ (values >> 15)) * 0x2C1B3C6D) & 0x7FFFFFFF
    values = ((values ^ (values >> 12)) * 0x297A2D39) & 0x7FFFFFFF
    return values ^ (values >> 15)


def masks_encoder_keeps(
    input_ids: torch.Tensor,
    attended: torch.Tensor,
    position_ids: torch.Tensor,
    document_ids: torch.Tensor | None,
    fraction: float,
) -> torch.Tensor:
    """
    Which tokens, were they [MASK], the encoder would see: a share `fraction` of them, (batch, length) bool.

    The choice is a hash of the ids and positions of the token's own document and of its own position, so that it is the
    same in the encoder alone and in pretraining, on resume, and whatever else is in the batch or in the row.
    """
    token_hash = hash_31_bits((input_ids * 0x9E3779B1 + position_ids * 0x85EBCA77) & 0x7FFFFFFF)
    if document_ids is None:
        document_hash = (token_hash * attended).sum(dim=1, keepdim=True)
    else:
        documents = document_ids.remainder(input_ids.shape[1])
        sums = torch.zeros_like(token_hash).scatter_add(1, documents, token_hash * attended)
        document_hash = sums.gather(1, documents)
    draw = hash_31_bits((document_hash ^ hash_31_bits(position_ids)) & 0x7FFFFFFF)
    return draw < int(fraction * 2**31)


# --- arithmetic -------------------------------------------------------------------------------------------------------


class BitwiseDropout(torch.autograd.Function):
    """
    Dropout of 16-bit values on a CPU: 15 random bits an element and bit operations, several times cheaper than a
    Bernoulli draw each. The probability is rounded to a multiple of 2^-15, and the scale is that of the rounded one.
    """

    @staticmethod
    def forward(ctx, values: torch.Tensor, probability: float) -> torch.Tensor:
        threshold = round(probability * 2**15)
        noise = torch.empty(-(-values.numel() // 4), dtype=torch.int64).random_(-(2**63), None).view(torch.int16)
        noise = noise[: values.numel()].view(values.shape)
        # All ones where the upper 15 bits, from -2^14 to 2^14 - 1, reach the threshold; nothing overflows 16 bits.
        keep = (threshold - 2**14 - 1 - (noise >> 1)) >> 15
        ctx.save_for_backward(keep)
        ctx.scale = 2**15 / (2**15 - threshold)
        return (values.contiguous().view(torch.int16) & keep).view(values.dtype).mul_(ctx.scale)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient: torch.Tensor):
        (keep,) = ctx.saved_tensors
        return (gradient.contiguous().view(torch.int16) & keep).view(gradient.dtype).mul_(ctx.scale), None


def drop(values: torch.Tensor, probability: float, training: bool) -> torch.Tensor:
    """Inverted dropout, as `torch.nn.functional.dropout`."""
    if probability == 0 or not training:
        return values
    bitwise = values.device.type == "cpu" and values.dtype in (torch.bfloat16, torch.float16)
    if bitwise and not torch.compiler.is_compiling():  # a compiler draws in its own way
        return BitwiseDropout.apply(values, probability)
    return F.dropout(values, probability)


class MaeLmDropout(nn.Dropout):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return drop(values, self.p, self.training)


def in_autocast_type(values: torch.Tensor) -> torch.Tensor:
    """
    values in the type that autocast multiplies in, where it is on.

    On a CPU, autocast leaves LayerNorm and sums in the type they are given: begun in bf16, hidden states stay in it and
    are not cast back and forth in every layer. (LayerNorm adds up in fp32 by itself.)
    """
    if torch.is_autocast_enabled(values.device.type):
        return values.to(torch.get_autocast_dtype(values.device.type))
    return values


class ChunkedCrossEntropy(torch.autograd.Function):
    """
    The summed cross-entropy of logits (rows, classes), in fp32 a few rows at a time.

    Of a vocabulary's logits in bf16, neither an fp32 copy nor fp32 probabilities ever exist as a whole.
    """

    @staticmethod
    def forward(ctx, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        rows = rows_of_a_chunk(logits)
        target = logits.gather(1, classes_of(labels)).squeeze(1).float()
        normalizer = torch.cat([chunk.float().logsumexp(1) for chunk in logits.split(rows)])  # (rows,)
        ctx.save_for_backward(logits, labels, normalizer)
        return (normalizer - target).masked_fill(labels == -100, 0.0).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient: torch.Tensor):
        logits, labels, normalizer = ctx.saved_tensors
        rows = rows_of_a_chunk(logits)
        scale = gradient.float() * (labels != -100)  # (rows,)
        result = torch.empty_like(logits)
        parts = zip(*(part.split(rows) for part in (logits, labels, normalizer, scale, result)), strict=True)
        for chunk, chunk_labels, chunk_normalizer, chunk_scale, out in parts:
            probabilities = (chunk.float() - chunk_normalizer[:, None]).exp_()
            one = torch.ones_like(chunk_normalizer)[:, None]
            probabilities.scatter_add_(1, classes_of(chunk_labels), -one)
            out.copy_(probabilities.mul_(chunk_scale[:, None]))
        return result, None


def classes_of(labels: torch.Tensor) -> torch.Tensor:
    """labels (rows,) as indices (rows, 1); other negative ones than -100 stay, and are refused as out of bounds."""
    return labels.masked_fill(labels == -100, 0)[:, None]


def rows_of_a_chunk(logits: torch.Tensor) -> int:
    """As many as stay in a CPU's cache in fp32, or keep an accelerator busy."""
    numbers = 2**19 if logits.device.type == "cpu" else 2**26
    return max(1, numbers // logits.shape[1])


def cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None
) -> torch.Tensor:
    """
    Cross-entropy in nats, in float32, over labels other than -100: summed, then divided by their number or by
    `num_items_in_batch`; 0 where there is none (a mean over nothing would be NaN).
    """
    logits, labels = logits.flatten(0, -2), labels.flatten().to(logits.device)
    count = (labels != -100).sum() if num_items_in_batch is None else num_items_in_batch
    count = torch.as_tensor(count, device=logits.device).clamp(min=1)
    if torch.compiler.is_compiling():  # a compiler fuses it by itself
        return F.cross_entropy(logits.float(), labels, reduction="sum") / count
    return ChunkedCrossEntropy.apply(logits, labels) / count


# --- attention inputs -------------------------------------------------------------------------------------------------


def relative_position_bucket(distance: torch.Tensor, buckets: int, max_distance: int) -> torch.Tensor:
    """
    Bucket (0 to buckets - 2) of each signed distance, key position - query position; int64, the shape of `distance`.

    Within buckets / 4 every distance has a bucket of its own; beyond, buckets widen logarithmically up to
    `max_distance` (the authors' code).
    """
    half = buckets // 2
    exact = half // 2
    magnitude = distance.abs()
    steps = torch.log(magnitude.clamp(min=1) / exact) / math.log((max_distance - 1) / exact) * (half - 1 - exact)
    coarse = (exact + torch.ceil(steps).long()).clamp(max=half - 1)
    return torch.where(magnitude < exact, magnitude, coarse) * distance.sign() + half - 1


class MaeLmRelativePositionBias(nn.Module):
    """One learned bias per distance bucket and head, shared by all encoder layers."""

    def __init__(self, config: MaeLmConfig):
        super().__init__()
        self.max_position_embeddings = config.max_position_embeddings
        self.buckets = config.relative_position_buckets
        self.max_distance = config.relative_position_max_distance
        self.bias = nn.Embedding(config.relative_position_buckets, config.num_attention_heads)

    def forward(self, position_ids: torch.Tensor) -> torch.Tensor:
        """position_ids (batch or 1, length) -> bias (batch or 1, heads, queries, keys)."""
        furthest = self.max_position_embeddings - 1
        distances = torch.arange(-furthest, furthest + 1, device=position_ids.device)
        by_distance = self.bias(
            relative_position_bucket(distances, self.buckets, self.max_distance)
        )  # (distances, heads)
        difference = position_ids[:, None, :] - position_ids[:, :, None]  # (batch, queries, keys)
        # Heads first: indexing the last axis of the transposed table is several times faster on a CPU, both ways.
        return by_distance.t()[:, difference + furthest].transpose(0, 1)


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Unpack[TransformersKwargs],
):
    query, key, value = (query * scaling).contiguous(), key.contiguous(), value.contiguous()
    scores = torch.matmul(query, key.transpose(2, 3))  # (batch, heads, queries, keys)
    if attention_mask is not None:
        scores = scores + attention_mask
    probabilities = F.softmax(scores, dim=-1)
    probabilities = drop(probabilities, dropout, module.training)
    output = torch.matmul(probabilities, value).transpose(1, 2).contiguous()  # (batch, queries, heads, head size)
    return output, probabilities


def same_document(query_documents: torch.Tensor, key_documents: torch.Tensor) -> Callable:
    """Mask function of packed rows: a query attends to keys of its own document."""

    def mask(batch_idx, head_idx, q_idx, kv_idx):
        return query_documents[batch_idx, q_idx] == key_documents[batch_idx, kv_idx]

    return mask


def within_window(query_positions: torch.Tensor, window: int, and_also: Callable | None) -> Callable:
    """Mask function of local attention by the tokens' own positions, which need not be 0, 1, 2 ..."""

    def mask(batch_idx, head_idx, q_idx, kv_idx):
        near = (query_positions[batch_idx, q_idx] - query_positions[batch_idx, kv_idx]).abs() <= window
        return near if and_also is None else near & and_also(batch_idx, head_idx, q_idx, kv_idx)

    return mask


def has_local_layers(backbone: PreTrainedConfig | None) -> bool:
    return "sliding_attention" in (getattr(backbone, "layer_types", None) or ())


def check_attention(config: MaeLmConfig, training: bool = False) -> None:
    """Refuse what a backend would do wrongly or refuse in words that do not help."""
    implementation = config._attn_implementation or ""
    if "flash" in implementation and has_local_layers(config.backbone_config):
        raise ValueError(
            f"attn_implementation={implementation!r} counts the local window of a backbone of type "
            f"{config.backbone_config.model_type!r} over the tokens that are left, not by position; use 'sdpa', "
            "'eager' or 'flex_attention'"
        )
    if "flash" in implementation and config.relative_position_buckets:
        raise ValueError(
            f"attn_implementation={implementation!r} cannot add a relative-position bias (relative_position_buckets="
            f"{config.relative_position_buckets}); use 'sdpa', 'eager' or 'flex_attention', or a model with "
            "relative_position_buckets=0"
        )
    if training and implementation == "flex_attention":
        for name in ("attention_probs_dropout_prob", "decoder_dropout_prob"):
            if getattr(config, name) > 0:
                raise ValueError(
                    f"attn_implementation='flex_attention' trains without attention dropout only, and {name}="
                    f"{getattr(config, name)}; set it to 0, or use 'sdpa' or 'eager'"
                )


def create_attention_mask(
    config: MaeLmConfig,
    keys: torch.Tensor,
    attended: torch.Tensor | None,
    queries: torch.Tensor | None = None,
    key_documents: torch.Tensor | None = None,
    query_documents: torch.Tensor | None = None,
    avoid_host_sync: bool = False,
    window: tuple[torch.Tensor, int] | None = None,
):
    """
    The mask a backend takes, built once for all layers.

    Args:
        keys (`torch.Tensor` of shape (batch, keys, size)): Hidden states that keys and values come from.
        attended (`torch.Tensor` of shape (batch, keys), bool): Which keys are real; `None` for all.
        queries (`torch.Tensor` of shape (batch, queries, size)): Where queries are other states than the keys.
        key_documents, query_documents (`torch.Tensor` of shape (batch, keys) and (batch, queries)): Documents of a
            packed row; a query attends to its own.
        avoid_host_sync (`bool`): Do not look, on an accelerator, whether the mask could be left out.
        window (`tuple` of `torch.Tensor` of shape (batch, keys) and `int`): Positions, and how far apart those of a
            query and of a key it attends to may be.
    """
    if attended is not None:
        # A row without any key would be NaN on some kernels. Its result is never used: it may look at its first slot.
        first = torch.arange(attended.shape[1], device=attended.device) == 0
        attended = attended | (first & ~attended.any(dim=1, keepdim=True))
    and_mask = None
    if key_documents is not None:
        # trf-ignore: TRF051 - flash takes no mask between tokens, and transformers would leave it out without a word.
        if "flash" in (config._attn_implementation or ""):
            raise ValueError(
                f"attn_implementation={config._attn_implementation!r} takes document_ids in training alone, on our "
                "own encoder, not compiled, and with neither hidden states, attentions nor dense logits asked for: "
                "elsewhere packed documents would see each other; use 'sdpa', 'eager' or 'flex_attention'"
            )
        and_mask = same_document(key_documents if query_documents is None else query_documents, key_documents)
    if window is not None:
        and_mask = within_window(*window, and_mask)
    return create_bidirectional_mask(
        config=config,
        inputs_embeds=keys if queries is None else queries,
        encoder_hidden_states=keys,
        attention_mask=attended,
        and_mask_function=and_mask,
        allow_is_bidirectional_skip=not (avoid_host_sync and keys.device.type != "cpu"),
    )


def takes_fewer_queries(config: MaeLmConfig) -> bool:
    """Whether the backend can ask for some tokens only; flash would take the mask's last columns for theirs."""
    # trf-ignore: TRF051 - it decides what is asked of the interface, not how it answers.
    return "flash" not in (config._attn_implementation or "")


class EndToEnd:
    """
    The real tokens of a batch laid end to end, sequence after sequence, for flash attention's kernels for varying
    lengths: unpadded once, and not in every layer. A sequence is a row, or a document of a packed row.

    Args:
        present (`torch.Tensor` of shape (batch, length), bool): The real tokens.
        documents (`torch.Tensor` of shape (batch, length), *optional*): Of packed rows.
        keys (`EndToEnd`, *optional*): Where these tokens are queries alone: the tokens that they attend to.
    """

    def __init__(self, present: torch.Tensor, documents: torch.Tensor | None, keys: "EndToEnd | None" = None):
        self.shape = present.shape
        rows = torch.arange(present.shape[0], device=present.device)[:, None].expand(present.shape)
        # Documents of a row are told apart by a number below that of its keys.
        width = present.shape[1] if keys is None else keys.shape[1]
        sequence = rows * width if documents is None else rows * width + documents.remainder(width)
        index = present.flatten().nonzero().squeeze(1)
        sequence, order = sequence.flatten()[index].sort(stable=True)
        self.index = index[order]  # (tokens,) into batch x length
        self.sequences = sequence.unique_consecutive() if keys is None else keys.sequences
        ends = torch.searchsorted(sequence, self.sequences, right=True).int()
        self.bounds = F.pad(ends, (1, 0))  # (sequences + 1,)
        self.longest = int(self.bounds.diff().max()) if len(ends) else 0
        self.keys = self if keys is None else keys

    @property
    def arguments(self) -> dict:
        """What transformers' flash attention takes in place of a mask."""
        return {
            "cu_seq_lens_q": self.bounds,
            "cu_seq_lens_k": self.keys.bounds,
            "max_length_q": self.longest,
            "max_length_k": self.keys.longest,
        }

    def lay(self, states: torch.Tensor) -> torch.Tensor:
        """(batch, length, size) -> (1, tokens, size)"""
        return states.flatten(0, 1)[self.index][None]

    def put_back(self, states: torch.Tensor) -> torch.Tensor:
        """(1, tokens, size) -> (batch, length, size), zero elsewhere."""
        result = states.new_zeros(self.shape.numel(), states.shape[2])
        return result.index_copy(0, self.index, states[0]).view(*self.shape, -1)


def lay_end_to_end(
    config: MaeLmConfig, training: bool, attended: torch.Tensor | None, documents: torch.Tensor | None
) -> EndToEnd | None:
    """
    The layout of a flash backend's training step; `None` where rows stay as they are: in evaluation, whose hidden
    states are read row by row, in a compiled graph, and where every row is full.
    """
    # trf-ignore: TRF051 - other backends take padded rows.
    if "flash" not in (config._attn_implementation or "") or not training or torch.compiler.is_compiling():
        return None
    if attended is None and documents is None:
        return None
    return EndToEnd(torch.ones_like(documents, dtype=torch.bool) if attended is None else attended, documents)


def merge_bias(config: MaeLmConfig, attention_mask, position_bias: torch.Tensor | None):
    """(mask, bias) as the backend takes them: flex adds the bias by itself, the others take one additive tensor."""
    # trf-ignore: TRF051 - flex takes the bias apart from its block mask; the attention interface cannot know that here.
    if position_bias is None or config._attn_implementation == "flex_attention":
        return attention_mask, position_bias
    if attention_mask is None:
        return position_bias, None
    if attention_mask.dtype == torch.bool:
        return torch.where(attention_mask, position_bias, torch.finfo(position_bias.dtype).min), None
    # The bias must not bring a masked score of finfo.min back above others, nor push it to -inf.
    return torch.where(attention_mask == 0, position_bias, attention_mask), None


# --- layers -----------------------------------------------------------------------------------------------------------


class MaeLmEmbeddings(nn.Module):
    """Token and learned absolute position embedding, LayerNorm, dropout; no segments."""

    def __init__(self, config: MaeLmConfig):
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.layer_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = MaeLmDropout(config.hidden_dropout_prob)

    def forward(self, inputs_embeds: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return self.dropout(in_autocast_type(self.layer_norm(inputs_embeds + self.position_embeddings(position_ids))))


class MaeLmAttention(nn.Module):
    """Bidirectional multi-head attention; queries may be other states than keys and values."""

    # trf-ignore: TRF029 - the same layer at the encoder's and at the decoder's width.
    def __init__(self, config: MaeLmConfig, hidden_size: int, num_attention_heads: int, dropout: float):
        super().__init__()
        self.config = config
        self.head_size = hidden_size // num_attention_heads
        self.scaling = self.head_size**-0.5
        self.attention_dropout = dropout
        self.is_causal = False
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)
        self.output = nn.Linear(hidden_size, hidden_size)

    def forward(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_bias: torch.Tensor | None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        query_shape = (*queries.shape[:2], -1, self.head_size)
        key_shape = (*keys.shape[:2], -1, self.head_size)
        query = self.query(queries).view(query_shape).transpose(1, 2)  # (batch, heads, queries, head size)
        key = self.key(keys).view(key_shape).transpose(1, 2)  # (batch, heads, keys, head size)
        value = self.value(keys).view(key_shape).transpose(1, 2)
        if position_bias is not None:
            kwargs["position_bias"] = position_bias

        attention_interface: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        output, probabilities = attention_interface(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        return self.output(output.reshape(*queries.shape[:2], -1)), probabilities


class MaeLmLayer(GradientCheckpointingLayer):
    """Post-LayerNorm transformer layer, at the encoder's or the decoder's width."""

    # trf-ignore: TRF029 - the same layer at the encoder's and at the decoder's width.
    def __init__(
        self,
        config: MaeLmConfig,
        hidden_size: int,
        num_attention_heads: int,
        intermediate_size: int,
        hidden_dropout: float,
        attention_dropout: float,
    ):
        super().__init__()
        self.attention = MaeLmAttention(config, hidden_size, num_attention_heads, attention_dropout)
        self.attention_norm = nn.LayerNorm(hidden_size, eps=config.layer_norm_eps)
        self.intermediate = nn.Linear(hidden_size, intermediate_size)
        self.activation = ACT2FN[config.hidden_act]
        self.output = nn.Linear(intermediate_size, hidden_size)
        self.output_norm = nn.LayerNorm(hidden_size, eps=config.layer_norm_eps)
        self.dropout = MaeLmDropout(hidden_dropout)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        queries: torch.Tensor | None = None,
        dropped: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> torch.Tensor:
        """
        hidden_states (batch, keys, size) -> (batch, keys, size), or with `queries` (batch, queries, size) their shape.
        `dropped` (batch, keys) bool: rows that stay zero. Pass what has a gradient by place: reentrant checkpointing
        does not see keywords.
        """
        if queries is None:
            queries = hidden_states
        attended, _ = self.attention(queries, hidden_states, attention_mask, position_bias, **kwargs)
        states = self.attention_norm(queries + self.dropout(attended))
        states = self.output_norm(states + self.dropout(self.output(self.activation(self.intermediate(states)))))
        if dropped is not None:
            states = states.masked_fill(dropped[..., None], 0.0)
        return states


class MaeLmDecoder(nn.Module):
    """The shallow decoder of pretraining: own positions, own LayerNorm, own width, no relative bias."""

    def __init__(self, config: MaeLmConfig):
        super().__init__()
        size = config.decoder_hidden_size
        word_size = config.word_embedding_size
        # CODEPATH: word embeddings have the encoder's width, but for backbones that project them to it (ELECTRA).
        self.mask_projection = nn.Linear(word_size, config.hidden_size) if word_size != config.hidden_size else None
        # CODEPATH: the paper's decoders have the encoder's width and take its outputs as they are.
        self.input_projection = nn.Linear(config.hidden_size, size) if size != config.hidden_size else None
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, size)
        self.layer_norm = nn.LayerNorm(size, eps=config.layer_norm_eps)
        self.dropout = MaeLmDropout(config.decoder_dropout_prob)
        self.layers = nn.ModuleList(
            MaeLmLayer(
                config,
                hidden_size=size,
                num_attention_heads=config.decoder_num_attention_heads,
                intermediate_size=config.decoder_intermediate_size,
                hidden_dropout=config.decoder_dropout_prob,
                attention_dropout=config.decoder_dropout_prob,
            )
            for _ in range(config.decoder_num_hidden_layers)
        )

    def embed(self, joined: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """joined (batch, length, encoder size) -> (batch, length, decoder size)."""
        if self.input_projection is not None:
            joined = self.input_projection(joined)
        return self.dropout(in_autocast_type(self.layer_norm(joined + self.position_embeddings(position_ids))))


class MaeLmLMHead(nn.Module):
    """
    Linear, activation, LayerNorm, then the (tied) embedding matrix and a bias per word.

    A decoder of another width is led back to that of the word embeddings: by a linear layer after LayerNorm, or, with a
    backbone, by the first one, as in stock models.
    """

    def __init__(self, config: MaeLmConfig):
        super().__init__()
        # CODEPATH: plain MLM checkpoints have no decoder: the head reads the encoder.
        size = config.decoder_hidden_size if config.decoder_num_hidden_layers else config.hidden_size
        word_size = config.word_embedding_size
        # CODEPATH: stock encoders (BERT, ELECTRA ...) lead back by the first layer.
        inner_size = size if config.backbone_config is None else word_size
        self.dense = nn.Linear(size, inner_size)
        self.activation = ACT2FN[config.hidden_act]
        self.layer_norm = nn.LayerNorm(inner_size, eps=config.layer_norm_eps)
        # CODEPATH: as above, only a decoder of another width is led back.
        self.output_projection = nn.Linear(inner_size, word_size, bias=False) if inner_size != word_size else None
        self.output = nn.Linear(word_size, config.vocab_size)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        hidden_states = self.layer_norm(self.activation(self.dense(hidden_states)))
        if self.output_projection is not None:
            hidden_states = self.output_projection(hidden_states)
        return self.output(hidden_states)


# --- models -----------------------------------------------------------------------------------------------------------

# What a checkpoint may hold that another head does not want: named, so that loading is not a wall of warnings.
HEADS = (
    "decoder",
    "lm_head",
    "sequence_classifier",
    "token_classifier",
    "question_answering",
    "multiple_choice",
)


def other_heads(*own: str) -> list[str]:
    return [rf"^{head}\." for head in HEADS if head not in own]


@auto_docstring
class MaeLmPreTrainedModel(PreTrainedModel):
    config: MaeLmConfig
    base_model_prefix = "encoder"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_flash_attn = True
    _supports_attention_backend = True
    _no_split_modules = ["MaeLmEmbeddings", "MaeLmLayer"]
    _keys_to_ignore_on_load_unexpected = other_heads()
    _can_record_outputs = {"hidden_states": MaeLmLayer, "attentions": MaeLmAttention}

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args, **kwargs) -> nn.Embedding:
        mask_token_id = self.config.mask_token_id
        if new_num_tokens is not None and mask_token_id is not None and new_num_tokens <= mask_token_id:
            raise ValueError(
                f"new_num_tokens={new_num_tokens} would cut off the mask embedding, row mask_token_id={mask_token_id}; "
                f"keep at least {mask_token_id + 1} tokens, or move the mask token first"
            )
        embeddings = super().resize_token_embeddings(new_num_tokens, *args, **kwargs)
        if self.config.backbone_config is not None:  # CODEPATH: stock encoders keep a config of their own.
            self.config.backbone_config.vocab_size = self.base_model.backbone.config.vocab_size = self.config.vocab_size
        return embeddings


@auto_docstring(
    custom_intro="""
    The MAE-LM encoder. [MASK] never enters it: at a [MASK] id the embedding is zero, no token attends to the position,
    and its row is zero in every hidden state. (With `config.encoder_mask_fraction` that share of [MASK] enters; with
    `inputs_embeds` nothing is dropped.)

    With `config.backbone_config` the encoder is `backbone`, a stock model of transformers, to which the same applies.
    Its pooler, which no pretraining trains, is kept as it is, without gradient.
    """
)
class MaeLmModel(MaeLmPreTrainedModel):
    def __init__(self, config: MaeLmConfig):
        check_attention(config)
        super().__init__(config)
        self.gradient_checkpointing = False
        # CODEPATH: another encoder in the place of our own.
        self.backbone = build_backbone(config) if config.backbone_config is not None else None
        if self.backbone is not None:
            self.post_init()
            if self.device.type != "meta":  # as when loading: what is saved was checked
                check_backbone(self)
            return
        self.embeddings = MaeLmEmbeddings(config)
        # CODEPATH: the paper's models have the bias; those that export to stock BERT have none.
        self.relative_position_bias = MaeLmRelativePositionBias(config) if config.relative_position_buckets else None
        self.layers = nn.ModuleList(
            MaeLmLayer(
                config,
                hidden_size=config.hidden_size,
                num_attention_heads=config.num_attention_heads,
                intermediate_size=config.intermediate_size,
                hidden_dropout=config.hidden_dropout_prob,
                attention_dropout=config.attention_probs_dropout_prob,
            )
            for _ in range(config.num_hidden_layers)
        )
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embeddings.word_embeddings if self.backbone is None else self.backbone.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Embedding):
        if self.backbone is None:
            self.embeddings.word_embeddings = value
        else:
            self.backbone.set_input_embeddings(value)

    def name_of_word_embeddings(self) -> str:
        words = self.get_input_embeddings().weight
        return next(name for name, parameter in self.named_parameters() if parameter is words)

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs):
        """A backbone is saved as what it is, a stock model: `AutoModel` loads it with transformers alone."""
        if self.backbone is None:
            return super().save_pretrained(save_directory, **kwargs)
        if (state_dict := kwargs.pop("state_dict", None)) is not None:
            kwargs["state_dict"] = {name.removeprefix("backbone."): value for name, value in state_dict.items()}
        return self.backbone.save_pretrained(save_directory, **kwargs)

    def dropped_masks(self, input_ids, attention_mask, position_ids, document_ids) -> torch.Tensor | None:
        """Which [MASK] tokens the encoder does not see, (batch, length) bool; `None` where it sees them all."""
        fraction, mask_token_id = self.config.encoder_mask_fraction, self.config.mask_token_id
        if fraction == 1 or mask_token_id is None:
            return None
        dropped = input_ids == mask_token_id
        if attention_mask is not None:
            dropped = dropped & attention_mask
        if fraction > 0:
            attended = torch.ones_like(dropped) if attention_mask is None else attention_mask
            dropped = dropped & ~masks_encoder_keeps(input_ids, attended, position_ids, document_ids, fraction)
        return dropped

    @merge_with_config_defaults
    @can_return_tuple
    @auto_docstring
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        document_ids: torch.LongTensor | None = None,
        avoid_host_sync: bool = False,
        token_type_ids: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutput:
        r"""
        position_ids (`torch.LongTensor` of shape `(batch_size, sequence_length)`, *optional*):
            Positions, where they are not 0, 1, 2 ...; from 0 for every backbone (RoBERTa's offset is added inside).
        document_ids (`torch.LongTensor` of shape `(batch_size, sequence_length)`, *optional*):
            Which document of a packed row each token belongs to (0, 1, 2 ...): tokens attend within theirs.
        avoid_host_sync (`bool`, *optional*, defaults to `False`):
            Do not look, on an accelerator, whether the attention mask could be left out.
        token_type_ids (`torch.LongTensor` of shape `(batch_size, sequence_length)`, *optional*):
            Segments, for a backbone that has them; our own encoder has none, and ignores what tokenizers give.
        """
        attention_mask, position_ids = check_inputs(
            self.config, input_ids, inputs_embeds, attention_mask, position_ids, document_ids
        )
        check_attention(self.config, self.training)

        dropped = None
        if inputs_embeds is None:
            dropped = self.dropped_masks(input_ids, attention_mask, position_ids, document_ids)
            inputs_embeds = self.get_input_embeddings()(input_ids)
        attended = attention_mask
        if dropped is not None:
            attended = ~dropped if attention_mask is None else attention_mask & ~dropped
        if self.backbone is not None:
            return self.run_backbone(
                inputs_embeds, position_ids, token_type_ids, attended, dropped, document_ids, avoid_host_sync, **kwargs
            )
        return self.run_layers(inputs_embeds, position_ids, attended, dropped, document_ids, avoid_host_sync, **kwargs)

    @capture_outputs  # not around a backbone, which records its own: transformers knows one way for a class
    def run_layers(
        self, embeds, position_ids, attended, dropped, documents, avoid_host_sync, **kwargs
    ) -> BaseModelOutput:
        """Our own encoder over word embeddings (batch, length, size), each at its own position."""
        hidden_states = self.embeddings(embeds, position_ids)  # (batch, length, size)
        if dropped is not None:
            hidden_states = hidden_states.masked_fill(dropped[..., None], 0.0)

        outputs = ("output_hidden_states", "output_attentions")
        looked_at = any(kwargs.get(name, getattr(self.config, name, False)) for name in outputs)
        layout = None if looked_at else lay_end_to_end(self.config, self.training, attended, documents)
        if layout is not None and not layout.longest:
            documents = None  # of no token
        elif layout is not None:
            states = layout.lay(hidden_states)  # (1, kept tokens, size)
            for layer in self.layers:
                states = layer(states, **layout.arguments, **kwargs)
            return BaseModelOutput(last_hidden_state=layout.put_back(states))

        mask = create_attention_mask(
            self.config, hidden_states, attended, key_documents=documents, avoid_host_sync=avoid_host_sync
        )
        bias = None
        if self.relative_position_bias is not None:
            bias = in_autocast_type(self.relative_position_bias(position_ids))
        mask, bias = merge_bias(self.config, mask, bias)
        for layer in self.layers:
            hidden_states = layer(hidden_states, mask, bias, dropped=dropped, **kwargs)
        return BaseModelOutput(last_hidden_state=hidden_states)

    def run_backbone(
        self, embeds, position_ids, token_type_ids, attended, dropped, documents, avoid_host_sync, **kwargs
    ) -> BaseModelOutput:
        """The stock encoder over word embeddings (batch, length, word size), each at its own position."""
        if dropped is not None:
            embeds = embeds.masked_fill(dropped[..., None], 0.0)  # no key anyway, but 0 x NaN would be NaN
        settings = self.backbone.config
        for name in ("output_hidden_states", "output_attentions"):
            kwargs.setdefault(name, getattr(self.config, name, False))
        if token_type_ids is not None and getattr(settings, "type_vocab_size", 0) > 1:
            kwargs["token_type_ids"] = token_type_ids
        mask = attended
        if self.backbone._supports_attention_backend:  # then it takes a mask made for its backend as it is
            mask_of = partial(
                create_attention_mask,
                settings,
                embeds,
                attended,
                key_documents=documents,
                avoid_host_sync=avoid_host_sync,
            )
            mask = mask_of()
            if has_local_layers(settings):
                positions = position_ids.expand(embeds.shape[:2])
                local = mask_of(window=(positions, settings.sliding_window))
                mask = {"full_attention": mask, "sliding_attention": local}
        elif documents is not None:
            raise ValueError(
                f"document_ids: {type(self.backbone).__name__} takes no mask between tokens, so packed documents would "
                "see each other; give one document a row"
            )
        if mask is None:  # without any mask transformers takes positions that leave some out for packed documents
            mask = torch.ones(embeds.shape[:2], dtype=torch.bool, device=embeds.device)
        outputs = self.backbone(
            inputs_embeds=embeds,
            attention_mask=mask,
            position_ids=(position_ids + self.config.position_offset).expand(embeds.shape[:2]),
            **kwargs,
        )
        states, layers = outputs.last_hidden_state, outputs.hidden_states
        if dropped is not None:
            states = states.masked_fill(dropped[..., None], 0.0)
            layers = layers and tuple(  # None where that layer was not asked for
                None if layer is None else layer.masked_fill(dropped[..., None], 0.0) for layer in layers
            )
        return BaseModelOutput(last_hidden_state=states, hidden_states=layers, attentions=outputs.attentions)


def build_backbone(config: MaeLmConfig) -> PreTrainedModel:
    """A stock encoder with new weights. Its pooler takes no part in what follows, so it gets no gradient."""
    backbone = AutoModel.from_config(config.backbone_config, dtype=torch.get_default_dtype())
    # trf-ignore: TRF051 - sdpa is a default, which older encoders do not have; another was asked for.
    if config._attn_implementation not in ("sdpa", backbone.config._attn_implementation):
        backbone.set_attn_implementation(config._attn_implementation)
    pooler = getattr(backbone, "pooler", None)
    if pooler is not None:
        pooler.requires_grad_(False)
    return backbone


@torch.no_grad()
def check_backbone(encoder: MaeLmModel) -> None:
    """
    Refuse a backbone that does not follow `position_ids`: it would learn on the positions of what is left of a text.

    One sequence of the greatest length, or of several local windows, once as usual and once in another order, each
    token with its position: every token must come out the same.
    """
    backbone, config = encoder.backbone, encoder.config
    if next(backbone.parameters()).dtype != torch.float32:  # 16 bits round more than the order of additions does
        encoder = copy.deepcopy(encoder).float()
        backbone = encoder.backbone
    training = backbone.training
    backbone.eval()
    length, name = config.max_position_embeddings, type(backbone).__name__
    if has_local_layers(backbone.config):  # a window counted by index shows as soon as it is left
        length = min(length, 8 * (backbone.config.sliding_window + 1))
    generator = torch.Generator("cpu").manual_seed(0)
    on_cpu = {"device": "cpu", "generator": generator}  # whatever torch.device is the default
    ids = torch.randint(config.vocab_size, (1, length), **on_cpu)
    apart = [token for token in (config.pad_token_id, config.mask_token_id) if token is not None]
    other = next(token for token in range(len(apart) + 1) if token not in apart)
    for token in apart:
        ids = ids.masked_fill(ids == token, other)
    ids = ids.to(encoder.device)
    order = torch.randperm(length, **on_cpu).to(ids.device)
    words = encoder.get_input_embeddings()(ids)

    expected = backbone(input_ids=ids).last_hidden_state
    tolerance = 5e-5 * max(1.0, expected.abs().max().item())
    shuffled = encoder(inputs_embeds=words[:, order], position_ids=order[None]).last_hidden_state
    difference = (shuffled - expected[:, order]).abs().max().item()
    if difference > tolerance:
        changed = words.clone()
        changed[:, -1] = words[:, 0] + 1.0
        first = [encoder(inputs_embeds=each).last_hidden_state[:, 0] for each in (words, changed)]
        if torch.equal(*first):
            raise ValueError(f"{name} is decoder-only: its first token does not see the last; MAE-LM is for encoders")
        raise ValueError(
            f"{name} does not follow position_ids: asked for {length} tokens in another order, its outputs differ by "
            f"{difference:.2g}; with tokens left out it would learn on wrong positions, so it cannot be a backbone"
        )
    backbone.train(training)


def check_inputs(config, input_ids, inputs_embeds, attention_mask, position_ids, document_ids):
    """Refuse inputs that do not fit; (attention mask as bool or `None`, position ids)."""
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("give either input_ids or inputs_embeds, and not both")
    tokens = input_ids if input_ids is not None else inputs_embeds
    batch_size, length = tokens.shape[:2]
    if length > config.max_position_embeddings:
        raise ValueError(
            f"the sequence has {length} tokens, the model takes max_position_embeddings="
            f"{config.max_position_embeddings}; cut it (truncation=True, max_length=...), or build the model longer"
        )
    for name, tensor in (("attention_mask", attention_mask), ("document_ids", document_ids)):
        if tensor is not None and tuple(tensor.shape) != (batch_size, length):
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, the tokens ({batch_size}, {length}); give one value per token"
            )
    if attention_mask is not None:
        attention_mask = attention_mask.bool()
    if position_ids is None:
        position_ids = torch.arange(length, device=tokens.device)[None]
    elif position_ids.device.type == "cpu" and not torch.compiler.is_compiling():  # elsewhere a look would be a sync
        furthest = int(position_ids.max())
        if furthest >= config.max_position_embeddings:
            raise ValueError(
                f"position_ids reach {furthest}, the model's positions end at {config.max_position_embeddings - 1} "
                f"(max_position_embeddings={config.max_position_embeddings}); shorten the sequences"
            )
    return attention_mask, position_ids


@auto_docstring(
    custom_intro="""
    Output of [`MaeLmForMaskedLM`].
    """
)
@dataclass
class MaeLmMaskedLMOutput(ModelOutput):
    r"""
    loss (`torch.FloatTensor` of shape `()`, *optional*, returned with labels):
        Cross-entropy in nats: the mean over labelled tokens, or their sum divided by `num_items_in_batch`.
    logits (`torch.FloatTensor`):
        (batch, length, vocabulary) in the caller's order; in training with labels, or with `sparse_logits`, those of
        the labelled tokens alone, row by row: (labelled tokens, vocabulary). In a compiled graph, and with indices on
        an accelerator, the slots without a token stay among them: (batch x slots, vocabulary), where a row has as many
        slots as `hidden_index` is wide.
    hidden_states (`tuple(torch.FloatTensor)`, *optional*, returned with `output_hidden_states=True`):
        The encoder's, (batch, length, hidden size), as `MaeLmModel` gives them: zero at tokens it does not see. Given
        indices of layers in place of `True`, `None` at the others.
    attentions (`tuple(torch.FloatTensor)`, *optional*, returned with `output_attentions=True`):
        The encoder's, (batch, heads, kept tokens, kept tokens): kept tokens in order.
    """

    loss: torch.FloatTensor | None = None
    logits: torch.FloatTensor | None = None
    hidden_states: tuple[torch.FloatTensor, ...] | None = None
    attentions: tuple[torch.FloatTensor, ...] | None = None


@dataclass
class MaeLmTokens:
    """A batch, seen from the encoder and the decoder: which tokens it keeps, which it hides, which are predicted."""

    ids: torch.Tensor | None  # (batch, length)
    embeds: torch.Tensor | None  # (batch, length, size), in place of the ids
    attended: torch.Tensor | None  # (batch, length) bool
    positions: torch.Tensor  # (batch or 1, length)
    documents: torch.Tensor | None  # (batch, length)
    segments: torch.Tensor | None  # (batch, length)
    shape: tuple[int, int]  # (batch, length)
    kept_index: torch.Tensor | None = None  # (batch, kept); None: every token, in place
    hidden_index: torch.Tensor | None = None  # (batch, hidden); None: no token is hidden
    mask_embedding: torch.Tensor | None = None  # (size,)
    target_slots: torch.Tensor | None = None  # (batch, targets), into kept + hidden; None: every token is predicted
    target_labels: torch.Tensor | None = None  # (batch, targets), -100 where there is none

    def take(self, values: torch.Tensor | None, index: torch.Tensor | None) -> torch.Tensor | None:
        """values (batch or 1, length) of the tokens of `index`; padding takes those of the first token."""
        if values is None or index is None:
            return values
        return values.expand(self.shape).gather(1, index.clamp(min=0))

    @property
    def joined_index(self) -> torch.Tensor | None:
        """Position of each token of the decoder's sequence: kept tokens, then hidden ones; `None`: in place."""
        if self.hidden_index is None:
            return self.kept_index
        return torch.cat([self.kept_index, self.hidden_index], dim=1)

    def attended_at(self, index: torch.Tensor | None) -> torch.Tensor | None:
        return self.attended if index is None else index >= 0


@auto_docstring(
    custom_intro="""
    MAE-LM for pretraining and for filling masks: the encoder over kept tokens, the shallow decoder over all, the head
    over the tokens to predict. It takes ordinary masked-language-model batches, [MASK] in `input_ids` and `labels`, and
    does the hiding. With `decoder_num_hidden_layers=0` and `encoder_mask_fraction=1` it is a plain masked language
    model.
    """
)
class MaeLmForMaskedLM(MaeLmPreTrainedModel):
    _tied_weights_keys = {"lm_head.output.weight": "encoder.embeddings.word_embeddings.weight"}
    _keys_to_ignore_on_load_unexpected = other_heads("decoder", "lm_head")

    def __init__(self, config: MaeLmConfig):
        if config.mask_token_id is None:
            raise ValueError(
                "mask_token_id=None: MaeLmForMaskedLM hides [MASK]; set config.mask_token_id=tokenizer.mask_token_id"
            )
        check_attention(config)
        super().__init__(config)
        self.encoder = MaeLmModel(config)
        # CODEPATH: plain MLM checkpoints have no decoder.
        self.decoder = MaeLmDecoder(config) if config.decoder_num_hidden_layers else None
        self.lm_head = MaeLmLMHead(config)
        if self.encoder.backbone is not None:
            self._tied_weights_keys = {"lm_head.output.weight": f"encoder.{self.encoder.name_of_word_embeddings()}"}
        self.post_init()

    @classmethod
    def from_encoder(
        cls,
        encoder: str | os.PathLike | PreTrainedModel,
        decoder_num_hidden_layers: int = 2,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        mask_token_id: int | None = None,
        add_mask_token: bool = False,
        trust_remote_code: bool = False,
        revision: str = "main",
        token: str | bool | None = None,
        **settings,
    ) -> "MaeLmForMaskedLM":
        """
        MAE-LM on an encoder that exists already, for continued pretraining.

        The encoder keeps its weights and the mask embedding is its [MASK] row. The head starts from the encoder's own
        for masked language modeling, where the checkpoint has one and the decoder its width. The decoder is new.
        `decoder_num_hidden_layers=0, encoder_mask_fraction=1` is the stock masked language model, in the same class.

        Args:
            encoder: Folder or Hub name of a checkpoint with safetensors, or a model of transformers.
            decoder_num_hidden_layers: Layers of the new decoder.
            tokenizer: Of the encoder; by default the one beside it. Its mask token is the model's.
            mask_token_id: In the place of a tokenizer.
            add_mask_token: Give `tokenizer` a token [MASK], and the model a row for it, where there is none.
            trust_remote_code: Run the checkpoint's own code, should it bring some. A model saved on such an encoder
                loads where its classes are registered.
            revision, token: Branch, tag or commit on the Hub, and the access token, as for `from_pretrained`.
            **settings: Others of [`MaeLmConfig`], but for those that follow the encoder.

        Returns:
            The model in float32 and in eval mode, as `from_pretrained`.

        Raises:
            ValueError: It is no encoder, does not follow `position_ids`, brings code without consent, has no mask
                token, sizes do not match, or a setting is none of [`MaeLmConfig`].
        """
        check_settings_on_encoder(settings)
        named = not isinstance(encoder, PreTrainedModel)
        source = {"trust_remote_code": trust_remote_code, "revision": revision, "token": token}
        stock_config = load_encoder_config(encoder, **source) if named else encoder.config
        if named and tokenizer is None and mask_token_id is None:
            tokenizer = AutoTokenizer.from_pretrained(encoder, **source)
        if mask_token_id is None:
            mask_token_id = find_mask_token(tokenizer, add_mask_token)
        rows = max(mask_token_id + 1, 0 if tokenizer is None else len(tokenizer))
        grown = rows > stock_config.vocab_size
        if grown and not add_mask_token:
            raise ValueError(
                f"the tokenizer has {rows} tokens, the encoder's vocabulary vocab_size={stock_config.vocab_size}: it "
                "is not this encoder's; for tokens added since, pass add_mask_token=True, which adds rows for them"
            )
        settings |= {"decoder_num_hidden_layers": decoder_num_hidden_layers}
        config = MaeLmConfig(backbone_config=stock_config, mask_token_id=None if grown else mask_token_id, **settings)
        config.mask_token_id = mask_token_id

        stock, masked_lm = load_encoder(encoder, stock_config, **source) if named else split_model(encoder)
        model = cls(config)
        loaded = model.encoder.backbone.load_state_dict(stock.state_dict(), strict=False)
        if loaded.unexpected_keys:
            wrong = ", ".join(loaded.unexpected_keys)
            raise ValueError(f"{type(stock).__name__} has weights that its config does not name: {wrong}")
        check_missing(encoder if named else type(encoder).__name__, loaded.missing_keys, model.encoder.backbone)
        check_backbone(model.encoder)  # again: of new weights, a bias that begins at zero would not show
        model.start_from(stock, masked_lm)
        if grown:
            model.resize_token_embeddings(rows)
        return model.eval()

    @torch.no_grad()
    def start_from(self, stock: PreTrainedModel, masked_lm: PreTrainedModel | None) -> None:
        """The head's weights are those of a stock masked language model, the mask projection's the encoder's."""
        projection = getattr(stock, "embeddings_project", None)
        if projection is not None and self.decoder is not None and self.decoder.mask_projection is not None:
            self.decoder.mask_projection.load_state_dict(projection.state_dict())
        modules = {} if masked_lm is None else dict(masked_lm.named_modules())
        names = next((names for names in STOCK_HEADS if names[0] in modules), None)
        if names is None:
            logger.warning(f"{type(stock).__name__} comes without a head for masked tokens: the head is new")
            return
        for ours, name in zip((self.lm_head.dense, self.lm_head.layer_norm), names, strict=True):
            theirs = modules[name].weight
            if theirs.shape != ours.weight.shape:
                logger.warning(
                    f"the head of {type(masked_lm).__name__} takes {tuple(theirs.shape)}, the decoder of another width "
                    f"{tuple(ours.weight.shape)}: that part of the head is new"
                )
                continue
            ours.load_state_dict({"bias": torch.zeros_like(ours.bias)} | modules[name].state_dict())
        output = masked_lm.get_output_embeddings()
        if output.bias is not None:
            self.lm_head.output.bias.copy_(output.bias)
        if not self.config.tie_word_embeddings:
            self.lm_head.output.weight.copy_(output.weight)

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head.output

    def set_output_embeddings(self, new_embeddings: nn.Linear):
        self.lm_head.output = new_embeddings

    @can_return_tuple
    @auto_docstring
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        kept_index: torch.LongTensor | None = None,
        hidden_index: torch.LongTensor | None = None,
        document_ids: torch.LongTensor | None = None,
        sparse_logits: bool | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        token_type_ids: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MaeLmMaskedLMOutput:
        r"""
        labels (`torch.LongTensor` of shape `(batch_size, sequence_length)`, *optional*):
            The original ids of the tokens to predict, -100 elsewhere. Labels at tokens that are not [MASK] (80/10/10
            masking) count too: the token stays in the encoder, its loss is taken from the decoder. (In training with
            the two indices they do not: pass no indices with such labels.)
        kept_index (`torch.LongTensor` of shape `(batch_size, kept_width)`, *optional*):
            Positions of the tokens that the encoder sees, -1 where a row has fewer, as `DataCollatorForMaeLm` makes
            them. Given this and `hidden_index`, forward needs no host sync and compiles with `fullgraph=True`, and in
            training only hidden tokens are predicted. Both are recomputed where 0 < `encoder_mask_fraction` < 1.
        hidden_index (`torch.LongTensor` of shape `(batch_size, hidden_width)`, *optional*):
            Positions of the hidden tokens, -1 where a row has fewer.
        document_ids (`torch.LongTensor` of shape `(batch_size, sequence_length)`, *optional*):
            Which document of a packed row each token belongs to (0, 1, 2 ...): tokens attend within theirs.
        sparse_logits (`bool`, *optional*):
            Whether to return the logits of labelled tokens alone (and, in a compiled graph or with indices on an
            accelerator, of slots without a token); by default in training with labels.
        num_items_in_batch (`torch.Tensor` or `int`, *optional*):
            What the summed loss is divided by: the labelled tokens of all micro-batches and processes of a step.
        token_type_ids (`torch.LongTensor` of shape `(batch_size, sequence_length)`, *optional*):
            Segments, for a backbone that has them.
        """
        attention_mask, position_ids = check_inputs(
            self.config, input_ids, inputs_embeds, attention_mask, position_ids, document_ids
        )
        if (kept_index is None) != (hidden_index is None):
            lacking = "kept_index" if kept_index is None else "hidden_index"
            raise ValueError(f"{lacking}=None: kept_index and hidden_index go together; give both, or neither")
        shape = tuple((input_ids if input_ids is not None else inputs_embeds).shape[:2])
        sparse = labels is not None and (self.training if sparse_logits is None else sparse_logits)
        tokens = MaeLmTokens(
            input_ids, inputs_embeds, attention_mask, position_ids, document_ids, token_type_ids, shape
        )
        indexed = kept_index is not None

        tokens = self.split(tokens, kept_index, hidden_index, labels if sparse else None)
        encoded = self.encode(tokens, avoid_host_sync=indexed, **kwargs)
        joined = self.join(tokens, encoded.last_hidden_state)
        states = self.decode(tokens, joined, avoid_host_sync=indexed)
        logits, loss = self.predict(tokens, states, labels, sparse, indexed, num_items_in_batch)
        hidden_states = encoded.hidden_states
        if hidden_states is not None and tokens.kept_index is not None:
            hidden_states = tuple(  # None where that layer was not asked for
                None if state is None else put(state, tokens.kept_index, shape[1]) for state in hidden_states
            )
        return MaeLmMaskedLMOutput(loss=loss, logits=logits, hidden_states=hidden_states, attentions=encoded.attentions)

    def split(self, tokens: MaeLmTokens, kept_index, hidden_index, labels) -> MaeLmTokens:
        """Kept tokens first, hidden tokens last: a stable partition of each row's attended tokens."""
        indexed = kept_index is not None
        dropped = None
        if tokens.ids is not None:
            dropped = self.encoder.dropped_masks(tokens.ids, tokens.attended, tokens.positions, tokens.documents)
        labelled = None
        if labels is not None:
            labelled = labels != -100 if tokens.attended is None else (labels != -100) & tokens.attended
        if dropped is None:  # the encoder sees every token: all stay in place
            if labels is not None:
                index = hidden_index if indexed else positions_where(labelled, max(1, int(labelled.sum(1).amax())))
                tokens.target_slots, tokens.target_labels = index, take(labels, index, -100)
            return tokens

        # CODEPATH: between 0 and 1 (the paper's ablation) the encoder keeps some [MASK], which the indices do not know.
        if indexed and self.config.encoder_mask_fraction == 0:
            tokens.kept_index, tokens.hidden_index = kept_index, hidden_index
            if labels is not None:
                slots = torch.arange(hidden_index.shape[1], device=hidden_index.device) + kept_index.shape[1]
                tokens.target_slots = slots.expand(hidden_index.shape)
                tokens.target_labels = take(labels, hidden_index, -100)
            return tokens

        kept = ~dropped if tokens.attended is None else tokens.attended & ~dropped
        chosen = [kept, dropped] if labelled is None else [kept, dropped, labelled]
        widths = torch.stack([tokens_chosen.sum(1).amax() for tokens_chosen in chosen]).clamp(min=1)
        widths = widths.tolist()  # the one host sync: how wide the encoder and the decoder really are
        tokens.kept_index = positions_where(kept, widths[0])
        tokens.hidden_index = positions_where(dropped, widths[1])
        if labels is not None:
            index = positions_where(labelled, widths[2])
            slots = torch.arange(widths[0] + widths[1], device=index.device).expand(index.shape[0], -1)
            slot_of_position = put(slots[..., None], tokens.joined_index, tokens.shape[1]).squeeze(-1)
            tokens.target_slots, tokens.target_labels = take(slot_of_position, index, -1), take(labels, index, -100)
        return tokens

    def embed(self, tokens: MaeLmTokens) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Embeddings of the kept tokens (batch, kept, size), and of [MASK] (size,) where tokens are hidden."""
        if tokens.embeds is not None:
            return tokens.embeds, None
        words, ids = self.encoder.get_input_embeddings(), tokens.take(tokens.ids, tokens.kept_index)
        if tokens.hidden_index is None:
            return words(ids), None
        # One look-up for both: each look-up's gradient is as large as the whole table.
        mask_id = torch.full((1,), self.config.mask_token_id, device=ids.device)
        embeds = words(torch.cat([ids.flatten(), mask_id]))
        return embeds[:-1].view(*ids.shape, -1), embeds[-1]

    def encode(self, tokens: MaeLmTokens, avoid_host_sync: bool, **kwargs) -> BaseModelOutput:
        """The encoder over kept tokens, each at its original position."""
        index = tokens.kept_index
        # Embedded here: the encoder drops no token of `inputs_embeds`, and what to drop is decided already.
        embeds, tokens.mask_embedding = self.embed(tokens)
        return self.encoder(
            inputs_embeds=embeds,  # (batch, kept, size)
            attention_mask=tokens.attended_at(index),
            position_ids=tokens.take(tokens.positions, index),
            document_ids=tokens.take(tokens.documents, index),
            avoid_host_sync=avoid_host_sync,
            token_type_ids=tokens.take(tokens.segments, index),
            **kwargs,
        )

    def join(self, tokens: MaeLmTokens, encoded: torch.Tensor) -> torch.Tensor:
        """Encoder outputs, then the mask embedding once for each hidden token: (batch, kept + hidden, size)."""
        if tokens.hidden_index is None:
            return encoded
        mask_embedding = tokens.mask_embedding
        if self.decoder.mask_projection is not None:
            mask_embedding = self.decoder.mask_projection(mask_embedding)
        mask_embedding = mask_embedding.to(encoded.dtype)
        return torch.cat([encoded, mask_embedding.expand(*tokens.hidden_index.shape, -1)], dim=1)

    def decode(self, tokens: MaeLmTokens, joined: torch.Tensor, avoid_host_sync: bool) -> torch.Tensor:
        """The decoder over all tokens, its last layer for the targets alone: (batch, targets, decoder size)."""
        slots = tokens.target_slots
        if self.decoder is None:
            return joined if slots is None else take(joined, slots, 0.0)
        index = tokens.joined_index
        documents = tokens.take(tokens.documents, index)
        states = self.decoder.embed(joined, tokens.take(tokens.positions, index))
        attended = tokens.attended_at(index)
        layout = lay_end_to_end(self.config, self.training, attended, documents)
        if layout is not None and slots is not None:
            if layout.longest and bool((tokens.target_labels != -100).any()):
                return self.decode_end_to_end(layout, states, tokens, documents)
            documents = None  # with nothing to predict, no matter who sees whom
        mask = create_attention_mask(
            self.config, states, attended, key_documents=documents, avoid_host_sync=avoid_host_sync
        )
        for layer in self.decoder.layers[:-1]:
            states = layer(states, mask)
        if slots is None or not takes_fewer_queries(self.config):
            states = self.decoder.layers[-1](states, mask)
            return states if slots is None else take(states, slots, 0.0)
        queries = take(states, slots, 0.0)
        mask = create_attention_mask(
            self.config,
            states,
            attended,
            queries=queries,
            key_documents=documents,
            query_documents=None if documents is None else documents.gather(1, slots.clamp(min=0)),
            avoid_host_sync=avoid_host_sync,
        )
        return self.decoder.layers[-1](states, mask, None, queries)

    def decode_end_to_end(self, layout: EndToEnd, states, tokens: MaeLmTokens, documents) -> torch.Tensor:
        """The same over the real tokens laid end to end."""
        slots = tokens.target_slots
        states = layout.lay(states)  # (1, tokens, size)
        for layer in self.decoder.layers[:-1]:
            states = layer(states, **layout.arguments)
        query_documents = None if documents is None else documents.gather(1, slots.clamp(min=0))
        targets = EndToEnd(tokens.target_labels != -100, query_documents, keys=layout)
        queries = targets.lay(take(layout.put_back(states), slots, 0.0))  # (1, targets, size)
        return targets.put_back(self.decoder.layers[-1](states, None, None, queries, **targets.arguments))

    def predict(self, tokens: MaeLmTokens, states, labels, sparse, indexed, num_items_in_batch):
        """
        Logits, (labelled tokens or batch x slots, vocabulary) or (batch, length, vocabulary), and the loss where there
        are labels.
        """
        if sparse:
            states, labels = states.flatten(0, 1), tokens.target_labels.flatten()
            # Padded slots go too, but where that would stop an accelerator or a graph; there they have no label.
            if not torch.compiler.is_compiling() and not (indexed and states.device.type != "cpu"):
                present = labels != -100
                states, labels = states[present], labels[present]
        else:
            index = tokens.joined_index
            if index is not None:
                states = put(states, index, tokens.shape[1])
            if labels is not None and tokens.attended is not None:
                labels = labels.masked_fill(~tokens.attended, -100)
        logits = self.lm_head(states)
        loss = None if labels is None else cross_entropy(logits, labels, num_items_in_batch)
        return logits, loss


# Linear layer and LayerNorm of the heads of stock masked language models.
STOCK_HEADS = (
    ("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm"),  # BERT
    ("lm_head.dense", "lm_head.layer_norm"),  # RoBERTa, XLM-RoBERTa, CamemBERT
    ("vocab_transform", "vocab_layer_norm"),  # DistilBERT
    ("generator_predictions.dense", "generator_predictions.LayerNorm"),  # ELECTRA
    ("head.dense", "head.norm"),  # ModernBERT
    ("predictions.dense", "predictions.LayerNorm"),  # ALBERT
)


def check_settings_on_encoder(settings: dict) -> None:
    """Refuse what a config would keep without a word: options of loading, misspelt settings, an access token."""
    known = {field.name for field in fields(MaeLmConfig)} - {"backbone_config", "dtype"} | {"attn_implementation"}
    for name in settings:
        if name not in known:  # named without its value, which may be a secret
            raise ValueError(
                f"{name}= is no setting of a MaeLmConfig on an encoder; for options of from_pretrained but revision= "
                "and token=, load the encoder by its own class and pass that model; for another dtype, call .to(dtype) "
                "on the result"
            )


def load_encoder_config(name: str | os.PathLike, trust_remote_code: bool = False, **source) -> PreTrainedConfig:
    """The config of a checkpoint, whose own code, if any, runs with consent alone."""
    source |= {"trust_remote_code": trust_remote_code}
    try:
        return AutoConfig.from_pretrained(name, **source)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ValueError(
            f"{name} brings code of its own, which runs with your rights: read it, then pass trust_remote_code=True"
        ) from None


def load_encoder(
    name: str | os.PathLike, config: PreTrainedConfig, **source
) -> tuple[PreTrainedModel, PreTrainedModel | None]:
    """The encoder of a checkpoint, and the model that saved it, where that predicts masked tokens."""
    options = {"dtype": torch.float32, "use_safetensors": True} | source
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # reports of what the other class reads; what lacks is said below
    try:
        stock, loaded = AutoModel.from_pretrained(name, output_loading_info=True, **options)
        masked_lm = None
        if brings_head(config):
            masked_lm, of_head = AutoModelForMaskedLM.from_pretrained(name, output_loading_info=True, **options)
            masked_lm = None if of_head["missing_keys"] else masked_lm
    finally:
        logging.set_verbosity(verbosity)
    check_missing(name, loaded["missing_keys"], stock)
    return stock, masked_lm


def check_missing(name: str | os.PathLike, missing_keys: Collection[str], encoder: PreTrainedModel) -> None:
    """Refuse an encoder without all its weights; a pooler alone may be missing, and is said to be new."""
    missing = sorted(key for key in missing_keys if not key.startswith("pooler."))
    if missing:
        raise ValueError(f"{name} lacks weights of {type(encoder).__name__}: {', '.join(missing[:3])} ...")
    if missing_keys:
        logger.warning(f"{name} has no pooler: that of the encoder is new, and is not trained")


def brings_head(config: PreTrainedConfig) -> bool:
    """Whether the checkpoint's model predicts masked tokens."""
    saved_by = (getattr(config, "architectures", None) or [""])[0]
    return saved_by.endswith("ForMaskedLM") or saved_by == "BertForPreTraining"


def split_model(model: PreTrainedModel) -> tuple[PreTrainedModel, PreTrainedModel | None]:
    """The encoder of a model, and the model, where that predicts masked tokens."""
    return model.base_model, model if type(model).__name__.endswith(("ForMaskedLM", "BertForPreTraining")) else None


def find_mask_token(tokenizer: PreTrainedTokenizerBase | None, add: bool) -> int:
    """Id of [MASK], added where it is asked for."""
    if tokenizer is None:
        raise ValueError("a model object knows no mask token: pass its tokenizer=, or mask_token_id=")
    if tokenizer.mask_token_id is None:
        if not add:
            raise ValueError(
                f"{type(tokenizer).__name__} has no mask token: pass tokenizer= and add_mask_token=True, which adds "
                "[MASK] to it and a row to the embeddings"
            )
        tokenizer.add_special_tokens({"mask_token": "[MASK]"})
    return tokenizer.mask_token_id


class MaeLmSequenceClassifier(nn.Module):
    """First token, dropout, linear, tanh, dropout, linear."""

    def __init__(self, config: MaeLmConfig):
        super().__init__()
        self.dropout = MaeLmDropout(config.hidden_dropout_prob)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.output = nn.Linear(config.hidden_size, config.num_labels)

    def forward(self, pooled: torch.Tensor) -> torch.Tensor:
        return self.output(self.dropout(torch.tanh(self.dense(self.dropout(pooled)))))


def first_token(states: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """states (batch, length, size) of each row's first attended token: (batch, size)."""
    if attention_mask is None:
        return states[:, 0]
    first = attention_mask.int().argmax(dim=1)
    return states[torch.arange(states.shape[0], device=states.device), first.to(states.device)]


@auto_docstring(
    custom_intro="""
    The MAE-LM encoder with a classifier of sequences on the first token: GLUE, for example.
    """
)
class MaeLmForSequenceClassification(MaeLmPreTrainedModel):
    _keys_to_ignore_on_load_unexpected = other_heads("sequence_classifier")

    def __init__(self, config: MaeLmConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.encoder = MaeLmModel(config)
        self.sequence_classifier = MaeLmSequenceClassifier(config)
        self.post_init()

    @can_return_tuple
    @auto_docstring
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        token_type_ids: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> SequenceClassifierOutput:
        r"""
        labels (`torch.Tensor` of shape `(batch_size,)`, *optional*):
            A class each; floats for regression (`num_labels == 1`) or, of shape `(batch_size, num_labels)`, for several
            classes at once. `config.problem_type` is set from the first labels where it is not given.
        num_items_in_batch (`torch.Tensor` or `int`, *optional*):
            What the summed loss of classes is divided by: the sequences of all micro-batches and processes of a step.
        token_type_ids (`torch.LongTensor` of shape `(batch_size, sequence_length)`, *optional*):
            Segments, for a backbone that has them.
        """
        outputs = self.encoder(
            input_ids, attention_mask, position_ids, inputs_embeds, token_type_ids=token_type_ids, **kwargs
        )
        logits = self.sequence_classifier(first_token(outputs.last_hidden_state, attention_mask))
        loss = None
        if labels is not None:
            loss = self.loss_of_problem(logits, labels.to(logits.device), num_items_in_batch)
        return SequenceClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )

    def loss_of_problem(self, logits, labels, num_items_in_batch) -> torch.Tensor:
        if self.config.problem_type is None:
            if self.num_labels == 1:
                self.config.problem_type = "regression"
            elif labels.is_floating_point():
                self.config.problem_type = "multi_label_classification"
            else:
                self.config.problem_type = "single_label_classification"
        if self.config.problem_type == "single_label_classification":
            return cross_entropy(logits, labels, num_items_in_batch)
        labels = labels.float().view(logits.shape)
        if self.config.problem_type == "regression":
            loss = F.mse_loss(logits.float(), labels, reduction="sum")
        else:
            loss = F.binary_cross_entropy_with_logits(logits.float(), labels, reduction="sum")
        return loss / (labels.numel() if num_items_in_batch is None else num_items_in_batch)


@auto_docstring(
    custom_intro="""
    The MAE-LM encoder with a classifier of tokens: named entities or parts of speech, for example.
    """
)
class MaeLmForTokenClassification(MaeLmPreTrainedModel):
    _keys_to_ignore_on_load_unexpected = other_heads("token_classifier")

    def __init__(self, config: MaeLmConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.encoder = MaeLmModel(config)
        self.dropout = MaeLmDropout(config.hidden_dropout_prob)
        self.token_classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    @auto_docstring
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        token_type_ids: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> TokenClassifierOutput:
        r"""
        labels (`torch.LongTensor` of shape `(batch_size, sequence_length)`, *optional*):
            A class each, -100 where there is none.
        num_items_in_batch (`torch.Tensor` or `int`, *optional*):
            What the summed loss is divided by: the labelled tokens of all micro-batches and processes of a step.
        token_type_ids (`torch.LongTensor` of shape `(batch_size, sequence_length)`, *optional*):
            Segments, for a backbone that has them.
        """
        outputs = self.encoder(
            input_ids, attention_mask, position_ids, inputs_embeds, token_type_ids=token_type_ids, **kwargs
        )
        logits = self.token_classifier(self.dropout(outputs.last_hidden_state))
        loss = None if labels is None else cross_entropy(logits, labels, num_items_in_batch)
        return TokenClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


@auto_docstring(
    custom_intro="""
    The MAE-LM encoder with start and end scores of a span: SQuAD, for example.
    """
)
class MaeLmForQuestionAnswering(MaeLmPreTrainedModel):
    _keys_to_ignore_on_load_unexpected = other_heads("question_answering")

    def __init__(self, config: MaeLmConfig):
        super().__init__(config)
        self.encoder = MaeLmModel(config)
        self.question_answering = nn.Linear(config.hidden_size, 2)
        self.post_init()

    @can_return_tuple
    @auto_docstring
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        start_positions: torch.LongTensor | None = None,
        end_positions: torch.LongTensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> QuestionAnsweringModelOutput:
        r"""
        start_positions (`torch.LongTensor` of shape `(batch_size,)`, *optional*):
            First token of the answer; a position outside the sequence does not count.
        end_positions (`torch.LongTensor` of shape `(batch_size,)`, *optional*):
            Last token of the answer.
        token_type_ids (`torch.LongTensor` of shape `(batch_size, sequence_length)`, *optional*):
            Segments, for a backbone that has them.
        """
        kwargs.pop("num_items_in_batch", None)  # it counts labels, and spans have none of that name
        outputs = self.encoder(
            input_ids, attention_mask, position_ids, inputs_embeds, token_type_ids=token_type_ids, **kwargs
        )
        start_logits, end_logits = self.question_answering(outputs.last_hidden_state).unbind(dim=-1)  # (batch, length)
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = (span_loss(start_logits, start_positions) + span_loss(end_logits, end_positions)) / 2
        return QuestionAnsweringModelOutput(
            loss=loss,
            start_logits=start_logits,
            end_logits=end_logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


def span_loss(logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy over rows of logits (batch, length) whose position lies in the sequence."""
    positions = positions.flatten().to(logits.device)
    inside = (positions >= 0) & (positions < logits.shape[1])
    return cross_entropy(logits, positions.masked_fill(~inside, -100), None)


@auto_docstring(
    custom_intro="""
    The MAE-LM encoder with a score of each choice on the first token: SWAG, for example.
    """
)
class MaeLmForMultipleChoice(MaeLmPreTrainedModel):
    _keys_to_ignore_on_load_unexpected = other_heads("multiple_choice")

    def __init__(self, config: MaeLmConfig):
        super().__init__(config)
        self.encoder = MaeLmModel(config)
        self.dropout = MaeLmDropout(config.hidden_dropout_prob)
        self.multiple_choice = nn.Linear(config.hidden_size, 1)
        self.post_init()

    @can_return_tuple
    @auto_docstring
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        token_type_ids: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MultipleChoiceModelOutput:
        r"""
        input_ids (`torch.LongTensor` of shape `(batch_size, num_choices, sequence_length)`):
            Ids of every choice; the other inputs likewise.
        attention_mask (`torch.Tensor` of shape `(batch_size, num_choices, sequence_length)`, *optional*):
            1 at tokens, 0 at padding.
        position_ids (`torch.LongTensor` of shape `(batch_size, num_choices, sequence_length)`, *optional*):
            Positions, where they are not 0, 1, 2 ...
        inputs_embeds (`torch.FloatTensor` of shape `(batch_size, num_choices, length, hidden_size)`, *optional*):
            Token embeddings in place of `input_ids`.
        labels (`torch.LongTensor` of shape `(batch_size,)`, *optional*):
            The right choice.
        num_items_in_batch (`torch.Tensor` or `int`, *optional*):
            What the summed loss is divided by: the examples of all micro-batches and processes of a step.
        token_type_ids (`torch.LongTensor` of shape `(batch_size, num_choices, sequence_length)`, *optional*):
            Segments, for a backbone that has them.
        """
        num_choices = (input_ids if input_ids is not None else inputs_embeds).shape[1]
        input_ids, attention_mask, position_ids, inputs_embeds = (
            None if tensor is None else tensor.flatten(0, 1)
            for tensor in (input_ids, attention_mask, position_ids, inputs_embeds)
        )
        if token_type_ids is not None:
            token_type_ids = token_type_ids.flatten(0, 1)
        outputs = self.encoder(
            input_ids, attention_mask, position_ids, inputs_embeds, token_type_ids=token_type_ids, **kwargs
        )
        pooled = first_token(outputs.last_hidden_state, attention_mask)  # (batch x choices, size)
        logits = self.multiple_choice(self.dropout(pooled)).view(-1, num_choices)
        loss = None if labels is None else cross_entropy(logits, labels, num_items_in_batch)
        return MultipleChoiceModelOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


__all__ = [
    "MaeLmForMaskedLM",
    "MaeLmForMultipleChoice",
    "MaeLmForQuestionAnswering",
    "MaeLmForSequenceClassification",
    "MaeLmForTokenClassification",
    "MaeLmModel",
    "MaeLmPreTrainedModel",
]
