"""Estimates against what really happens: torch's counter of operations, saved tensors, peak memory, files."""

import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from pretraining_helpers import ROOT
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from maelm_hf import MaeLmConfig, MaeLmForMaskedLM
from training import estimate as estimates
from training import pretrain
from training.estimate import DEVICES, Device, estimate, measured_device
from training.flops import Row, forward_flops, muon_flops
from training.memory import (
    Arithmetic,
    activation_bytes,
    checkpoint_bytes,
    count_parameters,
    ddp_memory,
    ddp_traffic,
)
from training.optimizers import build_optimizers, optimizer_tensors
from training.recipe import OptimizerSection, load_recipe, recipe_from_dict

RECIPES = sorted((ROOT / "training" / "recipes").glob("*.yaml"))
MASK, ROWS, LENGTH, HIDDEN = 4, 3, 40, 9

CONFIGS = {
    "MAE-LM": {},
    "no bias, one decoder layer": {"relative_position_buckets": 0, "decoder_num_hidden_layers": 1},
    "narrow decoder": {
        "decoder_hidden_size": 16,
        "decoder_num_attention_heads": 2,
        "decoder_intermediate_size": 48,
        "decoder_num_hidden_layers": 3,
    },
    "MLM": {"encoder_mask_fraction": 1.0, "decoder_num_hidden_layers": 0},
    "[MASK] everywhere and a decoder": {"encoder_mask_fraction": 1.0, "relative_position_buckets": 0},
}


def model_of(**settings) -> MaeLmForMaskedLM:
    torch.manual_seed(0)
    config = {
        "vocab_size": 211,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 80,
        "max_position_embeddings": 64,
        "relative_position_buckets": 8,
        "relative_position_max_distance": 16,
        "decoder_num_hidden_layers": 2,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "mask_token_id": MASK,
    }
    return MaeLmForMaskedLM(MaeLmConfig(**config | settings)).train()


def batch_of(rows: int = ROWS, length: int = LENGTH, hidden: int = HIDDEN, vocabulary: int = 211):
    """As many hidden tokens in every row."""
    ids = torch.randint(5, vocabulary, (rows, length))
    at = torch.rand(rows, length).argsort(1) < hidden
    return {"input_ids": ids.masked_fill(at, MASK), "labels": ids.masked_fill(~at, -100)}


# Operations


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@pytest.mark.parametrize("settings", CONFIGS.values(), ids=CONFIGS.keys())
def test_operations_are_those_that_torch_counts(settings, kernel):
    model = model_of(**settings)
    model.set_attn_implementation(kernel)
    with sdpa_kernel(SDPBackend.MATH):  # torch's counter does not know the fused kernels of a CPU
        with FlopCounterMode(display=False) as forward:
            loss = model(**batch_of()).loss
        with FlopCounterMode(display=False) as backward:
            loss.backward()
    flops = forward_flops(model.config, Row(LENGTH, HIDDEN))
    assert forward.get_total_flops() == ROWS * flops.forward
    assert forward.get_total_flops() + backward.get_total_flops() == ROWS * flops.training


def test_each_part_has_its_operations():
    model = model_of(decoder_hidden_size=16, decoder_num_attention_heads=2)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(**batch_of())
    counted = {name: sum(count.values()) for name, count in counter.get_flop_counts().items()}
    flops = forward_flops(model.config, Row(LENGTH, HIDDEN))
    assert counted["MaeLmForMaskedLM.encoder"] == ROWS * flops.encoder
    assert counted["MaeLmForMaskedLM.lm_head"] == ROWS * flops.head


def test_some_masks_in_the_encoder():
    model = model_of(encoder_mask_fraction=0.5)
    batch = batch_of(rows=1)
    positions = torch.arange(LENGTH)[None]
    dropped = model.encoder.dropped_masks(batch["input_ids"], None, positions, None).sum().item()
    assert 0 < dropped < HIDDEN
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(**batch)
    model.config.encoder_mask_fraction = 1 - dropped / HIDDEN  # what this row's hashes came to
    assert counter.get_total_flops() == pytest.approx(forward_flops(model.config, Row(LENGTH, HIDDEN)).forward)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon came with torch 2.9")
def test_operations_of_muon():
    matrices = [nn.Parameter(torch.randn(shape)) for shape in ((24, 24), (24, 96), (80, 24))]
    for matrix in matrices:
        matrix.grad = torch.randn_like(matrix)
    with FlopCounterMode(display=False) as counter:
        torch.optim.Muon(matrices).step()
    assert counter.get_total_flops() == muon_flops([tuple(matrix.shape) for matrix in matrices])


