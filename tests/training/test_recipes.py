"""The recipes that come with the code: complete, with their twins, and where they say so the paper's settings."""

import pytest
import yaml
from pretraining_helpers import ROOT

from training.recipe import load_recipe
from training.start import model_config

RECIPES = {path.stem: path for path in (ROOT / "training" / "recipes").glob("*.yaml")}
IDS = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "mask_token_id": 4}

# Of the authors' code; the width and inner width of base are also BERT-base's, those of large BERT-large's.
BASE = {
    "num_hidden_layers": 12,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "relative_position_buckets": 64,
    "relative_position_max_distance": 128,
}
LARGE = BASE | {
    "num_hidden_layers": 24,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "relative_position_buckets": 128,
    "relative_position_max_distance": 256,
}
DECODER = {"decoder_num_hidden_layers": 4, "decoder_dropout_prob": 0.0, "encoder_mask_fraction": 0.0}
COMMON = {
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "layer_norm_eps": 1e-5,
    "initializer_range": 0.02,
    "hidden_act": "gelu",
}


def test_the_recipes_that_are_promised_are_there():
    assert {"demo", "mini", "base", "base++", "large++", "base-fast"} <= set(RECIPES)


@pytest.mark.parametrize("twin", ["none", "mlm"])
@pytest.mark.parametrize("name", RECIPES)
def test_saved_resolved_it_is_the_same_recipe(name, twin, tmp_path):
    recipe = load_recipe(RECIPES[name], ["--twin", twin])
    recipe.save(tmp_path / "recipe.yaml")
    assert load_recipe(tmp_path / "recipe.yaml") == recipe
    saved = yaml.safe_load((tmp_path / "recipe.yaml").read_text())
    assert saved["optimizer"].keys() >= {"betas", "eps", "weight_decay", "max_grad_norm"}  # defaults too
    config = model_config(recipe, recipe.tokenizer.vocab_size, IDS)
    assert (config.decoder_num_hidden_layers == 0) == (twin == "mlm")
    assert config.encoder_mask_fraction == (1.0 if twin == "mlm" else 0.0)


@pytest.mark.parametrize(("name", "encoder"), [("base", BASE), ("base++", BASE), ("large++", LARGE)])
def test_the_models_are_the_papers(name, encoder):
    recipe = load_recipe(RECIPES[name])
    config = model_config(recipe, recipe.tokenizer.vocab_size, IDS)
    for key, value in (encoder | DECODER | COMMON).items():
        assert getattr(config, key) == value, key
    assert config.decoder_hidden_size == encoder["hidden_size"]


@pytest.mark.parametrize("name", ["base", "base++", "large++"])
def test_data_and_optimizer_are_the_papers(name):
    recipe = load_recipe(RECIPES[name])
    assert (recipe.data.max_length, recipe.data.mask_ratio, recipe.data.batch_size) == (512, 0.15, 2048)
    optimizer = recipe.optimizer
    assert (optimizer.name, optimizer.betas, optimizer.eps) == ("adamw", (0.9, 0.98), 1e-6)
    assert (optimizer.weight_decay, optimizer.max_grad_norm) == (0.01, 2.0)
    assert (optimizer.schedule, optimizer.warmup_steps) == ("linear", 10_000)
    if name != "base":
        assert recipe.max_steps == 2_000_000
    if name == "base++":
        assert optimizer.learning_rate == 2e-4


def test_the_fast_recipe_leaves_out_what_it_says():
    recipe = load_recipe(RECIPES["base-fast"])
    assert recipe.model["relative_position_buckets"] == 0
    assert recipe.model["attention_probs_dropout_prob"] == 0
    assert recipe.model["decoder_num_hidden_layers"] == 2
    assert recipe.data.mask_ratio == 0.4
    assert recipe.data.packing
