# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Bytes of pretraining, counted from a configuration: memory of a process, traffic between processes, checkpoints.

Weights, gradients and optimizer state are float32; under bf16 or fp16 autocast the linear layers compute in two bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from maelm_hf import MaeLmConfig, MaeLmForMaskedLM

from .flops import Row
from .optimizers import build_optimizers
from .recipe import OptimizerSection

FLOAT32 = 4
# Of activations: what glibc holds between blocks once it keeps freed memory, as training on a CPU makes it. Measured on
# six runs of 4 to 6 layers of 256 and 512, fp32 and bf16, both kernels: .39 to .79; this middle is within 12 % of each
# run's whole memory.
HELD_ON_CPU = 0.55


@dataclass(frozen=True)
class Arithmetic:
    """What decides how many bytes an activation takes.

    Attributes:
        autocast: linear layers compute in bf16 or fp16.
        scores_kept: attention keeps its maps for the backward pass: eager attention does, and sdpa on a CPU where it
            drops out or learns a bias.
        on_cpu: under autocast hidden states stay in two bytes there, while LayerNorm and softmax of a GPU return
            float32, which every linear layer copies; dropout keeps noise as wide as its input, a byte on a GPU.
    """

    autocast: bool
    scores_kept: bool
    on_cpu: bool = False

    @property
    def width(self) -> int:
        return 2 if self.autocast else FLOAT32

    @property
    def state_width(self) -> int:
        """Of hidden states between the layers, and of attention maps."""
        return self.width if self.on_cpu else FLOAT32

    @property
    def copies(self) -> bool:
        return self.autocast and not self.on_cpu

    def noise(self, probability: float, width: int) -> int:
        """Bytes an element that dropout keeps."""
        if probability == 0:
            return 0
        return width if self.on_cpu else 1


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters; the output matrix, tied to the token embedding, counts once, as embedding."""

    embedding: int  # tokens and positions of the encoder
    encoder: int  # without the embedding
    decoder: int
    head: int  # without the tied matrix
    layers: int  # of all these, in the layers of encoder and decoder
    cast: int  # elements of the matrices that autocast copies
    muon: list[tuple[int, int]]  # shapes of the matrices that Muon trains

    @property
    def total(self) -> int:
        return self.embedding + self.encoder + self.decoder + self.head

    @property
    def optimizer_bytes(self) -> int:
        """Two float32 moments of each parameter for AdamW, one for each of Muon's matrices."""
        return FLOAT32 * (2 * self.total - sum(rows * columns for rows, columns in self.muon))


def count_parameters(model: MaeLmForMaskedLM, optimizer: OptimizerSection) -> Parameters:
    """Of a model on any device, the meta device too, as the recipe's optimizers train it."""

    def number(module: nn.Module | None) -> int:
        return sum(parameter.numel() for parameter in module.parameters()) if module is not None else 0

    words = model.get_input_embeddings()
    names = model.encoder.named_modules()
    embedding = number(words) + sum(number(part) for name, part in names if name.endswith("position_embeddings"))
    tied = model.config.tie_word_embeddings
    _, *muon = build_optimizers(model, optimizer)
    linear = [module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear)]
    return Parameters(
        embedding=embedding,
        encoder=number(model.encoder) - embedding,
        decoder=number(model.decoder),
        head=number(model.lm_head) - (number(words) if tied else 0),
        layers=sum(number(module) for module in model.modules() if isinstance(module, GradientCheckpointingLayer)),
        cast=sum(linear),
        muon=[tuple(matrix.shape) for part in muon for group in part.param_groups for matrix in group["params"]],
    )


def activation_bytes(config: MaeLmConfig, row: Row, arithmetic: Arithmetic, activation_checkpointing: bool) -> float:
    """What one row keeps for its backward pass, and the gradients that are alive with it at the peak.

    Embedding and join: one float32 state a token (of LayerNorm). Layers: :func:`layer_bytes`; with checkpointing each
    keeps its input alone, and one layer at a time the rest. Head: four states of a hidden token, the logits and their
    gradient. Relative bias: one map of scores a head, and its gradient; int64 distances.
    """
    size, seen, width = config.hidden_size, row.seen_by_encoder(config), arithmetic.width
    encoder_layer = layer_bytes(
        seen,
        size,
        config.intermediate_size,
        config.num_attention_heads,
        arithmetic,
        config.hidden_dropout_prob,
        config.attention_probs_dropout_prob,
    )
    kept = [seen * size * arithmetic.state_width] * config.num_hidden_layers  # inputs: all that checkpointing keeps
    layers = [encoder_layer] * config.num_hidden_layers
    total = seen * size * (FLOAT32 + arithmetic.noise(config.hidden_dropout_prob, width))
    if config.relative_position_buckets:
        total += seen**2 * (2 * config.num_attention_heads * width + 8)
    head_size = size
    if config.decoder_num_hidden_layers:
        head_size = config.decoder_hidden_size
        for number in range(config.decoder_num_hidden_layers):
            is_last = number + 1 == config.decoder_num_hidden_layers
            layers.append(
                layer_bytes(
                    row.length,
                    head_size,
                    config.decoder_intermediate_size,
                    config.decoder_num_attention_heads,
                    arithmetic,
                    config.decoder_dropout_prob,
                    config.decoder_dropout_prob,
                    queries=row.hidden if is_last else None,
                )
            )
        kept += [row.length * head_size * arithmetic.state_width] * config.decoder_num_hidden_layers
        total += row.length * head_size * (FLOAT32 + arithmetic.noise(config.decoder_dropout_prob, width))
        if head_size != size:
            total += row.length * size * width
    total += sum(kept) + max(layers) if activation_checkpointing else sum(layers)
    total += row.hidden * (3 * head_size + size) * width
    return total + row.hidden * config.vocab_size * 2 * width


