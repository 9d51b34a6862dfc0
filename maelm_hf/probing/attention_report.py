# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""The attention probe's report."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Self

import pandas as pd
import torch
from matplotlib.figure import Figure

from .attention_figures import by_layer_figure, heads_figure, overlay_figure
from .attention_statistics import NUMBERS
from .report import Report

NORM_QUANTILES = ("q05", "q50", "q95", "max")
ROLLOUT_NUMBERS = ("diversity", "distance", "entropy_share")
SUMMARY_NUMBERS = (
    *("diversity", "distance_pixels", "entropy_share", "mutual_information"),
    *("head_redundancy", "prefix_mass"),
)


class AttentionReport(Report):
    """Where every head of every layer looks; made by :func:`maelm_hf.probing.probe_attention`.

    The table has a row a layer and head. ``NAME`` is the mean over images and ``NAME_std`` the standard deviation
    over images
    of: ``diversity`` (squared patches), ``diversity_share`` (of the grid's own variance), ``pairwise_jensen_shannon``
    (nats), ``pairwise_cosine_distance``, ``distance`` (patches), ``distance_pixels``, ``entropy`` (nats),
    ``entropy_share`` (of ln patches), ``mutual_information`` (normalised), ``head_redundancy`` and ``prefix_mass``.
    ``queries_left_out`` is the share of queries that look at the prefix alone. Of a layer as a whole, equal in all
    its rows: ``rollout_*`` (the rollout down to it), ``token_norm_*`` (quantiles of the patch tokens' norms) and
    ``fourier_log_amplitude``, both of the output of the block ``hidden_layer``. A number that a layer does not have
    (pixels of a text) is NaN.
    """

    kind: ClassVar[str] = "attention"
    title = "Attention by layer and head"
    tensors_file: ClassVar[str] = "overlays.safetensors"

    @classmethod
    def from_layers(
        cls,
        layers: Sequence[dict[str, Any]],
        settings: dict[str, Any],
        tensors: dict[str, torch.Tensor],
        notes: Iterable[str] = (),
    ) -> Self:
        rows = []
        for number, layer in enumerate(layers):
            of_layer = _layer_numbers(layer)
            for head in range(layer["layout"].heads):
                numbers = {}
                for name in NUMBERS:
                    for suffix in ("", "_std"):
                        numbers[name + suffix] = layer["heads"][name + suffix][head].item()
                pixels = layer["layout"].pixels
                # Anisotropic patches have no single pixel size: the mean of both sides is meant.
                side = math.nan if pixels is None else (pixels[0] + pixels[1]) / 2
                numbers["distance_pixels"] = numbers["distance"] * side
                numbers["distance_pixels_std"] = numbers["distance_std"] * side
                numbers["queries_left_out"] = layer["heads"]["queries_left_out"][head].item()
                place = {"layer_index": number, "layer": layer["layer_name"], "head": head}
                rows.append({**place, "images": layer["images"], **numbers, **of_layer})
        return cls(rows, settings, tensors, notes)

    def summary(self) -> pd.DataFrame:
        """A row a layer: the mean over its heads of the numbers one reads first."""
        frame = self.to_dataframe()
        names = [*SUMMARY_NUMBERS] if self.grid_variance else [name for name in SUMMARY_NUMBERS if "pixels" not in name]
        return frame.groupby("layer_index")[names].mean().reset_index()

    def figures(self) -> dict[str, Figure]:
        figures = {
            "attention_by_layer": by_layer_figure([self.to_dataframe()], [self.model], self.grid_variance),
            "attention_by_head": heads_figure(self.to_dataframe(), self.model),
        }
        if "pictures" in self.tensors:
            figures["attention_maps"] = self.plot_overlay("maps")
            figures["attention_centers"] = self.plot_overlay("centers")
        return figures

    def plot_overlay(
        self,
        what: str = "maps",
        image: int = 0,
        layers: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
        query: int | None = None,
    ) -> Figure:
        """Attention drawn on one of the kept images.

        Args:
            what: ``maps`` (where the CLS token looks, or without one how much attention each patch gets) or ``centers``
                (where each patch looks on average, coloured by where it lies itself).
            image: which of the kept images.
            layers: layer indices; ``None`` takes four from first to last.
            heads: ``None`` takes the first six.
            query: with ``maps``: the map of this one of the kept patches (the centre and its four quarters) instead.

        Raises:
            ValueError: no image was kept, or there is no such image, layer, head or query.
        """
        return overlay_figure(self.tensors, self.settings, what, image, layers, heads, query)

    @property
    def grid_variance(self) -> float | None:
        """Diversity of the identity map on this report's grid; None for sequences."""
        grid = self.settings.get("grid") or ()
        return (grid[0] ** 2 + grid[1] ** 2 - 2) / 12 if len(grid) == 2 else None

    @classmethod
    def comparison_figures(cls, reports: Sequence[Self], labels: Sequence[str]) -> dict[str, Figure]:
        frames = [report.to_dataframe() for report in reports]
        variances = {report.grid_variance for report in reports}
        return {"comparison": by_layer_figure(frames, labels, variances.pop() if len(variances) == 1 else None)}

    @classmethod
    def comparison_summary(cls, reports: Sequence[Self], labels: Sequence[str]) -> pd.DataFrame:
        """Layer by layer, a row a model."""
        return super().comparison_summary(reports, labels).sort_values("layer_index", kind="stable", ignore_index=True)


def _layer_numbers(layer: dict[str, Any]) -> dict[str, Any]:
    """The numbers that a layer has once."""
    numbers: dict[str, Any] = {"hidden_layer": layer["hidden_layer"]}
    for name in ROLLOUT_NUMBERS:
        value = layer["rollout"].get(name)
        numbers[f"rollout_{name}"] = math.nan if value is None else value.item()
    for name, present in layer["hidden_present"].items():
        numbers[name] = layer["hidden"][name].item() if present else math.nan
        numbers[f"{name}_std"] = layer["hidden"][f"{name}_std"].item() if present else math.nan
    return numbers
