# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""What the model promises: what the encoder sees, what comes back in which mode, and that no batch breaks it."""

import copy

import pytest
import torch
import torch.nn.functional as F
from transformers import BertConfig, BertForMaskedLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import is_flash_attn_2_available

from maelm_hf import (
    MaeLmConfig,
    MaeLmForMaskedLM,
    MaeLmForMultipleChoice,
    MaeLmForQuestionAnswering,
    MaeLmForSequenceClassification,
    MaeLmForTokenClassification,
    MaeLmModel,
)

MASK, PAD, VOCABULARY = 4, 1, 60
BACKENDS = ["eager", "sdpa"]


def config(**settings):
    return MaeLmConfig(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 32,
            "max_position_embeddings": 64,
            "relative_position_buckets": 16,
            "relative_position_max_distance": 32,
            "decoder_num_hidden_layers": 2,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "initializer_range": 0.3,
            "mask_token_id": MASK,
        }
        | settings
    )


def build(model_class=MaeLmForMaskedLM, attention="sdpa", seed=0, **settings):
    torch.manual_seed(seed)
    model = model_class._from_config(config(**settings), attn_implementation=attention)
    # Biases and norms start at constants, where a swap of two of them would not show.
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(parameter, mean=float("norm.weight" in name), std=0.2)
    return model.eval()


def batch(*lengths, hidden=0.3, width=None, seed=0):
    """Random rows of these lengths, right-padded: input ids with [MASK], attention mask, labels."""
    generator = torch.Generator().manual_seed(seed)
    width = width or max(lengths)
    shape = (len(lengths), width)
    ids = torch.randint(5, VOCABULARY, shape, generator=generator)
    attended = torch.arange(width) < torch.tensor(lengths)[:, None]
    gone = (torch.rand(shape, generator=generator) < hidden) & attended
    return {
        "input_ids": ids.masked_fill(gone, MASK).masked_fill(~attended, PAD),
        "attention_mask": attended.long(),
        "labels": ids.masked_fill(~gone, -100),
    }


def indices(inputs, kept_width=None, hidden_width=None):
    """kept_index and hidden_index written out by hand, with spare width."""
    rows = zip(inputs["input_ids"].tolist(), inputs["attention_mask"].tolist(), strict=True)
    kept, hidden = [], []
    for ids, attended in rows:
        kept.append([i for i, (token, real) in enumerate(zip(ids, attended, strict=True)) if real and token != MASK])
        hidden.append([i for i, (token, real) in enumerate(zip(ids, attended, strict=True)) if real and token == MASK])

    def pad(lists):
        width = max(map(len, lists)) + 3
        return torch.tensor([row + [-1] * (width - len(row)) for row in lists])

    return {"kept_index": pad(kept), "hidden_index": pad(hidden)}


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


class Widths:
    """Shapes that go into modules, read by hooks."""

    def __init__(self, **modules):
        self.seen = {}
        for name, module in modules.items():
            module.register_forward_hook(self.hook(name), with_kwargs=True)

    def hook(self, name):
        def read(module, args, kwargs, output):
            states, queries = args[0], args[3] if len(args) > 3 else args[0]
            self.seen[name] = (states.shape[1], queries.shape[1])

        return read


# --- what the encoder sees ---


@pytest.mark.parametrize("with_indices", [False, True])
def test_layers_really_see_fewer_tokens(with_indices):
    model = build()
    inputs = batch(40, 40, hidden=0.4)
    hidden = (inputs["input_ids"] == MASK).sum(1)
    kept_width, hidden_width = int((40 - hidden).max()), int(hidden.max())
    if with_indices:
        inputs |= indices(inputs)
        kept_width, hidden_width = inputs["kept_index"].shape[1], inputs["hidden_index"].shape[1]
    widths = Widths(encoder=model.encoder.layers[0], first=model.decoder.layers[0], last=model.decoder.layers[1])
    head = Widths(head=model.lm_head.dense)
    head.seen = {}
    model.lm_head.dense.register_forward_hook(lambda module, args, output: head.seen.update(rows=args[0].shape[0]))
    model(**inputs, sparse_logits=True)
    assert kept_width < 40
    assert widths.seen["encoder"] == (kept_width, kept_width)
    assert widths.seen["first"] == (kept_width + hidden_width, kept_width + hidden_width)
    assert widths.seen["last"] == (kept_width + hidden_width, hidden_width)
    assert head.seen["rows"] == hidden.sum()


