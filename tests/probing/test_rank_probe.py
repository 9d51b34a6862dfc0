# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""probe_rank against NumPy on hidden states that transformers itself hands out."""

import importlib.util

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from rank_toys import VOCAB_SIZE, random_texts, small_bert, word_tokenizer
from test_capture_hidden_states import FAMILIES, build, inputs_of
from torch import nn

from maelm_hf import DataCollatorForMaeLm, MaeLmConfig, MaeLmModel
from maelm_hf.hub import export_native
from maelm_hf.probing import RankReport, effective_rank, entropy_effective_rank, probe_attention, probe_rank
from maelm_hf.probing.loading import load_model

TEXTS = random_texts(40)
UNMASKED, MASKED, REAL, MASK = "unmasked", "masked/all", "masked/real", "masked/[MASK]"


def rows_of(report, layer):
    return {row["population"]: row for row in report.rows if row["layer"] == layer}


def probe(model, *args, **options):
    return probe_rank(model, *args, progress=False, **options)


@torch.no_grad()
def clean_tokens(model, tokenizer, texts, layer):
    """All real tokens' states at ``hidden_states[layer]``, one text at a time, without padding."""
    model.eval()
    states = []
    for text in texts:
        batch = tokenizer(text, return_tensors="pt")
        states.append(model(**batch, output_hidden_states=True).hidden_states[layer][0])
    return torch.cat(states).double().numpy()


@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_unmasked_is_all_real_tokens_whatever_the_batches(batch_size):
    model, tokenizer = small_bert(), word_tokenizer()
    report = probe(model, tokenizer, TEXTS, batch_size=batch_size)
    for number, layer in enumerate(report.positions()):
        tokens = clean_tokens(model, tokenizer, TEXTS, number)
        values = np.linalg.svd(tokens, compute_uv=False)
        np.testing.assert_allclose(report.spectrum(layer)[:-1], values[:-1], rtol=1e-4)
        row = rows_of(report, layer)[UNMASKED]
        assert row["tokens"] == len(tokens)
        assert row["effective_rank"] == effective_rank(values)
        assert row["entropy_effective_rank"] == pytest.approx(entropy_effective_rank(values), rel=1e-4)


def test_masked_populations_hold_the_tokens_of_masked_input():
    """Recorded from the model's own inputs: what went in masked, and what came out at those positions."""
    model, tokenizer = small_bert(), word_tokenizer()
    fed, states = [], []
    model.register_forward_pre_hook(lambda _m, _a, kwargs: fed.append(kwargs), with_kwargs=True)
    model.register_forward_hook(lambda _m, _a, output: states.append(output.last_hidden_state))
    report = probe(model, tokenizer, TEXTS, mask_ratio=0.3, batch_size=8)
    assert len(fed) == 2 * 5
    chosen = {REAL: [], MASK: []}
    eligible = masked = 0
    for clean, masked_input, hidden in zip(fed[::2], fed[1::2], states[1::2], strict=True):
        real = clean["attention_mask"].bool()
        is_mask = masked_input["input_ids"] == tokenizer.mask_token_id
        assert torch.equal(clean["input_ids"][~is_mask], masked_input["input_ids"][~is_mask])
        assert not torch.isin(clean["input_ids"][is_mask], torch.tensor(tokenizer.all_special_ids)).any()
        assert is_mask.any(1).all()
        eligible += int((real & ~torch.isin(clean["input_ids"], torch.tensor(tokenizer.all_special_ids))).sum())
        masked += int(is_mask.sum())
        chosen[REAL].append(hidden[real & ~is_mask])
        chosen[MASK].append(hidden[real & is_mask])
    assert masked / eligible == pytest.approx(0.3, abs=0.03)
    tokens = {name: torch.cat(parts).double().numpy() for name, parts in chosen.items()}
    tokens[MASKED] = np.concatenate([tokens[REAL], tokens[MASK]])
    rows = rows_of(report, "encoder.layer.1")
    for name, expected in tokens.items():
        assert rows[name]["tokens"] == len(expected)
        values = np.linalg.svd(expected, compute_uv=False)
        np.testing.assert_allclose(report.spectrum("encoder.layer.1", name)[:-1], values[:-1], rtol=1e-4)
    assert rows[MASKED]["deficiency"] == rows[MASKED]["effective_rank"] - rows[UNMASKED]["effective_rank"]
    _containment_is_numpys(rows[MASK], tokens[REAL], tokens[MASK])


