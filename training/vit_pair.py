# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""One small ViT encoder, two objectives, the same photographs: does the objective decide where the heads look?

An encoder of 6 layers x 192 (3 heads, patch 8, 64-px crops) is trained with MAE (75 % of the patches hidden) and with
SimCLR (two augmented views of one region, mean-pooled patch tokens), each for about ten minutes of one CPU core, over
several seeds. Both start from the same weights. Attention diversity, distance and normalised mutual information are
then measured layer by layer with `maelm_hf.probing.probe_attention` on crops of photographs that training never saw,
next to the encoder at random init. The same question is answered for one attention layer, on synthetic images, by
`training/vit_theory.py`.

    python -m training.vit_pair train        --out results/vit_pair      # a finished run is not repeated
    python -m training.vit_pair measure      --out results/vit_pair      # layers.csv and vit_pair.png
    python -m training.vit_pair photographs  --out runs/photographs      # all sixteen as files, for any probe
"""

import argparse
import csv
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import ViTMAEConfig

from maelm_hf._torchvision import make_torchvision_importable
from maelm_hf.probing import probe_attention

make_torchvision_importable()
from transformers import ViTMAEForPreTraining, ViTMAEModel  # noqa: E402

TRAIN_PHOTOGRAPHS = (
    *("astronaut", "brick", "camera", "coffee", "coins", "grass", "gravel", "hubble_deep_field"),
    *("immunohistochemistry", "moon", "retina", "rocket", "stereo_motorcycle"),
)
PROBED_PHOTOGRAPHS = ("chelsea", "china", "flower")  # never trained on; the last two ship with scikit-learn
OBJECTIVES = ("mae", "simclr")


@dataclass(frozen=True)
class Settings:
    """What a run depends on beside its objective and seed. The step counts give both objectives the same CPU time."""

    mae_steps: int = 3400
    simclr_steps: int = 850
    batch_size: int = 64
    learning_rate: float = 1e-3
    weight_decay: float = 0.05
    warmup_fraction: float = 0.1
    temperature: float = 0.2
    region_pixels: int = 112
    image_pixels: int = 64

    def steps(self, objective: str) -> int:
        return self.mae_steps if objective == "mae" else self.simclr_steps


def encoder_config(objective: str) -> ViTMAEConfig:
    """The encoder is the same for both; SimCLR hides nothing."""
    return ViTMAEConfig(
        hidden_size=192,
        num_hidden_layers=6,
        num_attention_heads=3,
        intermediate_size=768,
        image_size=64,
        patch_size=8,
        mask_ratio=0.75 if objective == "mae" else 0.0,
        norm_pix_loss=True,
        decoder_hidden_size=96,
        decoder_num_hidden_layers=2,
        decoder_num_attention_heads=3,
        decoder_intermediate_size=384,
        attn_implementation="eager",  # sdpa's backward is the slower one on a CPU at 65 tokens
    )


# Images


def photograph(name: str) -> torch.Tensor:
    """One photograph that ships with scikit-image or scikit-learn: (3, height, width), values in [0, 1]."""
    if name in ("china", "flower"):
        from sklearn.datasets import load_sample_image

        pixels = load_sample_image(f"{name}.jpg")
    else:
        import skimage.data

        pixels = getattr(skimage.data, name)()
        pixels = pixels[0] if isinstance(pixels, tuple) else pixels  # the stereo pair: its left image
    pixels = torch.from_numpy(np.array(pixels)).float() / 255
    if pixels.ndim == 2:
        return pixels.expand(3, -1, -1).contiguous()
    return pixels[..., :3].permute(2, 0, 1).contiguous()


def random_region(photographs: list[torch.Tensor], side: int, rng: np.random.Generator) -> torch.Tensor:
    """A square of `side` pixels at a random place of a random photograph."""
    photo = photographs[rng.integers(len(photographs))]
    top, left = (int(rng.integers(extent - side + 1)) for extent in photo.shape[1:])
    return photo[:, top : top + side, left : left + side]


def random_crop(region: torch.Tensor, size: int, rng: np.random.Generator, smallest: float = 0.3) -> torch.Tensor:
    """A random square of 30 to 100 % of the region's area, resized to `size` and mirrored half of the time."""
    side = round(region.shape[1] * math.sqrt(rng.uniform(smallest, 1.0)))
    top, left = (int(rng.integers(extent - side + 1)) for extent in region.shape[1:])
    crop = region[None, :, top : top + side, left : left + side]
    crop = F.interpolate(crop, size=(size, size), mode="bilinear", antialias=True)[0]
    return crop.flip(-1) if rng.random() < 0.5 else crop