@pytest.mark.parametrize("attention", BACKENDS)
def test_mask_never_enters_the_encoder(attention):
    model = build(MaeLmModel, attention)
    inputs = batch(20, 13)
    masked = inputs["input_ids"] == MASK
    with torch.no_grad():
        clean = model(inputs["input_ids"], inputs["attention_mask"], output_hidden_states=True)
        model.embeddings.word_embeddings.weight[MASK] = float("nan")
        poisoned = model(inputs["input_ids"], inputs["attention_mask"], output_hidden_states=True)
    assert len(clean.hidden_states) == 3
    for state, other in zip(clean.hidden_states, poisoned.hidden_states, strict=True):
        assert torch.equal(state, other)
        assert (state[masked] == 0).all()
        assert (state[~masked] != 0).any(-1).all()


def test_encoder_with_masks_equals_encoder_without_those_tokens():
    model = build(MaeLmModel)
    ids = torch.tensor([[7, MASK, 9, 10, MASK, 12]])
    kept = torch.tensor([0, 2, 3, 5])
    with torch.no_grad():
        whole = model(ids).last_hidden_state[:, kept]
        removed = model(ids[:, kept], position_ids=kept[None]).last_hidden_state
    assert torch.allclose(whole, removed, atol=1e-6)


def test_with_embeddings_nothing_is_hidden():
    model, seeing = build(MaeLmModel), build(MaeLmModel, encoder_mask_fraction=1.0)
    ids = batch(12, 9)["input_ids"]
    with torch.no_grad():
        embeds = model.get_input_embeddings()(ids)
        assert torch.allclose(model(inputs_embeds=embeds).last_hidden_state, seeing(ids).last_hidden_state, atol=1e-6)


def test_hidden_states_of_the_pretraining_model_are_the_encoders():
    model = build()
    inputs = batch(20, 13)
    with torch.no_grad():
        states = model(**inputs, output_hidden_states=True).hidden_states
        expected = model.encoder(inputs["input_ids"], inputs["attention_mask"], output_hidden_states=True).hidden_states
    real = inputs["attention_mask"].bool()
    assert len(states) == len(expected) == 3
    for state, other in zip(states, expected, strict=True):
        assert torch.allclose(state[real], other[real], atol=1e-5)


@pytest.mark.parametrize("asked", [[-1], 1, [0, 2]])
@pytest.mark.parametrize("backbone", [False, True])
def test_hidden_states_of_some_layers_are_those_of_all(backbone, asked):
    model = build()
    if backbone:
        plain = build(encoder_mask_fraction=1.0, decoder_num_hidden_layers=0, relative_position_buckets=0)
        model = MaeLmForMaskedLM.from_encoder(stock_bert(plain), mask_token_id=MASK)
    inputs = batch(20, 13)
    for each in (model, model.encoder):
        given = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        with torch.no_grad():
            every = each(**given, output_hidden_states=True).hidden_states
            some = each(**given, output_hidden_states=asked).hidden_states
        chosen = {index % 3 for index in ([asked] if isinstance(asked, int) else asked)}
        assert {index for index, state in enumerate(some) if state is not None} == chosen
        assert all(torch.equal(some[index], every[index]) for index in chosen)


def test_attentions_are_probabilities_over_kept_tokens():
    model = build(attention="eager")
    inputs = batch(20, 20)
    with torch.no_grad():
        maps = model(**inputs, output_attentions=True).attentions
    kept = 20 - (inputs["input_ids"] == MASK).sum(1)
    assert len(maps) == 2
    assert maps[0].shape == (2, 2, kept.max(), kept.max())
    assert torch.allclose(maps[1].sum(-1), torch.ones(2, 2, int(kept.max())), atol=1e-5)
    row = int(kept.argmin())
    assert (maps[0][row, ..., kept[row] :].abs() < 1e-6).all()


# --- logits and loss by mode ---


def test_logits_by_mode():
    model = build()
    inputs = batch(20, 13)
    hidden = int((inputs["labels"] != -100).sum())
    unlabelled = {key: value for key, value in inputs.items() if key != "labels"}
    with torch.no_grad():
        dense = model(**inputs)
        sparse = model(**inputs, sparse_logits=True)
        model.train()
        training = model(**inputs)
        assert dense.logits.shape == model(**unlabelled).logits.shape == (2, 20, VOCABULARY)
    assert sparse.logits.shape == training.logits.shape == (hidden, VOCABULARY)
    chosen = dense.logits[inputs["labels"] != -100]
    for other in (sparse, training):
        assert torch.allclose(other.logits, chosen, atol=1e-5)
        assert torch.allclose(other.loss, dense.loss, atol=1e-6)
    assert torch.allclose(dense.loss, F.cross_entropy(chosen, inputs["labels"][inputs["labels"] != -100]), atol=1e-6)


