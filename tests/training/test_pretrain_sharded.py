"""Sharded by FSDP2 in two processes: what one process computes, and optimizer state that survives."""

import os
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
import torch.multiprocessing
import yaml
from accelerate import FullyShardedDataParallelPlugin
from accelerate.utils import fsdp2_prepare_model
from pretraining_helpers import ROOT
from torch import distributed
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from maelm_hf import MaeLmConfig, MaeLmForMaskedLM
from training.memory import count_parameters, fsdp_traffic
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


def shard_by_hand(model: MaeLmForMaskedLM, mesh) -> MaeLmForMaskedLM:
    """Layers and root as units."""
    for layer in [*model.encoder.layers, *model.decoder.layers]:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def shard_by_accelerate(model: MaeLmForMaskedLM, mesh) -> MaeLmForMaskedLM:
    """As training/accelerate/fsdp2.yaml has it done; Accelerator itself wants GPUs for it."""
    settings = yaml.safe_load((ROOT / "training" / "accelerate" / "fsdp2.yaml").read_text())["fsdp_config"]
    names = {"fsdp_transformer_layer_cls_to_wrap": "FSDP_TRANSFORMER_CLS_TO_WRAP"}  # as accelerate launch hands them on
    os.environ |= {names.get(key, key.upper()): str(value) for key, value in settings.items()}
    state = SimpleNamespace(fsdp_plugin=FullyShardedDataParallelPlugin())
    accelerator = SimpleNamespace(
        state=state,
        torch_device_mesh={("dp",): mesh},
        parallelism_config=SimpleNamespace(fsdp_dim_names=("dp",)),
        mixed_precision="no",
        device=torch.device("cpu"),
        is_main_process=True,
    )
    return fsdp2_prepare_model(accelerator, model)


SHARD = {"by hand": shard_by_hand, "by Accelerate": shard_by_accelerate}


def facts(model: MaeLmForMaskedLM) -> dict:
    """What must hold of a sharded model at any time."""
    layers = [*model.encoder.layers, *model.decoder.layers]
    return {
        "tied": model.lm_head.output.weight is model.encoder.get_input_embeddings().weight,
        "layers and root are units": all(isinstance(module, FSDPModule) for module in [*layers, model]),
        "all parameters are shared out": all(isinstance(parameter, DTensor) for parameter in model.parameters()),
    }


class Traffic:
    """Bytes that this process has to send to the other one: its part of what is gathered, the other's of the rest."""

    def __init__(self):
        self.bytes = 0
        for name in ("all_gather_single", "reduce_scatter_single", "all_gather_into_tensor", "reduce_scatter_tensor"):
            if hasattr(distributed, name):  # their names before and from torch 2.13 on
                setattr(distributed, name, self.counting(getattr(distributed, name)))

    def counting(self, collective):
        def counted(*args, **kwargs):
            self.bytes += min(value.nbytes for value in (*args, *kwargs.values()) if torch.is_tensor(value))
            return collective(*args, **kwargs)

        return counted


def one_process(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"tcp://localhost:{port}", rank=rank, world_size=2)
    mesh, traffic = init_device_mesh("cpu", (2,)), Traffic()
    for how in SHARD:
        found = train_sharded(rank, mesh, SHARD[how], traffic)
        if rank == 0:
            torch.save(found, Path(folder, how))
    distributed.destroy_process_group()


def train_sharded(rank: int, mesh, shard, traffic: Traffic) -> dict:
    section = OptimizerSection(learning_rate=0.01)
    model = shard(new_model(), mesh)
    before = facts(model)
    optimizers = build_optimizers(model, section)
    traffic.bytes = 0
    gradients = train(model, optimizers, [0], rank)
    sent = traffic.bytes
    gradients += train(model, optimizers, range(1, STEPS), rank)
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
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=True)
    gathered = get_model_state_dict(model, options=options)  # as a checkpoint is made of a sharded model
    found = {"facts": [before, facts(model)], "gradients": gradients, "state": state, "after": after, "again": again}
    return found | {"gathered": gathered, "sent": sent}


def write_model(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """As a run writes its checkpoints."""
    from training.pretrain import Pretraining  # the sharded processes need not wait for all that it imports
    from training.tokenizer import train_tokenizer

    tokenizer = train_tokenizer(iter([["some words to begin with"]]), 300, 32)
    run = SimpleNamespace(_unwrapped=new_model, text=SimpleNamespace(tokenizer_as_loaded=tokenizer))
    Pretraining._write_model(run, folder, weights)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """What two processes found, sharded in either way."""
    path = tmp_path_factory.mktemp("sharded")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(one_process, (port, str(path)), nprocs=2)
    return path


@pytest.mark.skipif(sys.platform == "win32", reason="gloo over localhost is not tried on Windows")
@pytest.mark.parametrize("how", SHARD)
def test_two_sharded_processes_are_one(folder: Path, tmp_path: Path, how: str):
    sharded = torch.load(folder / how, weights_only=True)

    model = new_model()
    optimizers = build_optimizers(model, OptimizerSection(learning_rate=0.01))
    gradients = train(model, optimizers, range(STEPS))
    for found in sharded["facts"]:
        assert all(found.values()), found
    for expected, got in zip(gradients, sharded["gradients"], strict=True):
        assert expected.keys() == got.keys()
        for name in expected:
            torch.testing.assert_close(got[name], expected[name], rtol=1e-4, atol=1e-6)
    assert sharded["sent"] == fsdp_traffic(count_parameters(model, OptimizerSection()), 2, micro_batches=1)
    state = optimizer_tensors(model, optimizers)
    assert state.keys() == sharded["state"].keys()
    for name in state:
        torch.testing.assert_close(sharded["state"][name], state[name], rtol=1e-3, atol=1e-6)
    for name, tensor in sharded["after"].items():
        assert torch.equal(tensor, sharded["again"][name])

    write_model(tmp_path / "model", sharded["gathered"])
    written = safetensors.torch.load_file(tmp_path / "model" / "model.safetensors")
    assert written.keys() == sharded["after"].keys()  # the tied matrix once
    reloaded = MaeLmForMaskedLM.from_pretrained(tmp_path / "model")
    assert reloaded.lm_head.output.weight is reloaded.encoder.get_input_embeddings().weight
    for name, parameter in reloaded.named_parameters():
        assert torch.equal(parameter, sharded["after"][name])