def jitter(images: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    """SimCLR's colour distortion: brightness, contrast and saturation by 0.6 to 1.4; grey for one image in five."""
    draw = lambda: torch.from_numpy(rng.uniform(0.6, 1.4, (len(images), 1, 1, 1))).float()  # noqa: E731
    images = images * draw()
    mean = images.mean(dim=(1, 2, 3), keepdim=True)
    images = mean + (images - mean) * draw()
    grey = images.mean(dim=1, keepdim=True)
    saturation = draw() * torch.from_numpy(rng.random((len(images), 1, 1, 1)) >= 0.2)
    return (grey + (images - grey) * saturation).clamp(0, 1)


def normalise(images: torch.Tensor) -> torch.Tensor:
    """[0, 1] to [-1, 1]."""
    return images * 2 - 1


def batch_of_crops(photographs: list[torch.Tensor], settings: Settings, rng: np.random.Generator, views: int) -> list:
    """`views` tensors (batch, 3, 64, 64); row i of each is a crop of the same region."""
    regions = [random_region(photographs, settings.region_pixels, rng) for _ in range(settings.batch_size)]
    return [torch.stack([random_crop(r, settings.image_pixels, rng) for r in regions]) for _ in range(views)]


# Objectives


class SimCLR(nn.Module):
    """The encoder, its mean-pooled patch tokens, and SimCLR's two-layer projection."""

    def __init__(self, config: ViTMAEConfig, temperature: float):
        super().__init__()
        self.vit = ViTMAEModel(config)
        self.projection = nn.Sequential(nn.Linear(config.hidden_size, 512), nn.ReLU(), nn.Linear(512, 128))
        self.temperature = temperature

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """NT-Xent (Chen et al. 2020) over the 2 x batch views."""
        images = torch.cat([first, second])
        tokens = self.vit(images, noise=keep_order(self.vit.config, len(images))).last_hidden_state[:, 1:]
        z = F.normalize(self.projection(tokens.mean(dim=1)).float(), dim=-1)
        logits = z @ z.T / self.temperature
        logits.fill_diagonal_(-math.inf)
        partner = torch.arange(len(z)).roll(len(first))
        return F.cross_entropy(logits, partner)


def keep_order(config: ViTMAEConfig, batch: int) -> torch.Tensor:
    """ViT-MAE shuffles its patches by this noise even when it hides none; ascending noise keeps them in place."""
    return torch.arange((config.image_size // config.patch_size) ** 2, dtype=torch.float32).expand(batch, -1)


def build(objective: str, seed: int, settings: Settings) -> nn.Module:
    """The model to train. Encoders of one seed start equal, whatever the objective."""
    config = encoder_config(objective)
    torch.manual_seed(seed)
    encoder = ViTMAEModel(config)
    model = ViTMAEForPreTraining(config) if objective == "mae" else SimCLR(config, settings.temperature)
    model.vit.load_state_dict(encoder.state_dict())
    return model


def train(objective: str, seed: int, settings: Settings, photographs: list[torch.Tensor], log=print) -> tuple:
    """Returns the trained encoder and the curve: a list of (step, loss averaged since the last row, CPU seconds)."""
    model = build(objective, seed, settings)
    rng = np.random.default_rng((seed, OBJECTIVES.index(objective)))
    steps = settings.steps(objective)
    warmup = max(1, round(steps * settings.warmup_fraction))
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay)

    def schedule(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    start, curve, losses = time.process_time(), [], []
    for step in range(1, steps + 1):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if objective == "mae":
                (images,) = batch_of_crops(photographs, settings, rng, views=1)
                loss = model(normalise(images)).loss
            else:
                views = batch_of_crops(photographs, settings, rng, views=2)
                loss = model(*(normalise(jitter(view, rng)) for view in views))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            raise FloatingPointError(f"{objective}, seed {seed}: loss {losses[-1]} at step {step}")
        if step % max(1, steps // 40) == 0 or step == steps:
            curve.append((step, sum(losses) / len(losses), time.process_time() - start))
            log(f"{objective} seed {seed} step {step}/{steps} loss {curve[-1][1]:.4f} cpu {curve[-1][2]:.0f} s")
            losses = []
    return model.vit, curve


# Commands


def train_all(out: Path, weights: Path, seeds: range, settings: Settings) -> None:
    """Trains what is not trained yet. Encoders go to `weights`, curves to `out`/training_*.csv."""
    photographs = [photograph(name) for name in TRAIN_PHOTOGRAPHS]
    out.mkdir(parents=True, exist_ok=True)
    weights.mkdir(parents=True, exist_ok=True)
    for seed in seeds:
        for objective in OBJECTIVES:
            checkpoint = weights / f"{objective}_seed{seed}.safetensors"
            if checkpoint.exists():
                print(f"{checkpoint.name} is there: not trained again", flush=True)
                continue
            encoder, curve = train(objective, seed, settings, photographs, log=lambda line: print(line, flush=True))
            with (out / f"training_{objective}_seed{seed}.csv").open("w", newline="") as file:
                writer = csv.writer(file, lineterminator="\n")
                writer.writerow(["objective", "seed", "step", "loss", "cpu_seconds"])
                writer.writerows((objective, seed, step, f"{loss:.5f}", f"{cpu:.1f}") for step, loss, cpu in curve)
            metadata = {key: str(value) for key, value in asdict(settings).items()}
            partial = checkpoint.with_suffix(".partial")  # a killed run must not leave half a file under the final name
            save_file(encoder.state_dict(), partial, metadata=metadata)
            partial.rename(checkpoint)


def probed_images(count: int, settings: Settings, seed: int = 0) -> torch.Tensor:
    """The fixed crops that every encoder is probed with: (count, 3, 64, 64), from photographs never trained on."""
    rng = np.random.default_rng(seed)
    photographs = [photograph(name) for name in PROBED_PHOTOGRAPHS]
    regions = [random_region(photographs, settings.region_pixels, rng) for _ in range(count)]
    size = (settings.image_pixels, settings.image_pixels)
    return normalise(F.interpolate(torch.stack(regions), size=size, mode="bilinear", antialias=True))


def load_encoder(path: Path) -> ViTMAEModel:
    encoder = ViTMAEModel(encoder_config("simclr"))
    encoder.load_state_dict(load_file(path))
    return encoder.eval()


def measure(out: Path, weights: Path, seeds: range, settings: Settings, images: int = 128) -> pd.DataFrame:
    """Probe every trained encoder, and each seed's common start; a row an encoder, layer and head, to layers.csv."""
    pixels = probed_images(images, settings)
    frames = []
    for seed in seeds:
        checkpoints = {objective: weights / f"{objective}_seed{seed}.safetensors" for objective in OBJECTIVES}
        missing = [path.name for path in checkpoints.values() if not path.exists()]
        if missing:
            print(f"seed {seed} is left out: {' and '.join(missing)} not trained yet")
            continue
        encoders = {"init": build("simclr", seed, settings).vit.eval()}
        encoders |= {objective: load_encoder(path) for objective, path in checkpoints.items()}
        for objective, encoder in encoders.items():
            report = probe_attention(encoder, pixels, overlay_images=0, progress=False)
            frames.append(report.to_dataframe().assign(objective=objective, seed=seed))
    if not frames:
        raise FileNotFoundError(f"{weights} holds no seed with both encoders: run the train command first")
    frame = pd.concat(frames, ignore_index=True)
    columns = ["objective", "seed", "layer_index", "head", *MEASURED]
    frame[columns].to_csv(out / "layers.csv", index=False, float_format="%.5g", lineterminator="\n")
    return frame[columns]


MEASURED = (
    *("diversity", "diversity_share", "pairwise_jensen_shannon", "distance", "distance_pixels", "entropy_share"),
    *("mutual_information", "head_redundancy", "prefix_mass", "rollout_diversity", "fourier_log_amplitude"),
)
PANELS = (
    ("diversity", "Attention diversity", "squared patches"),
    ("distance", "Attention distance", "patches"),
    ("mutual_information", "Mutual information", "normalised"),
)
NAMES = {"init": ("random init", "0.45"), "mae": ("MAE", "#0b5fa5"), "simclr": ("SimCLR", "#d1495b")}


def draw(frame: pd.DataFrame) -> Figure:
    """By layer: a thin line a seed (mean over heads), a thick one for the mean over seeds."""
    figure = Figure(figsize=(11.5, 3.6), layout="constrained")
    for axes, (number, title, unit) in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
        for objective, (name, color) in NAMES.items():
            runs = frame[frame["objective"] == objective]
            by_seed = runs.groupby(["seed", "layer_index"])[number].mean().unstack("seed")
            axes.plot(by_seed.index, by_seed, color=color, linewidth=0.8, alpha=0.5)
            axes.plot(
                by_seed.index, by_seed.mean(axis=1), color=color, linewidth=2, marker="o", markersize=4, label=name
            )
        axes.set(title=title, xlabel="layer", ylabel=unit)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="0.92", linewidth=0.8)
        axes.set_axisbelow(True)
    figure.axes[0].legend(frameon=False)
    seeds = frame["seed"].nunique()
    figure.suptitle(
        f"6 x 192 ViT on photographs never trained on: mean over heads; thin lines: {seeds} seeds", fontsize=10
    )
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["train", "measure", "photographs"])
    parser.add_argument("--out", type=Path, default=Path("results/vit_pair"))
    parser.add_argument("--weights", type=Path, default=Path("runs/vit_pair"), help="where the trained encoders lie")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--mae-steps", type=int, default=Settings.mae_steps)
    parser.add_argument("--simclr-steps", type=int, default=Settings.simclr_steps)
    arguments = parser.parse_args()
    settings = Settings(mae_steps=arguments.mae_steps, simclr_steps=arguments.simclr_steps)
    torch.set_num_threads(1)
    if arguments.command == "train":
        train_all(arguments.out, arguments.weights, range(arguments.seeds), settings)
    elif arguments.command == "measure":
        frame = measure(arguments.out, arguments.weights, range(arguments.seeds), settings)
        draw(frame).savefig(arguments.out / "vit_pair.png", dpi=150)
    else:
        arguments.out.mkdir(parents=True, exist_ok=True)
        for name in (*TRAIN_PHOTOGRAPHS, *PROBED_PHOTOGRAPHS):
            pixels = (photograph(name) * 255).round().byte().permute(1, 2, 0).numpy()
            Image.fromarray(pixels).save(arguments.out / f"{name}.png")


if __name__ == "__main__":
    main()
