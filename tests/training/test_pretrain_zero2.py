"""ZeRO-2 by DeepSpeed in two processes: the run that DDP gives, resumed from checkpoints of the common kind.

DeepSpeed is no dependency: where it is not installed, only the refusals are tested.
"""

import importlib.util
import sys

import pytest
import torch
from accelerate.utils import DeepSpeedPlugin, DistributedType
from pretraining_helpers import log_of, start, tiny_recipe, weights_of

from training.recipe import RecipeError, recipe_from_dict
from training.start import check_distribution

# On a CPU, which Accelerate does not expect DeepSpeed to run on, it takes each of the processes for the only one, and
# the loop asks it for DDP.
ALL_PROCESSES = """
import accelerate.state, torch
torch.set_num_threads(1)
torch.accelerator.is_available = lambda: True
begin = accelerate.state.PartialState.__init__
def with_all_processes(self, *args, **kwargs):
    begin(self, *args, **kwargs)
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    self._shared_state.update(num_processes=size, process_index=rank, local_process_index=rank)
accelerate.state.PartialState.__init__ = with_all_processes
save = pretrain.Pretraining.save
def save_if_sharded(self):
    engine = self.model.optimizer  # DeepSpeed's
    assert engine.partition_gradients and engine.optimizer.param_groups[0]["params"][0].numel() < self.parameters
    save(self)
pretrain.Pretraining.save = save_if_sharded
"""
KILL = """
step_of = pretrain.Pretraining.step
def step_or_die(self, step):
    row = step_of(self, step)
    if row["step"] == 13:
        os._exit(9)
    return row
pretrain.Pretraining.step = step_or_die
"""
TWO = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port")


def plugin(**settings) -> DeepSpeedPlugin:
    return DeepSpeedPlugin(**{"zero_stage": 2, "gradient_accumulation_steps": 1} | settings)


@pytest.mark.parametrize(
    ("settings", "changes", "said"),
    [
        ({"zero_stage": 3}, {}, r"stage 3 is not supported: set zero_stage 2, or use FSDP2, .*fsdp2\.yaml"),
        ({"offload_optimizer_device": "cpu"}, {}, "set offload_optimizer_device none"),
        ({}, {"optimizer__name": "muon"}, "muon is two optimizers, and DeepSpeed steps one: use adamw"),
        ({}, {"precision": "fp16"}, "fp16 is not supported with DeepSpeed: use bf16"),
    ],
)
def test_what_deepspeed_would_do_otherwise_is_refused(tmp_path, settings, changes, said):
    recipe = recipe_from_dict(tiny_recipe(tmp_path, **{"optimizer__name": "adamw"} | changes))
    with pytest.raises(RecipeError, match=said):
        check_distribution(recipe, DistributedType.DEEPSPEED, plugin(**settings))


def test_adamw_at_stage_two_is_not_refused(tmp_path):
    recipe = recipe_from_dict(tiny_recipe(tmp_path, optimizer__name="adamw", precision="bf16", probe_every=5))
    check_distribution(recipe, DistributedType.DEEPSPEED, plugin())


@pytest.mark.parametrize("name", ["DEEPSPEED", "FSDP"])
def test_sharding_that_accelerate_leaves_out_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.setenv(f"ACCELERATE_USE_{name}", "true")
    recipe = recipe_from_dict(tiny_recipe(tmp_path, optimizer__name="adamw"))
    for kind in (DistributedType.MULTI_CPU, DistributedType.NO):
        with pytest.raises(RecipeError, match=rf"asks for {name}, which needs several processes on GPUs"):
            check_distribution(recipe, kind)
    check_distribution(recipe, DistributedType[name])


def finish(process) -> int:
    output, _ = process.communicate(timeout=280)
    print(output)
    return process.returncode


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_is_that_of_ddp_and_resumes_exactly(tmp_path, monkeypatch, precision):
    changes = {"optimizer__name": "adamw", "precision": precision, "data__micro_batch_size": 2}  # accumulated, too
    assert finish(start(tiny_recipe(tmp_path, "ddp", **changes), launcher=(*TWO, "29611"))) == 0
    for name, value in {"DS_ACCELERATOR": "cpu", "ACCELERATE_USE_DEEPSPEED": "true"}.items():
        monkeypatch.setenv(name, value)
    whole, killed = (tiny_recipe(tmp_path, name, **changes) for name in ("whole", "killed"))
    assert finish(start(whole, before=ALL_PROCESSES, launcher=(*TWO, "29612"))) == 0
    assert finish(start(killed, before=ALL_PROCESSES + KILL, launcher=(*TWO, "29613"))) != 0
    assert finish(start(killed, before=ALL_PROCESSES, launcher=(*TWO, "29614"))) == 0

    logs = {name: log_of(tmp_path / name) for name in ("ddp", "whole", "killed")}
    weights = {name: weights_of(tmp_path / name) for name in logs}
    assert logs["killed"] == logs["whole"]
    assert all(weights["killed"][name].equal(tensor) for name, tensor in weights["whole"].items())
    # Of gradients in parts the norm is rounded elsewhere.
    for name in ("loss", "grad_norm"):
        expected, found = ([row[name] for row in logs[run]] for run in ("ddp", "whole"))
        assert found == pytest.approx(expected, rel=1e-4 if precision == "fp32" else 1e-2)
    assert [row["batch"] for row in logs["whole"]] == [row["batch"] for row in logs["ddp"]]
    assert weights["ddp"].keys() == weights["whole"].keys()
    for name, tensor in weights["ddp"].items():
        torch.testing.assert_close(weights["whole"][name], tensor, rtol=0, atol=1e-5 if precision == "fp32" else 1e-3)
