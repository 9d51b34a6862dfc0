# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""The whole probe on tiny models of every family: layout found, numbers right, everything restored, bad input named."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from attention_models import FAMILIES, SoftmaxViT, build, by_fused_attention, by_matmul, keep_order, pixels, sharpened
from PIL import Image
from torch import nn

from maelm_hf.probing.attention import (
    attention_distance,
    attention_diversity,
    attention_entropy,
    attention_rollout,
    fourier_log_amplitude,
    token_norm_quantiles,
)
from maelm_hf.probing.attention_probe import probe_attention

DINOV2 = Path(__file__).resolve().parents[2] / "../shared/models/dinov2_small"


def probe(model, images, processor=None, **options):
    return probe_attention(model, images, processor, progress=False, **options)


def by_layer_and_head(report, name: str) -> np.ndarray:
    return report.to_dataframe().pivot(index="layer_index", columns="head", values=name).to_numpy()


@pytest.mark.parametrize("family", FAMILIES)
def test_numbers_are_those_of_the_models_own_eager_maps(family):
    images, prefix = pixels(3), FAMILIES[family][3]
    report = probe(build(family), images)
    eager = build(family, "eager")
    if family == "vit_mae":
        eager.config.mask_ratio = 0.0
    with torch.no_grad():
        maps = eager(images, output_attentions=True, **keep_order(eager, images)).attentions
    assert report.settings["grid"] == [4, 4]
    assert report.settings["prefix_tokens"] == prefix
    assert report.settings["patch_size_pixels"] == [8, 8]
    assert report.settings["images"] == 3
    assert len(report.rows) == 2 * 4
    for name, function in (
        ("diversity", attention_diversity),
        ("distance", attention_distance),
        ("entropy", attention_entropy),
    ):
        expected = np.stack([function(layer, (4, 4), prefix).mean(0).numpy() for layer in maps])
        np.testing.assert_allclose(by_layer_and_head(report, name), expected, rtol=1e-3, atol=1e-4, err_msg=name)
    rollout = attention_rollout(maps)
    expected = attention_diversity(rollout, (4, 4), prefix).mean().item()
    assert report.rows[-1]["rollout_diversity"] == pytest.approx(expected, rel=1e-3, abs=1e-6)
    np.testing.assert_allclose(
        by_layer_and_head(report, "distance_pixels"), 8 * by_layer_and_head(report, "distance"), rtol=1e-6
    )


@pytest.mark.parametrize("family", ["vit", "dinov2_registers", "dinov3", "ijepa", "vit_mae", "siglip"])
def test_images_that_are_not_square(family):
    report = probe(build(family), pixels(2, height=24, width=48))
    assert report.settings["grid"] == [3, 6]
    assert report.settings["prefix_tokens"] == FAMILIES[family][3]


def test_hidden_states_are_measured_at_the_blocks_output():
    model = build("vit")
    report = probe(model, pixels())
    hidden = model(pixels(), output_hidden_states=True).hidden_states
    for layer, row in enumerate(report.rows[::4]):
        assert row["hidden_layer"] == f"layers.{layer}"
        expected = fourier_log_amplitude(hidden[layer + 1], (4, 4), 1).mean().item()
        assert row["fourier_log_amplitude"] == pytest.approx(expected, rel=1e-4)
        quantiles = token_norm_quantiles(hidden[layer + 1], 1).mean(0).tolist()
        found = [row[f"token_norm_{name}"] for name in ("q05", "q50", "q95", "max")]
        assert found == pytest.approx(quantiles, rel=1e-4)


def test_vit_mae_is_probed_whole_and_in_order_and_left_as_it_was():
    config = build("vit_mae").config
    torch.manual_seed(0)
    model = sharpened(transformers.ViTMAEForPreTraining(config)).train()
    state = torch.get_rng_state()
    report = probe(model, pixels())
    assert torch.equal(state, torch.get_rng_state())
    assert config.mask_ratio == model.config.mask_ratio == 0.75
    assert all(module.training for module in model.modules())
    assert report.to_dataframe()["layer"].nunique() == 2  # the encoder's layers; the decoder has no place here
    assert report.settings["grid"] == [4, 4]
    assert probe(model, pixels()).rows == report.rows


