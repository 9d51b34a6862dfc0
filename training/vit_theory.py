# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Why MAE keeps attention diverse and contrastive learning does not: one attention layer, synthetic images, minutes
on a CPU.

The setting of Huang, Wen, Chi & Liang (ICLR 2025, arXiv 2403.02233), as far as it is known to us. An image has 8 x 8
patches and belongs to one of four clusters. A cluster splits the patches into one *global* area of P^kappa_c patches
and *local* areas of P^kappa_s = 4; patch p of area j holds z_j v_(cluster, j), with orthonormal v and z_j drawn anew
for each image. The information gap Delta = (1 - kappa_s) - 2 (1 - kappa_c) grows with the global area. The model is
one softmax layer with a merged matrix Q and identity values: patch p attends to q by softmax_q(e_p^T Q (M(X)_q +
e_q)), e orthonormal position codes, M the mask (content 0 where hidden). Both objectives start from Q = 0 and run
plain gradient descent on fresh samples:

- MAE: squared error on the 75 % of patches that are hidden;
- contrastive: InfoNCE between mean-pooled outputs of two independently masked views, with L2 on Q.

Predicted: under MAE every patch's attention moves onto its own area, for Delta of either sign, and for Delta > 0 in
two phases; under the contrastive objective all attention moves onto the global area. What was found is in
results/vit_theory/README.md.

    python -m training.vit_theory                  # trains every point, writes the CSV, draws the figure
    python -m training.vit_theory --figure-only    # draws the figure from the CSV
"""

import argparse
import csv
import math
import time
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor
from tqdm.auto import tqdm

from maelm_hf.probing.attention import attention_diversity

SIDE, LOCAL_PATCHES, CLUSTERS = 8, 4, 4
PATCHES = SIDE * SIDE
MEASURED_STEPS = (0, 1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 200, 250, 300)


@dataclass(frozen=True)
class Point:
    """One run. `global_patches` sets the information gap; the temperature belongs to the contrastive objective."""

    objective: str
    global_patches: int
    seed: int
    temperature: float | None = None
    weight_decay: float = 0.0
    learning_rate: float = 100.0
    steps: int = 300
    batch_size: int = 64
    hidden_share: float = 0.75

    @property
    def delta(self) -> float:
        kappa_c, kappa_s = (math.log(size, PATCHES) for size in (self.global_patches, LOCAL_PATCHES))
        return (1 - kappa_s) - 2 * (1 - kappa_c)


def points(seeds: int) -> list[Point]:
    """Both objectives over five gaps, the contrastive one at four temperatures."""
    runs = []
    for global_patches in (8, 16, 24, 32, 48):
        for seed in range(seeds):
            runs.append(Point("mae", global_patches, seed))
            for temperature in (0.05, 0.1, 0.3, 1.0):
                # The loss bends as 1 / temperature^2: the step has to shrink with it, or low temperatures overshoot.
                rate = min(1000.0, 1e4 * temperature**2)
                runs.append(Point("contrastive", global_patches, seed, temperature, 1e-5, rate))
    return runs


@dataclass
class Images:
    """The distribution that images are drawn from.

    Attributes:
        area: (clusters, patches): 0 for the global area, 1, 2 ... for the local ones.
        feature: (clusters, patches): index of the patch's v among all features.
    """

    global_patches: int
    generator: torch.Generator
    area: Tensor = field(init=False)
    feature: Tensor = field(init=False)

    def __post_init__(self) -> None:
        # Areas are made of 2 x 2 blocks: one block is a local area, the global area is several blocks anywhere.
        row, column = torch.arange(PATCHES) // SIDE, torch.arange(PATCHES) % SIDE
        block_of_patch = row // 2 * (SIDE // 2) + column // 2
        blocks = PATCHES // LOCAL_PATCHES
        of_global = self.global_patches // LOCAL_PATCHES
        areas = []
        for _ in range(CLUSTERS):
            order = torch.randperm(blocks, generator=self.generator)
            area_of_block = torch.zeros(blocks, dtype=torch.long)
            area_of_block[order[of_global:]] = torch.arange(1, blocks - of_global + 1)
            areas.append(area_of_block[block_of_patch])
        self.area = torch.stack(areas)
        self.feature = self.area + torch.arange(CLUSTERS)[:, None] * self.areas

    @property
    def areas(self) -> int:
        return (PATCHES - self.global_patches) // LOCAL_PATCHES + 1

    @property
    def features(self) -> int:
        return CLUSTERS * self.areas

    def sample(self, count: int) -> tuple[Tensor, Tensor]:
        """Clusters (count,) and every patch's strength z (count, patches): one value an area, uniform in [0.5, 1.5]."""
        cluster = torch.randint(CLUSTERS, (count,), generator=self.generator)
        strength = 0.5 + torch.rand(count, self.areas, generator=self.generator)
        return cluster, strength.gather(1, self.area[cluster])

    def visible(self, count: int, hidden_share: float) -> Tensor:
        """(count, patches): 1 for the patches that stay visible, the same number in every image."""
        rank = torch.rand(count, PATCHES, generator=self.generator).argsort(dim=1).argsort(dim=1)
        return (rank >= round(hidden_share * PATCHES)).float()

    def content(self, cluster: Tensor, strength: Tensor) -> Tensor:
        """(count, patches, features)."""
        return F.one_hot(self.feature[cluster], self.features) * strength.unsqueeze(-1)