@pytest.mark.parametrize("settings", [{}, {"encoder_mask_fraction": 1.0}], ids=["MAE-LM", "masks seen"])
def test_labels_at_tokens_that_are_not_masked_count(settings):
    """80/10/10: a labelled token that stays visible is kept by the encoder and predicted by the decoder."""
    model = build(**settings)
    inputs = batch(20, 13)
    visible = inputs["labels"].clone()
    visible[0, 2], visible[1, 5] = 11, 12  # one more label in each row, at whatever token is there
    inputs["input_ids"][0, 2], inputs["input_ids"][1, 5] = 30, 12
    with torch.no_grad():
        plain = model(inputs["input_ids"], inputs["attention_mask"]).logits
        sparse = model(inputs["input_ids"], inputs["attention_mask"], labels=visible, sparse_logits=True)
    labelled = visible != -100
    assert sparse.logits.shape[0] == labelled.sum()
    assert torch.allclose(sparse.logits, plain[labelled], atol=1e-5)
    assert torch.allclose(sparse.loss, F.cross_entropy(plain[labelled], visible[labelled]), atol=1e-6)


@pytest.mark.parametrize("count", [17, torch.tensor(17)])
def test_the_number_of_items_divides_the_summed_loss(count):
    model = build()
    inputs = batch(20, 13)
    hidden = (inputs["labels"] != -100).sum()
    with torch.no_grad():
        assert torch.allclose(
            model(**inputs, num_items_in_batch=count).loss * 17, model(**inputs).loss * hidden, rtol=1e-6
        )


@pytest.mark.parametrize("settings", [{}, {"encoder_mask_fraction": 1.0, "decoder_num_hidden_layers": 0}])
def test_given_indices_change_nothing(settings):
    inputs = batch(20, 13, 1)
    results = []
    for extra in ({}, indices(inputs)):
        model = build(**settings).train()
        output = model(**inputs, **extra)
        output.loss.backward()
        results.append((output, gradients(model)))
        with torch.no_grad():
            results.append((model.eval()(**inputs, **extra), {}))
    (train, train_grads), (dense, _), (train_indexed, indexed_grads), (dense_indexed, _) = results
    assert torch.allclose(train.logits, train_indexed.logits, atol=1e-5)
    assert torch.allclose(train.loss, train_indexed.loss, atol=1e-6)
    real = inputs["attention_mask"].bool()
    assert torch.allclose(dense.logits[real], dense_indexed.logits[real], atol=1e-5)
    for name, gradient in train_grads.items():
        assert torch.allclose(gradient, indexed_grads[name], atol=1e-5), name


def test_every_parameter_has_a_gradient():
    model = build(decoder_hidden_size=8).train()
    model(**batch(20, 13)).loss.backward()
    for name, gradient in gradients(model).items():
        assert gradient is not None, name
        assert gradient.abs().sum() > 0, name


# --- batches that break other models ---


def odd_batches():
    yield "no token hidden", batch(10, 6, hidden=0.0)
    all_hidden = batch(10, 6)
    all_hidden["labels"][0], all_hidden["input_ids"][0] = all_hidden["input_ids"][0].clamp(min=5), MASK
    yield "all tokens of a row hidden", all_hidden
    everything = batch(6, 6, hidden=1.1)
    yield "all tokens hidden", everything
    yield "a row of padding", batch(10, 0)
    yield "batch of one", batch(10)
    yield "length one", batch(1, 1, hidden=0.0)
    yield "length one, hidden", batch(1, hidden=1.1)
    inside = batch(12, 12)
    inside["attention_mask"][0, 3:6] = 0
    yield "padding inside", inside


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("attention", BACKENDS)
@pytest.mark.parametrize(
    "settings",
    [{}, {"relative_position_buckets": 0}, {"encoder_mask_fraction": 1.0, "decoder_num_hidden_layers": 0}],
    ids=["bias", "no bias", "plain MLM"],
)
@pytest.mark.parametrize(("name", "inputs"), list(odd_batches()), ids=[name for name, _ in odd_batches()])
def test_odd_batches_are_finite_forward_and_backward(name, inputs, settings, attention, dtype):
    model = build(attention=attention, **settings).to(dtype).train()
    output = model(**inputs)
    output.loss.backward()
    assert torch.isfinite(output.loss)
    for parameter, gradient in gradients(model).items():
        assert gradient is None or torch.isfinite(gradient).all(), parameter
    if (inputs["labels"] == -100).all():
        assert output.loss == 0
        assert all(gradient is None or (gradient == 0).all() for gradient in gradients(model).values())
    with torch.no_grad():
        assert torch.isfinite(model.eval()(**inputs).logits).all()


