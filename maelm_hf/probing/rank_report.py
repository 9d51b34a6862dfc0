# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""The rank probe's report."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self

import pandas as pd
import torch
from matplotlib.figure import Figure

from .rank import RepresentationMoments
from .rank_figures import compare_ranks, rank_by_layer, spectra_by_layer
from .rank_table import MASKED, POPULATIONS, UNMASKED, Moments, rank_table
from .report import Report

# Sums of other tokens, weights or numbers than these say do not add up to anything.
MERGED_ONLY_IF_EQUAL = ("mask_ratio", "revision", "tau", "power", "centred")


class RankReport(Report):
    """Rank numbers by layer and token population; made by :func:`maelm_hf.probing.probe_rank`.

    One row of :meth:`to_dataframe` is a layer and population. ``tokens``, ``dim`` and ``tokens_per_dim`` (n / d) say
    how much it rests on; ``effective_rank`` is at the tau, power and centring of ``settings``, with the bounds of its
    95 % interval in ``_low`` and ``_high``; every number has its value at half of the tokens in ``_half``, and in
    ``_settled`` whether that agrees (see :mod:`maelm_hf.probing.resampling`).

    Rows of masked/[MASK] say how far its tokens lie outside the subspace of the real ones: ``subspace_dim`` (of
    masked/real: the effective rank at this tau and power, always raw), ``mask_energy_outside`` and
    ``real_energy_outside`` (shares), ``principal_angle_median`` and ``principal_angle_max`` (degrees).
    """

    kind: ClassVar[str] = "rank"
    title = "Effective rank by layer"
    tensors_file: ClassVar[str] = "moments.safetensors"

    @classmethod
    def from_moments(
        cls, moments: Moments, positions: Mapping[str, str], settings: Mapping[str, Any], notes: Iterable[str] = ()
    ) -> Self:
        """Measure everything that can be read off moments; under several processes, every one has to call it.

        Args:
            moments: by (layer, population).
            positions: what each layer is, in order of depth.
            settings: of the probe; ``tau``, ``power``, ``centred`` and ``seed`` are read here.

        Raises:
            ValueError: there is no token in them.
        """
        rows, tensors = rank_table(moments, positions, settings)
        if not rows:
            raise ValueError("the data gave no token: nothing was measured")
        told = dict.fromkeys([*notes, *_warnings(rows, settings)])  # merged reports bring theirs along
        return cls(rows, dict(settings), tensors, told)

    @classmethod
    def merge(cls, reports: Sequence[Self]) -> Self:
        """Join reports of one model over different data, from their saved moments: exact, as if probed in one run.

        Intervals are not available afterwards: the saved moments hold two blocks.

        Raises:
            ValueError: reports of different models, layers or settings.
        """
        first, *others = reports
        joined, positions = first.moments(), first.positions()
        for other in others:
            for name in MERGED_ONLY_IF_EQUAL:
                mine, theirs = first.settings.get(name), other.settings.get(name)
                if mine != theirs:
                    raise ValueError(f"cannot merge reports of {name}={mine!r} and {name}={theirs!r}: probe with one")
            if other.positions() != positions or other.model != first.model:
                raise ValueError(f"cannot merge {other.model!r} into {first.model!r}: their layers or names differ")
            theirs = other.moments()
            if theirs.keys() != joined.keys():
                raise ValueError(f"cannot merge reports with the populations {sorted(theirs)} and {sorted(joined)}")
            for key, sums in joined.items():
                sums.merge(theirs[key])
        data = " + ".join(str(report.settings.get("data")) for report in reports)
        notes = list(dict.fromkeys(note for report in reports for note in report.notes))
        return cls.from_moments(joined, positions, {**first.settings, "data": data}, notes)

    def moments(self) -> dict[tuple[str, str], RepresentationMoments]:
        """The sums that the report was read off, by (layer, population); masked/all is left to add up."""
        found: dict[tuple[str, str], RepresentationMoments] = {}
        for key, value in self.tensors.items():
            kind, _, rest = key.partition("/")
            if kind != "moments":
                continue
            rest, _, state = rest.rpartition("/")
            layer, population = _layer_and_population(rest)
            if (layer, population) not in found:
                first = self.tensors[f"moments/{rest}/first"]
                found[layer, population] = RepresentationMoments(first.shape[1], blocks=first.shape[0], name=layer)
            setattr(found[layer, population], state, value.clone())
        return found

    def positions(self) -> dict[str, str]:
        """What each layer is (embeddings, block output, final norm, named layer), in order of depth."""
        return {row["layer"]: row["position"] for row in self.rows}

    def spectrum(self, layer: str, population: str = UNMASKED, *, centred: bool = False) -> torch.Tensor:
        """Singular values (dim,), largest first."""
        key = f"{'centred' if centred else 'raw'}/{layer}/{population}"
        if key not in self.tensors:
            raise ValueError(
                f"no spectrum of layer {layer!r}, population {population!r}: layers {list(self.positions())}"
            )
        return self.tensors[key]

    @property
    def rank_label(self) -> str:
        centring = "centred" if self.settings["centred"] else "raw"
        return f"Effective rank (tau {self.settings['tau']:g}, power {self.settings['power']:g}, {centring})"

    def summary(self) -> pd.DataFrame:
        """The effective rank, a row a layer and a column a population, and the deficiency with its interval."""
        frame = self.to_dataframe()
        table = frame.drop_duplicates("layer_index").set_index("layer_index")[["layer"]]
        for population in POPULATIONS:
            rows = frame[frame["population"] == population].set_index("layer_index")
            if len(rows):
                table[population] = rows["effective_rank"]
        rows = frame[frame["population"] == MASKED].set_index("layer_index")
        if len(rows):
            table["deficiency"] = rows["deficiency"].astype(int)
            bounds = zip(rows["deficiency_low"], rows["deficiency_high"], strict=True)
            table["95 % interval"] = ["" if pd.isna(low) else f"{low:.1f} to {high:.1f}" for low, high in bounds]
        table["settled"] = frame.groupby("layer_index")["effective_rank_settled"].all()
        return table.reset_index(drop=True)

    def figures(self) -> dict[str, Figure]:
        frame, first = self.to_dataframe(), self.rows[0]
        title = f"{self.model}: {int(first['tokens']):,} tokens, width {int(first['dim'])}"
        figures = {"rank_by_layer": rank_by_layer(frame, title, self.rank_label)}
        spectra = spectra_by_layer(frame, self.tensors, f"{self.model}: spectra", self.settings["centred"])
        return figures | ({"spectra": spectra} if spectra is not None else {})

    @classmethod
    def comparison_summary(cls, reports: Sequence[Self], labels: Sequence[str]) -> pd.DataFrame:
        """Models side by side, a row a layer."""
        columns = {}
        for report, label in zip(reports, labels, strict=True):
            frame = report.to_dataframe()
            for population in (UNMASKED, MASKED):
                rows = frame[frame["population"] == population].set_index("layer_index")
                if len(rows):
                    columns[f"{label}: {population}"] = rows["effective_rank"].astype("Int64")
        return pd.DataFrame(columns).reset_index(names="layer")

    @classmethod
    def comparison_figures(cls, reports: Sequence[Self], labels: Sequence[str]) -> dict[str, Figure]:
        how = {report.rank_label for report in reports}
        if len(how) > 1:
            raise ValueError(f"reports show different ranks, {sorted(how)}: probe with equal tau, power and centred")
        return {"comparison": compare_ranks([report.to_dataframe() for report in reports], labels, how.pop())}


