# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""MAE-LM on encoders of transformers; the reference is always the stock model itself."""

import copy
import logging
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import (
    AlbertConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    BertModel,
    CamembertConfig,
    DistilBertConfig,
    ElectraConfig,
    GPT2Config,
    ModernBertConfig,
    MPNetConfig,
    PreTrainedTokenizerFast,
    RobertaConfig,
    T5Config,
    Trainer,
    TrainingArguments,
    XLMRobertaConfig,
)

from maelm_hf import MaeLmConfig, MaeLmForMaskedLM, MaeLmForMultipleChoice, MaeLmModel
from maelm_hf.hub import export_native, publish

MASK, VOCABULARY = 4, 60
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BERT = SIZES | NO_DROPOUT | {"num_hidden_layers": 2}
CONFIGS = {
    "BERT": BertConfig(max_position_embeddings=40, **BERT),
    "RoBERTa": RobertaConfig(max_position_embeddings=42, **BERT),
    "XLM-RoBERTa": XLMRobertaConfig(max_position_embeddings=42, type_vocab_size=1, **BERT),
    "CamemBERT": CamembertConfig(max_position_embeddings=42, type_vocab_size=1, **BERT),
    "DistilBERT": DistilBertConfig(
        vocab_size=VOCABULARY,
        dim=32,
        n_layers=2,
        n_heads=4,
        hidden_dim=48,
        dropout=0.0,
        attention_dropout=0.0,
        max_position_embeddings=40,
    ),
    "ELECTRA": ElectraConfig(embedding_size=16, max_position_embeddings=40, **BERT),
    "ALBERT": AlbertConfig(embedding_size=16, max_position_embeddings=40, **BERT),
    # Three kinds of layers: everywhere, and within 4 tokens on either side.
    "ModernBERT": ModernBertConfig(
        num_hidden_layers=4,
        local_attention=8,
        max_position_embeddings=40,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
        **SIZES,
    ),
}
OFFSETS = {"RoBERTa": 2, "XLM-RoBERTa": 2, "CamemBERT": 2}  # padding_idx + 1, and padding_idx is 1
FOLLOWING = [name for name in CONFIGS if name != "ModernBERT"]  # position_ids, to the stock code's last operation


