# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""The C library's memory, on a CPU: kept from step to step instead of given back and asked for again."""

import ctypes
import platform

# Of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_TOP_PAD = 64 * 2**20


def keep_freed_memory() -> bool:
    """
    Lets the process keep the memory that tensors free, for the tensors that follow; returns whether it could.

    By default glibc gives every large block back to the system, and the next step's tensors are paged in anew, zeroed
    4 KiB at a time: a large part of a training step on a CPU, of a vocabulary's logits above all. From this call on,
    nothing is given back before the process ends: it holds on to its peak, and, where sizes change from step to step,
    to more than that. It changes no number. Only glibc (Linux) has the setting: elsewhere the call does nothing and
    returns False.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1), (_M_TOP_PAD, _TOP_PAD))
    return all(mallopt(name, value) == 1 for name, value in settings)
