# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""The arms of the pretraining benchmark: each one a model, its batches and its optimizer in a process of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import islice
from multiprocessing.connection import Connection
from typing import Any, Literal

import numpy as np
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DataCollatorForLanguageModeling,
    ModernBertConfig,
    ModernBertForMaskedLM,
    PreTrainedModel,
)

from maelm_hf import DataCollatorForMaeLm, MaeLmConfig, MaeLmForMaskedLM
from maelm_hf.memory import keep_freed_memory
from maelm_hf.modeling_maelm import cross_entropy

from .attention_choice import choose_attention
from .choices import autocast_of
from .data import Cursor, IndexedSteps
from .flops import Row, forward_flops
from .recipe import Recipe, recipe_from_dict
from .text import Text, prepare_text

VOCABULARY = 32_768


@dataclass(frozen=True)
class Setting:
    """What the arms of a table share: the encoder's shape, the text, the batches, the device."""

    layers: int
    hidden_size: int
    length: int
    attention_dropout: float
    batch_tokens: int
    batches: int
    device: str
    corpus: str = "docstrings"
    cache_dir: str = "~/.cache/maelm_hf"

    @property
    def heads(self) -> int:
        return self.hidden_size // 64

    def recipe(self, mask_ratio: float) -> Recipe:
        data = {"max_length": self.length, "mask_ratio": mask_ratio, "batch_tokens": self.batch_tokens}
        values: dict[str, Any] = {"output_dir": "unused", "max_steps": 1, "cache_dir": self.cache_dir, "data": data}
        values |= {"corpus": {"source": self.corpus}, "tokenizer": {"vocab_size": VOCABULARY}}
        return recipe_from_dict(values)


@dataclass(frozen=True)
class Arm:
    """One way of pretraining."""

    name: str
    model: Literal["bert", "modernbert", "maelm"]
    keeps_memory: bool = False
    stock_collator: bool = False  # random order, 80/10/10, padding to the longest
    buckets: int = 0  # of the relative-position bias
    decoder_layers: int = 2
    mask_ratio: float = 0.15


@dataclass(frozen=True)
class Batch:
    """Inputs on the device, the real tokens in them, and the matrix operations that MAE-LM spends on these."""

    inputs: dict[str, torch.Tensor]
    tokens: int
    operations: float = field(default=0.0)