@pytest.mark.parametrize("attention", BACKENDS)
@pytest.mark.parametrize("settings", [{}, {"encoder_mask_fraction": 0.5}], ids=["MAE-LM", "half of the masks seen"])
def test_a_row_depends_on_nothing_but_itself(attention, settings):
    model = build(attention=attention, **settings)
    alone, mates = batch(13, seed=1), batch(13, 20, 2, seed=1, width=32)
    for key in alone:
        mates[key][0, :13] = alone[key][0]
    with torch.no_grad():
        first = model(alone["input_ids"], alone["attention_mask"]).logits[0]
        second = model(mates["input_ids"], mates["attention_mask"]).logits[0, :13]
        assert torch.allclose(first, second, atol=1e-5)
        pooled = build(MaeLmForSequenceClassification, attention, **settings)
        first = pooled(alone["input_ids"], alone["attention_mask"]).logits
        second = pooled(mates["input_ids"], mates["attention_mask"]).logits[:1]
    assert torch.allclose(first, second, atol=1e-5)


def test_left_padding_with_position_ids_equals_right_padding():
    model = build()
    right = batch(9, width=14)
    left = {key: torch.cat([value[:, 9:], value[:, :9]], dim=1) for key, value in right.items()}
    positions = torch.cat([torch.zeros(1, 5, dtype=torch.long), torch.arange(9)[None]], dim=1)
    with torch.no_grad():
        expected = model(**right)
        output = model(**left, position_ids=positions)
        assert torch.allclose(output.logits[:, 5:], expected.logits[:, :9], atol=1e-5)
        assert torch.allclose(output.loss, expected.loss, atol=1e-6)
        classifier = build(MaeLmForSequenceClassification)
        assert torch.allclose(
            classifier(left["input_ids"], left["attention_mask"], position_ids=positions).logits,
            classifier(right["input_ids"], right["attention_mask"]).logits,
            atol=1e-5,
        )


# --- backends ---


@pytest.fixture
def static_flex():
    """
    flex_attention compiles for every shape it meets. On a CPU, torch 2.13 writes C++ that does not build once it takes
    those shapes for dynamic, so each is compiled by itself.
    """
    torch.compiler.reset()
    with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
        yield
    torch.compiler.reset()


@pytest.mark.parametrize("buckets", [0, 16])
def test_eager_and_sdpa_agree(buckets):
    inputs = batch(20, 13)
    model = build(attention="eager", relative_position_buckets=buckets)
    real = inputs["attention_mask"].bool()
    with torch.no_grad():
        expected = model(**inputs).logits[real]
        model.set_attn_implementation("sdpa")
        assert torch.allclose(model(**inputs).logits[real], expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("static_flex")
def test_flex_attention_agrees_with_eager():
    inputs = batch(20, 13)
    model = build(attention="eager", num_hidden_layers=1, decoder_num_hidden_layers=1)
    with torch.no_grad():
        expected = model(**inputs, sparse_logits=True).logits
        model.set_attn_implementation("flex_attention")
        assert torch.allclose(model(**inputs, sparse_logits=True).logits, expected, atol=1e-5)


def test_flash_attention_with_a_bias_is_refused():
    with pytest.raises(ValueError, match=r"cannot add a relative-position bias.*relative_position_buckets=0"):
        MaeLmModel._from_config(config(), attn_implementation="flash_attention_2")


def as_flash(query, key, value, attended):
    """
    transformers' flash path on padded input, in plain torch: `attended` (batch, keys) tells real keys, and, of a layer
    that asks fewer queries than it has keys, its last columns tell which queries are real; others come back as zeros.
    """
    batch_size, _, queries, size = query.shape
    attended = torch.ones(batch_size, key.shape[2], dtype=torch.bool) if attended is None else attended.bool()
    scores = query @ key.transpose(2, 3) * size**-0.5
    scores = scores.masked_fill(~attended[:, None, None], torch.finfo(scores.dtype).min)
    output = (scores.softmax(-1) @ value).transpose(1, 2)
    return output * attended[:, -queries:, None, None]


@pytest.fixture
def flash_stand_in(monkeypatch):
    """The flash backend is CUDA's alone; what our model asks of it can be tested without."""
    name = "flash_attention_2"

    def forward(module, query, key, value, attention_mask, **kwargs):
        return as_flash(query, key, value, attention_mask), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, name, forward)
    return name


