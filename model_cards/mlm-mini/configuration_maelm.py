# Copyright 2026 The maelm_hf authors. All rights reserved.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""MAE-LM configuration."""

import copy
import difflib
from dataclasses import fields
from typing import ClassVar

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)
from transformers.utils import auto_docstring, logging

logger = logging.get_logger(__name__)

# Every head loads from one checkpoint only if the config names them all: saving a registered class names just that one.
AUTO_MAP = {
    "AutoConfig": "configuration_maelm.MaeLmConfig",
    "AutoModel": "modeling_maelm.MaeLmModel",
    "AutoModelForPreTraining": "modeling_maelm.MaeLmForMaskedLM",
    "AutoModelForMaskedLM": "modeling_maelm.MaeLmForMaskedLM",
    "AutoModelForSequenceClassification": "modeling_maelm.MaeLmForSequenceClassification",
    "AutoModelForTokenClassification": "modeling_maelm.MaeLmForTokenClassification",
    "AutoModelForQuestionAnswering": "modeling_maelm.MaeLmForQuestionAnswering",
    "AutoModelForMultipleChoice": "modeling_maelm.MaeLmForMultipleChoice",
}

# What a backbone's config calls our settings, where its own name differs.
BACKBONE_NAMES = {
    "vocab_size": ("vocab_size",),
    "hidden_size": ("hidden_size",),
    "num_hidden_layers": ("num_hidden_layers",),
    "num_attention_heads": ("num_attention_heads",),
    "intermediate_size": ("intermediate_size", "hidden_dim"),
    "hidden_act": ("hidden_act", "activation", "hidden_activation"),
    "hidden_dropout_prob": ("hidden_dropout_prob", "dropout", "mlp_dropout"),
    "attention_probs_dropout_prob": ("attention_probs_dropout_prob", "attention_dropout"),
    "max_position_embeddings": ("max_position_embeddings",),
    "layer_norm_eps": ("layer_norm_eps", "norm_eps"),
    "initializer_range": ("initializer_range",),
    "pad_token_id": ("pad_token_id",),
    "bos_token_id": ("bos_token_id",),
    "eos_token_id": ("eos_token_id",),
    "tie_word_embeddings": ("tie_word_embeddings",),
}
FOLLOWING = ("relative_position_buckets", *BACKBONE_NAMES)
# Settings without which nothing can be built on it.
BACKBONE_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
)
# The tokenizer's say (Trainer sets them from it), so that ours stand where the backbone's differ.
SPECIAL_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")
# Their first position is pad_token_id + 1, as in fairseq.
OFFSET_BACKBONES = (
    "camembert",
    "data2vec-text",
    "mpnet",
    "roberta",
    "roberta-prelayernorm",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
)


