# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""A checkpoint file as fairseq writes it becomes our model, and nothing in it is run."""

import argparse
import json
import os

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM, AutoTokenizer
from typer.testing import CliRunner

from maelm_hf.cli import app
from maelm_hf.hub.fairseq_checkpoint import (
    convert_fairseq_checkpoint,
    read_dictionary,
    read_fairseq_checkpoint,
    settings_from_arguments,
)

# As the authors' script sets them (and base_architecture() fills them in), at the sizes of the golden checkpoint.
ARGUMENTS = {
    "arch": "ae",
    "no_return_mask": True,
    "encoder_layers": 3,
    "encoder_embed_dim": 64,
    "encoder_ffn_embed_dim": 128,
    "encoder_attention_heads": 4,
    "gen_decoder_layers": 4,
    "decoder_embed_dim": 64,
    "decoder_ffn_embed_dim": 128,
    "decoder_attention_heads": 4,
    "activation_fn": "gelu",
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "rel_pos": 1,
    "rel_pos_bins": 64,
    "max_rel_pos": 128,
    "max_positions": 512,
    "tokens_per_sample": 512,
}


def write_checkpoint(path, weights, style="args", **more):
    """The layouts of fairseq before and after its move to structured configs."""
    arguments = {
        "args": {"args": argparse.Namespace(**ARGUMENTS)},
        "cfg": {"args": None, "cfg": {"model": argparse.Namespace(**ARGUMENTS), "task": {"data": "corpus"}}},
        "cfg of dicts": {"args": None, "cfg": {"model": dict(ARGUMENTS)}},
    }[style]
    rest = {"optimizer_history": [{"num_updates": 3}], "extra_state": {"epoch": 1}, "last_optimizer_state": None}
    torch.save(arguments | {"model": weights} | rest | more, path)
    return path


def write_dictionary(path, symbols):
    path.write_text("".join(f"{symbol} {1000 - index}\n" for index, symbol in enumerate(symbols)), "utf-8")
    return path


@pytest.fixture
def weights(golden):
    return load_file(golden / "official_state_dict.safetensors")


@pytest.mark.parametrize("style", ["args", "cfg", "cfg of dicts"])
def test_the_official_forward_pass_is_reproduced_from_the_file_alone(style, weights, golden, tmp_path):
    write_dictionary(tmp_path / "dict.txt", [f"word{index}" for index in range(115)])
    model, tokenizer = convert_fairseq_checkpoint(write_checkpoint(tmp_path / "a.pt", weights, style))
    batch = load_file(golden / "batch.safetensors")
    ids = batch["input_ids"]
    masked = {name: batch[name] for name in ("attention_mask", "labels")} | {"input_ids": batch["masked_input_ids"]}
    with torch.no_grad():
        states = model.encoder(ids, attention_mask=batch["attention_mask"]).last_hidden_state
        output = model(**masked, sparse_logits=True)
    expected = batch["masked_logits"]
    assert (output.logits - expected).abs().max() < 2e-5 * max(1, expected.abs().max())
    assert abs(output.loss - batch["loss"]) < 2e-5
    expected = batch["encoder_last_hidden_state_unmasked_batch"]
    real = batch["attention_mask"].bool()
    assert (states - expected)[real].abs().max() < 2e-5 * max(1, expected[real].abs().max())
    expected_config = json.loads((golden / "config.json").read_text())
    assert {name: getattr(model.config, name) for name in expected_config} == expected_config
    assert len(tokenizer) == 120


def test_dictionary_gives_every_symbol_the_id_that_fairseq_gives_it(weights, tmp_path):
    symbols = [f"word{index}" for index in range(113)] + ["Ġthe", "ein#wort"]
    write_dictionary(tmp_path / "words.txt", symbols)
    path = write_checkpoint(tmp_path / "a.pt", weights)
    model, tokenizer = convert_fairseq_checkpoint(path, tmp_path / "words.txt")
    # Dictionary.__init__ adds the four, load() the lines in order, the task <mask> last.
    order = ["<s>", "<pad>", "</s>", "<unk>", *symbols, "<mask>"]
    assert tokenizer.convert_tokens_to_ids(order) == list(range(120))
    assert model.config.mask_token_id == tokenizer.mask_token_id == 119
    # encode_line: split at white space, unknown symbols to <unk>, </s> at the end; the task puts <s> in front.
    assert tokenizer("word7 Ġthe <mask> nowhere")["input_ids"] == [0, 11, 117, 119, 3, 2]
    tokenizer.save_pretrained(tmp_path / "ours")
    model.save_pretrained(tmp_path / "ours")
    again = AutoTokenizer.from_pretrained(tmp_path / "ours")
    assert again("word7 Ġthe <mask> nowhere")["input_ids"] == [0, 11, 117, 119, 3, 2]


def test_rows_that_pad_to_a_multiple_of_8_are_named_and_mask_comes_before_them(weights, tmp_path):
    write_dictionary(tmp_path / "dict.txt", [f"word{index}" for index in range(110)])
    model, tokenizer = convert_fairseq_checkpoint(write_checkpoint(tmp_path / "a.pt", weights))
    assert model.config.mask_token_id == 114
    assert tokenizer.convert_ids_to_tokens([114, 115, 119]) == ["<mask>", "madeupword0000", "madeupword0004"]