# Memory


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(
    "settings",
    [{"relative_position_buckets": 0}, {"relative_position_buckets": 0, **CONFIGS["narrow decoder"]}, CONFIGS["MLM"]],
    ids=["MAE-LM", "narrow decoder", "MLM"],
)
def test_activations_are_the_tensors_saved_for_backward(settings, dropout, autocast):
    settings = settings | {"hidden_dropout_prob": dropout, "decoder_dropout_prob": 0.0, "relative_position_buckets": 0}
    model = model_of(hidden_size=128, intermediate_size=512, vocab_size=900, **settings)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    precision = torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), precision:
        model(**batch_of(vocabulary=900))
    total = sum(tensor.untyped_storage().nbytes() for at, tensor in saved.items() if at not in parameters)

    arithmetic = Arithmetic(autocast=autocast, scores_kept=False, on_cpu=True)
    expected = ROWS * activation_bytes(model.config, Row(LENGTH, HIDDEN), arithmetic, activation_checkpointing=False)
    # The estimate is of the peak: with the gradient of the logits, which exists only in the backward pass.
    expected -= ROWS * HIDDEN * 900 * (2 if autocast else 4)
    if autocast:
        expected += 2 * count_parameters(model, OptimizerSection()).cast
    assert total == pytest.approx(expected, rel=0.05)


