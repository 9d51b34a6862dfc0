"""Sharded by FSDP2 in two processes: what one process computes, and optimizer state that survives."""

import socket
import sys
from pathlib import Path

import pytest
import torch
import torch.multiprocessing
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from maelm_hf import MaeLmConfig, MaeLmForMaskedLM
from training.optimizers import build_optimizers, load_optimizer_tensors, optimizer_tensors
from training.recipe import OptimizerSection

STEPS = 3


def new_model() -> MaeLmForMaskedLM:
    torch.manual_seed(0)
    config = MaeLmConfig(
        vocab_size=60,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        decoder_num_hidden_layers=1,
        relative_position_buckets=8,
        relative_position_max_distance=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        mask_token_id=4,
    )
    return MaeLmForMaskedLM(config)


def batch(step: int) -> dict[str, torch.Tensor]:
    """Four rows with a quarter of the tokens hidden."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(5, 60, (4, 12), generator=generator)
    hidden = torch.rand(ids.shape, generator=generator) < 0.25
    return {"input_ids": ids.masked_fill(hidden, 4), "labels": ids.masked_fill(~hidden, -100)}


def train(model, optimizers, steps, rank=None) -> list[dict[str, torch.Tensor]]:
    """Gradients of every step, gathered; ``rank`` takes two of the four rows."""
    gradients = []
    for step in steps:
        inputs = batch(step)
        hidden = (inputs["labels"] != -100).sum()
        if rank is not None:
            inputs = {name: tensor[2 * rank : 2 * rank + 2] for name, tensor in inputs.items()}
            hidden = hidden / 2  # FSDP averages over the processes
        model.train()(**inputs, num_items_in_batch=hidden).loss.backward()
        gradients.append({name: whole(parameter.grad) for name, parameter in model.named_parameters()})
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return gradients


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def shard(model: MaeLmForMaskedLM, mesh) -> MaeLmForMaskedLM:
    for layer in [*model.encoder.layers, *model.decoder.layers]:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def one_process(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"tcp://localhost:{port}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    section = OptimizerSection(learning_rate=0.01)
    model = shard(new_model(), mesh)
    tied = model.lm_head.output.weight is model.encoder.get_input_embeddings().weight
    optimizers = build_optimizers(model, section)
    gradients = train(model, optimizers, range(STEPS), rank)
    state = optimizer_tensors(model, optimizers)
    weights = {name: whole(parameter) for name, parameter in model.named_parameters()}

    # A second run from the state: the same next step.
    restored = new_model()
    restored.load_state_dict(weights, strict=False)
    restored = shard(restored, mesh)
    others = build_optimizers(restored, section)
    load_optimizer_tensors(restored, others, state)
    train(model, optimizers, [STEPS], rank)
    train(restored, others, [STEPS], rank)
    after, again = (
        {name: whole(parameter) for name, parameter in part.named_parameters()} for part in (model, restored)
    )
    if rank == 0:
        torch.save(
            {"tied": tied, "gradients": gradients, "state": state, "after": after, "again": again}, f"{folder}/0"
        )
    distributed.destroy_process_group()


@pytest.mark.skipif(sys.platform == "win32", reason="gloo over localhost is not tried on Windows")
def test_two_sharded_processes_are_one(tmp_path: Path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(one_process, (port, str(tmp_path)), nprocs=2)
    sharded = torch.load(tmp_path / "0", weights_only=True)

    model = new_model()
    optimizers = build_optimizers(model, OptimizerSection(learning_rate=0.01))
    gradients = train(model, optimizers, range(STEPS))
    assert sharded["tied"]
    for expected, got in zip(gradients, sharded["gradients"], strict=True):
        assert expected.keys() == got.keys()
        for name in expected:
            torch.testing.assert_close(got[name], expected[name], rtol=1e-4, atol=1e-6)
    state = optimizer_tensors(model, optimizers)
    assert state.keys() == sharded["state"].keys()
    for name in state:
        torch.testing.assert_close(sharded["state"][name], state[name], rtol=1e-3, atol=1e-6)
    for name, tensor in sharded["after"].items():
        assert torch.equal(tensor, sharded["again"][name])
