# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""The report: saved, loaded, compared and drawn; and the command line."""

import re

import pandas as pd
import pytest
import torch
import transformers
from attention_models import SoftmaxBlock, build, by_fused_attention, pixels, sharpened
from matplotlib.figure import Figure
from PIL import Image
from typer.testing import CliRunner

from maelm_hf.cli import app
from maelm_hf.probing import AttentionReport, Report, compare, probe_attention

runner = CliRunner()


@pytest.fixture(scope="module")
def report() -> AttentionReport:
    return probe_attention(build("dinov2"), pixels(3), progress=False, overlay_images=2)


def test_table_has_a_row_a_layer_and_head(report):
    frame = report.to_dataframe()
    assert frame[["layer_index", "head"]].to_numpy().tolist() == [[i, j] for i in range(2) for j in range(4)]
    assert frame.filter(regex="^(diversity|distance|entropy|mutual|head_|prefix)").notna().all().all()
    assert len(report.summary()) == 2
    assert report.summary()["diversity"][0] == pytest.approx(frame["diversity"][:4].mean())


def test_saved_and_loaded_is_the_same(report, tmp_path):
    folder = report.save(tmp_path / "out")
    loaded = Report.load(folder)
    assert isinstance(loaded, AttentionReport)
    pd.testing.assert_frame_equal(loaded.to_dataframe(), report.to_dataframe())
    assert loaded.settings == report.settings
    assert loaded.notes == report.notes
    assert set(loaded.tensors) == set(report.tensors)
    assert all(torch.equal(loaded.tensors[name], value) for name, value in report.tensors.items())
    for name in ("attention_by_layer", "attention_by_head", "attention_maps", "attention_centers"):
        assert Image.open(folder / f"{name}.png").width > 800
    page = (folder / "report.html").read_text()
    assert page.count("data:image/png;base64") == 4
    assert not re.search(r"""(src|href)=["']?https?:""", page)  # opens without a network


def test_kept_tensors_are_those_of_the_maps(report):
    model = build("dinov2", "eager")
    with torch.no_grad():
        maps = model(pixels(3), output_attentions=True).attentions
    tensors = report.tensors
    assert tensors["pictures"].shape == (2, 32, 32, 3)
    for layer, expected in enumerate(maps):
        patches = expected[:2, :, 1:, 1:] / expected[:2, :, 1:, 1:].sum(-1, keepdim=True)
        torch.testing.assert_close(tensors[f"received.{layer}"].float(), patches.mean(2), rtol=2e-3, atol=1e-3)
        first = expected[:2, :, 0, 1:] / expected[:2, :, 0, 1:].sum(-1, keepdim=True)
        torch.testing.assert_close(tensors[f"prefix.{layer}"].float(), first, rtol=2e-3, atol=1e-3)
        torch.testing.assert_close(tensors[f"query.{layer}"].float()[:, :, 2], patches[:, :, 10], rtol=2e-3, atol=1e-3)


def test_overlays_of_chosen_heads_and_layers(report):
    figure = report.plot_overlay("maps", image=1, layers=[1], heads=[0, 3], query=2)
    assert isinstance(figure, Figure)
    assert [axes.get_title() for axes in figure.axes] == ["input", "head 0", "head 3"]
    for options, message in (
        ({"heads": [4]}, r"heads=\[4\] must be among \[0, 1, 2, 3\]"),
        ({"layers": [7]}, "layers"),
        ({"image": 2}, "image=2 must be below 2"),
        ({"query": 9}, "query=9"),
        ({"what": "flow"}, "'maps' or 'centers'"),
    ):
        with pytest.raises(ValueError, match=message):
            report.plot_overlay(**options)
    bare = probe_attention(build("dinov2"), pixels(), progress=False, overlay_images=0)
    assert set(bare.figures()) == {"attention_by_layer", "attention_by_head"}
    with pytest.raises(ValueError, match="overlay_images"):
        bare.plot_overlay()


def swin(stages: int) -> transformers.SwinModel:
    torch.manual_seed(0)
    sizes = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "window_size": 4}
    config = transformers.SwinConfig(depths=[2] * stages, num_heads=[2] * stages, **sizes)
    return sharpened(transformers.SwinModel(config)).eval()


def test_a_model_of_windows_alone_has_no_overlays_and_its_report_is_written(tmp_path):
    report = probe_attention(swin(stages=2), pixels(), progress=False)
    assert report.tensors == {}
    assert "attention_by_head" in report.figures()
    assert (report.save(tmp_path / "out") / "report.html").is_file()
    with pytest.raises(ValueError, match="windows are not drawn"):
        report.plot_overlay()