@auto_docstring(checkpoint="org/mae-lm-base")
@strict
class MaeLmConfig(PreTrainedConfig):
    r"""
    max_position_embeddings (`int`, *optional*, defaults to 512):
        Longest sequence, in tokens.
    relative_position_buckets (`int`, *optional*, defaults to 64):
        Buckets of the learned relative-position bias that all encoder layers share, an even number of at least 4; 0 for
        no such bias.
    relative_position_max_distance (`int`, *optional*, defaults to 128):
        Distance, in tokens, from which on all distances share a bucket.
    decoder_num_hidden_layers (`int`, *optional*, defaults to 4):
        Decoder layers; 0, with `encoder_mask_fraction=1`, is a plain masked language model.
    decoder_hidden_size (`int`, *optional*):
        Width of the decoder; the encoder's where it is not given.
    decoder_intermediate_size (`int`, *optional*):
        Inner width of a decoder layer; the encoder's where it is not given.
    decoder_num_attention_heads (`int`, *optional*):
        Attention heads of a decoder layer; the encoder's where it is not given.
    decoder_dropout_prob (`float`, *optional*, defaults to 0.0):
        Dropout everywhere in the decoder.
    encoder_mask_fraction (`float`, *optional*, defaults to 0.0):
        Share of the [MASK] tokens that the encoder sees: 0 is MAE-LM, 1 a plain masked language model (the paper's
        delta).
    mask_token_id (`int`, *optional*):
        Id of [MASK], `tokenizer.mask_token_id`. `MaeLmForMaskedLM` needs it; without it the encoder takes [MASK] for a
        token like any other.
    backbone_config (`dict` or `PreTrainedConfig`, *optional*):
        Another encoder of transformers in the place of our own: its config. Vocabulary, sizes, activation, dropout and
        LayerNorm epsilon then follow it, special tokens where they are not given; what is set here later is set there
        too. `max_position_embeddings` counts the tokens that it takes.

    The defaults are the base size of Meng et al., "Representation Deficiency in Masked Language Modeling", ICLR 2024.
    Settings that contradict each other raise a `ValueError` that names what to change.

    Example:

    ```python
    >>> from maelm_hf import MaeLmConfig, MaeLmForMaskedLM

    >>> config = MaeLmConfig(num_hidden_layers=2, decoder_num_hidden_layers=1, mask_token_id=50264)
    >>> model = MaeLmForMaskedLM(config)
    ```"""

    model_type = "maelm"
    sub_configs: ClassVar[dict] = {"backbone_config": AutoConfig}

    vocab_size: int = 50265
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float | int = 0.1
    attention_probs_dropout_prob: float | int = 0.1
    max_position_embeddings: int = 512
    relative_position_buckets: int = 64
    relative_position_max_distance: int = 128
    layer_norm_eps: float = 1e-5
    initializer_range: float | int = 0.02
    decoder_num_hidden_layers: int = 4
    decoder_hidden_size: int | None = None
    decoder_intermediate_size: int | None = None
    decoder_num_attention_heads: int | None = None
    decoder_dropout_prob: float | int = 0.0
    encoder_mask_fraction: float | int = 0.0
    mask_token_id: int | None = None
    pad_token_id: int | None = 1
    bos_token_id: int | None = 0
    eos_token_id: int | None = 2
    tie_word_embeddings: bool = True
    backbone_config: dict | PreTrainedConfig | None = None

    def __post_init__(self, **kwargs):
        if self.backbone_config is not None:
            self.backbone_config = config_of_backbone(self.backbone_config)
            self._follow_backbone()
        if self.decoder_hidden_size is None:
            self.decoder_hidden_size = self.hidden_size
        if self.decoder_intermediate_size is None:
            self.decoder_intermediate_size = self.intermediate_size
        if self.decoder_num_attention_heads is None:
            self.decoder_num_attention_heads = self.num_attention_heads
        self._warn_of_near_misses(kwargs)
        kwargs.setdefault("auto_map", dict(AUTO_MAP))
        self._check_settings()  # here too, so that the error is a plain ValueError
        super().__post_init__(**kwargs)

    @property
    def position_offset(self) -> int:
        """What the backbone adds to our positions 0, 1, 2 ...; 0 without one."""
        if self.backbone_config is None or self.backbone_config.model_type not in OFFSET_BACKBONES:
            return 0
        return self.backbone_config.pad_token_id + 1

    @property
    def word_embedding_size(self) -> int:
        """Width of the word embeddings: the encoder's, but for a backbone that projects them to it (ELECTRA)."""
        return getattr(self.backbone_config, "embedding_size", None) or self.hidden_size

    def __setattr__(self, name, value):
        """A backbone is built from its own config: what is changed here later is changed there too, or refused."""
        if name in FOLLOWING and isinstance(self.__dict__.get("backbone_config"), PreTrainedConfig):
            self._change_backbone(name, value)
        super().__setattr__(name, value)

    def _change_backbone(self, name, value):
        if name == "pad_token_id" and self.position_offset:
            return  # its positions begin behind its own padding id, and are learnt
        theirs = self._name_in_backbone(name)
        if theirs is None:
            self._refuse_other(name, value, self._of_backbone().get(name, value))
        else:
            offset = self.position_offset if name == "max_position_embeddings" else 0
            setattr(self.backbone_config, theirs, value + offset if offset else value)

    def _name_in_backbone(self, name: str) -> str | None:
        return next((each for each in BACKBONE_NAMES.get(name, ()) if hasattr(self.backbone_config, each)), None)

    def _refuse_other(self, name, given, value):
        if given != value:
            raise ValueError(
                f"{name}={given} contradicts the backbone's {value}: leave it out, or change it in backbone_config"
            )

    def _of_backbone(self) -> dict:
        """What follows the backbone, by our names."""
        follows = {"relative_position_buckets": 0}
        for name in BACKBONE_NAMES:
            theirs = self._name_in_backbone(name)
            if theirs is not None:
                follows[name] = getattr(self.backbone_config, theirs)
            elif name in BACKBONE_SIZES:
                raise ValueError(
                    f"backbone_config of type {self.backbone_config.model_type!r} has no {name}: it is no text encoder "
                    "that a decoder could be put on"
                )
        # DistilBERT has no setting for it, and BERT's value in its code.
        follows.setdefault("layer_norm_eps", 1e-12)
        follows["max_position_embeddings"] -= self.position_offset
        return follows

    def _follow_backbone(self):
        """Sizes and arithmetic are the backbone's, and what says otherwise is refused; special tokens may differ."""
        defaults = {field.name: field.default for field in fields(self)}
        for name, value in self._of_backbone().items():
            given = getattr(self, name)
            if given == defaults[name]:
                given = value
            elif name not in SPECIAL_TOKENS:
                self._refuse_other(name, given, value)
            setattr(self, name, given)

    def _warn_of_near_misses(self, unknown):
        """Configs keep keys they do not know, so a misspelt setting would pass in silence."""
        names = [field.name for field in fields(self)]
        for key in unknown:
            near = difflib.get_close_matches(key, names, n=1, cutoff=0.85)
            if near:
                logger.warning(f"MaeLmConfig has no setting `{key}`, which has no effect; did you mean `{near[0]}`?")

    def validate_architecture(self):
        """Part of `@strict`-powered validation, which runs again whenever the config is saved."""
        self._check_settings()

    def _check_settings(self):
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "max_position_embeddings"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: it must be at least 1")
        if self.hidden_act not in ACT2FN:
            raise ValueError(f"hidden_act={self.hidden_act!r} is no activation; choose one of {', '.join(ACT2FN)}")
        self._check_heads("hidden_size", "num_attention_heads")
        self._check_relative_positions()
        self._check_decoder()
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob", "decoder_dropout_prob"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: a dropout probability lies in [0, 1)")
        for name in ("mask_token_id", "pad_token_id"):
            token_id = getattr(self, name)
            if token_id is not None and not 0 <= token_id < self.vocab_size:
                raise ValueError(
                    f"{name}={token_id} is no id of a vocabulary of vocab_size={self.vocab_size}; "
                    f"pass {name}=tokenizer.{name} and vocab_size=len(tokenizer)"
                )
        if self.mask_token_id is not None and self.mask_token_id == self.pad_token_id:
            raise ValueError(
                f"mask_token_id={self.mask_token_id} is pad_token_id too, and the embedding of padding is not trained; "
                "pass pad_token_id=tokenizer.pad_token_id, or pad_token_id=None where there is none"
            )

    def _check_heads(self, size_name, heads_name):
        size, heads = getattr(self, size_name), getattr(self, heads_name)
        if heads < 1 or size % heads:
            raise ValueError(
                f"{size_name}={size} is not divisible by {heads_name}={heads}; choose a multiple of the number of heads"
            )

    def _check_relative_positions(self):
        buckets, distance = self.relative_position_buckets, self.relative_position_max_distance
        if buckets == 0:
            return
        if buckets < 4 or buckets % 2:
            raise ValueError(
                f"relative_position_buckets={buckets}: half of the buckets are for either side, so give an even number "
                "of at least 4, or 0 for no relative-position bias"
            )
        exact = buckets // 4
        if distance - 1 <= exact:
            raise ValueError(
                f"relative_position_max_distance={distance} leaves nothing to the logarithmic buckets: with "
                f"relative_position_buckets={buckets} it must be at least {exact + 2}"
            )

    def _check_decoder(self):
        fraction, layers = self.encoder_mask_fraction, self.decoder_num_hidden_layers
        if not 0 <= fraction <= 1:
            raise ValueError(f"encoder_mask_fraction={fraction}: it is a share, between 0 (MAE-LM) and 1 (plain MLM)")
        if layers < 0:
            raise ValueError(f"decoder_num_hidden_layers={layers}: it cannot be negative")
        if layers == 0 and fraction < 1:
            raise ValueError(
                "decoder_num_hidden_layers=0 leaves nothing to predict the tokens that "
                f"encoder_mask_fraction={fraction} hides from the encoder; give the decoder layers, or set "
                "encoder_mask_fraction=1 for plain MLM"
            )
        if layers:
            self._check_heads("decoder_hidden_size", "decoder_num_attention_heads")