@pytest.mark.parametrize("sparse", [True, False])
def test_flash_attention_is_asked_for_what_it_can_do(flash_stand_in, sparse):
    model = build(attention="eager", relative_position_buckets=0)
    inputs = batch(20, 13, hidden=0.2)
    inputs["labels"][0, :6] = 9  # more targets than hidden tokens
    with torch.no_grad():
        expected = model(**inputs, sparse_logits=sparse)
        model.config._attn_implementation_internal = flash_stand_in
        output = model(**inputs, sparse_logits=sparse)
    real = slice(None) if sparse else inputs["attention_mask"].bool()
    assert torch.allclose(output.logits[real], expected.logits[real], atol=1e-5)
    assert torch.allclose(output.loss, expected.loss, atol=1e-6)
    packed, _ = packed_and_separate()
    with pytest.raises(ValueError, match=r"flash_attention_2.*document_ids.*'sdpa', 'eager' or 'flex_attention'"):
        model(**packed)


@pytest.mark.cuda
@pytest.mark.skipif(
    not (torch.cuda.is_available() and is_flash_attn_2_available()), reason="needs an NVIDIA GPU and flash-attn"
)
@pytest.mark.parametrize("sparse", [True, False])
def test_flash_attention_agrees_with_eager(sparse):
    model = build(attention="eager", relative_position_buckets=0).to("cuda", torch.bfloat16)
    inputs = {key: value.cuda() for key, value in batch(20, 13).items()}
    with torch.no_grad():
        expected = model(**inputs, sparse_logits=sparse).logits
        model.set_attn_implementation("flash_attention_2")
        output = model(**inputs, sparse_logits=sparse).logits
    real = slice(None) if sparse else inputs["attention_mask"].bool()
    assert torch.allclose(output[real].float(), expected[real].float(), atol=0.1)  # bf16


@pytest.mark.parametrize("name", ["attention_probs_dropout_prob", "decoder_dropout_prob"])
def test_flex_attention_with_dropout_is_refused_in_our_words(name):
    model = build(attention="flex_attention", **{name: 0.1}).train()
    with pytest.raises(ValueError, match=f"flex_attention.*{name}=0.1.*'sdpa' or 'eager'"):
        model(**batch(10))


def packed_and_separate(lengths=(9, 5, 12)):
    parts = [batch(length, seed=seed) for seed, length in enumerate(lengths)]
    packed = {key: torch.cat([part[key] for part in parts], dim=1) for key in parts[0]}
    packed["position_ids"] = torch.cat([torch.arange(length) for length in lengths])[None]
    packed["document_ids"] = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    return packed, parts


