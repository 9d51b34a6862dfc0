# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0

import logging

import pytest
from transformers import AutoConfig

from maelm_hf import MaeLmConfig, MaeLmForMaskedLM, MaeLmModel


def test_defaults_are_the_papers_base_size():
    config = MaeLmConfig()
    assert (config.num_hidden_layers, config.hidden_size, config.num_attention_heads) == (12, 768, 12)
    assert (config.intermediate_size, config.max_position_embeddings) == (3072, 512)
    assert (config.relative_position_buckets, config.relative_position_max_distance) == (64, 128)
    assert (config.decoder_num_hidden_layers, config.decoder_hidden_size, config.decoder_dropout_prob) == (4, 768, 0.0)
    assert config.encoder_mask_fraction == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_size": 100}, "hidden_size=100 is not divisible by num_attention_heads=12"),
        ({"decoder_hidden_size": 100}, "decoder_hidden_size=100 is not divisible by decoder_num_attention_heads=12"),
        ({"relative_position_buckets": 33}, "relative_position_buckets=33.*even number"),
        ({"relative_position_buckets": 2}, "relative_position_buckets=2.*at least 4"),
        ({"relative_position_max_distance": 17}, "relative_position_max_distance=17.*at least 18"),
        ({"decoder_num_hidden_layers": 0}, "decoder_num_hidden_layers=0.*encoder_mask_fraction=1"),
        ({"encoder_mask_fraction": 1.5}, "encoder_mask_fraction=1.5.*between 0"),
        ({"vocab_size": 100, "mask_token_id": 100}, "mask_token_id=100 is no id.*tokenizer.mask_token_id"),
        ({"mask_token_id": 1}, "mask_token_id=1 is pad_token_id too.*pad_token_id=tokenizer.pad_token_id"),
        ({"hidden_dropout_prob": 1.0}, r"hidden_dropout_prob=1.0.*\[0, 1\)"),
        ({"hidden_act": "gellu"}, "hidden_act='gellu' is no activation; choose one of gelu"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0.*at least 1"),
        ({"decoder_num_hidden_layers": -1}, "decoder_num_hidden_layers=-1"),
    ],
)
def test_contradictions_are_refused_with_the_way_out(settings, message):
    with pytest.raises(ValueError, match=message):
        MaeLmConfig(**settings)


def test_wrong_types_are_refused():
    with pytest.raises(Exception, match=r"hidden_size.*expected int, got str"):
        MaeLmConfig(hidden_size="768")


def test_a_model_that_hides_needs_the_mask_token():
    config = MaeLmConfig(vocab_size=50, hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8)
    MaeLmModel(config)
    with pytest.raises(ValueError, match=r"mask_token_id=None.*tokenizer\.mask_token_id"):
        MaeLmForMaskedLM(config)


def test_a_misspelt_setting_warns_and_others_pass(caplog):
    logger = logging.getLogger("maelm_hf.configuration_maelm")
    logger.addHandler(caplog.handler)
    try:
        MaeLmConfig(encoder_mask_fractoin=1.0)
        assert "did you mean `encoder_mask_fraction`" in caplog.text
        caplog.clear()
        MaeLmConfig(my_project_note="kept, as transformers does")
        assert caplog.text == ""
    finally:
        logger.removeHandler(caplog.handler)


def test_a_round_trip_keeps_every_setting(tmp_path):
    config = MaeLmConfig(decoder_hidden_size=384, encoder_mask_fraction=0.25, mask_token_id=4, num_labels=5)
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(loaded, MaeLmConfig)
    same, other = config.to_dict(), loaded.to_dict()
    assert same.keys() == other.keys()
    # The loaded one names the folder it came from.
    assert {key for key in same if same[key] != other[key]} <= {"_name_or_path"}
    assert len(loaded.auto_map) == 8


def test_a_vocabulary_without_padding_may_mask_with_any_token():
    assert MaeLmConfig(mask_token_id=1, pad_token_id=None).mask_token_id == 1
    assert MaeLmConfig(mask_token_id=1, pad_token_id=0).mask_token_id == 1