def test_everything_is_restored_after_an_exception():
    model = build("vit_mae").train()
    model.layers[0].eval()  # a mixed state is restored as it was
    with torch.no_grad():
        model.layers[1].attention.q_proj.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match=r"layers\.1\.attention: the maps hold NaN"):
        probe(model, pixels())
    assert model.training
    assert not model.layers[0].training
    assert model.layers[1].training
    assert model.config.mask_ratio == 0.75
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_siglip_pooling_head_is_told_and_not_mixed_with_the_layers():
    report = probe(build("siglip"), pixels())
    assert report.to_dataframe()["layer"].nunique() == 2
    assert any("1 queries over 16 keys" in note for note in report.notes)


@pytest.mark.parametrize("name", ["CLIP", "Siglip"])
def test_a_model_with_a_vision_tower_is_probed_by_it(name):
    vision = {
        k: v
        for k, v in build("clip").config.to_dict().items()
        if k
        in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "image_size", "patch_size")
    }
    text = {
        "vocab_size": 50,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    config = getattr(transformers, f"{name}Config")(vision_config=vision, text_config=text)
    report = probe(getattr(transformers, f"{name}Model")(config), pixels())
    assert any("vision_model" in note for note in report.notes)
    assert report.to_dataframe()["layer"].nunique() == 2


@pytest.mark.parametrize("source", ["timm", "torchvision"])
def test_models_of_other_libraries(source):
    library = pytest.importorskip(source)
    torch.manual_seed(0)
    if source == "timm":
        model = library.create_model(
            "vit_tiny_patch16_224",
            img_size=(32, 64),
            patch_size=8,
            depth=2,
            embed_dim=32,
            num_heads=4,
            num_classes=0,
            reg_tokens=3,
        )
        report = probe(model, pixels(height=32, width=64))
        assert (report.settings["grid"], report.settings["prefix_tokens"]) == ([4, 8], 4)
    else:
        report = probe(library.models.VisionTransformer(32, 8, 2, 4, 32, 48), pixels())
        assert (report.settings["grid"], report.settings["prefix_tokens"]) == ([4, 4], 1)
    assert report.to_dataframe()["layer"].nunique() == 2


@pytest.mark.parametrize("source", ["transformers", "timm", "torchvision"])
def test_swin_is_measured_inside_its_windows(source):
    library = pytest.importorskip(source)
    torch.manual_seed(0)
    if source == "transformers":
        config = library.SwinConfig(
            image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4
        )
        model = library.SwinModel(config)
    elif source == "timm":
        model = library.create_model(
            "swin_tiny_patch4_window7_224",
            img_size=32,
            patch_size=2,
            window_size=4,
            embed_dim=16,
            depths=(2, 2),
            num_heads=(2, 4),
            num_classes=0,
        )
    else:
        model = library.models.SwinTransformer([2, 2], 16, [2, 2], [2, 4], [4, 4])
    report = probe(sharpened(model), pixels())
    frame = report.to_dataframe()
    assert frame.groupby("layer_index").size().tolist() == [2, 2, 4, 4]
    assert report.settings["grid"] == [4, 4]
    assert any("windows of 4 x 4" in note for note in report.notes)
    assert (frame["distance"] < 4 * 2**0.5).all()
    ratio = (frame["distance_pixels"] / frame["distance"]).round(4)
    assert ratio.groupby(frame["layer_index"]).first().tolist() == [2, 2, 4, 4]  # the second stage merges 2 x 2 patches
    assert frame["rollout_diversity"].isna().all()
    assert frame["token_norm_q50"].notna().all()


@pytest.mark.parametrize("attend", [by_matmul, by_fused_attention])
def test_a_hand_written_model_without_a_convolution(attend):
    torch.manual_seed(0)
    model = SoftmaxViT(attend)
    report = probe(model, pixels(height=16, width=40))
    assert (report.settings["grid"], report.settings["prefix_tokens"]) == ([2, 5], 1)
    given = probe(model, pixels(height=16, width=40), grid=(2, 5), prefix_tokens=1)
    assert given.rows == report.rows


def test_single_pictures_for_a_model_without_a_convolution_are_stacked():
    torch.manual_seed(0)
    model, images = SoftmaxViT(by_matmul), pixels(4, height=16, width=40)
    assert probe(model, list(images)).rows == probe(model, images).rows


def test_a_bare_transformer_encoder_is_a_sequence_unless_a_grid_is_given():
    torch.manual_seed(0)
    model = sharpened(nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2))
    tokens = torch.randn(2, 12, 16)
    sequence, grid = probe(model, [tokens]), probe(model, [tokens], grid=(3, 4))
    assert sequence.settings["grid"] == []
    assert grid.settings["grid"] == [3, 4]
    np.testing.assert_allclose(by_layer_and_head(sequence, "entropy"), by_layer_and_head(grid, "entropy"), rtol=1e-6)
    assert sequence.to_dataframe()["distance_pixels"].isna().all()