class Attention:
    """The layer. Only rows e_p of Q get a gradient: their position-feature and position-position parts are kept."""

    def __init__(self, images: Images):
        self.images = images
        self.feature = torch.zeros(PATCHES, images.features, requires_grad=True)  # e_p^T Q v
        self.position = torch.zeros(PATCHES, PATCHES, requires_grad=True)  # e_p^T Q e_q

    def maps(self, cluster: Tensor, strength: Tensor, visible: Tensor) -> Tensor:
        """(count, patches, patches), post-softmax."""
        of_content = self.feature[:, self.images.feature[cluster]].permute(1, 0, 2)  # (count, p, q)
        return (of_content * (strength * visible).unsqueeze(1) + self.position).softmax(dim=-1)

    def __call__(self, cluster: Tensor, strength: Tensor, visible: Tensor) -> Tensor:
        """(count, patches, features): what each patch gathers."""
        content = self.images.content(cluster, strength) * visible.unsqueeze(-1)
        return self.maps(cluster, strength, visible) @ content


def mae_loss(layer: Attention, point: Point) -> Tensor:
    images = layer.images
    cluster, strength = images.sample(point.batch_size)
    visible = images.visible(point.batch_size, point.hidden_share)
    error = (layer(cluster, strength, visible) - images.content(cluster, strength)).square().sum(dim=-1)
    return (error * (1 - visible)).sum() / (1 - visible).sum() / 2


def contrastive_loss(layer: Attention, point: Point) -> Tensor:
    images = layer.images
    cluster, strength = images.sample(point.batch_size)
    views = (images.visible(point.batch_size, point.hidden_share) for _ in range(2))
    first, second = (layer(cluster, strength, visible).mean(dim=1) for visible in views)  # (batch, features)
    loss = F.cross_entropy(first @ second.T / point.temperature, torch.arange(point.batch_size))
    return loss + point.weight_decay / 2 * (layer.feature.square().sum() + layer.position.square().sum())