@pytest.mark.parametrize("attention", BACKENDS)
@pytest.mark.parametrize("settings", [{}, {"encoder_mask_fraction": 0.5}], ids=["MAE-LM", "half of the masks seen"])
def test_packed_documents_equal_separate_ones(attention, settings):
    model = build(attention=attention, **settings)
    packed, parts = packed_and_separate()
    with torch.no_grad():
        separate = torch.cat([model(**part).logits[0] for part in parts])
        together = model(**packed)
        encoded = torch.cat([model.encoder(part["input_ids"]).last_hidden_state[0] for part in parts])
        together_encoded = model.encoder(
            packed["input_ids"], position_ids=packed["position_ids"], document_ids=packed["document_ids"]
        ).last_hidden_state[0]
        sparse = model(**packed, sparse_logits=True)
    assert torch.allclose(together.logits[0], separate, atol=1e-5)
    assert torch.allclose(together_encoded, encoded, atol=1e-5)
    assert torch.allclose(sparse.logits, separate[packed["labels"][0] != -100], atol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("static_flex")
def test_packed_documents_equal_separate_ones_on_flex_attention():
    model = build(attention="eager", num_hidden_layers=1, decoder_num_hidden_layers=1)
    packed, parts = packed_and_separate()
    with torch.no_grad():
        separate = torch.cat([model(**part, sparse_logits=True).logits for part in parts])
        model.set_attn_implementation("flex_attention")
        assert torch.allclose(model(**packed, sparse_logits=True).logits, separate, atol=1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("attention", BACKENDS)
def test_activation_checkpointing_gives_the_same_gradients(attention, reentrant):
    inputs = batch(20, 13)
    plain, checkpointed = build(attention=attention).train(), build(attention=attention).train()
    checkpointed.activation_checkpointing_enable({"use_reentrant": reentrant})
    for model in (plain, checkpointed):
        model(**inputs).loss.backward()
    for name, gradient in gradients(plain).items():
        assert torch.allclose(gradient, gradients(checkpointed)[name], atol=1e-6), name


@pytest.mark.slow
@pytest.mark.parametrize("buckets", [0, 16])
def test_forward_with_indices_compiles_without_a_break(buckets):
    inputs = batch(20, 13)
    inputs |= indices(inputs)
    model = build(relative_position_buckets=buckets).train()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    expected = model(**inputs)
    output = compiled(**inputs)
    assert torch.allclose(output.loss, expected.loss, atol=1e-5)
    output.loss.backward()
    # In a graph the padded slots of the indices stay, without a label.
    assert output.logits.shape == (inputs["hidden_index"].numel(), VOCABULARY)


def test_the_encoder_exports():
    model = build(MaeLmModel)
    inputs = batch(20, 13)
    arguments = (inputs["input_ids"], inputs["attention_mask"])
    with torch.no_grad():
        exported = torch.export.export(model, arguments, strict=False).module()
        output = exported(*arguments).last_hidden_state
        expected = model(*arguments).last_hidden_state
    real = inputs["attention_mask"].bool()
    assert torch.allclose(output[real], expected[real], atol=1e-5)


# --- fraction of masks that the encoder sees ---


def stock_bert(model):
    """A BertForMaskedLM of the same sizes that holds the same weights."""
    ours = model.config
    bert = BertForMaskedLM(
        BertConfig(
            vocab_size=ours.vocab_size,
            hidden_size=ours.hidden_size,
            num_hidden_layers=ours.num_hidden_layers,
            num_attention_heads=ours.num_attention_heads,
            intermediate_size=ours.intermediate_size,
            max_position_embeddings=ours.max_position_embeddings,
            layer_norm_eps=ours.layer_norm_eps,
            pad_token_id=ours.pad_token_id,
            type_vocab_size=1,
        )
    ).eval()
    renames = {
        "encoder.embeddings.layer_norm": "bert.embeddings.LayerNorm",
        "encoder.embeddings": "bert.embeddings",
        "encoder.layers": "bert.encoder.layer",
        "attention.output": "attention.output.dense",
        "attention.query": "attention.self.query",
        "attention.key": "attention.self.key",
        "attention.value": "attention.self.value",
        "attention_norm": "attention.output.LayerNorm",
        "intermediate": "intermediate.dense",
        "output_norm": "output.LayerNorm",
        "lm_head.dense": "cls.predictions.transform.dense",
        "lm_head.layer_norm": "cls.predictions.transform.LayerNorm",
        "lm_head.output": "cls.predictions.decoder",
    }
    weights = {}
    for name, tensor in model.state_dict().items():
        for ours_part, theirs in renames.items():
            name = name.replace(ours_part, theirs, 1) if ours_part in name else name
        if name.startswith("bert.encoder") and name.split(".")[4] == "output" and "LayerNorm" not in name:
            name = name.replace("output", "output.dense")
        weights[name] = tensor
    weights["cls.predictions.bias"] = weights["cls.predictions.decoder.bias"]
    weights["bert.embeddings.token_type_embeddings.weight"] = torch.zeros(1, ours.hidden_size)
    bert.load_state_dict(weights)
    return bert


@pytest.mark.parametrize("attention", BACKENDS)
def test_without_decoder_and_bias_it_is_a_stock_bert(attention):
    model = build(
        attention=attention, encoder_mask_fraction=1.0, decoder_num_hidden_layers=0, relative_position_buckets=0
    )
    bert = stock_bert(model)
    inputs = batch(20, 13)
    with torch.no_grad():
        ours, theirs = model(**inputs), bert(**inputs)
    real = inputs["attention_mask"].bool()
    assert torch.allclose(ours.logits[real], theirs.logits[real], atol=1e-5)
    assert torch.allclose(ours.loss, theirs.loss, atol=1e-6)
    model.train()
    model(**inputs).loss.backward()
    theirs = bert.train()(**inputs)  # dropout is 0.1 there: gradients are compared without it
    for module in bert.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    bert(**inputs).loss.backward()
    assert torch.allclose(
        model.encoder.layers[0].intermediate.weight.grad,
        bert.bert.encoder.layer[0].intermediate.dense.weight.grad,
        atol=1e-6,
    )


@pytest.mark.parametrize("fraction", [0.25, 0.5, 0.75])
def test_that_fraction_of_masks_reaches_the_encoder(fraction):
    model = build(MaeLmModel, encoder_mask_fraction=fraction, max_position_embeddings=512)
    inputs = batch(*[500] * 8)
    masked = inputs["input_ids"] == MASK
    with torch.no_grad():
        states = model(inputs["input_ids"]).last_hidden_state
    seen = (states != 0).any(-1)
    assert seen[~masked].all()
    share, count = seen[masked].float().mean().item(), int(masked.sum())
    assert abs(share - fraction) < 4 * (fraction * (1 - fraction) / count) ** 0.5  # four standard errors


def test_with_a_fraction_encoder_and_pretraining_model_choose_the_same_masks():
    model = build(encoder_mask_fraction=0.5)
    inputs = batch(40, 33, hidden=0.5)
    with torch.no_grad():
        states = model(**inputs, output_hidden_states=True).hidden_states[-1]
        alone = model.encoder(inputs["input_ids"], inputs["attention_mask"]).last_hidden_state
    real = inputs["attention_mask"].bool()
    assert torch.allclose(states[real], alone[real], atol=1e-5)
    seen = (alone != 0).any(-1)[inputs["input_ids"] == MASK]
    assert 0 < seen.sum() < len(seen)


# --- embeddings ---


def test_resized_embeddings_keep_the_mask_embedding_and_the_head_bias():
    model = build()
    inputs = batch(20, 13)
    with torch.no_grad():
        before = model(**inputs).logits
        bias = model.lm_head.output.bias.clone()
        model.resize_token_embeddings(VOCABULARY + 7)
        after = model(**inputs).logits
    assert model.config.vocab_size == after.shape[-1] == VOCABULARY + 7
    assert torch.equal(model.lm_head.output.bias[:VOCABULARY], bias)
    assert model.lm_head.output.weight is model.encoder.embeddings.word_embeddings.weight
    assert torch.allclose(after[..., :VOCABULARY], before, atol=1e-5)
    with pytest.raises(ValueError, match=f"new_num_tokens={MASK} would cut off the mask embedding"):
        model.resize_token_embeddings(MASK)


@pytest.mark.parametrize("tie", [True, False])
def test_tied_means_one_tensor_and_untied_means_two(tie):
    model = build(tie_word_embeddings=tie)
    for other in (model, copy.deepcopy(model), model.to(torch.bfloat16)):
        same = other.lm_head.output.weight is other.encoder.embeddings.word_embeddings.weight
        assert same is tie


# --- wrong inputs ---


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "either input_ids or inputs_embeds"),
        ({"input_ids": torch.zeros(1, 3).long(), "inputs_embeds": torch.zeros(1, 3, 16)}, "and not both"),
        ({"input_ids": torch.zeros(1, 65).long()}, "65 tokens.*max_position_embeddings=64.*truncation"),
        (
            {"input_ids": torch.zeros(2, 3).long(), "attention_mask": torch.ones(2, 4)},
            r"attention_mask has shape \(2, 4\), the tokens \(2, 3\)",
        ),
        (
            {"input_ids": torch.zeros(2, 3).long(), "attention_mask": torch.ones(2, 1, 3, 3)},
            "attention_mask has shape.*one value per token",
        ),
        ({"input_ids": torch.zeros(2, 3).long(), "document_ids": torch.zeros(3).long()}, "document_ids has shape"),
        (
            {"input_ids": torch.zeros(1, 2).long(), "position_ids": torch.tensor([[0, 64]])},
            r"position_ids reach 64, the model's positions end at 63",
        ),
    ],
)
@pytest.mark.parametrize("model_class", [MaeLmModel, MaeLmForMaskedLM])
def test_wrong_inputs_are_refused(model_class, inputs, message):
    with pytest.raises(ValueError, match=message):
        build(model_class)(**inputs)


