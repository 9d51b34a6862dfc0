# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""The CPU time of an optimizer step, for comparisons at equal compute: of one run, whatever else the machine does."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from . import pretrain
from .recipe import Recipe

_TIMED = (10, 40)  # steps of the two runs whose difference is the time of a step


def cpu_seconds_a_step(recipe_of: Callable[[int, Path], Recipe], folder: Path) -> float:
    """Processor seconds of one step, all threads together: two short runs less what they have in common.

    Args:
        recipe_of: (steps, output folder) -> the run; it should neither evaluate nor probe.
        folder: for what the two runs leave.
    """
    used = []
    for steps in (1, *_TIMED):  # the first prepares the text, and is left out
        recipe = recipe_of(steps, folder / f"{steps}-{time.time_ns()}")  # never a folder that is finished
        started = time.process_time()
        pretrain.run(recipe)
        used.append(time.process_time() - started)
    seconds = (used[2] - used[1]) / (_TIMED[1] - _TIMED[0])
    if seconds <= 0:
        raise RuntimeError(
            f"{_TIMED[1]} steps took {used[2]:.1f} s and {_TIMED[0]} steps {used[1]:.1f} s: time them again"
        )
    return seconds
