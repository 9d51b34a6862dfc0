"""The files for `accelerate launch`: read as they are meant, on one machine and on several."""

import importlib.util

import pytest
from accelerate.commands.config import config_args
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from pretraining_helpers import ROOT

FOLDER = ROOT / "training" / "accelerate"
KINDS = {"cpu": "NO", "ddp": "MULTI_GPU", "fsdp2": "FSDP", "deepspeed_zero2": "DEEPSPEED"}


def launched(name: str, *options: str):
    """What the launcher makes of a file and options, before it starts anything."""
    arguments = ["--config_file", str(FOLDER / f"{name}.yaml"), *options, "-m", "training.pretrain", "recipe.yaml"]
    return _validate_launch_command(launch_command_parser().parse_args(arguments))[0]


def test_every_file_is_tested():
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(KINDS)


@pytest.mark.parametrize("name", KINDS)
def test_a_file_means_what_its_name_says(name):
    if name == "deepspeed_zero2" and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed, and the launcher asks for it first")
    arguments = launched(name)
    assert config_args.load_config_from_file(str(FOLDER / f"{name}.yaml")).distributed_type == KINDS[name]
    assert bool(arguments.multi_gpu) == (name == "ddp")
    assert bool(arguments.cpu or arguments.use_cpu) == (name == "cpu")
    assert arguments.use_fsdp == (name == "fsdp2")
    assert arguments.use_deepspeed == (name == "deepspeed_zero2")
    assert arguments.mixed_precision == "no"  # the recipe decides
    if name == "fsdp2":
        assert str(arguments.fsdp_version) == "2"
        assert arguments.fsdp_transformer_layer_cls_to_wrap == "MaeLmLayer"
    if name == "deepspeed_zero2":
        assert (arguments.zero_stage, arguments.gradient_accumulation_steps) == (2, 1)


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_options_make_it_one_of_several_machines(name):
    address = ("--main_process_ip", "10.0.0.1", "--main_process_port", "29500")
    arguments = launched(name, "--num_machines", "2", "--machine_rank", "1", *address, "--num_processes", "16")
    assert (arguments.num_machines, arguments.machine_rank, arguments.num_processes) == (2, 1, 16)
    assert (arguments.main_process_ip, arguments.main_process_port) == ("10.0.0.1", 29500)