def text_model():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=64,
    )
    return sharpened(transformers.BertModel(config))


def test_text_encoders_are_measured_along_the_sequence_and_without_padding():
    model = text_model()
    ids = torch.randint(5, 50, (2, 9), generator=torch.Generator().manual_seed(0))
    padded = torch.cat([ids[1:, :5], torch.zeros(1, 4, dtype=torch.long)], dim=1)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 5:] = 0
    together = probe(model, [{"input_ids": torch.cat([ids[:1], padded]), "attention_mask": mask}])
    alone = [probe(model, [{"input_ids": part}]) for part in (ids[:1], ids[1:, :5])]
    for name in ("diversity", "distance", "entropy", "mutual_information", "token_norm_q50"):
        expected = (by_layer_and_head(alone[0], name) + by_layer_and_head(alone[1], name)) / 2
        np.testing.assert_allclose(by_layer_and_head(together, name), expected, rtol=1e-4, atol=1e-5, err_msg=name)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        maps = model.eval()(input_ids=ids[:1], output_attentions=True).attentions
    expected = np.stack([attention_distance(layer).mean(0).numpy() for layer in maps])
    np.testing.assert_allclose(by_layer_and_head(alone[0], "distance"), expected, rtol=1e-4)


def test_half_precision_models_are_probed():
    reference = probe(build("vit"), pixels())
    for dtype in (torch.bfloat16, torch.float16):
        report = probe(build("vit").to(dtype), pixels())
        np.testing.assert_allclose(
            by_layer_and_head(report, "entropy"), by_layer_and_head(reference, "entropy"), rtol=0.1
        )


def test_a_compiled_model_is_probed_uncompiled_and_says_so():
    model = build("vit")
    report = probe(torch.compile(model, backend="eager"), pixels())
    assert report.rows == probe(model, pixels()).rows
    assert any("compiled" in note for note in report.notes)


def test_a_model_that_draws_random_numbers_gives_the_same_report_and_the_random_state_is_untouched():
    model = build("vit")
    model.embeddings.register_forward_hook(lambda _module, _args, tokens: tokens + torch.randn_like(tokens))
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    first = probe(model, pixels())
    assert torch.equal(torch.rand(4), expected)
    assert probe(model, pixels()).rows == first.rows


def test_batches_do_not_matter():
    model = build("dinov2")
    one, many = probe(model, pixels(5).unbind(0), batch_size=2), probe(model, pixels(5))
    frames = [report.to_dataframe().select_dtypes("number") for report in (one, many)]
    np.testing.assert_allclose(*(frame.to_numpy() for frame in frames), rtol=1e-3, atol=1e-4)


def test_pictures_without_a_processor_get_the_usual_steps_and_a_note():
    rng = np.random.default_rng(0)
    pictures = [
        Image.fromarray(rng.integers(0, 255, size, dtype=np.uint8)) for size in ((50, 40, 3), (33, 90, 3), (40, 40))
    ]
    report = probe(build("dinov2"), pictures)
    assert report.settings["images"] == 3
    assert any("No image processor" in note and "32 x 32" in note for note in report.notes)
    processor = lambda picture: torch.from_numpy(np.asarray(picture.resize((32, 32)))).permute(2, 0, 1).float() / 255  # noqa: E731
    assert probe(build("dinov2"), pictures, processor).settings["grid"] == [4, 4]


