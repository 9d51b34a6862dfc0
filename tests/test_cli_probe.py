# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""``maelm probe rank`` and ``maelm probe compare``."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "probing"))  # the toys of the probes' tests

from rank_toys import random_texts, small_bert, word_tokenizer

from maelm_hf import cli


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "small-bert"
    small_bert().save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    lines = random_texts(40)
    (folder / "texts.txt").write_text("\n".join(lines), encoding="utf-8")
    rows = [json.dumps({"title": "no", "body": line}) for line in lines]
    (folder / "texts.jsonl").write_text("\n".join(rows), encoding="utf-8")
    return folder


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["maelm", *map(str, arguments)])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return stopped.value.code


def test_rank_and_compare_write_reports_and_print_tables(model, texts, tmp_path, monkeypatch, capsys):
    for name, extra in (("a", []), ("b", ["--mask-ratio", "0.4"])):
        data = ["--data", texts / "texts.txt", "--device", "cpu"]
        code = run(monkeypatch, "probe", "rank", model, *data, *extra, "--out", tmp_path / name)
        assert code == 0
        assert {"report.json", "report.html", "rank_by_layer.png"} <= {p.name for p in (tmp_path / name).iterdir()}
    printed = capsys.readouterr()
    assert "encoder.layer.1" in printed.out
    assert "masked/[MASK]" in printed.out
    assert "tok/s" in printed.err  # the progress bar
    assert json.loads((tmp_path / "b" / "report.json").read_text())["settings"]["mask_ratio"] == 0.4
    assert run(monkeypatch, "probe", "compare", tmp_path / "a", tmp_path / "b", "--out", tmp_path / "c") == 0
    assert (tmp_path / "c" / "comparison.png").is_file()
    assert "small-bert (2): unmasked" in capsys.readouterr().out


def test_column_layers_and_token_limit(model, texts, tmp_path, monkeypatch):
    data = ["--data", texts / "texts.jsonl", "--column", "body", "--max-tokens", "100", "--device", "cpu"]
    layers = ["--layer", "encoder.layer.1", "--layer", "embeddings.LayerNorm"]
    assert run(monkeypatch, "probe", "rank", model, *data, *layers, "--out", tmp_path) == 0
    rows = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert {row["layer"] for row in rows} == {"encoder.layer.1", "embeddings.LayerNorm"}
    assert 100 <= rows[0]["tokens"] < 122


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["probe", "rank", "MODEL", "--data", "no/such/file.txt"], "no/such/file.txt"),
        (["probe", "rank", "MODEL", "--data", "no-such-data:config:test"], "no-such-data"),
        (["probe", "rank", "no/such-model", "--data", "TEXTS"], "no/such-model"),
        (["probe", "rank", "./nowhere", "--data", "TEXTS"], "./nowhere does not exist"),
        (["probe", "rank", "timm/no_such_model", "--data", "TEXTS"], "timm"),
        (
            ["probe", "rank", "timm/vit_tiny", "--data", "TEXTS", "--revision", "v1"],
            "revision='v1' is not taken for timm",
        ),
        (["probe", "rank", "MODEL", "--data", "TEXTS", "--layer", "encoder.layer.7"], "near matches"),
        (["probe", "rank", "MODEL", "--data", "TEXTS", "--tau", "2"], "tau=2"),
        (["probe", "rank", "MODEL", "--data", "TEXTS", "--dtype", "float1"], "float1"),
        (["probe", "rank", "MODEL", "--data", "JSONL", "--column", "nobody"], "nobody"),
        (["probe", "compare", "nowhere", "elsewhere"], "nowhere"),
    ],
)
def test_what_a_user_can_put_right_is_one_line_and_exit_code_2(
    arguments, message, model, texts, tmp_path, monkeypatch, capsys
):
    places = {"MODEL": model, "TEXTS": texts / "texts.txt", "JSONL": texts / "texts.jsonl"}
    code = run(monkeypatch, *(places.get(word, word) for word in arguments), "--out", tmp_path / "out")
    assert code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert message in line
    assert not (tmp_path / "out").exists()


def test_remote_code_is_off_unless_asked(model, texts, tmp_path, monkeypatch):
    asked = []

    def from_pretrained(*args, **kwargs):
        asked.append(kwargs["trust_remote_code"])
        raise OSError("stop here")

    monkeypatch.setattr("transformers.AutoModel.from_pretrained", from_pretrained)
    arguments = ["probe", "rank", model, "--data", texts / "texts.txt", "--out", tmp_path]
    assert run(monkeypatch, *arguments) == 2
    assert run(monkeypatch, *arguments, "--trust-remote-code") == 2
    assert asked == [False, True]
