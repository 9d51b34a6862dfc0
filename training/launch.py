# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""What ``accelerate launch`` leaves undone: several processes on a CPU, and SIGTERM.

On a CPU, Accelerate (1.15) leaves several processes to MPI and starts a single one in silence. That one starts all of
them here, through torchrun; on GPUs and under torchrun or MPI nothing is done.

Where Accelerate starts one process, SIGTERM ends the launcher alone, and what it started trains on, seen by nobody. So
that process asks the kernel for a SIGTERM at its parent's end (on Linux). Several processes on GPUs are under torchrun,
which passes SIGTERM on.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Mapping, Sequence

import psutil
from accelerate.commands.config import config_args
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from .recipe import RecipeError


def asked_for_processes(environment: Mapping[str, str], launcher: Sequence[str]) -> int:
    """How many processes ``accelerate launch`` was asked for and did not start; 0 if none are missing.

    Args:
        environment: of this process.
        launcher: the command line of the process that started it.

    Raises:
        RecipeError: several processes were asked for that cannot be started here.
    """
    on_cpu = environment.get("ACCELERATE_USE_CPU", "false").lower() in ("true", "1")
    # Accelerate announces an address only where it was asked for more than one process.
    if not on_cpu or "MASTER_ADDR" not in environment:
        return 0
    if any(name in environment for name in ("LOCAL_RANK", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")):
        return 0
    if not any("accelerate" in word for word in launcher):
        return 0
    settings = _settings(launcher)
    if int(settings.get("num_machines") or 1) > 1:
        raise RecipeError("accelerate launch starts no processes on the CPUs of several machines: use torchrun.")
    if settings.get("num_processes") is None:
        raise RecipeError("accelerate launch asks for several CPU processes, how many is not said: --num_processes N.")
    return int(settings["num_processes"])


def check_processes(environment: Mapping[str, str], together: int) -> None:
    """Refuses processes that a launcher started to work together and that do not know of each other.

    Each would train by itself, and all write into one folder.

    Args:
        environment: of this process.
        together: how many processes Accelerate sees.

    Raises:
        RecipeError: they are fewer than were started.
    """
    started = int(environment.get("WORLD_SIZE", "1"))
    if started > together:
        raise RecipeError(
            f"{started} processes were started, and Accelerate sees {together}: start them by accelerate launch with "
            "a configuration for this machine (training/accelerate/)."
        )


def _settings(launcher: Sequence[str]) -> dict[str, str | int | None]:
    """The launcher's numbers of processes and machines: its options, then its configuration file, as Accelerate."""
    options = {}
    for word, following in zip(launcher, [*launcher[1:], ""], strict=True):
        option, _, value = word.partition("=")
        if option.startswith("--"):
            options.setdefault(option[2:].replace("-", "_"), value or following)
    path = options.get("config_file")
    if path is None and "cpu" not in options and os.path.isfile(config_args.default_config_file):
        path = config_args.default_config_file
    stored = vars(config_args.load_config_from_file(path)) if path else {}
    return {name: options.get(name, stored.get(name)) for name in ("num_processes", "num_machines")}


def start_missing_processes(arguments: Sequence[str]) -> int | None:
    """Starts them with the same arguments; returns their exit status, or None if this process is to go on by itself."""
    parent = psutil.Process().parent()
    launcher = parent.cmdline() if parent else []
    if any("accelerate" in word for word in launcher) and "LOCAL_RANK" not in os.environ:
        _end_with_parent()
    count = asked_for_processes(os.environ, launcher)
    if count < 2:
        return None
    print(f"accelerate launch starts one process on a CPU: starting the {count} through torchrun")
    port = os.environ.get("MASTER_PORT", "29500")
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "3600")  # seconds they have for a checkpoint after SIGTERM
    try:
        torchrun.main(["--nproc_per_node", str(count), "--master_port", port, "-m", "training.pretrain", *arguments])
    except ChildFailedError:
        return 1  # the processes have said why
    except SignalException:
        pass  # the processes have got it too, saved, and ended
    return 0


def _end_with_parent() -> None:
    """SIGTERM for this process when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