def _containment_is_numpys(row, real, mask):
    _, real_values, real_basis = np.linalg.svd(real, full_matrices=False)
    _, mask_values, mask_basis = np.linalg.svd(mask, full_matrices=False)
    k, k_mask = effective_rank(real_values), effective_rank(mask_values)
    inside, spanned = real_basis[:k], mask_basis[:k_mask]
    outside = 1 - np.linalg.norm(mask @ inside.T) ** 2 / np.linalg.norm(mask) ** 2
    assert row["subspace_dim"] == k
    assert row["mask_energy_outside"] == pytest.approx(outside, abs=1e-5)
    own = 1 - np.linalg.norm(real @ inside.T) ** 2 / np.linalg.norm(real) ** 2
    assert row["real_energy_outside"] == pytest.approx(own, abs=1e-5)
    angles = np.degrees(np.arccos(np.clip(np.linalg.svd(inside @ spanned.T, compute_uv=False), 0, 1)))
    assert row["principal_angle_max"] == pytest.approx(angles.max(), abs=0.1)


def test_subspaces_are_of_the_raw_tokens_and_a_centred_report_says_so():
    raw, centred = (probe(small_bert(), word_tokenizer(), TEXTS, centred=centred) for centred in (False, True))
    told = "subspace_dim, the energies outside and the principal angles are of the raw tokens"
    assert [any(note.startswith(told) for note in report.notes) for report in (raw, centred)] == [False, True]
    for layer in centred.positions():
        one, other = rows_of(raw, layer), rows_of(centred, layer)
        assert other[MASK]["subspace_dim"] == one[REAL]["effective_rank"]
        assert other[MASK]["mask_energy_outside"] == one[MASK]["mask_energy_outside"]


def test_masks_depend_on_the_seed_and_not_on_the_batches():
    model, tokenizer = small_bert(), word_tokenizer()
    spectra = [
        probe(model, tokenizer, TEXTS, seed=seed, batch_size=size).spectrum("embeddings", MASK)
        for seed, size in ((0, 4), (0, 32), (1, 32))
    ]
    torch.testing.assert_close(spectra[0], spectra[1], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(spectra[1], spectra[2], rtol=1e-3)


def test_masks_are_those_of_the_collator():
    """Of the same seed, in epoch 0, for a text's number in the data."""
    model, tokenizer = small_bert(), word_tokenizer()
    fed = []
    model.register_forward_pre_hook(lambda _m, _a, kwargs: fed.append(kwargs), with_kwargs=True)
    probe(model, tokenizer, TEXTS[:6], mask_ratio=0.3, batch_size=1, seed=7)
    masked = {
        tuple(clean["input_ids"][0].tolist()): row["input_ids"][0]
        for clean, row in zip(fed[::2], fed[1::2], strict=True)
    }
    collator = DataCollatorForMaeLm(tokenizer, 0.3, seed=7)
    for number, text in enumerate(TEXTS[:6]):
        ids = tokenizer(text)["input_ids"]
        expected = collator([{"input_ids": ids, "sample_index": number, "epoch": 0}])["input_ids"][0]
        assert torch.equal(masked[tuple(ids)], expected)


def mae_lm(fraction, **more):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "mask_token_id": 3}
    options = sizes | ids | {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 40, "initializer_range": 0.3}
    return MaeLmModel(MaeLmConfig(encoder_mask_fraction=fraction, **(options | more))).eval()


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_a_model_that_drops_mask_tokens(fraction):
    report = probe(mae_lm(fraction), word_tokenizer(), TEXTS, mask_ratio=0.3)
    rows = rows_of(report, list(report.positions())[-1])
    if fraction == 0:
        assert MASK not in rows
        same = {name: value for name, value in rows[REAL].items() if not name.startswith(("population", "deficiency"))}
        assert all(rows[MASKED][name] == pytest.approx(value, nan_ok=True) for name, value in same.items())
    else:
        everything = rows[UNMASKED]["tokens"] - rows[REAL]["tokens"]
        assert rows[MASK]["tokens"] == pytest.approx(fraction * everything, rel=0.25)
        assert rows[MASKED]["tokens"] == rows[REAL]["tokens"] + rows[MASK]["tokens"]
        # A dropped token is a row of zeros; were it counted, norms would start there.
        assert rows[MASK]["token_norm_q01"] > 0.1
    assert rows[REAL]["tokens"] < rows[UNMASKED]["tokens"]