def measure(layer: Attention, held_out: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Where attention goes on whole, unseen images; means over patches, images and (correlations) clusters."""
    images, (cluster, strength) = layer.images, held_out
    maps = layer.maps(cluster, strength, torch.ones_like(strength))
    area = images.area[cluster]
    same_area = (area.unsqueeze(2) == area.unsqueeze(1)).float()
    is_global, is_local = (area == 0).float(), (area > 0).float()
    own = (maps * same_area).sum(dim=-1)
    to_global = (maps * is_global.unsqueeze(1)).sum(dim=-1)
    even = same_area / same_area.sum(dim=-1, keepdim=True)  # every patch looks evenly at its own area
    features = torch.arange(CLUSTERS) * images.areas
    to_global_feature = layer.feature[:, features].T  # (clusters, patches)
    to_own_feature = layer.feature.gather(1, images.feature.T).T
    local = images.area > 0
    return {
        "own_mass_of_local": ((own * is_local).sum() / is_local.sum()).item(),
        "global_mass_of_local": ((to_global * is_local).sum() / is_local.sum()).item(),
        "own_mass_of_global": ((own * is_global).sum() / is_global.sum()).item(),
        "diversity": attention_diversity(maps, grid=(SIDE, SIDE)).mean().item(),
        "diversity_own_area": attention_diversity(even, grid=(SIDE, SIDE)).mean().item(),
        "correlation_local_to_global": to_global_feature[local].mean().item(),
        "correlation_local_to_own": to_own_feature[local].mean().item(),
        "correlation_global_to_global": to_global_feature[~local].mean().item(),
    }


def train(point: Point) -> list[dict]:
    """One run: a row for each measured step."""
    images = Images(point.global_patches, torch.Generator().manual_seed(point.seed))
    held_out = images.sample(128)
    layer = Attention(images)
    loss_of = mae_loss if point.objective == "mae" else contrastive_loss
    rows = []
    for step in range(point.steps + 1):
        loss = loss_of(layer, point)
        if step in MEASURED_STEPS:
            with torch.no_grad():
                numbers = measure(layer, held_out)
            settings = {
                "objective": point.objective,
                "temperature": point.temperature,
                "global_patches": point.global_patches,
                "delta": point.delta,
                "learning_rate": point.learning_rate,
                "seed": point.seed,
                "step": step,
                "loss": loss.item(),
            }
            rows.append({**settings, **numbers})
        gradients = torch.autograd.grad(loss, (layer.feature, layer.position))
        with torch.no_grad():
            for parameter, gradient in zip((layer.feature, layer.position), gradients, strict=True):
                parameter -= point.learning_rate * gradient
    return rows


def write(rows: list[dict], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.5g}" if isinstance(v, float) else v for k, v in row.items()})


# Figure

_MAE, _CONTRASTIVE = "#0b5fa5", "#d1495b"


def draw(frame: pd.DataFrame, temperature: float = 0.3, gap: int = 32) -> Figure:
    """Six panels; lines are means over seeds, bands run from the lowest seed to the highest."""
    mae = frame[frame["objective"] == "mae"]
    contrastive = frame[frame["temperature"] == temperature]
    last = frame["step"].max()
    figure = Figure(figsize=(12.5, 7.2), layout="constrained")
    figure.get_layout_engine().set(h_pad=0.12, w_pad=0.08)
    grid = figure.subplots(2, 3)
    title_gap = f"Delta = {mae[mae['global_patches'] == gap]['delta'].iloc[0]:+.2f}"
    for axes, runs, name in ((grid[0][0], mae, "MAE"), (grid[0][1], contrastive, "Contrastive")):
        runs = runs[runs["global_patches"] == gap]
        _line(axes, runs, "step", "own_mass_of_local", _MAE, "own area")
        _line(axes, runs, "step", "global_mass_of_local", _CONTRASTIVE, "global area")
        axes.set(title=f"{name}: where local patches look, {title_gap}", xlabel="gradient step", ylim=(-0.02, 1.02))
        axes.set_ylabel("share of attention")
        _log_steps(axes)
    axes = grid[0][2]
    for runs, name, color in ((mae, "MAE", _MAE), (contrastive, "contrastive", _CONTRASTIVE)):
        _line(axes, runs[runs["global_patches"] == gap], "step", "diversity", color, name)
    ideal = mae[(mae["global_patches"] == gap) & (mae["step"] == last)]["diversity_own_area"].mean()
    axes.axhline(ideal, color="0.5", linewidth=0.9, linestyle=(0, (4, 3)), label="each patch evenly on its own area")
    axes.set(title=f"Attention diversity, {title_gap}", xlabel="gradient step", ylabel="squared patches")
    _log_steps(axes)

    axes = grid[1][0]
    for runs, name, color in ((mae, "MAE", _MAE), (contrastive, "contrastive", _CONTRASTIVE)):
        end = runs[runs["step"] == last]
        _line(axes, end, "delta", "own_mass_of_local", color, f"{name}: own area")
        _line(axes, end, "delta", "global_mass_of_local", color, f"{name}: global area", style="--")
    axes.set(title="After training: where local patches look", xlabel="information gap Delta", ylim=(-0.02, 1.02))
    axes.set_ylabel("share of attention")
    axes = grid[1][1]
    for patches, style in ((8, ":"), (48, "-")):
        runs = mae[mae["global_patches"] == patches]
        label = f"Delta = {runs['delta'].iloc[0]:+.2f}"
        _line(axes, runs, "step", "correlation_local_to_own", _MAE, f"to own area, {label}", style)
        _line(axes, runs, "step", "correlation_local_to_global", _CONTRASTIVE, f"to global area, {label}", style)
    axes.set(title="MAE: correlations of local patches", xlabel="gradient step", ylabel="position-feature part of Q")
    axes.set_yscale("symlog", linthresh=0.1)
    _log_steps(axes)
    axes = grid[1][2]
    end = frame[(frame["objective"] == "contrastive") & (frame["step"] == last)]
    for value, color in zip(
        sorted(end["temperature"].unique()), ("#3b1c4a", "#8a3b6e", _CONTRASTIVE, "#edae49"), strict=True
    ):
        _line(axes, end[end["temperature"] == value], "delta", "global_mass_of_local", color, f"temperature {value:g}")
    axes.set(title="Contrastive, after training: by temperature", xlabel="information gap Delta", ylim=(-0.02, 1.02))
    axes.set_ylabel("share on the global area")
    for axes in grid.flat:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="0.92", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.legend(frameon=False, fontsize=8, handlelength=3)
        axes.title.set_fontsize(10)
    return figure


def _line(axes, runs: pd.DataFrame, x: str, y: str, color: str, label: str, style: str = "-") -> None:
    groups = runs.groupby(x)[y]
    mean = groups.mean()
    axes.plot(mean.index, mean, style, color=color, label=label, linewidth=1.8, marker="o", markersize=2.5)
    axes.fill_between(mean.index, groups.min(), groups.max(), color=color, alpha=0.15, linewidth=0)


def _log_steps(axes) -> None:
    axes.set_xscale("symlog", linthresh=1, linscale=0.3)
    axes.set_xticks([0, 1, 10, 100], ["0", "1", "10", "100"])
    axes.set_xlim(0, 330)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/vit_theory"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--figure-only", action="store_true", help="draw the figure from the CSV in --out")
    arguments = parser.parse_args()
    table = arguments.out / "runs.csv"
    torch.set_num_threads(1)  # the tensors are small: more threads are slower
    if not arguments.figure_only:
        start = time.process_time()
        write([row for point in tqdm(points(arguments.seeds), unit="run") for row in train(point)], table)
        print(f"{time.process_time() - start:.0f} s of CPU time")
    draw(pd.read_csv(table)).savefig(arguments.out / "vit_theory.png", dpi=150)


if __name__ == "__main__":
    main()