PEAK = """
import json, sys, torch
from maelm_hf import MaeLmConfig, MaeLmForMaskedLM
from maelm_hf.memory import keep_freed_memory
from training.optimizers import build_optimizers
from training.recipe import OptimizerSection

torch.set_num_threads(1)
torch.manual_seed(0)
keep_freed_memory()  # as a run on a CPU does

def train(rows, length, hidden, kernel, autocast, **settings):
    model = MaeLmForMaskedLM(MaeLmConfig(mask_token_id=4, **settings)).train()
    model.set_attn_implementation(kernel)
    optimizers = build_optimizers(model, OptimizerSection())
    for micro_batches in ([1], [rows, rows]):  # the first step makes the optimizer's state
        for rows in micro_batches:
            ids = torch.randint(5, settings["vocab_size"], (rows, length))
            at = torch.rand(rows, length).argsort(1) < hidden
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(input_ids=ids.masked_fill(at, 4), labels=ids.masked_fill(~at, -100)).loss
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

def resident(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field)) * 1024

job = json.loads(sys.argv[1])
small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
train(2, 16, 3, job["kernel"], job["autocast"], vocab_size=50, decoder_num_hidden_layers=1, **small)
before = resident("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # the peak counts from here
train(**job)
print(resident("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="resident memory is read as Linux gives it")
@pytest.mark.parametrize(
    ("kernel", "autocast", "settings"),
    [
        ("sdpa", False, {"relative_position_buckets": 0, "hidden_dropout_prob": 0.0}),
        ("eager", True, {"relative_position_buckets": 64, "hidden_dropout_prob": 0.1}),
    ],
    ids=["fp32, sdpa", "bf16, eager, bias, dropout"],
)
def test_memory_is_that_of_a_run(kernel, autocast, settings):
    rows, length, hidden = 24, 128, 19
    settings = settings | {
        "vocab_size": 4096,
        "hidden_size": 256,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "intermediate_size": 1024,
        "max_position_embeddings": length,
        "decoder_num_hidden_layers": 2,
        "attention_probs_dropout_prob": settings["hidden_dropout_prob"],
    }
    job = settings | {"rows": rows, "length": length, "hidden": hidden, "kernel": kernel, "autocast": autocast}
    done = subprocess.run([sys.executable, "-c", PEAK, json.dumps(job)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with torch.device("meta"):
        model = MaeLmForMaskedLM(MaeLmConfig(mask_token_id=MASK, **settings))
    arithmetic = Arithmetic(autocast=autocast, scores_kept=kernel == "eager", on_cpu=True)
    activations = rows * activation_bytes(model.config, Row(length, hidden), arithmetic, False)
    memory = ddp_memory(count_parameters(model, OptimizerSection()), arithmetic, 1, activations)
    assert memory.total == pytest.approx(int(done.stdout), rel=0.2)


def test_checkpointing_keeps_layers_inputs_alone():
    config, arithmetic = model_of(num_hidden_layers=8).config, Arithmetic(autocast=False, scores_kept=True)
    row = Row(LENGTH, HIDDEN)
    whole, checkpointed = (activation_bytes(config, row, arithmetic, flag) for flag in (False, True))
    assert checkpointed < 0.4 * whole


@pytest.mark.parametrize("settings", [*CONFIGS.values(), {"tie_word_embeddings": False}])
def test_every_parameter_is_counted_once(settings):
    model = model_of(**settings)
    with torch.device("meta"):
        weightless = MaeLmForMaskedLM(model.config)
    assert count_parameters(weightless, OptimizerSection()).total == model.num_parameters()


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_checkpoints_are_as_large_as_said(name):
    model, section = model_of(hidden_size=64), OptimizerSection(name=name)
    optimizers = build_optimizers(model, section)
    model(**batch_of()).loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    written = sum(tensor.nbytes for tensor in optimizer_tensors(model, optimizers).values())
    written += sum(parameter.nbytes for parameter in model.parameters())
    # But for AdamW's step counts, a number for each parameter.
    assert checkpoint_bytes(count_parameters(model, section)) == pytest.approx(written, rel=0.005)


# Network


@pytest.mark.parametrize("processes", [2, 5])
def test_traffic_is_that_of_a_ring(processes):
    parameters = count_parameters(model_of(), OptimizerSection())
    size = 4 * parameters.total
    # One way round a ring, every process hands on a share (processes - 1) times.
    round_trip = sum(size / processes for _ in range(processes - 1))
    assert ddp_traffic(parameters, processes) == pytest.approx(2 * round_trip)
    assert ddp_traffic(parameters, 1) == 0  # FSDP2's is counted in test_pretrain_sharded.py


# A recipe


def small_recipe(**changes):
    values = {
        "output_dir": "runs/none",
        "max_steps": 50,
        "precision": "bf16",
        "model": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128},
        "tokenizer": {"vocab_size": 1000},
        "data": {"max_length": 64, "batch_size": 32, "micro_batch_size": 4},
    }
    return recipe_from_dict(values | changes)


def test_hours_are_operations_over_operations_a_second():
    device = Device("a toy", half=1e9, full=1e8, memory=1e9)
    found = estimate(small_recipe(), device, processes=2, utilisation=0.5)
    tokens = 50 * 32 * 64
    assert found.tokens == tokens
    assert found.hours == pytest.approx(tokens * found.executed / (2 * 1e9 * 0.5) / 3600)
    assert (found.rows, found.micro_batches) == (4, 4)
    slower = estimate(small_recipe(precision="fp32"), device, processes=2, utilisation=0.5)
    assert slower.hours == pytest.approx(10 * found.hours)
    recomputed = estimate(small_recipe(activation_checkpointing=True), device, processes=2, utilisation=0.5)
    layers = found.flops.encoder + found.flops.decoder
    assert recomputed.executed == pytest.approx(found.executed + layers)


def test_muon_adds_its_operations():
    device, muon = DEVICES["h100"], {"name": "muon"}
    found, plain = (
        estimate(small_recipe(**changes), device, processes=8, utilisation=0.4) for changes in ({"optimizer": muon}, {})
    )
    assert found.step_seconds > plain.step_seconds
    assert found.ddp.optimizer < plain.ddp.optimizer


def test_more_processes_than_rows_are_refused():
    with pytest.raises(ValueError, match="32 rows of 64 tokens for 33 devices"):
        estimate(small_recipe(), DEVICES["h100"], processes=33, utilisation=0.4)


def test_this_machine_can_be_measured():
    device = measured_device()
    assert device.half > 1e6
    assert device.full > 1e6
    assert device.memory > 1e8


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_and_its_twin_can_be_estimated(path):
    found = estimate(load_recipe(path), DEVICES["h100"], processes=1, utilisation=0.4)
    twin = estimate(load_recipe(path, ["--twin", "mlm"]), DEVICES["h100"], processes=1, utilisation=0.4)
    assert found.flops.decoder > 0
    assert twin.flops.decoder == 0
    assert twin.config.encoder_mask_fraction == 1
    assert twin.parameters.total == found.parameters.total - found.parameters.decoder
    assert found.mlm_training == pytest.approx(twin.flops.training)
    assert found.tokens == twin.tokens


def test_nothing_is_read_or_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arguments = ["--estimate", "--cache_dir", "cache", "--corpus.source", "nowhere"]
    arguments += ["--devices", "2", "16", "--device", "a100"]
    assert pretrain.main([str(ROOT / "training" / "recipes" / "base.yaml"), *arguments]) == 0
    printed = capsys.readouterr().out
    assert "base, 2 devices" in printed
    assert "base, 16 devices" in printed
    assert "A100" in printed
    assert not list(tmp_path.iterdir())


def test_markdown_has_a_column_for_each_recipe_and_number(capsys):
    paths = [str(ROOT / "training" / "recipes" / f"{name}.yaml") for name in ("base", "mini")]
    assert estimates.main([*paths, "--devices", "1", "8", "--markdown", "--max_steps", "20000"]) == 0
    header, rule, *rows = capsys.readouterr().out.splitlines()
    assert header == "|  | base, 1 device | base, 8 devices | mini, 1 device | mini, 8 devices |"
    assert rule == "| --- | --- | --- | --- | --- |"
    assert "| steps | 20,000 | 20,000 | 20,000 | 20,000 |" in rows


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "abacus"], "'h100'"),
        (["--devices", "0"], "at least 1"),
        (["--utilisation", "40"], "at most 1"),
    ],
)
def test_unknown_values_are_refused(arguments, said, capsys):
    with pytest.raises(SystemExit):
        pretrain.main([str(ROOT / "training" / "recipes" / "mini.yaml"), "--estimate", *arguments])
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--max_step", "4000"], "did you mean max_steps"),
        (["--tokenizer.path", "nobody/nothing"], "an estimate downloads nothing"),
    ],
)
def test_recipes_that_cannot_be_estimated_are_refused_in_a_line(arguments, said, capsys):
    assert pretrain.main([str(ROOT / "training" / "recipes" / "mini.yaml"), "--estimate", *arguments]) == 1
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
