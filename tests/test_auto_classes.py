# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Saved from any head, loaded by every head; pipelines; what lies on disk."""

import itertools
import json
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from toy_tokenizers import ROLES, SPECIALS
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForPreTraining,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    pipeline,
)

from maelm_hf import (
    MaeLmConfig,
    MaeLmForMaskedLM,
    MaeLmForMultipleChoice,
    MaeLmForQuestionAnswering,
    MaeLmForSequenceClassification,
    MaeLmForTokenClassification,
    MaeLmModel,
)

HEADS = {
    AutoModel: MaeLmModel,
    AutoModelForPreTraining: MaeLmForMaskedLM,
    AutoModelForMaskedLM: MaeLmForMaskedLM,
    AutoModelForSequenceClassification: MaeLmForSequenceClassification,
    AutoModelForTokenClassification: MaeLmForTokenClassification,
    AutoModelForQuestionAnswering: MaeLmForQuestionAnswering,
    AutoModelForMultipleChoice: MaeLmForMultipleChoice,
}
CLASSES = list(dict.fromkeys(HEADS.values()))
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "looked", "at", "its", "old", "red", "hat"]


@pytest.fixture(scope="module")
def tokenizer():
    vocabulary = {token: i for i, token in enumerate([*SPECIALS, *dict.fromkeys(WORDS)])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=32, **ROLES)


def config(tokenizer, **settings):
    return MaeLmConfig(
        **{
            "vocab_size": len(tokenizer),
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 32,
            "max_position_embeddings": 32,
            "relative_position_buckets": 8,
            "relative_position_max_distance": 16,
            "decoder_num_hidden_layers": 1,
            "decoder_hidden_size": 8,
            "mask_token_id": tokenizer.mask_token_id,
            "num_labels": 3,
            "initializer_range": 0.2,
        }
        | settings
    )


def encoder_state(model):
    return {name: tensor.clone() for name, tensor in model.base_model.state_dict().items()}


def test_heads_share_no_parameter_name(tokenizer):
    own = {
        model_class: {name for name in model_class(config(tokenizer)).state_dict() if not name.startswith("encoder.")}
        for model_class in CLASSES
        if model_class is not MaeLmModel
    }
    for one, other in itertools.combinations(own, 2):
        assert not own[one] & own[other], (one, other)


@pytest.mark.parametrize("source", CLASSES, ids=lambda model_class: model_class.__name__)
def test_saved_from_any_head_loads_in_every_head(source, tokenizer, tmp_path, capfd):
    torch.manual_seed(0)
    model = source(config(tokenizer))
    model.save_pretrained(tmp_path)
    for auto_class, expected in HEADS.items():
        loaded, info = auto_class.from_pretrained(tmp_path, output_loading_info=True)
        assert type(loaded) is expected
        for name, tensor in encoder_state(loaded).items():
            assert torch.equal(tensor, encoder_state(model)[name]), name
        assert not info["unexpected_keys"]
        assert not info["mismatched_keys"]
        new = {name.split(".")[0] for name in info["missing_keys"]}
        assert "encoder" not in new
        assert bool(new) == (expected not in (source, MaeLmModel))
    assert "UNEXPECTED" not in capfd.readouterr().err


def test_a_fresh_process_loads_every_head(tokenizer, tmp_path):
    torch.manual_seed(0)
    model = MaeLmForMaskedLM(config(tokenizer))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    script = f"""
import json, torch, transformers, maelm_hf
result = {{}}
for name in {[auto_class.__name__ for auto_class in HEADS]!r}:
    model = getattr(transformers, name).from_pretrained({str(tmp_path)!r})
    result[name] = [type(model).__name__, float(sum(p.double().sum() for p in model.base_model.parameters()))]
result["mask"] = transformers.AutoTokenizer.from_pretrained({str(tmp_path)!r}).mask_token_id
print(json.dumps(result))
"""
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    result = json.loads(output.stdout.splitlines()[-1])
    total = float(sum(parameter.double().sum() for parameter in model.encoder.parameters()))
    assert result.pop("mask") == tokenizer.mask_token_id
    assert result == {auto_class.__name__: [expected.__name__, total] for auto_class, expected in HEADS.items()}