def config_of_backbone(config: dict | PreTrainedConfig) -> PreTrainedConfig:
    """A copy of an encoder's config; decoders, encoder-decoders and unknown types are refused."""
    if isinstance(config, dict):
        settings = dict(config)
        model_type = settings.pop("model_type", None)
        try:
            config = AutoConfig.for_model(model_type, **settings)
        except ValueError:
            raise ValueError(
                f"backbone_config of type {model_type!r} is none that transformers knows: use a newer transformers, "
                "or register its classes first (AutoConfig.register, AutoModel.register)"
            ) from None
    else:
        config = copy.deepcopy(config)
    if isinstance(config, MaeLmConfig):
        raise ValueError("backbone_config is of MAE-LM itself: load that checkpoint with from_pretrained")
    if config.is_encoder_decoder:
        raise ValueError(
            f"backbone_config of type {config.model_type!r} is an encoder-decoder; MAE-LM is for encoders (BERT, "
            "RoBERTa, DistilBERT, ELECTRA ...)"
        )
    name = config.model_type
    if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and name not in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        raise ValueError(f"backbone_config of type {config.model_type!r} is decoder-only; MAE-LM is for encoders")
    if getattr(config, "is_decoder", False):
        raise ValueError(
            f"backbone_config of type {config.model_type!r} has is_decoder=True; MAE-LM is for encoders: set it False"
        )
    return config


__all__ = ["MaeLmConfig"]