def _layer_and_population(key: str) -> tuple[str, str]:
    for population in POPULATIONS:
        if key.endswith(f"/{population}"):
            return key.removesuffix(f"/{population}"), population
    raise ValueError(f"moments of {key!r} belong to no known population {POPULATIONS}")


def _warnings(rows: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> list[str]:
    """What a reader of these rows has to know."""
    notes = []
    positions = {row["position"]: row["layer"] for row in rows}
    if "final norm" in positions:
        notes.append(
            f"The model's last hidden state is post-norm: {positions['final norm']} normalises what the last block "
            "returns. It is a row of its own; the blocks' rows are what the blocks return."
        )
    if settings["centred"] and any(not math.isnan(row["subspace_dim"]) for row in rows):
        notes.append(
            "subspace_dim, the energies outside and the principal angles are of the raw tokens: they are about row "
            "spaces, from which no mean is taken."
        )
    thin = sorted({row["population"] for row in rows if row["tokens"] < row["dim"]})
    if thin:
        notes.append(f"Fewer tokens than dimensions in {', '.join(thin)}: the rank there is bounded by the tokens.")
    unsettled = sorted({row["population"] for row in rows if not row["effective_rank_settled"]} - set(thin))
    if unsettled:
        notes.append(f"The effective rank of {', '.join(unsettled)} has not settled in every layer: probe more tokens.")
    return notes
