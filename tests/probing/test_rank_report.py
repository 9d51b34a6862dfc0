# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""What a rank report writes, reads back and shows."""

import json
import re

import pytest
from PIL import Image
from rank_toys import random_texts, small_bert, word_tokenizer
from safetensors.torch import load_file

from maelm_hf.probing import RankReport, Report, compare, probe_rank


@pytest.fixture(scope="module")
def report():
    return probe_rank(small_bert(), word_tokenizer(), random_texts(60), tau=0.8, seed=3, progress=False)


@pytest.fixture(scope="module")
def folder(report, tmp_path_factory):
    return report.save(tmp_path_factory.mktemp("report"))


def test_folder_holds_everything_and_loads_to_the_same(report, folder):
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "report.json",
        "table.csv",
        "moments.safetensors",
        "rank_by_layer.png",
        "spectra.png",
        "report.html",
    }
    for loaded in (RankReport.load(folder), Report.load(folder)):
        assert type(loaded) is RankReport
        assert loaded.to_dataframe().equals(report.to_dataframe())
        assert loaded.settings == report.settings
        assert loaded.notes == report.notes
    for name in ("rank_by_layer.png", "spectra.png"):
        with Image.open(folder / name) as image:
            assert image.width > 800


def test_json_is_strict_and_carries_the_settings(folder):
    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    document = json.loads((folder / "report.json").read_text(encoding="utf-8"), parse_constant=refuse)
    settings = document["settings"]
    wanted = {
        "model",
        "revision",
        "data",
        "seed",
        "tau",
        "power",
        "centred",
        "mask_ratio",
        "versions",
        "date",
        "device",
    }
    assert wanted <= settings.keys()
    assert (settings["tau"], settings["seed"]) == (0.8, 3)
    assert {"torch", "transformers", "python", "maelm-hf"} <= settings["versions"].keys()


def test_every_number_has_its_half_and_a_flag(report):
    frame = report.to_dataframe()
    numbers = [name.removesuffix("_settled") for name in frame if name.endswith("_settled")]
    assert len(numbers) > 30
    assert {"effective_rank", "rankme", "nesum", "stable_rank", "alpha_req", "mean_cosine"} <= set(numbers)
    for name in numbers:
        assert {name, f"{name}_half"} <= set(frame.columns)
    assert set(frame["alpha_req_fit_range"]) == {"2-16"}
    for name in ("tokens", "dim", "tokens_per_dim", "effective_rank_low", "effective_rank_high"):
        assert frame[name].notna().all()
    assert frame["tokens_per_dim"].tolist() == pytest.approx((frame["tokens"] / frame["dim"]).tolist())


def test_moments_are_those_the_numbers_came_from(report, folder):
    tensors = load_file(folder / "moments.safetensors")
    assert tensors["moments/embeddings/unmasked/count"].sum() == report.rows[0]["tokens"]
    sums = RankReport.load(folder).moments()["encoder.layer.1", "unmasked"]
    row = next(r for r in report.rows if (r["layer"], r["population"]) == ("encoder.layer.1", "unmasked"))
    assert sums.numbers()["participation_ratio_centred"] == pytest.approx(row["participation_ratio_centred"], rel=1e-9)


@pytest.mark.parametrize("what", ["report", "comparison"])
def test_page_opens_offline(report, folder, what, tmp_path):
    path = folder if what == "report" else compare([report, folder]).save(tmp_path)
    page = (path / "report.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert "data:image/png;base64," in page
    # Nothing is fetched: no link, script or picture from elsewhere.
    assert not re.findall(r"""(?:src|href)=["'](?!data:)""", page)
    assert not re.search(r"https?://|@import|<script", page)
    assert "masked/[MASK]" in page
    assert "effective_rank" in page


def test_notebook_view_is_a_fragment_with_the_figure(report):
    view = report._repr_html_()
    assert "<html" not in view
    assert "data:image/png;base64," in view


def test_plot_draws_each_population_and_the_interval(report):
    (axes,) = report.plot().axes
    assert {text.get_text() for text in axes.get_legend().get_texts()} >= set(report.to_dataframe()["population"])
    assert len(axes.collections) == 4
    assert axes.get_xlabel() == "Layer"
    assert "tau 0.8" in axes.get_ylabel()


def test_compare_labels_models_and_refuses_what_cannot_be_compared(report, folder):
    comparison = compare([report, str(folder)])
    assert comparison.labels == ["BertModel (1)", "BertModel (2)"]
    assert set(comparison.to_dataframe()["model"]) == set(comparison.labels)
    assert list(comparison.summary().columns)[:2] == ["layer", "BertModel (1): unmasked"]
    with pytest.raises(ValueError, match="at least two"):
        compare([report])
    other = probe_rank(small_bert(), word_tokenizer(), random_texts(60), tau=0.9, progress=False)
    with pytest.raises(ValueError, match="equal tau"):
        compare([report, other]).figures()


def test_models_of_other_width_and_depth_compare_on_relative_axes(report):
    options = {"tau": 0.8, "progress": False}
    other = probe_rank(small_bert(hidden_size=16, num_hidden_layers=4), word_tokenizer(), random_texts(60), **options)
    left, right = compare([report, other]).plot().axes
    assert "share of the model's width" in left.get_ylabel()
    assert "Relative depth" in right.get_xlabel()
    assert all(0 <= x <= 1 for line in left.lines for x in line.get_xdata())


def test_loading_what_is_no_report(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no report\.json"):
        RankReport.load(tmp_path)
    (tmp_path / "report.json").write_text('{"format_version": 1, "kind": "other"}', encoding="utf-8")
    with pytest.raises(ValueError, match="'other'"):
        Report.load(tmp_path)
