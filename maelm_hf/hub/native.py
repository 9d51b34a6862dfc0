# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""The encoder as a stock BERT checkpoint: it loads with nothing but transformers, and in all that knows BERT.

Without relative-position bias the encoder is BERT to the last operation; only the names differ, and BERT's segment
embeddings, which are zero here. A head that BERT has in the same form comes along.
"""

import logging
from pathlib import Path

import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    BertPreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..configuration_maelm import MaeLmConfig
from ..modeling_maelm import MaeLmPreTrainedModel
from .folder import CONFIG_FILE, load_maelm, local_folder, read_config, write_tokenizer

logger = logging.getLogger(__name__)

EMBEDDING_PARTS = {
    "word_embeddings": "word_embeddings",
    "position_embeddings": "position_embeddings",
    "layer_norm": "LayerNorm",
}
LAYER_PARTS = {
    "attention.query": "attention.self.query",
    "attention.key": "attention.self.key",
    "attention.value": "attention.self.value",
    "attention.output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "intermediate": "intermediate.dense",
    "output": "output.dense",
    "output_norm": "output.LayerNorm",
}
# Ours -> BERT's class, and the head's modules. Multiple choice is absent: BERT's has a tanh layer that ours has not.
HEADS = {
    "MaeLmModel": (BertModel, {}),
    "MaeLmForMaskedLM": (BertModel, {}),
    "MaeLmForSequenceClassification": (
        BertForSequenceClassification,
        {"sequence_classifier.dense": "bert.pooler.dense", "sequence_classifier.output": "classifier"},
    ),
    "MaeLmForTokenClassification": (BertForTokenClassification, {"token_classifier": "classifier"}),
    "MaeLmForQuestionAnswering": (BertForQuestionAnswering, {"question_answering": "qa_outputs"}),
}
# Plain MLM has no decoder: its head reads the encoder, as BERT's does.
PLAIN_MLM_HEAD = (
    BertForMaskedLM,
    {
        "lm_head.dense": "cls.predictions.transform.dense",
        "lm_head.layer_norm": "cls.predictions.transform.LayerNorm",
        "lm_head.output": "cls.predictions.decoder",
    },
)
SAME_SETTINGS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "hidden_act",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "max_position_embeddings",
    "layer_norm_eps",
    "initializer_range",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "tie_word_embeddings",
    "id2label",
    "label2id",
    "problem_type",
    # BERT has no such settings; tools that look for them (the rank probe) learn how the encoder met [MASK].
    "mask_token_id",
    "encoder_mask_fraction",
)


def export_native(
    model_or_dir: MaeLmPreTrainedModel | str | Path,
    out_dir: str | Path,
    to: str = "bert",
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Path:
    """
    Writes the encoder as a stock BERT checkpoint: `AutoModel.from_pretrained(out_dir)` needs transformers alone.

    Hidden states, (batch, length, hidden size) at every layer, are those of `MaeLmModel` at real tokens, right padding
    included. Heads for sequence classification, token classification and question answering come along, and the head
    of a plain masked language model (no decoder, `encoder_mask_fraction=1`); the decoder of MAE-LM, which has no place
    in BERT, does not. Two things that the stock class does differently:

    - It lets [MASK] in, which the encoder never saw: do not ask an exported MAE-LM to fill masks.
    - Its pooler has a weight of its own, which no pretraining trained. It is the identity here, so that
      `pooler_output` is tanh of the first token's state, the same at every load.

    Args:
        model_or_dir: A model of this package, a folder that `save_pretrained` wrote, or a Hub name.
        out_dir: The folder to write; an earlier export in it is replaced.
        to: The stock architecture; "bert" is the only one that our encoder equals. With `config.backbone_config` it is
            the backbone's own, and the encoder alone is written, as `model.encoder.save_pretrained` does.
        tokenizer: To write beside a model; a folder's own is copied.

    Returns:
        `out_dir`.

    Raises:
        ValueError: The encoder has a relative-position bias, the head has no equal in BERT, or `to` is another
            architecture than the encoder's.
        FileExistsError: `out_dir` holds a model that is not an export.
    """
    source = None
    if isinstance(model_or_dir, (str, Path)):
        source = local_folder(model_or_dir)
        model = load_maelm(source)
    elif isinstance(model_or_dir, MaeLmPreTrainedModel):
        model = model_or_dir
    else:
        raise TypeError(
            f"model_or_dir is a {type(model_or_dir).__name__}: give a maelm_hf model, its folder or a Hub name"
        )
    backbone = model.base_model.backbone
    written = "bert" if backbone is None else backbone.config.model_type
    if to != written:
        raise ValueError(f"to={to!r}: the encoder can be written as {written!r} only")
    stock = to_bert(model) if backbone is None else backbone
    out_dir = Path(out_dir)
    if (out_dir / CONFIG_FILE).exists() and read_config(out_dir).get("model_type") != written:
        raise FileExistsError(f"{out_dir} holds another model, which an export would overwrite; choose another folder")
    out_dir.mkdir(parents=True, exist_ok=True)
    stock.save_pretrained(out_dir)
    if not write_tokenizer(tokenizer, source, out_dir):
        logger.warning("no tokenizer written to %s: there was none beside the model; pass tokenizer=", out_dir)
    return out_dir


def to_bert(model: MaeLmPreTrainedModel) -> BertPreTrainedModel:
    """The stock model, in the dtype of `model`, on the CPU and in eval mode; errors as in `export_native`."""
    config = model.config
    if config.relative_position_buckets:
        raise ValueError(
            f"relative_position_buckets={config.relative_position_buckets}: BERT has no relative-position bias, so "
            "this encoder cannot be a stock BERT; publish it with its code (maelm publish), which loads with "
            "trust_remote_code=True, or pretrain with relative_position_buckets=0"
        )
    stock_class, head = _stock_class(model)
    stock = stock_class(_bert_config(config)).to(next(model.parameters()).dtype)
    prefix = "" if stock_class is BertModel else "bert."
    names = _encoder_names(config, prefix) | head
    ours, theirs = model.state_dict(), stock.state_dict()
    if not any(name.startswith("encoder.embeddings.") for name in ours):  # MaeLmModel itself
        ours = {f"encoder.{name}": value for name, value in ours.items()}
    converted = {
        f"{stock_name}.{kind}": ours[f"{name}.{kind}"]
        for name, stock_name in names.items()
        for kind in ("weight", "bias")
        if f"{name}.{kind}" in ours
    }
    segments = f"{prefix}embeddings.token_type_embeddings.weight"
    converted[segments] = torch.zeros_like(theirs[segments])
    pooler = f"{prefix}pooler.dense.weight"
    if pooler in theirs and pooler not in converted:
        converted[pooler] = torch.eye(config.hidden_size, dtype=theirs[pooler].dtype)
        converted[f"{prefix}pooler.dense.bias"] = torch.zeros_like(theirs[f"{prefix}pooler.dense.bias"])
    if stock_class is BertForMaskedLM:
        converted["cls.predictions.bias"] = converted["cls.predictions.decoder.bias"]
    stock.load_state_dict(converted)  # strict: a name that either side lacks is an error
    return stock.eval()


def _stock_class(model: MaeLmPreTrainedModel) -> tuple[type[BertPreTrainedModel], dict[str, str]]:
    name = type(model).__name__
    if name == "MaeLmForMaskedLM" and model.decoder is None:
        return PLAIN_MLM_HEAD
    if name not in HEADS:
        raise ValueError(f"BERT has no head like that of {name}; export its encoder: export_native(model.encoder, ...)")
    return HEADS[name]


def _encoder_names(config: MaeLmConfig, prefix: str) -> dict[str, str]:
    """Module name -> BERT's."""
    names = {f"encoder.embeddings.{ours}": f"{prefix}embeddings.{stock}" for ours, stock in EMBEDDING_PARTS.items()}
    for layer in range(config.num_hidden_layers):
        for ours, stock in LAYER_PARTS.items():
            names[f"encoder.layers.{layer}.{ours}"] = f"{prefix}encoder.layer.{layer}.{stock}"
    return names


def _bert_config(config: MaeLmConfig) -> BertConfig:
    return BertConfig(type_vocab_size=2, **{name: getattr(config, name) for name in SAME_SETTINGS})
