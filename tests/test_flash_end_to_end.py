"""
In training with a flash backend, tokens are unpadded once and laid end to end. The backend itself is CUDA's alone: a
stand-in computes what transformers' flash path does with sequence bounds, one sequence at a time.
"""

import copy

import pytest
import torch
from test_modeling_maelm import MASK, VOCABULARY, batch, build, config, indices, packed_and_separate
from transformers import BertConfig, ModernBertConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from maelm_hf import MaeLmConfig, MaeLmForMaskedLM, MaeLmForSequenceClassification, MaeLmForTokenClassification
from training.attention_choice import takes_flash

NAME = "flash_attention_2"


@pytest.fixture
def flash(monkeypatch):
    """Switches a model to the stand-in, and collects the shapes that it was asked for."""
    asked = []

    def forward(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
        assert attention_mask is None
        assert query.shape[0] == key.shape[0] == 1
        bounds_q, bounds_k = kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"]
        assert bounds_q.dtype == bounds_k.dtype == torch.int32
        assert bounds_q[-1] == query.shape[2]
        assert bounds_k[-1] == key.shape[2]
        assert kwargs["max_length_q"] == bounds_q.diff().max()
        assert kwargs["max_length_k"] == bounds_k.diff().max()
        asked.append((query.shape[2], key.shape[2]))
        parts = []
        for number in range(len(bounds_q) - 1):
            q = query[0, :, bounds_q[number] : bounds_q[number + 1]]
            k, v = (each[0, :, bounds_k[number] : bounds_k[number + 1]] for each in (key, value))
            parts.append((q @ k.transpose(1, 2) * scaling).softmax(-1) @ v)
        return torch.cat(parts, dim=1).transpose(0, 1)[None], None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, NAME, forward)

    def switch(model):
        model.config._attn_implementation_internal = NAME
        return asked

    return switch


def loss_and_gradients(model, inputs):
    model.zero_grad()
    loss = model.train()(**inputs).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found, expected):
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-6)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=1e-5, msg=name)


def rows_of_many_kinds():
    inputs = batch(20, 13, 1, 7, hidden=0.3)
    inputs["attention_mask"][2] = 0  # a row of padding alone
    inputs["labels"][2] = -100
    inputs["labels"][0, :6] = 9  # labels at tokens that stay
    return inputs


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("width", [16, 24])
def test_training_step_equals_eagers(flash, indexed, width):
    model = build(attention="eager", relative_position_buckets=0, decoder_hidden_size=width)
    inputs = batch(20, 13, 7, hidden=0.3) if indexed else rows_of_many_kinds()
    if indexed:
        inputs |= indices(inputs)
    expected = loss_and_gradients(model, inputs)
    asked = flash(model)
    assert_same(loss_and_gradients(model, inputs), expected)

    real = inputs["attention_mask"].bool()
    kept, tokens = int((real & (inputs["input_ids"] != MASK)).sum()), int(real.sum())
    targets = int((real & (inputs["labels"] != -100)).sum())
    assert asked == [(kept, kept)] * 2 + [(tokens, tokens), (targets, tokens)]


def test_packed_training_step_equals_that_of_separate_documents(flash):
    model = build(attention="eager", relative_position_buckets=0)
    packed, _ = packed_and_separate()
    expected = loss_and_gradients(model, packed)
    flash(model)
    assert_same(loss_and_gradients(model, packed), expected)


def test_a_document_without_targets_has_no_queries_in_the_last_layer(flash):
    model = build(attention="eager", relative_position_buckets=0)
    packed, _ = packed_and_separate((9, 5, 12))
    middle = packed["document_ids"] == 1
    packed["input_ids"][middle] = torch.where(packed["input_ids"][middle] == MASK, 6, packed["input_ids"][middle])
    packed["labels"][middle] = -100
    expected = loss_and_gradients(model, packed)
    flash(model)
    assert_same(loss_and_gradients(model, packed), expected)


@pytest.mark.parametrize("model_class", [MaeLmForSequenceClassification, MaeLmForTokenClassification])
def test_fine_tuning_step_equals_eagers(flash, model_class):
    model = build(model_class, attention="eager", relative_position_buckets=0)
    inputs = batch(20, 13, 7, hidden=0.0)
    labels = torch.tensor([0, 1, 1])
    if model_class is MaeLmForTokenClassification:
        labels = inputs["attention_mask"] * (inputs["input_ids"] % 2) - 100 * (1 - inputs["attention_mask"])
    inputs["labels"] = labels
    expected = loss_and_gradients(model, inputs)
    asked = flash(model)
    assert_same(loss_and_gradients(model, inputs), expected)
    assert asked == [(40, 40)] * 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers(flash, reentrant):
    model = build(attention="eager", relative_position_buckets=0)
    inputs = batch(20, 13)
    expected = loss_and_gradients(model, inputs)
    flash(model)
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    assert_same(loss_and_gradients(model, inputs), expected)