def build(arm: Arm, setting: Setting, text: Text) -> PreTrainedModel:
    """The arm's model; hidden dropout .1 (ModernBERT: its default, none), random weights of seed 0."""
    torch.manual_seed(0)
    vocabulary = len(text.tokenizer)
    shape = {"hidden_size": setting.hidden_size, "num_hidden_layers": setting.layers}
    shape |= {"vocab_size": vocabulary, "num_attention_heads": setting.heads, "pad_token_id": 0}
    if arm.model == "modernbert":
        dropout = {"attention_dropout": setting.attention_dropout}
        # Its MLP is gated, three matrices instead of two: as many weights in a layer as the others have.
        shape |= {"intermediate_size": -(-8 * setting.hidden_size // 3 // 16) * 16, "sparse_prediction": True}
        special = {"cls_token_id": 0, "sep_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
        return ModernBertForMaskedLM(ModernBertConfig(**shape, **dropout, **special))
    shape |= {"intermediate_size": 4 * setting.hidden_size, "max_position_embeddings": setting.length}
    shape |= {"attention_probs_dropout_prob": setting.attention_dropout}
    if arm.model == "bert":
        return BertForMaskedLM(BertConfig(**shape))
    decoder = {"decoder_num_hidden_layers": arm.decoder_layers, "mask_token_id": text.tokenizer.mask_token_id}
    return MaeLmForMaskedLM(MaeLmConfig(**shape, **decoder, relative_position_buckets=arm.buckets))


def our_batches(arm: Arm, setting: Setting, text: Text, config: Any) -> list[Batch]:
    """The first batches of a run: blocks of like lengths, their masks. Stock models get the same, less the indices."""
    recipe = setting.recipe(arm.mask_ratio)
    collator = DataCollatorForMaeLm(text.tokenizer, arm.mask_ratio, seed=0)
    steps = IndexedSteps(recipe, text.training, collator, rank=0, world_size=1, micro_batch_tokens=2**30)
    batches = []
    for step in islice(steps.steps(Cursor(), num_workers=0, pin=False), setting.batches):
        (inputs,) = step.micro_batches
        operations = 0.0
        if arm.model == "maelm":
            lengths, hidden = inputs["attention_mask"].sum(1).tolist(), (inputs["labels"] != -100).sum(1).tolist()
            operations = sum(
                forward_flops(config, Row(length, count)).training
                for length, count in zip(lengths, hidden, strict=True)
            )
        else:
            inputs = {name: inputs[name] for name in ("input_ids", "attention_mask", "labels")}
        batches.append(Batch(inputs, step.tokens, operations))
    return batches


def stock_batches(arm: Arm, setting: Setting, text: Text) -> list[Batch]:
    """What the stock collator makes of as many blocks in random order."""
    collator = DataCollatorForLanguageModeling(text.tokenizer, mlm_probability=arm.mask_ratio)
    torch.manual_seed(0)
    blocks = text.training
    rows = max(1, round(setting.batch_tokens / float(np.mean(blocks.lengths))))
    order = np.random.default_rng(0).permutation(len(blocks))[: rows * setting.batches]
    batches = []
    for part in order.reshape(setting.batches, rows):
        inputs = dict(collator([{"input_ids": block.tolist()} for block in blocks.input_ids(part)]))
        batches.append(Batch(inputs, int(blocks.lengths[part].sum())))
    return batches


class Trainee:
    """A model in training."""

    def __init__(self, arm: Arm, setting: Setting):
        text = prepare_text(setting.recipe(arm.mask_ratio), say=lambda line: None)
        self.device = torch.device(setting.device)
        self.model = build(arm, setting, text).to(self.device).train()
        batches = (
            stock_batches(arm, setting, text)
            if arm.stock_collator
            else our_batches(arm, setting, text, self.model.config)
        )
        self.batches = [
            replace(batch, inputs={name: value.to(self.device) for name, value in batch.inputs.items()})
            for batch in batches
        ]
        self.autocast: Callable[[], AbstractContextManager] = autocast_of("bf16", self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        kernel, self.reason = choose_attention(self.model, [self.batches[0].inputs], "bf16")
        self.model.set_attn_implementation(kernel)
        self.kernel = kernel

    def step(self, number: int) -> float:
        """Seconds of forward, backward, clipping and update on a batch."""
        self.wait()
        start = time.perf_counter()
        with self.autocast():
            loss = self.model(**self.batches[number].inputs).loss
        loss.backward()
        self.update()
        self.wait()
        return time.perf_counter() - start

    def update(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 2.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def parts(self, number: int) -> dict[str, float]:
        """Seconds of each part of MAE-LM, forward and backward, on a batch; each module run again on its own inputs."""
        model, inputs = self.model, self.batches[number].inputs
        modules = {
            "embedding": [model.encoder.embeddings],
            "encoder layers": [*model.encoder.layers],
            "decoder layers": [*model.decoder.layers],
            "head and loss": [model.lm_head],
        }
        calls: dict[torch.nn.Module, tuple[tuple, dict]] = {}

        def record(module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
            calls[module] = tuple(_leaf(value) for value in args), {key: _leaf(value) for key, value in kwargs.items()}

        hooks = [
            module.register_forward_pre_hook(record, with_kwargs=True) for part in modules.values() for module in part
        ]
        with self.autocast(), torch.no_grad():
            model(**inputs)
        for hook in hooks:
            hook.remove()
        seconds = {}
        for name, part in modules.items():
            self.wait()
            start = time.perf_counter()
            for module in part:
                args, kwargs = calls[module]
                with self.autocast():
                    output = module(*args, **kwargs)
                    if module is model.lm_head:
                        output = cross_entropy(output, output.new_zeros(len(output), dtype=torch.long), 1)
                output.backward(torch.ones_like(output))
            self.wait()
            seconds[name] = time.perf_counter() - start
        start = time.perf_counter()
        self.update()
        self.wait()
        seconds["optimizer"] = time.perf_counter() - start
        return seconds


def _leaf(value: Any) -> Any:
    """A tensor of numbers as the start of a graph of its own."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach().requires_grad_()
    return value


def serve(connection: Connection, arm: Arm, setting: Setting) -> None:
    """The arm's process: tells its kernel and its batches, then answers what the benchmark asks for."""
    if arm.keeps_memory:
        keep_freed_memory()
    trainee = Trainee(arm, setting)
    facts = [(batch.tokens, batch.operations, batch.inputs["input_ids"].numel()) for batch in trainee.batches]
    connection.send((trainee.kernel, trainee.reason, facts))
    while (request := connection.recv()) is not None:
        what, number = request
        connection.send(trainee.step(number) if what == "step" else trainee.parts(number))
