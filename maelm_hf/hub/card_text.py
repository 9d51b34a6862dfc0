# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""What a card says in words: what the model is, how to use it, where it ends."""

from collections.abc import Mapping
from typing import Any

HEADS = {
    "ForSequenceClassification": "fine-tuned to classify texts",
    "ForTokenClassification": "fine-tuned to classify tokens",
    "ForQuestionAnswering": "fine-tuned to answer questions with a span of a text",
    "ForMultipleChoice": "fine-tuned to choose among several answers",
}


def describe(config: Mapping[str, Any]) -> str:
    """What the model is, out of its config alone."""
    architecture = (config.get("architectures") or [""])[0]
    size = f"{config['num_hidden_layers']} layers, {config['hidden_size']} dimensions"
    head = next((text for suffix, text in HEADS.items() if architecture.endswith(suffix)), None)
    fraction = config.get("encoder_mask_fraction")
    # A backbone may have been pretrained in its own way before: the config knows of the training here alone.
    done, then = ("pretrained", "") if config.get("backbone_config") is None else ("trained", "in that training ")
    if fraction is None:
        trained = f"a stock `{config['model_type']}` model of transformers"
    elif fraction == 0:
        trained = f"{done} with MAE-LM: {then}[MASK] never entered it"
    elif fraction == 1:
        trained = f"{done} as a plain masked language model: {then}it saw every [MASK]"
    else:
        trained = f"{done} with a share {fraction} of the [MASK] tokens in its input, the rest left to the decoder"
    return f"A bidirectional transformer encoder for text ({size}), {trained}" + (f"; {head}." if head else ".")


def form(config: Mapping[str, Any]) -> str:
    """How it loads, and which form to prefer."""
    if config["model_type"] != "maelm":
        return (
            f"The weights are in the form of a stock `{config['model_type']}` model: they load with `transformers` "
            "alone, without further code, and in every tool that takes such a model. This is the recommended form for "
            "fine-tuning and serving."
        )
    code = (
        "The model's code lies in this repository: it loads with `trust_remote_code=True`, or without it where the "
        "package `maelm_hf` is imported. "
    )
    if config.get("relative_position_buckets"):
        return (
            code + "Its relative-position bias has no place in a stock architecture, so there is no other form of it."
        )
    backbone = config.get("backbone_config")
    if backbone is not None:
        return code + (
            f"Its encoder alone is a stock `{backbone['model_type']}` model, which loads without code and is "
            f"recommended for fine-tuning: `maelm export MODEL OUT --to {backbone['model_type']}`."
        )
    return code + (
        "For fine-tuning and serving its stock BERT form is recommended, which loads without code: "
        "`maelm export MODEL OUT --to bert`."
    )


def method(config: Mapping[str, Any]) -> str:
    """How it was pretrained, with the source."""
    fraction = config.get("encoder_mask_fraction")
    if fraction is None:
        return "How it was pretrained: not stated."
    named = "Plain masked language modeling, the baseline of" if fraction == 1 else "MAE-LM, after"
    return (
        f'{named} Meng et al., "Representation Deficiency in Masked Language Modeling", ICLR 2024, '
        "[arXiv 2302.02060](https://arxiv.org/abs/2302.02060)."
    )


def snippets(
    repo_id: str,
    config: Mapping[str, Any],
    pipeline: str,
    *,
    has_tokenizer: bool,
    revision: str | None = None,
    subfolder: str | None = None,
) -> list[dict[str, str]]:
    """Three snippets that run as they are: hidden states, a model to fine-tune, and what the repository is for."""
    arguments = [f'"{repo_id}"']
    arguments += [f'revision="{revision}"'] if revision else []
    arguments += [f'subfolder="{subfolder}"'] if subfolder else []
    # The tokenizer too: transformers reads the config first, and would ask whether to run its code.
    arguments += ["trust_remote_code=True"] if config["model_type"] == "maelm" else []
    arguments = ", ".join(arguments)
    if has_tokenizer:
        tokenize = (
            "from transformers import {}, AutoTokenizer",
            f"tokenizer = AutoTokenizer.from_pretrained({arguments})\n"
            'inputs = tokenizer(["The first text.", "Another, longer text."], padding=True, return_tensors="pt")',
        )
    else:
        tokenize = (
            "import torch\nfrom transformers import {}",
            'inputs = {"input_ids": torch.tensor([[5, 6, 7]])}  # there is no tokenizer here',
        )
    return [
        _hidden_states(arguments, tokenize),
        _fine_tuning(arguments, has_other_classes=pipeline == "text-classification"),
        _purpose(arguments, tokenize, pipeline, config),
    ]