def test_mask_inside_the_dictionary_is_found_there(tmp_path):
    dictionary = read_dictionary(write_dictionary(tmp_path / "dict.txt", ["a", "<mask>", "b"]))
    assert dictionary.mask_token_id == 5
    assert len(dictionary.symbols) == 7


@pytest.mark.parametrize("count", [50, 107, 116, 200])
def test_a_dictionary_of_another_checkpoint_is_refused(count, weights, tmp_path):
    write_dictionary(tmp_path / "dict.txt", [f"word{index}" for index in range(count)])
    with pytest.raises(ValueError, match=rf"{count + 5} symbols .* has 120 rows"):
        convert_fairseq_checkpoint(write_checkpoint(tmp_path / "a.pt", weights))


def test_broken_dictionaries_are_refused_by_line(tmp_path):
    path = tmp_path / "dict.txt"
    path.write_text("a 3\nb\n")
    with pytest.raises(ValueError, match="line 2: expected 'symbol count', got 'b'"):
        read_dictionary(path)
    with pytest.raises(ValueError, match="'a' occurs twice"):
        read_dictionary(write_dictionary(path, ["a", "b", "a"]))


def test_without_a_dictionary_the_choice_of_mask_is_said(weights, tmp_path, caplog):
    model, tokenizer = convert_fairseq_checkpoint(write_checkpoint(tmp_path / "a.pt", weights))
    assert model.config.mask_token_id == 119
    assert tokenizer is None
    assert "taking id 119 for <mask>" in caplog.text


def test_missing_and_unknown_weights_are_listed(weights, tmp_path):
    del weights["gen_decoder.lm_head.bias"]
    weights["encoder.classification_heads.mnli.dense.weight"] = torch.zeros(2)
    with pytest.raises(ValueError, match=r"missing gen_decoder\.lm_head\.bias; unknown encoder\.classification_heads"):
        convert_fairseq_checkpoint(write_checkpoint(tmp_path / "a.pt", weights))


def test_missing_arguments_are_listed():
    arguments = {name: value for name, value in ARGUMENTS.items() if name not in ("gen_decoder_layers", "max_rel_pos")}
    with pytest.raises(ValueError, match="lack gen_decoder_layers or decoder_layers, max_rel_pos"):
        settings_from_arguments(arguments)
    settings = settings_from_arguments(arguments | {"decoder_layers": 2, "rel_pos": 0})
    assert settings["relative_position_buckets"] == 0
    assert settings["decoder_num_hidden_layers"] == 2


def test_experiments_of_the_code_that_are_another_model_are_refused_by_name():
    with pytest.raises(ValueError, match="decoder_cross_attn=True, decoder_rel_pos=1, no_return_mask=False"):
        settings_from_arguments(
            ARGUMENTS
            | {"decoder_rel_pos": 1, "decoder_cross_attn": True, "share_pos_emb": False, "no_return_mask": False}
        )
    with pytest.raises(ValueError, match="activation_fn='swish'"):
        settings_from_arguments(ARGUMENTS | {"activation_fn": "swish"})


def test_the_command_writes_a_folder_that_loads(weights, tmp_path):
    write_dictionary(tmp_path / "dict.txt", [f"word{index}" for index in range(115)])
    path = write_checkpoint(tmp_path / "checkpoint_last.pt", weights)
    done = CliRunner().invoke(app, ["convert", str(path)])
    assert done.exit_code == 0, done.output
    out = tmp_path / "checkpoint_last"
    loaded, model = AutoModelForMaskedLM.from_pretrained(out), convert_fairseq_checkpoint(path)[0]
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)
    assert AutoTokenizer.from_pretrained(out)("word7 <mask>")["input_ids"] == [0, 11, 119, 2]
    again = CliRunner().invoke(app, ["convert", str(path)])
    assert isinstance(again.exception, FileExistsError)


class RunsACommand:
    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


class Stranger:
    pass


@pytest.mark.parametrize("zipped", [True, False])
def test_a_checkpoint_that_would_run_a_command_is_refused_and_does_not(zipped, tmp_path):
    marker = tmp_path / "ran"
    path = tmp_path / "a.pt"
    content = {"model": {}, "args": argparse.Namespace(hook=RunsACommand(f"touch {marker}"))}
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(ValueError, match=r"a\.pt is refused: it holds (posix|nt)\.system"):
        read_fairseq_checkpoint(path)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("value", "named"),
    [(Stranger(), r"[\w.]*\.Stranger"), (np.float64(1), r"numpy[\w.]*scalar")],
    ids=["class", "numpy"],
)
def test_any_other_object_is_refused_by_name(value, named, tmp_path):
    torch.save({"model": {}, "extra_state": value}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match=f"is refused: it holds {named}"):
        read_fairseq_checkpoint(tmp_path / "a.pt")


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04 cut off"])
def test_files_that_are_no_checkpoint_are_refused_in_one_line(content, tmp_path):
    (tmp_path / "a.pt").write_bytes(content)
    with pytest.raises(ValueError, match=r"^[^\n]*a\.pt is no whole checkpoint file[^\n]*$"):
        read_fairseq_checkpoint(tmp_path / "a.pt")
    with pytest.raises(FileNotFoundError, match=r"no checkpoint file .*b\.pt"):
        read_fairseq_checkpoint(tmp_path / "b.pt")
    torch.save({"weights": {}}, tmp_path / "c.pt")
    with pytest.raises(ValueError, match="has no 'model'"):
        read_fairseq_checkpoint(tmp_path / "c.pt")
