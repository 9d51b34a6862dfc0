# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Probes for any torch model: is it wasting dimensions, are its heads all looking at the same place?

Names are imported when they are first used, so importing this package stays cheap.
"""

import importlib
from typing import Any

_HOMES = {
    "AttentionReport": "attention_report",
    "AttentionStatistics": "attention_statistics",
    "RankProbeCallback": "callback",
    "RankReport": "rank_report",
    "Report": "report",
    "RepresentationMoments": "rank",
    "TrainingProbe": "callback",
    "attention_distance": "attention",
    "attention_diversity": "attention",
    "attention_entropy": "attention",
    "attention_head_redundancy": "attention",
    "attention_mutual_information": "attention",
    "attention_pairwise_diversity": "attention",
    "attention_prefix_mass": "attention",
    "attention_rollout": "attention",
    "capture_attention": "attention_capture",
    "capture_hidden_states": "capture",
    "compare": "report",
    "effective_rank": "spectrum",
    "entropy_effective_rank": "spectrum",
    "participation_ratio": "spectrum",
    "probe_attention": "attention_probe",
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