def _hidden_states(arguments: str, tokenize: tuple[str, str]) -> dict[str, str]:
    code = f"""
{tokenize[0].format("AutoModel")}

{tokenize[1]}
model = AutoModel.from_pretrained({arguments})
hidden_states = model(**inputs).last_hidden_state  # (batch, length, hidden size)
"""
    return {"title": "Hidden states", "code": code.strip()}


def _fine_tuning(arguments: str, has_other_classes: bool) -> dict[str, str]:
    more = ", ignore_mismatched_sizes=True" if has_other_classes else ""
    code = f"""
import torch
from transformers import AutoModelForSequenceClassification

model = AutoModelForSequenceClassification.from_pretrained(
    {arguments}, num_labels=3, dtype=torch.float32{more}
)
"""
    return {"title": "A model to fine-tune, for `Trainer` or a loop of your own", "code": code.strip()}


def _purpose(arguments: str, tokenize: tuple[str, str], pipeline: str, config: Mapping[str, Any]) -> dict[str, str]:
    if pipeline == "fill-mask" and tokenize[1].startswith("tokenizer"):
        code = f"""
from transformers import AutoModelForMaskedLM, AutoTokenizer, pipeline

{tokenize[1].splitlines()[0]}
model = AutoModelForMaskedLM.from_pretrained({arguments})
fill = pipeline("fill-mask", model=model, tokenizer=tokenizer)
print(fill(f"The capital of France is {{tokenizer.mask_token}}."))
"""
        return {"title": "Filling masks", "code": code.strip()}
    heads = {
        "text-classification": ("AutoModelForSequenceClassification", "logits", "(batch, classes)"),
        "token-classification": ("AutoModelForTokenClassification", "logits", "(batch, length, classes)"),
        "question-answering": ("AutoModelForQuestionAnswering", "start_logits", "(batch, length); end_logits likewise"),
        "fill-mask": ("AutoModelForMaskedLM", "logits", "(batch, length, vocabulary)"),
    }
    if pipeline in heads:
        auto_class, output, shape = heads[pipeline]
        code = f"""
{tokenize[0].format(auto_class)}

{tokenize[1]}
model = {auto_class}.from_pretrained({arguments})
{output} = model(**inputs).{output}  # {shape}
"""
        return {"title": "Predictions", "code": code.strip()}
    mean = "embeddings = states.mean(dim=1)"
    if tokenize[1].startswith("tokenizer"):
        mean = 'mask = inputs["attention_mask"].unsqueeze(-1)\nembeddings = (states * mask).sum(1) / mask.sum(1)'
    code = f"""
{tokenize[0].format("AutoModel")}

{tokenize[1]}
model = AutoModel.from_pretrained({arguments})
states = model(**inputs).last_hidden_state
{mean}  # (batch, hidden size)
"""
    return {"title": "Embeddings of texts, the mean over their tokens", "code": code.strip()}


def _always(config, measured) -> bool:
    return True


# Each with the condition, of the config and the measurements, under which a card says it.
LIMITS = (
    (
        # Of a stock config without the key nobody knows how it met [MASK].
        lambda config, measured: config["model_type"] != "maelm" and config.get("encoder_mask_fraction", 1) < 1,
        "In this form the encoder takes every [MASK] in, which in training it did not: do not fill masks with it.",
    ),
    (
        lambda config, measured: config["model_type"] == "maelm" and config.get("encoder_mask_fraction", 0) < 1,
        "The encoder's rows at [MASK] are zero; the decoder, which fills masks, comes with `AutoModelForMaskedLM`.",
    ),
    (
        _always,
        "Longer texts than the longest sequence have to be cut, or read in parts.",
    ),
    (
        lambda config, measured: not measured.results,
        "Quality on downstream tasks is not measured.",
    ),
    (
        _always,
        "It repeats the errors and prejudices of its training text; bias and safety are not measured.",
    ),
)