@pytest.mark.parametrize("tie", [True, False])
def test_tied_weights_lie_on_disk_once(tie, tokenizer, tmp_path):
    model = MaeLmForMaskedLM(config(tokenizer, tie_word_embeddings=tie))
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert "encoder.embeddings.word_embeddings.weight" in names
    assert ("lm_head.output.weight" in names) is not tie
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert (loaded.lm_head.output.weight is loaded.encoder.embeddings.word_embeddings.weight) is tie
    assert torch.equal(loaded.lm_head.output.weight, model.lm_head.output.weight)


def test_outputs_are_bit_equal_after_loading_and_after_meta_initialisation(tokenizer, tmp_path):
    """There are no buffers that could come back as garbage; the outputs show it."""
    model = MaeLmForMaskedLM(config(tokenizer)).eval()
    model.save_pretrained(tmp_path)
    ids = torch.tensor([[0, 6, 4, 8, 9, 4, 2]])
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert not list(model.buffers())
    with torch.device("meta"):
        empty = MaeLmForMaskedLM(config(tokenizer))
    empty.to_empty(device="cpu")
    empty.init_weights()
    empty.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(empty.eval()(ids).logits, model(ids).logits)


def test_tokenizer_and_config_agree_on_ids(tokenizer, tmp_path):
    model = MaeLmForMaskedLM(config(tokenizer))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded, settings = AutoTokenizer.from_pretrained(tmp_path), AutoModel.from_pretrained(tmp_path).config
    for name in ("mask_token_id", "pad_token_id", "bos_token_id", "eos_token_id"):
        assert getattr(loaded, name) == getattr(settings, name), name
    assert len(loaded) == settings.vocab_size


def test_fill_mask_with_one_and_several_masks(tokenizer, capfd):
    model = MaeLmForMaskedLM(config(tokenizer)).eval()
    fill = pipeline("fill-mask", model=model, tokenizer=tokenizer)
    assert "is not supported" not in capfd.readouterr().err
    one = fill("the cat sat on a <mask>", top_k=3)
    assert len(one) == 3
    ids = tokenizer("the cat sat on a <mask>", return_tensors="pt")
    with torch.no_grad():
        probabilities = model(**ids).logits[0, ids["input_ids"][0] == tokenizer.mask_token_id].softmax(-1)[0]
    assert one[0]["token"] == probabilities.argmax()
    assert one[0]["score"] == pytest.approx(probabilities.max().item(), rel=1e-5)
    several = fill("the <mask> sat on a <mask>", top_k=2)
    assert [len(candidates) for candidates in several] == [2, 2]
    with pytest.raises(Exception, match=r"No mask_token"):
        fill("the cat sat")


def test_feature_extraction_gives_the_encoder_output(tokenizer):
    model = MaeLmModel(config(tokenizer)).eval()
    features = pipeline("feature-extraction", model=model, tokenizer=tokenizer)("the cat sat", return_tensors=True)
    with torch.no_grad():
        expected = model(**tokenizer("the cat sat", return_tensors="pt")).last_hidden_state
    assert torch.allclose(features, expected, atol=1e-6)


def test_half_precision_checkpoints_load_in_full_precision_when_asked(tokenizer, tmp_path):
    MaeLmModel(config(tokenizer)).to(torch.bfloat16).save_pretrained(tmp_path)
    assert AutoModel.from_pretrained(tmp_path, dtype=torch.float32).dtype == torch.float32
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float32).dtype == torch.float32


def test_importing_neither_warns_nor_compiles():
    script = "import sys, maelm_hf; print('triton' in sys.modules, 'torch._inductor.compile_fx' in sys.modules)"
    command = [sys.executable, "-W", "error::FutureWarning", "-c", script]
    output = subprocess.run(command, capture_output=True, text=True, check=True)
    assert output.stdout.split() == ["False", "False"]
