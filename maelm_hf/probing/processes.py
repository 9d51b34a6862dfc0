# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""What the processes of a run agree on before they sum: one of them may have got no batch, and so know no layer."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def from_every_process(value: T) -> list[T]:
    """The small object that each process gives, in order of rank; without ``torch.distributed`` this one's alone."""
    if not dist.is_initialized():
        return [value]
    found: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def all_notes(notes: Iterable[str]) -> list[str]:
    """Every note that a process made, once."""
    return list(dict.fromkeys(chain.from_iterable(from_every_process(list(notes)))))