@torch.no_grad()
def test_mask_tokens_that_never_entered_are_hidden_from_the_stock_form_too(tmp_path):
    """The reference: stock BERT on what is left of each masked text, every token at its own position."""
    model, tokenizer = mae_lm(0.0, relative_position_buckets=0), word_tokenizer()
    stock = transformers.AutoModel.from_pretrained(export_native(model, tmp_path, tokenizer=tokenizer)).eval()
    fed = []
    hook = stock.register_forward_pre_hook(lambda _m, _a, kwargs: fed.append(kwargs["input_ids"]), with_kwargs=True)
    of_stock = probe(stock, tokenizer, TEXTS, mask_ratio=0.3)
    hook.remove()
    assert any("[MASK] tokens are hidden from this stock model" in note for note in of_stock.notes)
    states = []
    for ids in (row for batch in fed[1::2] for row in batch):
        left = (ids != tokenizer.mask_token_id) & (ids != tokenizer.pad_token_id)
        left_ids, positions = ids[left][None], left.nonzero().T
        inputs = {"attention_mask": torch.ones_like(positions), "position_ids": positions}
        states.append(stock(left_ids, **inputs, output_hidden_states=True).hidden_states)
    of_ours = probe(model, tokenizer, TEXTS, mask_ratio=0.3)
    for number, layers in enumerate(zip(of_stock.positions(), of_ours.positions(), strict=True)):
        tokens = torch.cat([layer_states[number][0] for layer_states in states]).double().numpy()
        values = np.linalg.svd(tokens, compute_uv=False)
        for report, layer in zip((of_stock, of_ours), layers, strict=True):
            rows = rows_of(report, layer)
            assert set(rows) == {UNMASKED, MASKED, REAL}
            assert rows[MASKED]["tokens"] == rows[REAL]["tokens"] == len(tokens)
            assert rows[MASKED]["effective_rank"] == effective_rank(values)
            np.testing.assert_allclose(report.spectrum(layer, REAL)[:-1], values[:-1], rtol=1e-4)