@pytest.mark.parametrize("lacking", ["kept_index", "hidden_index"])
def test_one_index_without_the_other_is_refused(lacking):
    inputs = batch(20, 13)
    inputs |= indices(inputs) | {lacking: None}
    with pytest.raises(ValueError, match=f"^{lacking}=None: kept_index and hidden_index go together"):
        build()(**inputs)


# --- heads ---


def test_sequence_classification_is_first_token_dropout_linear_tanh_dropout_linear():
    model = build(MaeLmForSequenceClassification, num_labels=3)
    inputs = batch(12, 7, hidden=0)
    inputs["attention_mask"][1, 0] = 0  # the first *attended* token is the second one here
    labels = torch.tensor([2, 0])
    with torch.no_grad():
        output = model(inputs["input_ids"], inputs["attention_mask"], labels=labels)
        states = model.encoder(inputs["input_ids"], inputs["attention_mask"]).last_hidden_state
        first = torch.stack([states[0, 0], states[1, 1]])
        head = model.sequence_classifier
        expected = torch.tanh(first @ head.dense.weight.T + head.dense.bias) @ head.output.weight.T + head.output.bias
    assert torch.allclose(output.logits, expected, atol=1e-6)
    assert torch.allclose(output.loss, F.cross_entropy(expected, labels), atol=1e-6)


