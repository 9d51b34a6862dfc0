# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Probes for any torch model: is it wasting dimensions, are its heads all looking at the same place?

Names are imported when they are first used, so importing this package stays cheap.
"""

import importlib
from typing import Any

_HOMES = {
    "RankProbeCallback": "callback",
    "RankReport": "rank_report",
    "Report": "report",
    "RepresentationMoments": "rank",
    "TrainingProbe": "callback",
    "capture_hidden_states": "capture",
    "compare": "report",
    "effective_rank": "spectrum",
    "entropy_effective_rank": "spectrum",
    "participation_ratio": "spectrum",
    "probe_rank": "probe",
    "stable_rank": "spectrum",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