# Bad input


def test_a_corrupt_file_is_named_skipped_and_counted(tmp_path):
    for number in range(3):
        Image.new("RGB", (40, 40), (number, 90, 50)).save(tmp_path / f"{number}.png")
    (tmp_path / "1.png").write_bytes(b"no image at all")
    report = probe(build("vit"), tmp_path)
    assert report.settings["images"] == 2
    assert any("1 files could not be read" in note and "1.png" in note for note in report.notes)


def test_images_of_mixed_sizes_are_refused():
    images = [torch.randn(3, 32, 32), torch.randn(3, 32, 40)]
    with pytest.raises(ValueError, match=r"different sizes, \(3, 32, 32\) and \(3, 32, 40\)"):
        probe(build("dinov2"), images)
    with pytest.raises(ValueError, match=r"grid 4 x 4 with 1 prefix tokens makes 17 tokens, the maps have 21"):
        probe(build("dinov2"), [pixels(), pixels(width=40)])


def test_a_model_without_attention_is_refused():
    with pytest.raises(ValueError, match="no attention"):
        probe(nn.Sequential(nn.Conv2d(3, 4, 8, 8), nn.Flatten(), nn.Linear(64, 2)), pixels())


def test_a_grid_that_does_not_match_names_both_numbers():
    with pytest.raises(ValueError, match=r"grid 3 x 5 with 1 prefix tokens makes 16 tokens, the maps have 17"):
        probe(build("vit"), pixels(), grid=(3, 5))
    with pytest.raises(ValueError, match=r"the maps have 17 tokens.*4 x 4 = 16 patches.*2 prefix tokens"):
        probe(build("vit"), pixels(), prefix_tokens=2)


@pytest.mark.parametrize(
    ("images", "error"), [(None, "images is missing"), ([], "empty"), (Path("no/such/folder"), "neither a file")]
)
def test_no_images(images, error):
    with pytest.raises((ValueError, FileNotFoundError), match=error):
        probe(build("vit"), images)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"max_images": 0}, "max_images=0 must be at least 1: None reads everything"),
        ({"overlay_images": -1}, "overlay_images=-1 must be at least 0"),
        ({"prefix_tokens": -1}, "prefix_tokens=-1 must be at least 0"),
    ],
)
def test_counts_that_are_too_small_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        probe(build("vit"), pixels(), **options)


def test_a_layer_whose_attention_cannot_be_seen_is_noted():
    class OwnAttention(nn.Module):
        def forward(self, tokens):
            weights = (tokens @ tokens.mT / 8).exp()
            return weights / weights.sum(-1, keepdim=True) @ tokens

    model = nn.Sequential(OwnAttention(), nn.TransformerEncoderLayer(16, 4, 32, batch_first=True))
    report = probe(model, [torch.randn(2, 6, 16)])
    assert any("No attention map was seen in 0 (OwnAttention)" in note for note in report.notes)


@pytest.mark.skipif(not DINOV2.exists(), reason="the DINOv2-small weights are not here")
def test_real_dinov2_keeps_what_random_init_does_not_have():
    skimage = pytest.importorskip("skimage")
    pictures = [Image.fromarray(skimage.data.astronaut()), Image.fromarray(skimage.data.chelsea())]
    trained = probe(str(DINOV2), pictures, dtype=torch.float32)
    untrained = probe(str(DINOV2), pictures, dtype=torch.float32, random_init=True)
    assert trained.settings["grid"] == [16, 16]
    assert trained.settings["prefix_tokens"] == 1
    # At random init every patch looks everywhere; training gives heads places of their own.
    assert by_layer_and_head(untrained, "diversity_share").max() < 0.01
    assert by_layer_and_head(trained, "diversity_share").max() > 0.5
    assert by_layer_and_head(untrained, "entropy_share").min() > by_layer_and_head(trained, "entropy_share").mean()