def stock_model(name: str, seed: int = 0, auto=AutoModelForMaskedLM):
    """The stock model with every parameter, biases and norms included, random."""
    torch.manual_seed(seed)
    model = auto.from_config(CONFIGS[name]).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def masked_batch(seed: int = 0):
    """Right-padded ids with [MASK] in place, the mask of real tokens, and labels at [MASK]."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([30, 17, 2])
    ids = torch.randint(5, VOCABULARY, (3, 30), generator=generator)
    attended = torch.arange(30) < lengths[:, None]
    hidden = attended & (torch.rand(3, 30, generator=generator) < 0.4)
    hidden[2] = torch.arange(30) == 0
    labels = ids.masked_fill(~hidden, -100)
    return ids.masked_fill(hidden, MASK).masked_fill(~attended, 1), attended, labels


def close(one, other):
    torch.testing.assert_close(one, other, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_with_nothing_hidden_the_encoder_is_the_stock_encoder(name):
    stock = stock_model(name)
    model = MaeLmForMaskedLM.from_encoder(stock, mask_token_id=MASK)
    ids, attended, labels = masked_batch()
    ids = torch.where(labels != -100, labels, ids)
    inputs = {"attention_mask": attended.long(), "output_hidden_states": True}
    ours, theirs = model.encoder(ids, **inputs), stock.base_model(ids, **inputs)
    assert len(ours.hidden_states) == len(theirs.hidden_states) == model.config.num_hidden_layers + 1
    for mine, expected in zip(ours.hidden_states, theirs.hidden_states, strict=True):
        close(mine[attended], expected[attended])
    close(ours.last_hidden_state[attended], theirs.last_hidden_state[attended])


@pytest.mark.parametrize("name", FOLLOWING)
def test_kept_tokens_are_the_stock_model_on_what_is_left_at_its_own_positions(name):
    stock = stock_model(name)
    model = MaeLmForMaskedLM.from_encoder(stock, mask_token_id=MASK)
    ids, attended, labels = masked_batch()
    found = model(ids, attended.long(), labels=labels, output_hidden_states=True).hidden_states
    for row in range(2):
        kept = (attended[row] & (labels[row] == -100)).nonzero().squeeze(1)
        positions = kept[None] + OFFSETS.get(name, 0)  # with gaps: without a mask they would pass for packed documents
        inputs = {"attention_mask": torch.ones_like(positions), "position_ids": positions}
        expected = stock.base_model(ids[row, kept][None], **inputs, output_hidden_states=True).hidden_states
        for mine, theirs in zip(found, expected, strict=True):
            close(mine[row, kept], theirs[0])


@pytest.mark.parametrize("name", CONFIGS)
def test_kept_tokens_are_the_stock_model_with_hidden_ones_masked_as_keys(name):
    """The tokens in place, and the stock code's own window: also what ModernBERT's local layers see."""
    stock = stock_model(name)
    model = MaeLmForMaskedLM.from_encoder(stock, mask_token_id=MASK)
    ids, attended, labels = masked_batch()
    kept = attended & (labels == -100)
    positions = torch.arange(30).expand(3, -1) + OFFSETS.get(name, 0)
    expected = stock.base_model(ids, attention_mask=kept.long(), position_ids=positions).last_hidden_state
    hidden_states = model(ids, attended.long(), labels=labels, output_hidden_states=True).hidden_states
    alone = model.encoder(ids, attended.long()).last_hidden_state
    for found in (hidden_states[-1], alone):
        close(found[kept], expected[kept])
        assert not found[~kept & attended].any()


@pytest.mark.parametrize("name", CONFIGS)
def test_the_layers_see_fewer_tokens_and_never_the_mask_embedding(name):
    model = MaeLmForMaskedLM.from_encoder(stock_model(name), mask_token_id=MASK)
    ids, attended, labels = masked_batch()
    before = model.encoder(ids, attended.long()).last_hidden_state
    widths = []
    layer = next(module for module in model.encoder.modules() if isinstance(module, nn.ModuleList))[0]
    handle = layer.register_forward_pre_hook(lambda _module, inputs: widths.append(inputs[0].shape[1]))
    model(ids, attended.long(), labels=labels)
    handle.remove()
    assert set(widths) == {int((attended & (labels == -100)).sum(1).max())}
    with torch.no_grad():
        model.get_input_embeddings().weight[MASK] = float("nan")
    poisoned = model.encoder(ids, attended.long()).last_hidden_state
    assert torch.equal(poisoned[attended], before[attended])


@pytest.mark.parametrize("name", CONFIGS)
def test_the_mlm_twin_has_the_loss_of_the_stock_masked_language_model(name):
    stock = stock_model(name)
    twin = MaeLmForMaskedLM.from_encoder(stock, 0, encoder_mask_fraction=1, mask_token_id=MASK)
    ids, attended, labels = masked_batch()
    inputs = {"attention_mask": attended.long(), "labels": labels}
    ours, theirs = twin(ids, **inputs), stock(ids, **inputs)
    close(ours.loss, theirs.loss)
    close(ours.logits[attended], theirs.logits[attended])
    ours.loss.backward()
    theirs.loss.backward()
    close(twin.get_input_embeddings().weight.grad, stock.get_input_embeddings().weight.grad)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_head_and_the_mask_embedding_start_from_the_encoder(name):
    """By what the decoder gets and what the head makes of it, not by the names of weights."""
    stock = stock_model(name)
    model = MaeLmForMaskedLM.from_encoder(stock, mask_token_id=MASK)
    ids, attended, labels = masked_batch()
    joined, heads = [], []
    embed = model.decoder.embed
    model.decoder.embed = lambda states, positions: joined.append(states) or embed(states, positions)
    model.lm_head.register_forward_hook(lambda _module, inputs, output: heads.append((inputs[0], output)))
    model(ids, attended.long(), labels=labels)
    row = stock.get_input_embeddings().weight[MASK]
    if name == "ELECTRA":
        row = stock.electra.embeddings_project(row)
    if name != "ALBERT":  # its projection stands apart from its embeddings: the mask's is new
        close(joined[0][0, -1], row)

    # The stock head over the same states.
    twin = MaeLmForMaskedLM.from_encoder(stock, 0, encoder_mask_fraction=1, mask_token_id=MASK)
    states, logits = heads[0]
    close(twin.lm_head(states), logits)


@pytest.mark.parametrize("name", CONFIGS)
def test_training_gives_every_parameter_a_gradient_but_the_pooler(name):
    model = MaeLmForMaskedLM.from_encoder(stock_model(name), mask_token_id=MASK).train()
    ids, attended, labels = masked_batch()
    model(ids, attended.long(), labels=labels).loss.backward()
    for key, parameter in model.named_parameters():
        assert (parameter.grad is None) == ("pooler" in key) == (not parameter.requires_grad), key


@pytest.mark.parametrize("name", CONFIGS)
def test_it_saves_and_loads_as_any_checkpoint(name, tmp_path):
    stock = stock_model(name)
    model = MaeLmForMaskedLM.from_encoder(stock, mask_token_id=MASK)
    ids, attended, _ = masked_batch()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(ids, attended.long()).logits, model(ids, attended.long()).logits)
    assert loaded.lm_head.output.weight is loaded.get_input_embeddings().weight
    assert "lm_head.output.weight" not in load_file(tmp_path / "model.safetensors")  # tied: one copy on disk
    encoder = AutoModel.from_pretrained(tmp_path)
    assert isinstance(encoder, MaeLmModel)
    ours, theirs = encoder(ids, attended.long()), model.encoder(ids, attended.long())
    assert torch.equal(ours.last_hidden_state, theirs.last_hidden_state)
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    assert classifier(ids, attended.long()).logits.shape == (3, 3)


@pytest.mark.parametrize("name", CONFIGS)
def test_settings_changed_while_loading_reach_the_backbone_and_are_saved(name, tmp_path):
    MaeLmForMaskedLM.from_encoder(stock_model(name), mask_token_id=MASK).save_pretrained(tmp_path / "before")
    changed = {"hidden_dropout_prob": 0.25, "attention_probs_dropout_prob": 0.125}
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "before", num_labels=2, **changed)
    dropouts = [module.p for module in model.encoder.backbone.modules() if isinstance(module, nn.Dropout)]
    assert 0.25 in dropouts
    model.save_pretrained(tmp_path / "after")
    config = MaeLmConfig.from_pretrained(tmp_path / "after")
    stock = type(CONFIGS[name]).from_dict(config.backbone_config.to_dict())
    written = [getattr(stock, each, None) for each in ("hidden_dropout_prob", "dropout", "mlp_dropout")]
    assert config.hidden_dropout_prob == next(each for each in written if each is not None) == 0.25
    assert config.attention_probs_dropout_prob == 0.125
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "after")
    ids, attended, _ = masked_batch()
    assert torch.equal(loaded(ids, attended.long()).logits, model.eval()(ids, attended.long()).logits)


@pytest.mark.parametrize(
    ("setting", "value", "theirs"), [("relative_position_buckets", 32, "0"), ("layer_norm_eps", 1e-6, "1e-12")]
)
def test_what_a_backbone_cannot_follow_is_refused_while_loading(setting, value, theirs, tmp_path):
    MaeLmForMaskedLM.from_encoder(stock_model("DistilBERT"), mask_token_id=MASK).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"{setting}={value} contradicts the backbone's {theirs}"):
        MaeLmForMaskedLM.from_pretrained(tmp_path, **{setting: value})


def test_a_longer_offset_backbone_counts_its_own_positions():
    config = MaeLmConfig(backbone_config=CONFIGS["RoBERTa"], mask_token_id=MASK)
    config.max_position_embeddings = 50
    assert config.backbone_config.max_position_embeddings == 52
    assert MaeLmModel(config).backbone.embeddings.position_embeddings.weight.shape[0] == 52
    assert CONFIGS["RoBERTa"].max_position_embeddings == 42  # the caller's config is left alone


@pytest.mark.parametrize("name", ["BERT", "RoBERTa"])
def test_a_checkpoint_of_trainer_loads_whatever_its_tokenizers_special_tokens(name, tmp_path):
    """Trainer writes the tokenizer's ids into the config; RoBERTa's positions stay where they were learnt."""
    model = MaeLmForMaskedLM.from_encoder(stock_model(name), mask_token_id=MASK)
    ids, attended, labels = masked_batch()
    expected = model(ids, attended.long()).logits
    tokenizer = small_tokenizer(bos_token="[CLS]", eos_token="w3", pad_token="w5")
    rows = [{"input_ids": ids[row], "labels": labels[row]} for row in range(2)]
    arguments = TrainingArguments(tmp_path, max_steps=1, learning_rate=0.0, report_to="none", use_cpu=True)
    Trainer(model, arguments, train_dataset=rows, processing_class=tokenizer).train()
    loaded = MaeLmForMaskedLM.from_pretrained(tmp_path / "checkpoint-1")
    special = (loaded.config.bos_token_id, loaded.config.eos_token_id, loaded.config.pad_token_id)
    assert special == (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    close(loaded(ids, attended.long()).logits, expected)


ELSEWHERE = """
import sys, torch
sys.modules["maelm_hf"] = None  # cannot be imported
from safetensors.torch import load_file, save_file
from transformers import AutoModel
model, info = AutoModel.from_pretrained(sys.argv[1], output_loading_info=True)
assert not info["missing_keys"] and not info["unexpected_keys"], info
inputs = load_file(sys.argv[1] + "/inputs.safetensors")
states = model(**inputs).last_hidden_state.detach()
save_file({"states": states}, sys.argv[1] + "/states.safetensors", metadata={"class": type(model).__name__})
"""


def test_the_saved_encoder_is_a_stock_checkpoint_in_a_process_without_this_package(tmp_path):
    stock = stock_model("RoBERTa", auto=AutoModel)
    model = MaeLmForMaskedLM.from_encoder(stock, mask_token_id=MASK)
    ids, attended, _ = masked_batch()
    model.encoder.save_pretrained(tmp_path)
    save_file({"input_ids": ids, "attention_mask": attended.long()}, tmp_path / "inputs.safetensors")
    subprocess.run([sys.executable, "-c", ELSEWHERE, str(tmp_path)], check=True, cwd=tmp_path)
    states = load_file(tmp_path / "states.safetensors")["states"]
    close(states[attended], stock(ids, attended.long()).last_hidden_state[attended])


def test_every_backbone_is_written_as_its_own_architecture_with_its_pooler(tmp_path):
    for name in CONFIGS:
        stock = stock_model(name, auto=AutoModel)
        MaeLmForMaskedLM.from_encoder(stock, mask_token_id=MASK).encoder.save_pretrained(tmp_path / name)
        loaded = AutoModel.from_pretrained(tmp_path / name)
        assert type(loaded) is type(stock)
        expected = stock.state_dict()
        assert all(torch.equal(value, expected[key]) for key, value in loaded.state_dict().items())
        assert all(parameter.requires_grad for parameter in loaded.parameters())


def test_export_and_publish_take_it(tmp_path):
    model = MaeLmForMaskedLM.from_encoder(stock_model("DistilBERT"), mask_token_id=MASK)
    export_native(model, tmp_path / "native", to="distilbert")
    assert type(AutoModel.from_pretrained(tmp_path / "native")).__name__ == "DistilBertModel"
    with pytest.raises(ValueError, match="'distilbert' only"):
        export_native(model, tmp_path / "other", to="bert")
    publish(model, "someone/adapted", dry_run=tmp_path / "hub")  # proves it in a process without this package


# --- where it comes from ----------------------------------------------------------------------------------------------


def small_tokenizer(**special) -> PreTrainedTokenizerFast:
    words = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"] + [f"w{number}" for number in range(VOCABULARY - 5)]
    core = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "mask_token": "[MASK]"} | special
    return PreTrainedTokenizerFast(
        tokenizer_object=core, **{role: token for role, token in special.items() if token is not None}
    )


def test_a_checkpoint_with_a_head_gives_it_and_one_without_says_so(tmp_path, caplog):
    stock = stock_model("BERT")
    stock.save_pretrained(tmp_path / "head")
    small_tokenizer().save_pretrained(tmp_path / "head")
    model = MaeLmForMaskedLM.from_encoder(tmp_path / "head")
    assert model.config.mask_token_id == MASK
    assert torch.equal(model.lm_head.dense.weight, stock.cls.predictions.transform.dense.weight)
    assert torch.equal(model.lm_head.output.bias, stock.cls.predictions.decoder.bias)
    assert model.dtype == torch.float32
    assert not model.training

    bare = stock_model("BERT", auto=AutoModel)
    bare.save_pretrained(tmp_path / "bare")
    small_tokenizer().save_pretrained(tmp_path / "bare")
    model = MaeLmForMaskedLM.from_encoder(tmp_path / "bare")
    assert torch.equal(model.encoder.backbone.pooler.dense.weight, bare.pooler.dense.weight)
    assert not model.lm_head.output.bias.any()


def test_16_bit_weights_are_checked_and_trained_in_fp32():
    model = MaeLmForMaskedLM.from_encoder(stock_model("BERT").bfloat16(), mask_token_id=MASK)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_a_missing_mask_token_is_added_when_asked_for(tmp_path):
    stock, tokenizer = stock_model("BERT"), small_tokenizer(mask_token=None)
    with pytest.raises(ValueError, match=r"has no mask token: pass tokenizer= and add_mask_token=True"):
        MaeLmForMaskedLM.from_encoder(stock, tokenizer=tokenizer)
    tokenizer = small_tokenizer(mask_token=None)
    tokenizer.add_tokens(["new"])
    model = MaeLmForMaskedLM.from_encoder(stock, tokenizer=tokenizer, add_mask_token=True)
    assert tokenizer.mask_token == "[MASK]"
    assert model.config.mask_token_id == tokenizer.mask_token_id == MASK  # the vocabulary had one, unnamed
    assert model.config.vocab_size == model.encoder.backbone.config.vocab_size == VOCABULARY + 1
    model.save_pretrained(tmp_path)
    loaded = MaeLmForMaskedLM.from_pretrained(tmp_path)
    ids, attended, _ = masked_batch()
    assert torch.equal(loaded(ids, attended.long()).logits, model(ids, attended.long()).logits)
    loaded.encoder.save_pretrained(tmp_path / "stock")
    assert AutoModel.from_pretrained(tmp_path / "stock").config.vocab_size == VOCABULARY + 1


# --- inputs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["BERT", "RoBERTa", "ModernBERT"])
def test_packed_documents_equal_separate_ones(name, attention):
    model = MaeLmForMaskedLM.from_encoder(stock_model(name), mask_token_id=MASK)
    model.set_attn_implementation(attention)
    assert model.encoder.backbone.config._attn_implementation == attention
    ids, _, _ = masked_batch()
    first, second = ids[:1, :14], ids[:1, 14:]
    documents = (torch.arange(30) >= 14).long()[None]
    positions = torch.cat([torch.arange(14), torch.arange(16)])[None]
    packed = model(ids[:1], position_ids=positions, document_ids=documents).logits
    close(packed, torch.cat([model(first).logits, model(second).logits], dim=1))


def test_segments_go_with_their_tokens():
    stock = stock_model("BERT")
    model = MaeLmForMaskedLM.from_encoder(stock, mask_token_id=MASK)
    ids, attended, labels = masked_batch()
    segments = (torch.arange(30) >= 9).long().expand(3, -1)
    found = model(ids, attended.long(), token_type_ids=segments, output_hidden_states=True).hidden_states[-1]
    kept = (attended[0] & (labels[0] == -100)).nonzero().squeeze(1)
    inputs = {"attention_mask": torch.ones_like(kept)[None], "position_ids": kept[None]}
    expected = stock.bert(ids[0, kept][None], token_type_ids=segments[0, kept][None], **inputs)
    close(found[0, kept], expected.last_hidden_state[0])
    zeros = model(ids, attended.long(), output_hidden_states=True).hidden_states[-1]
    assert (found - zeros).abs().max() > 0.1


def test_segments_of_choices_reach_the_backbone():
    model = MaeLmForMultipleChoice(MaeLmConfig(backbone_config=CONFIGS["BERT"], mask_token_id=MASK)).eval()
    ids = torch.randint(5, VOCABULARY, (2, 3, 9), generator=torch.Generator().manual_seed(0))
    segments = (torch.arange(9) >= 4).long().expand_as(ids)
    assert model(ids, token_type_ids=segments).logits.shape == (2, 3)
    assert not torch.equal(model(ids, token_type_ids=segments).logits, model(ids).logits)


def test_given_indices_change_nothing_and_compile_without_a_break():
    model = MaeLmForMaskedLM.from_encoder(stock_model("RoBERTa"), mask_token_id=MASK)
    ids, attended, labels = masked_batch()
    hidden = labels != -100
    order = torch.arange(30)
    kept_index, hidden_index = (
        torch.stack([nn.functional.pad(order[row], (0, 32 - int(row.sum())), value=-1) for row in chosen])
        for chosen in (attended & ~hidden, hidden)
    )
    plain = model(ids, attended.long(), labels=labels, sparse_logits=True)
    given = model(
        ids, attended.long(), labels=labels, sparse_logits=True, kept_index=kept_index, hidden_index=hidden_index
    )
    close(given.loss, plain.loss)
    close(given.logits, plain.logits)
    inputs = {"labels": labels, "kept_index": kept_index, "hidden_index": hidden_index}
    compiled = torch.compile(model.train(), fullgraph=True, backend="eager")
    close(compiled(input_ids=ids, attention_mask=attended.long(), **inputs).loss, plain.loss)


@pytest.mark.parametrize("own_first", [True, False])
def test_our_own_encoder_beside_it_changes_no_hidden_states(own_first):
    """transformers notes by class which layers give hidden states, and both kinds are a MaeLmModel."""
    stock = stock_model("BERT")
    stock.set_attn_implementation("eager")
    ids, attended, labels = masked_batch()
    ids = torch.where(labels != -100, labels, ids)
    asked = {"attention_mask": attended.long(), "output_hidden_states": True, "output_attentions": True}
    config = MaeLmConfig(max_position_embeddings=40, relative_position_buckets=0, **BERT)
    models = {}
    for kind in ("own", "BERT") if own_first else ("BERT", "own"):
        if kind == "own":
            models[kind] = MaeLmModel._from_config(config, attn_implementation="eager").eval()
        else:
            models[kind] = MaeLmForMaskedLM.from_encoder(stock, mask_token_id=MASK, attn_implementation="eager").encoder
    own, ours, theirs = models["own"](ids, **asked), models["BERT"](ids, **asked), stock.base_model(ids, **asked)
    assert len(own.hidden_states) == len(ours.hidden_states) == 3
    assert len(own.attentions) == len(ours.attentions) == 2
    close(own.hidden_states[0], models["own"].embeddings(models["own"].get_input_embeddings()(ids), torch.arange(30)))
    for mine, expected in zip(ours.hidden_states, theirs.hidden_states, strict=True):
        close(mine[attended], expected[attended])
    for mine, expected in zip(ours.attentions, theirs.attentions, strict=True):
        close(mine, expected)
    as_tuple = models["own"](ids, attended.long(), return_dict=False)
    assert torch.equal(as_tuple[0], models["own"](ids, attended.long()).last_hidden_state)
    as_tuple = models["BERT"](ids, attended.long(), return_dict=False)
    assert torch.equal(as_tuple[0], models["BERT"](ids, attended.long()).last_hidden_state)


# --- what is refused --------------------------------------------------------------------------------------------------


class CompactedBert(BertModel):
    """An encoder that takes position_ids and ignores them."""

    def forward(self, *args, position_ids=None, **kwargs):
        return super().forward(*args, **kwargs)


def test_an_encoder_that_does_not_follow_positions_is_refused():
    with pytest.raises(ValueError, match=r"MPNetModel does not follow position_ids: asked for 38 tokens"):
        MaeLmModel(MaeLmConfig(backbone_config=MPNetConfig(max_position_embeddings=40, **BERT), mask_token_id=MASK))
    model = MaeLmModel(MaeLmConfig(backbone_config=CONFIGS["BERT"], mask_token_id=MASK))
    model.backbone.__class__ = CompactedBert
    from maelm_hf.modeling_maelm import check_backbone

    with pytest.raises(ValueError, match="CompactedBert does not follow position_ids"):
        check_backbone(model)


def test_a_window_by_index_is_noticed_only_beyond_it_and_ours_is_by_position():
    """ModernBERT's own mask follows indices; the check asks beyond its window, where that shows."""
    stock = stock_model("ModernBERT", auto=AutoModel)
    ids, order = torch.arange(5, 45)[None], torch.randperm(40, generator=torch.Generator().manual_seed(1))
    expected = stock(ids).last_hidden_state[:, order]
    alone = stock(ids[:, order], position_ids=order[None]).last_hidden_state
    assert (alone - expected).abs().max() > 0.01
    model = MaeLmForMaskedLM.from_encoder(stock, mask_token_id=MASK)
    close(model.encoder(ids[:, order], position_ids=order[None]).last_hidden_state, expected)