def test_dropped_mask_tokens_of_a_backbone_are_not_counted():
    """Inside a backbone their rows are no zeros; they are in what MaeLmModel returns."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    backbone = transformers.BertConfig(vocab_size=VOCAB_SIZE, max_position_embeddings=40, pad_token_id=0, **sizes)
    torch.manual_seed(0)
    model = MaeLmModel(MaeLmConfig(encoder_mask_fraction=0.5, backbone_config=backbone, mask_token_id=3))
    fed, states = [], []
    model.register_forward_pre_hook(lambda _m, _a, kwargs: fed.append(kwargs["input_ids"]), with_kwargs=True)
    model.register_forward_hook(lambda _m, _a, output: states.append(output.last_hidden_state))
    report = probe(model, word_tokenizer(), TEXTS, mask_ratio=0.3)
    kept, masked = [], 0
    for ids, hidden in zip(fed[1::2], states[1::2], strict=True):
        is_mask = ids == 3
        kept.append(hidden[is_mask & (hidden != 0).any(-1)])
        masked += int(is_mask.sum())
    kept = torch.cat(kept).double().numpy()
    assert 0.3 * masked < len(kept) < 0.7 * masked
    assert {rows_of(report, layer)[MASK]["tokens"] for layer in report.positions()} == {len(kept)}
    values = np.linalg.svd(kept, compute_uv=False)
    np.testing.assert_allclose(report.spectrum("backbone.encoder.layer.1", MASK)[:-1], values[:-1], rtol=1e-4)


def test_a_stock_model_that_saw_some_of_the_mask_tokens_has_the_unmasked_population_alone(tmp_path):
    model, tokenizer = mae_lm(0.5, relative_position_buckets=0), word_tokenizer()
    report = probe(export_native(model, tmp_path, tokenizer=tokenizer), None, TEXTS)
    assert {row["population"] for row in report.rows} == {UNMASKED}
    assert any("trained on a share 0.5 of the [MASK] tokens" in note for note in report.notes)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family):
    model = build(family)
    if model.main_input_name == "pixel_values":
        report = probe(model, None, [inputs_of(model) for _ in range(3)])
        expected = {UNMASKED}
        assert any("mask token" in note or "tokenizer" in note for note in report.notes)
    elif family in ("GPT-2", "Llama"):
        report = probe(model, word_tokenizer(mask_token=None), TEXTS)
        expected = {UNMASKED}
        assert any("the tokenizer has no mask token" in note for note in report.notes)
    else:
        report = probe(model, word_tokenizer(), TEXTS)
        expected = {UNMASKED, MASKED, REAL, MASK}
    assert {row["population"] for row in report.rows} == expected
    is_post_norm = FAMILIES[family][3]
    assert any("post-norm" in note for note in report.notes) == is_post_norm
    assert len(report.positions()) == 4 + is_post_norm


def test_images_with_a_processor():
    model = build("ViT")
    size = {"height": 32, "width": 32}
    processor = transformers.ViTImageProcessor(size=size)
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 256, (40, 50, 3), dtype=np.uint8) for _ in range(6)]
    report = probe(model, processor, images, batch_size=4)
    assert report.rows[0]["tokens"] == 6 * (1 + 16)
    pixels = processor(images, return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        tokens = model(pixels).last_hidden_state.flatten(0, 1).double().numpy()
    values = np.linalg.svd(tokens, compute_uv=False)
    np.testing.assert_allclose(report.spectrum("layernorm")[:-1], values[:-1], rtol=1e-4)


def final_tokens_spectrum(states):
    return np.linalg.svd(states.flatten(0, 1).double().numpy(), compute_uv=False)


def test_pictures_without_a_processor_get_the_usual_steps_and_a_note():
    sizes = ((50, 40, 3), (33, 90, 3))
    pictures = [Image.fromarray(np.full(size, 90 * number, dtype=np.uint8)) for number, size in enumerate(sizes, 1)]
    report = probe(build("ViT"), None, pictures)
    assert report.rows[0]["tokens"] == 2 * (1 + 16)
    assert any("No image processor" in note and "32 x 32" in note for note in report.notes)


def test_images_of_another_size_than_the_config_and_of_mixed_sizes():
    model, images = build("ViT"), torch.randn(2, 3, 48, 32, generator=torch.Generator().manual_seed(0))
    report = probe(model, None, list(images))
    with torch.no_grad():
        states = model(images, interpolate_pos_encoding=True).last_hidden_state
    np.testing.assert_allclose(report.spectrum("layernorm")[:-1], final_tokens_spectrum(states)[:-1], rtol=1e-4)
    with pytest.raises(ValueError, match=r"different sizes, \(3, 32, 32\) and \(3, 48, 32\)"):
        probe(model, None, [images[0], images[0, :, :32]])


@pytest.mark.parametrize("as_batches", [False, True])
def test_a_model_with_two_towers_is_probed_by_the_one_that_takes_the_data(as_batches):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    vision = sizes | {"image_size": 32, "patch_size": 8, "initializer_range": 0.3}
    text = sizes | {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 40, "num_hidden_layers": 3}
    model = transformers.CLIPModel(transformers.CLIPConfig(vision_config=vision, text_config=text)).eval()
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    report = probe(model, None, [{"pixel_values": images}] if as_batches else list(images))
    assert "CLIPModel is probed by its vision_model." in report.notes
    with torch.no_grad():
        states = model.vision_model(images, output_hidden_states=True).hidden_states[-1]
    layer = [name for name, position in report.positions().items() if position == "block output"][-1]
    np.testing.assert_allclose(report.spectrum(layer), final_tokens_spectrum(states), rtol=1e-4)
    ids = word_tokenizer()(TEXTS[:1], return_tensors="pt")["input_ids"]
    of_texts = probe(model, word_tokenizer(), [{"input_ids": ids}] if as_batches else TEXTS, mask_ratio=0)
    assert list(of_texts.positions().values()).count("block output") == 3


def test_vit_mae_is_probed_with_every_patch():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = transformers.ViTMAEConfig(**sizes, image_size=32, patch_size=8, mask_ratio=0.75)
    model = transformers.ViTMAEModel(config).eval()
    batches = [{"pixel_values": torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))}]
    reports = [probe(model, None, batches) for _ in range(2)]
    assert reports[0].rows[0]["tokens"] == 4 * (1 + 16)
    for layer in reports[0].positions():
        assert torch.equal(reports[0].spectrum(layer), reports[1].spectrum(layer))
    assert config.mask_ratio == 0.75


@pytest.mark.parametrize("kind", ["text", "images"])
def test_bfloat16_model_is_near_its_float32_twin(kind):
    if kind == "text":
        reports = [probe(small_bert().to(dtype), word_tokenizer(), TEXTS) for dtype in (torch.float32, torch.bfloat16)]
    else:
        images = inputs_of(build("ViT"))
        reports = [probe(build("ViT").to(dtype), None, [images]) for dtype in (torch.float32, torch.bfloat16)]
    assert reports[1].settings["dtype"] == "bfloat16"
    for one, other in zip(reports[0].rows, reports[1].rows, strict=True):
        assert other["entropy_effective_rank"] == pytest.approx(one["entropy_effective_rank"], rel=0.03)


@pytest.mark.skipif(importlib.util.find_spec("timm") is None, reason="timm is not installed")
def test_timm_model_with_image_batches():
    import timm

    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=0)
    generator = torch.Generator().manual_seed(0)
    report = probe(model, None, [torch.randn(4, 3, 32, 32, generator=generator) for _ in range(2)])
    assert list(report.positions()) == ["embeddings", "blocks.0", "blocks.1", "norm"]
    assert report.rows[0]["tokens"] == 8 * 5


def test_bare_module_with_named_layers_and_a_loader():
    model = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 3))
    features = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(features, torch.zeros(64)), batch_size=10)
    report = probe(model, None, loader, layers=["0", "2"])
    assert report.rows[0]["tokens"] == 64
    values = np.linalg.svd(model[0](features).detach().double().numpy(), compute_uv=False)
    np.testing.assert_allclose(report.spectrum("0")[:4], values[:4], rtol=1e-5)


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_ready_batches_of_vectors_are_no_images_whatever_their_size(batch_size):
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2).eval()
    batches = torch.randn(4, batch_size, 12, 16, generator=torch.Generator().manual_seed(0))
    report = probe(model, None, list(batches))
    with torch.no_grad():
        states = torch.cat([model(batch) for batch in batches])
    assert report.rows[0]["tokens"] == 4 * batch_size * 12
    np.testing.assert_allclose(report.spectrum("layers.1")[:-1], final_tokens_spectrum(states)[:-1], rtol=1e-4)
    assert probe_attention(model, list(batches), progress=False).settings["images"] == 4 * batch_size


def test_ready_batches_are_masked_too():
    model, tokenizer = small_bert(), word_tokenizer()
    batches = [
        dict(tokenizer(TEXTS[start : start + 8], padding=True, return_tensors="pt")) for start in range(0, 40, 8)
    ]
    ready, texts = probe(model, tokenizer, iter(batches)), probe(model, tokenizer, TEXTS)
    for one, other in zip(ready.rows, texts.rows, strict=True):
        assert one["population"] == other["population"]
        assert one["tokens"] == other["tokens"]
        assert one["entropy_effective_rank"] == pytest.approx(other["entropy_effective_rank"], rel=1e-4)


def test_mode_and_random_state_are_untouched():
    model, tokenizer = small_bert(), word_tokenizer()
    model.train()
    model.encoder.layer[0].eval()  # modes may differ from module to module
    modes = [module.training for module in model.modules()]
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    probe(model, tokenizer, TEXTS)
    assert torch.equal(torch.rand(4), expected)
    assert [module.training for module in model.modules()] == modes


def test_another_dtype_or_device_is_that_of_a_copy():
    model, tokenizer = small_bert(), word_tokenizer()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = probe(model, tokenizer, TEXTS, dtype="bfloat16")
    assert report.settings["dtype"] == "bfloat16"
    for layer in report.positions():
        expected = probe(small_bert().bfloat16(), tokenizer, TEXTS).spectrum(layer)
        torch.testing.assert_close(report.spectrum(layer), expected)
    assert load_model(model, device="meta").device.type == "meta"
    for name, value in model.state_dict().items():
        assert value.dtype == before[name].dtype
        assert torch.equal(value, before[name])
    assert load_model(model, dtype=torch.float32, device="cpu").module is model


def test_long_sequences_are_cut_counted_and_told():
    long = [
        " ".join(["w1", "w2", "w3"] * 30),
        "w4 w5",
        " ".join(["w6"] * 38),
    ]  # 92, 4 and 40 tokens; the model takes 40
    report = probe(small_bert(), word_tokenizer(), long)
    assert report.rows[0]["tokens"] == 40 + 4 + 40
    assert any(note.startswith("1 sequences were longer") for note in report.notes)


def test_max_tokens_stops_after_the_sequence_that_reaches_it():
    lengths = [len(text.split()) + 2 for text in TEXTS]
    expected = next(total for total in np.cumsum(lengths) if total >= 100)
    for batch_size in (1, 8):
        report = probe(small_bert(), word_tokenizer(), iter(TEXTS), max_tokens=100, batch_size=batch_size)
        assert report.rows[0]["tokens"] == expected


def test_fewer_tokens_than_dimensions_is_told_and_flagged():
    with pytest.warns(UserWarning, match="tokens for 64 dimensions"):
        report = probe(small_bert(hidden_size=64), word_tokenizer(), TEXTS[:3])
    assert any("Fewer tokens than dimensions" in note for note in report.notes)
    assert not any(row["effective_rank_settled"] for row in report.rows)


def test_nan_names_the_layer():
    model = small_bert()
    with torch.no_grad():
        model.encoder.layer[1].output.dense.weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"encoder\.layer\.1.*NaN"):
        probe(model, word_tokenizer(), TEXTS)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"data": []}, ValueError, "empty"),
        ({"data": ["", ""], "processor": "plain"}, ValueError, "no token"),
        ({"data": None}, ValueError, "data is missing"),
        ({"data": 3}, TypeError, "data must be"),
        ({"data": [3]}, TypeError, "int"),
        ({"data": "no/such/folder/at_all.txt"}, FileNotFoundError, "neither a file or folder"),
        ({"mask_ratio": 1.0}, ValueError, "mask_ratio=1.0"),
        ({"processor": None}, ValueError, "tokenizer"),
        ({"layers": ["encoder.layers.0"]}, ValueError, r"near matches: .*encoder\.layer\.0"),
        ({"tau": 1.5}, ValueError, "tau=1.5"),
        ({"model": 3}, TypeError, "model must be"),
        ({"batch_size": 0}, ValueError, "batch_size=0 must be at least 1"),
        ({"max_tokens": 0}, ValueError, "max_tokens=0 must be at least 1: None reads everything"),
        ({"max_tokens": 1.5}, TypeError, "max_tokens must be an integer, got 1.5"),
        ({"max_length": 0}, ValueError, "max_length=0"),
        ({"max_length": 1}, ValueError, "max_length=1 leaves no room beside 2 special tokens: pass at least 3"),
        ({"blocks": 0}, ValueError, "blocks=0"),
        ({"seed": -1}, ValueError, "seed=-1"),
    ],
)
def test_bad_input_is_refused_in_one_line(options, error, message, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    arguments = {"model": small_bert(), "processor": word_tokenizer(), "data": TEXTS} | options
    if arguments["processor"] == "plain":
        tokenizer = word_tokenizer()
        tokenizer.backend_tokenizer.post_processor = None
        arguments["processor"] = tokenizer
    with pytest.raises(error, match=message) as caught:
        probe(arguments.pop("model"), **arguments)
    assert "\n" not in str(caught.value)


def test_tokenizer_of_another_model_is_refused():
    tokenizer = word_tokenizer()
    tokenizer.add_tokens([f"extra{number}" for number in range(10)])
    with pytest.raises(ValueError, match="embeds 65 ids"):
        probe(small_bert(), tokenizer, ["w1 w2 extra7"])
    model = small_bert()
    model.config.mask_token_id = 4
    with pytest.raises(ValueError, match="mask_token_id 3"):
        probe(model, word_tokenizer(), TEXTS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask_ratio": 0.3}, r"mask_ratio=0\.15 and mask_ratio=0\.3"),
        ({"tau": 0.95}, r"tau=0\.9 and tau=0\.95"),
        ({"power": 2}, "power=1 and power=2"),
        ({"centred": True}, "centred=False and centred=True"),
        ({"revision": "other"}, "revision=None and revision='other'"),
    ],
)
def test_reports_of_different_settings_are_not_merged(options, message):
    revision, options = options.get("revision"), {k: v for k, v in options.items() if k != "revision"}
    model, tokenizer = small_bert(), word_tokenizer()
    first = probe(model, tokenizer, TEXTS)
    model.config._commit_hash = revision
    with pytest.raises(ValueError, match=message):
        RankReport.merge([first, probe(model, tokenizer, TEXTS, **options)])


def test_reports_of_two_machines_merge_to_that_of_one(tmp_path):
    model, tokenizer = small_bert(), word_tokenizer()
    halves = []
    for name, texts in (("a", TEXTS[:20]), ("b", TEXTS[20:])):
        halves.append(RankReport.load(probe(model, tokenizer, texts, mask_ratio=0).save(tmp_path / name)))
    merged, whole = RankReport.merge(halves), probe(model, tokenizer, TEXTS, mask_ratio=0)
    for one, other in zip(merged.rows, whole.rows, strict=True):
        assert one["tokens"] == other["tokens"]
        assert one["entropy_effective_rank"] == pytest.approx(other["entropy_effective_rank"], rel=1e-6)
        assert one["oversmoothing_residual"] == pytest.approx(other["oversmoothing_residual"], rel=1e-6)
    with pytest.raises(ValueError, match="cannot merge"):
        RankReport.merge([halves[0], probe(small_bert(num_hidden_layers=3), tokenizer, TEXTS, mask_ratio=0)])