def test_overlays_are_numbered_as_the_layers_of_the_table():
    """The third stage of this Swin is one window: the whole grid."""
    model = swin(stages=3)
    report = probe_attention(model, pixels(), progress=False)
    kept = {int(name.rpartition(".")[2]) for name in report.tensors if name != "pictures"}
    names = report.to_dataframe().groupby("layer_index")["layer"].first()
    assert {names[number].split(".attention")[0] for number in kept} == {
        f"encoder.layers.2.blocks.{block}" for block in range(2)
    }
    model.set_attn_implementation("eager")
    with torch.no_grad():
        last = model(pixels(), output_attentions=True).attentions[-1]  # (images, heads, 16, 16)
    torch.testing.assert_close(report.tensors["received.5"].float(), last.mean(2), rtol=2e-3, atol=1e-3)
    figure = report.plot_overlay("centers", layers=[5])
    assert [axes.get_ylabel() for axes in figure.axes if axes.get_ylabel()] == ["layer 5"]
    assert "attention_maps" in report.figures()


class Pyramid(torch.nn.Module):
    """Attention over 8 x 8 patches, then over every 2 x 2 of them merged."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Conv2d(3, 16, 4, 4)
        self.layers = torch.nn.ModuleList(SoftmaxBlock(by_fused_attention, 2, 16) for _ in range(2))

    def forward(self, images):
        fine = self.layers[0](self.embed(images).flatten(2).mT)
        return self.layers[1](torch.nn.functional.avg_pool2d(fine.mT.unflatten(2, (8, 8)), 2).flatten(2).mT)


def test_every_stage_is_drawn_on_its_own_grid():
    torch.manual_seed(0)
    report = probe_attention(Pyramid(), pixels(), progress=False)
    assert [report.tensors[f"grid.{layer}"].tolist() for layer in range(2)] == [[8, 8], [4, 4]]
    maps = report.plot_overlay("maps", heads=[0]).axes  # the input and a head, layer by layer
    drawn = [maps[cell].images[-1].get_array().shape for cell in (1, 3)]
    assert drawn == [(8, 8), (4, 4)]


def test_the_main_figure_has_a_line_a_model(report):
    other = probe_attention(build("vit"), pixels(), progress=False, overlay_images=0)
    comparison = compare([report, other])
    labels = [text.get_text() for text in comparison.plot().legends[0].get_texts()]
    assert labels == ["Dinov2Model", "ViTModel"]
    assert len(comparison.to_dataframe()) == 16
    assert comparison.summary()["model"].tolist() == labels * 2
    single = report.plot()
    panel = next(axes for axes in single.axes if axes.get_title() == "Attention diversity")
    drawn = panel.lines[0].get_ydata()
    assert drawn == pytest.approx(report.to_dataframe().groupby("layer_index")["diversity"].mean().to_numpy())


def test_a_report_of_a_sequence_can_be_drawn(tmp_path):
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    text = probe_attention(torch.nn.TransformerEncoder(layer, 2), [torch.randn(2, 9, 16)], progress=False)
    text.save(tmp_path)
    assert "distance_pixels" not in text.summary()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("cli")
    build("dinov2").save_pretrained(root / "model")
    (root / "images").mkdir()
    for number in range(3):
        Image.new("RGB", (50, 40), (60 * number, 100, 200)).save(root / "images" / f"{number}.png")
    (root / "images" / "broken.jpg").write_bytes(b"\xff\xd8 not a picture")
    return root


def test_command_line(folders):
    arguments = ["probe", "attention", str(folders / "model"), "--images", str(folders / "images"), "--out"]
    for extra, out in (([], "trained"), (["--random-init", "--seed", "3"], "random")):
        result = runner.invoke(app, [*arguments, str(folders / out), *extra])
        assert result.exit_code == 0, result.output
        assert "broken.jpg" in result.output.replace("\n", "")
    trained, random = (Report.load(folders / name) for name in ("trained", "random"))
    assert trained.settings["images"] == random.settings["images"] == 3
    assert trained.model == "model"
    assert random.model == "model, random init"
    assert trained.rows != random.rows
    result = runner.invoke(
        app, ["probe", "compare", str(folders / "trained"), str(folders / "random"), "--out", str(folders / "both")]
    )
    assert result.exit_code == 0, result.output
    assert (folders / "both" / "comparison.png").exists()


def test_the_same_command_gives_the_same_numbers(folders):
    arguments = ["probe", "attention", str(folders / "model"), "--images", str(folders / "images"), "--out"]
    for name in ("once", "twice"):
        runner.invoke(app, [*arguments, str(folders / name)])
    assert (folders / "once" / "table.csv").read_bytes() == (folders / "twice" / "table.csv").read_bytes()