def test_the_check_of_a_long_backbone_asks_for_a_few_windows_and_others_for_all():
    from maelm_hf.modeling_maelm import check_backbone

    long = copy.deepcopy(CONFIGS["ModernBERT"])
    long.max_position_embeddings = 8192
    for stock, length in ((long, 40), (CONFIGS["BERT"], 40), (CONFIGS["RoBERTa"], 40)):
        model, asked = MaeLmModel(MaeLmConfig(backbone_config=stock, mask_token_id=MASK)), []
        layer = next(module for module in model.modules() if isinstance(module, nn.ModuleList))[0]
        layer.register_forward_pre_hook(lambda _module, inputs, asked=asked: asked.append(inputs[0].shape[1]))
        with torch.device("meta"):  # another default device, as cuda would be: the check says where its tensors lie
            check_backbone(model)
        assert asked == [length, length]


REFUSED = {
    "encoder-decoder": (T5Config(), "'t5' is an encoder-decoder"),
    "decoder-only": (GPT2Config(), "'gpt2' is decoder-only"),
    "is_decoder": (BertConfig(is_decoder=True), "is_decoder=True"),
    "unknown": ({"model_type": "nothing"}, "'nothing' is none that transformers knows"),
    "its own": (MaeLmConfig(), "of MAE-LM itself"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_configs_of_no_encoder_are_refused_in_one_line(case):
    config, message = REFUSED[case]
    with pytest.raises(ValueError, match=message) as error:
        MaeLmConfig(backbone_config=config)
    assert "\n" not in str(error.value)


def test_sizes_that_contradict_the_backbone_are_refused():
    with pytest.raises(ValueError, match=r"hidden_size=64 contradicts the backbone's 32"):
        MaeLmConfig(backbone_config=CONFIGS["BERT"], hidden_size=64)
    with pytest.raises(ValueError, match=r"relative_position_buckets=32 contradicts the backbone's 0"):
        MaeLmConfig(backbone_config=CONFIGS["BERT"], relative_position_buckets=32)
    with pytest.raises(ValueError, match="mask_token_id=60 is no id"):
        MaeLmConfig(backbone_config=CONFIGS["BERT"], mask_token_id=VOCABULARY)
    tokenizer = small_tokenizer()
    tokenizer.add_tokens(["one", "two"])
    with pytest.raises(ValueError, match=r"tokenizer has 62 tokens, the encoder's vocabulary vocab_size=60"):
        MaeLmForMaskedLM.from_encoder(stock_model("BERT"), tokenizer=tokenizer)
    with pytest.raises(ValueError, match="knows no mask token"):
        MaeLmForMaskedLM.from_encoder(stock_model("BERT"))
    model = MaeLmForMaskedLM.from_encoder(stock_model("RoBERTa"), mask_token_id=MASK)
    with pytest.raises(ValueError, match="41 tokens, the model takes max_position_embeddings=40"):
        model(torch.full((1, 41), 7))


def test_code_of_a_checkpoint_runs_only_with_consent(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"model_type": "theirs", "auto_map": {"AutoConfig": "theirs.TheirConfig", "AutoModel": "theirs.TheirModel"}}'
    )
    (tmp_path / "theirs.py").write_text("raise SystemExit('their code ran')\n")
    with pytest.raises(ValueError, match=r"brings code of its own, .* pass trust_remote_code=True") as error:
        MaeLmForMaskedLM.from_encoder(tmp_path, mask_token_id=MASK)
    assert "\n" not in str(error.value)


def test_a_model_without_its_weights_is_refused_and_without_its_pooler_says_so(caplog):
    logger = logging.getLogger("maelm_hf.modeling_maelm")
    logger.addHandler(caplog.handler)
    try:
        MaeLmForMaskedLM.from_encoder(BertModel(CONFIGS["BERT"]), mask_token_id=MASK)
        assert "pooler" not in caplog.text
        MaeLmForMaskedLM.from_encoder(BertForMaskedLM(CONFIGS["BERT"]), mask_token_id=MASK)
        assert "BertForMaskedLM has no pooler: that of the encoder is new" in caplog.text
    finally:
        logger.removeHandler(caplog.handler)
    cut = BertModel(CONFIGS["BERT"])
    del cut.encoder.layer[1]
    with pytest.raises(ValueError, match=r"BertModel lacks weights of BertModel: encoder\.layer\.1\."):
        MaeLmForMaskedLM.from_encoder(cut, mask_token_id=MASK)


def test_a_checkpoint_without_its_weights_is_refused(tmp_path):
    BertForMaskedLM(CONFIGS["BERT"]).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    left = {key: value for key, value in weights.items() if "layer.1." not in key}
    save_file(left, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="lacks weights of BertModel"):
        MaeLmForMaskedLM.from_encoder(tmp_path, mask_token_id=MASK)


@pytest.mark.parametrize("name", ["cache_dir", "use_auth_token", "dtype", "decoder_hidden_sise", "backbone_config"])
def test_what_is_no_setting_is_refused_and_not_kept(name):
    with pytest.raises(ValueError, match=f"^{name}= is no setting of a MaeLmConfig on an encoder") as error:
        MaeLmForMaskedLM.from_encoder(stock_model("BERT"), mask_token_id=MASK, **{name: "a secret"})
    assert "\n" not in str(error.value)
    assert "a secret" not in str(error.value)


def test_settings_and_the_attention_reach_the_model():
    model = MaeLmForMaskedLM.from_encoder(
        stock_model("BERT"), mask_token_id=MASK, decoder_hidden_size=16, attn_implementation="eager", token="a secret"
    )
    assert model.decoder.layer_norm.normalized_shape == (16,)
    assert model.encoder.backbone.config._attn_implementation == "eager"
    assert "a secret" not in model.config.to_json_string()