@pytest.mark.parametrize(
    ("labels", "num_labels", "problem", "loss"),
    [
        (torch.tensor([0.5, -1.0]), 1, "regression", lambda x, y: F.mse_loss(x[:, 0], y)),
        (torch.tensor([[1.0, 0, 1], [0, 0, 1]]), 3, "multi_label_classification", F.binary_cross_entropy_with_logits),
        (torch.tensor([1, 2]), 3, "single_label_classification", F.cross_entropy),
    ],
)
def test_the_problem_follows_the_labels(labels, num_labels, problem, loss):
    model = build(MaeLmForSequenceClassification, num_labels=num_labels)
    inputs = batch(12, 7, hidden=0)
    with torch.no_grad():
        output = model(inputs["input_ids"], inputs["attention_mask"], labels=labels)
    assert model.config.problem_type == problem
    assert torch.allclose(output.loss, loss(output.logits, labels), atol=1e-6)


def test_token_classification_ignores_unlabelled_tokens_and_survives_none():
    model = build(MaeLmForTokenClassification, num_labels=4)
    inputs = batch(12, 7, hidden=0)
    labels = torch.randint(0, 4, (2, 12)).masked_fill(inputs["attention_mask"] == 0, -100)
    output = model(inputs["input_ids"], inputs["attention_mask"], labels=labels)
    assert torch.allclose(output.loss, F.cross_entropy(output.logits.flatten(0, 1), labels.flatten()), atol=1e-6)
    none = model(inputs["input_ids"], inputs["attention_mask"], labels=torch.full((2, 12), -100))
    none.loss.backward()
    assert none.loss == 0


def test_question_answering_ignores_answers_outside_the_window():
    model = build(MaeLmForQuestionAnswering)
    ids = batch(12, 12, hidden=0)["input_ids"]
    with torch.no_grad():
        output = model(ids, start_positions=torch.tensor([3, 99]), end_positions=torch.tensor([5, 12]))
        expected = (
            F.cross_entropy(output.start_logits[:1], torch.tensor([3]))
            + F.cross_entropy(output.end_logits[:1], torch.tensor([5]))
        ) / 2
    assert output.start_logits.shape == output.end_logits.shape == (2, 12)
    assert torch.allclose(output.loss, expected, atol=1e-6)


def test_multiple_choice_scores_every_choice():
    model = build(MaeLmForMultipleChoice)
    inputs = batch(*[9, 7, 12, 4, 5, 6], hidden=0)
    shaped = {key: inputs[key].view(2, 3, 12) for key in ("input_ids", "attention_mask")}
    labels = torch.tensor([2, 0])
    with torch.no_grad():
        output = model(**shaped, labels=labels)
        one = model(shaped["input_ids"][1:, 1:2], shaped["attention_mask"][1:, 1:2]).logits
    assert output.logits.shape == (2, 3)
    assert torch.allclose(output.logits[1, 1], one[0, 0], atol=1e-5)
    assert torch.allclose(output.loss, F.cross_entropy(output.logits, labels), atol=1e-6)