def test_checkpointed_layers_and_plain_mlm(flash):
    model = build(
        attention="eager", relative_position_buckets=0, encoder_mask_fraction=1.0, decoder_num_hidden_layers=0
    )
    inputs = batch(20, 13)
    expected = loss_and_gradients(model, inputs)
    flash(model)
    model.activation_checkpointing_enable()
    assert_same(loss_and_gradients(model, inputs), expected)


def in_rows(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """Shapes and no more: zeros."""
    return torch.zeros_like(query).transpose(1, 2), None


def test_hidden_states_that_are_asked_for_stay_in_rows(monkeypatch):
    model = build(attention="eager", relative_position_buckets=0).train()
    inputs = batch(20, 13, 7)
    expected = model(**inputs, output_hidden_states=True).hidden_states

    def rows(module, query, key, value, attention_mask, scaling, **kwargs):
        assert "cu_seq_lens_q" not in kwargs or query.shape[0] == 1
        if "cu_seq_lens_q" in kwargs:  # the decoder, which nobody looks into
            return torch.zeros_like(query).transpose(1, 2), None
        scores = (query @ key.transpose(2, 3) * scaling).masked_fill(~attention_mask[:, None, None].bool(), -1e9)
        return (scores.softmax(-1) @ value).transpose(1, 2), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, NAME, rows)
    model.config._attn_implementation_internal = NAME
    found = model(**inputs, output_hidden_states=True).hidden_states
    kept = inputs["attention_mask"].bool() & (inputs["input_ids"] != MASK)
    for state, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(state[kept], reference[kept], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("training", "asked"),
    [
        (False, {}),
        (True, {"sparse_logits": False}),
        (True, {"labels": None}),
        (True, {"output_hidden_states": True}),
        (True, {"output_attentions": True}),
    ],
)
def test_packed_rows_that_are_not_laid_end_to_end_are_refused(flash, training, asked):
    model = build(attention="eager", relative_position_buckets=0)
    flash(model)
    packed, _ = packed_and_separate()
    with pytest.raises(ValueError, match=r"document_ids in training alone"):
        model.train(training)(**packed | asked)


def bert_backbone():
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return MaeLmConfig(
        backbone_config=BertConfig(vocab_size=VOCABULARY, max_position_embeddings=64, **sizes), mask_token_id=MASK
    )


def modernbert_backbone():
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
    backbone = ModernBertConfig(
        vocab_size=VOCABULARY, max_position_embeddings=64, local_attention=8, pad_token_id=1, **sizes
    )
    return MaeLmConfig(backbone_config=backbone, mask_token_id=MASK)


def test_packed_rows_of_a_backbone_are_refused(flash):
    model = MaeLmForMaskedLM(bert_backbone())
    flash(model)
    flash(model.encoder.backbone)
    packed, _ = packed_and_separate()
    with pytest.raises(ValueError, match=r"document_ids in training alone, on our own encoder"):
        model.train()(**packed)


def test_a_backbone_with_a_local_window_is_refused(flash):
    model = MaeLmForMaskedLM(modernbert_backbone())
    flash(model)
    flash(model.encoder.backbone)
    with pytest.raises(ValueError, match=r"local window of a backbone of type 'modernbert'") as error:
        model.train()(**batch(20, 13))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    "config",
    [bert_backbone(), modernbert_backbone(), config(), config(relative_position_buckets=0)],
    ids=["BERT", "ModernBERT", "bias", "no bias"],
)
def test_flash_is_offered_to_what_trains_with_it(flash, monkeypatch, config, packed):
    """The choice of kernels before training agrees with what the model itself does."""
    model = MaeLmForMaskedLM(copy.deepcopy(config))
    inputs = packed_and_separate()[0] if packed else batch(20, 13)
    for each in (model, model.encoder.backbone):
        if each is not None:
            flash(each)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, NAME, in_rows)
    try:
        model.train()(**inputs)
        trains = True
    except ValueError:
        trains = False
    assert takes_flash(model, [inputs]) is trains


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("nothing", ["to predict", "to see"])
def test_a_batch_with_nothing_is_no_error(flash, nothing, packed, monkeypatch):
    model = build(attention="eager", relative_position_buckets=0)
    inputs = batch(9, 9, hidden=0.0 if nothing == "to predict" else 1.0)
    if packed:
        inputs["document_ids"] = (torch.arange(9) >= 5).long().expand(2, -1)
    expected = loss_and_gradients(model, inputs)
    flash(model)
    varlen = ALL_ATTENTION_FUNCTIONS._global_mapping[NAME]

    def with_rows(module, query, key, value, attention_mask, scaling, **kwargs):
        if "cu_seq_lens_q" in kwargs:
            return varlen(module, query, key, value, attention_mask, scaling, **kwargs)
        real = torch.ones(key.shape[0], key.shape[2]) if attention_mask is None else attention_mask
        scores = (query @ key.transpose(2, 3) * scaling).masked_fill(~real[:, None, None].bool(), -1e9)
        return (scores.softmax(-1) @ value).transpose(1, 2), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, NAME, with_rows)
    found = loss_and_gradients(model, inputs)
    torch.testing.assert_close(found[0], expected[0])
    assert all(torch.isfinite(gradient).all() for gradient in found[1].values())
