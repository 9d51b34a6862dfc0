# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""The rank probe's report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self

import pandas as pd
from matplotlib.figure import Figure

from .rank import RepresentationMoments
from .report import Report
from .spectrum import effective_rank

UNMASKED, MASKED, REAL, MASK = "unmasked", "masked/all", "masked/real", "masked/[MASK]"
POPULATIONS = (UNMASKED, MASKED, REAL, MASK)

_COLOURS = {UNMASKED: "#0b5fa5", MASKED: "#d1495b", REAL: "#66a182", MASK: "#edae49"}


class RankReport(Report):
    """Rank numbers by layer and token population; made by :func:`maelm_hf.probing.probe_rank`."""

    kind: ClassVar[str] = "rank"
    title = "Effective rank by layer"
    tensors_file: ClassVar[str] = "moments.safetensors"

    @classmethod
    def from_moments(
        cls,
        moments: Mapping[tuple[str, str], RepresentationMoments],
        positions: Mapping[str, str],
        settings: dict[str, Any],
        notes: Iterable[str] = (),
    ) -> Self:
        rows = []
        for number, (layer, position) in enumerate(positions.items()):
            for population, sums in _populations_of(layer, moments).items():
                if not sums.tokens:
                    continue
                numbers = sums.compute()
                values = sums.singular_values(centred=settings["centred"])
                rows.append(
                    {
                        "layer_index": number,
                        "layer": layer,
                        "position": position,
                        "population": population,
                        "tokens": sums.tokens,
                        "dim": sums.dim,
                        "tokens_per_dim": sums.tokens / sums.dim,
                        "effective_rank": effective_rank(values, settings["tau"], settings["power"]),
                        "entropy_effective_rank": numbers[
                            f"entropy_effective_rank_{'centred' if settings['centred'] else 'raw'}"
                        ],
                        **numbers,
                    }
                )
        if not rows:
            raise ValueError("the data gave no token: nothing was measured")
        return cls(rows, settings, notes=notes)

    def summary(self) -> pd.DataFrame:
        """The headline effective rank, a row a layer and a column a population."""
        frame = self.to_dataframe()
        table = frame.pivot_table(index=["layer_index", "layer", "dim"], columns="population", values="effective_rank")
        table = table[[population for population in POPULATIONS if population in table]].reset_index()
        table.columns.name = None
        if MASKED in table:
            table["deficiency"] = table[MASKED] - table[UNMASKED]
        return table

    def figures(self) -> dict[str, Figure]:
        figure = Figure(figsize=(7.5, 4.5), layout="constrained")
        axes = figure.subplots()
        for population, rows in self.to_dataframe().groupby("population", sort=False):
            axes.plot(rows["layer_index"], rows["effective_rank"], "o-", label=population, color=_COLOURS[population])
        axes.set(xlabel="Layer", ylabel="Effective rank (dimensions)", title=self.model)
        axes.legend(frameon=False)
        return {"rank_by_layer": figure}

    @classmethod
    def comparison_figures(cls, reports: Sequence[Self], labels: Sequence[str]) -> dict[str, Figure]:
        figure = Figure(figsize=(7.5, 4.5), layout="constrained")
        axes = figure.subplots()
        for report, label in zip(reports, labels, strict=True):
            frame = report.to_dataframe()
            rows = frame[frame["population"] == UNMASKED]
            axes.plot(rows["layer_index"], rows["effective_rank"], "o-", label=label)
        axes.set(xlabel="Layer", ylabel="Effective rank (dimensions)", title="Unmasked tokens")
        axes.legend(frameon=False)
        return {"comparison": figure}


def _populations_of(
    layer: str, moments: Mapping[tuple[str, str], RepresentationMoments]
) -> dict[str, RepresentationMoments]:
    """A layer's populations in the order of reports; masked/all is masked/real and masked/[MASK] together."""
    found = {population: sums for (name, population), sums in moments.items() if name == layer}
    if REAL in found:
        everything = RepresentationMoments(found[REAL].dim, blocks=found[REAL].blocks, name=f"layer {layer}, {MASKED}")
        found[MASKED] = everything.to(found[REAL].device).merge(
            *(found[name] for name in (REAL, MASK) if name in found)
        )
    return {population: found[population] for population in POPULATIONS if population in found}