def layer_bytes(
    tokens: float,
    size: int,
    inner: int,
    heads: int,
    arithmetic: Arithmetic,
    hidden_dropout: float,
    attention_dropout: float,
    queries: float | None = None,
) -> float:
    """What one layer keeps for its backward pass, keys and values of ``tokens`` tokens, all else of ``queries``.

    The input of query, key and value (on a GPU under autocast a copy for each), these three, the attention's output,
    the input and the inner states of the MLP before and after its activation, in the width of autocast; both LayerNorm
    inputs; noise of dropout; and the attention maps where the kernel keeps them.
    """
    width = arithmetic.width
    every = tokens if queries is None else tokens + queries  # tokens that enter, as queries or as keys
    queries = tokens if queries is None else queries
    total = size * width * (queries + 2 * tokens if arithmetic.copies else every)
    total += size * width * (queries + 2 * tokens)
    total += queries * (size * 2 * width + inner * 2 * width + size * 2 * arithmetic.state_width)
    total += queries * size * 2 * arithmetic.noise(hidden_dropout, width)
    if arithmetic.scores_kept:
        # Probabilities, and what multiplies the values: their copy under autocast, or after dropout.
        copied = arithmetic.copies or attention_dropout > 0
        an_element = arithmetic.state_width + copied * width + arithmetic.noise(attention_dropout, width)
        total += heads * queries * tokens * an_element
    return total


@dataclass(frozen=True)
class Memory:
    """Bytes of one process at the peak of a step that accumulates gradients."""

    weights: float
    gradients: float
    optimizer: float
    casts: float  # autocast's copies of matrices
    buckets: float  # DDP's, in which gradients are averaged
    activations: float  # of the micro-batch
    held: float  # by the C library, between blocks

    @property
    def states(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.casts + self.buckets

    @property
    def total(self) -> float:
        return self.states + self.activations + self.held


def ddp_memory(parameters: Parameters, arithmetic: Arithmetic, processes: int, activations: float) -> Memory:
    """A whole model a process; with several, one more copy of the gradients."""
    weights = FLOAT32 * parameters.total
    return Memory(
        weights=weights,
        gradients=weights,
        optimizer=parameters.optimizer_bytes,
        casts=2 * parameters.cast if arithmetic.autocast else 0,
        buckets=weights if processes > 1 else 0,
        activations=activations,
        held=HELD_ON_CPU * activations if arithmetic.on_cpu else 0,
    )


def fsdp_memory(
    parameters: Parameters, arithmetic: Arithmetic, processes: int, micro_batches: int, activations: float
) -> Memory:
    """Weights and optimizer state shared out; gradients too, but whole while they are accumulated.

    The unit that is gathered last and largest, the embedding, is in memory whole once more.
    """
    weights = FLOAT32 * parameters.total
    return Memory(
        weights=weights / processes + FLOAT32 * parameters.embedding,
        gradients=weights if micro_batches > 1 else weights / processes,
        optimizer=parameters.optimizer_bytes / processes,
        casts=2 * parameters.cast if arithmetic.autocast else 0,
        buckets=0,
        activations=activations,
        held=HELD_ON_CPU * activations if arithmetic.on_cpu else 0,
    )


def ddp_traffic(parameters: Parameters, processes: int) -> float:
    """Bytes that each process sends, and as many that it receives, in a step: a ring all-reduce of the gradients.

    2 (N - 1) / N of their size (Patarasuk & Yuan 2009), once a step, whatever the number of micro-batches.
    """
    return 2 * (processes - 1) / processes * FLOAT32 * parameters.total


def fsdp_traffic(parameters: Parameters, processes: int, micro_batches: int) -> float:
    """As :func:`ddp_traffic`: each micro-batch gathers the layers twice, for forward and for backward, and the other
    weights, which stay from one to the other, once; gradients are scattered once a step.
    """
    gathered = micro_batches * (parameters.total + parameters.layers)
    return (processes - 1) / processes * FLOAT32 * (gathered + parameters.total)


def checkpoint_bytes(parameters: Parameters) -> int:
    """Weights and optimizer state, without the few kilobytes of tokenizer and settings."""
    return FLOAT32 * parameters.total + parameters.optimizer_bytes
