# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""A checkpoint file of the authors' fairseq code (`.pt` and `dict.txt`) into a folder of this package.

A `.pt` file is a pickle, which may run anything when it is read. It is read with PyTorch's restricted unpickler here,
which knows tensors and plain containers, and of classes `argparse.Namespace` alone.
"""

import argparse
import logging
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from ..modeling_maelm import MaeLmForMaskedLM
from .official import convert_official_state_dict

logger = logging.getLogger(__name__)

DICTIONARY_FILE = "dict.txt"
EMBED_TOKENS = "encoder.sentence_encoder.embed_tokens.weight"
# fairseq's Dictionary puts these first, whatever dict.txt holds.
FIRST_SYMBOLS = ("<s>", "<pad>", "</s>", "<unk>")
MASK_SYMBOL = "<mask>"
PADDED_TO = 8  # fairseq pads vocabularies to a multiple of 8 with madeupword0000, madeupword0001 ...
# Our name -> the names of the code's arguments that give it, the first one present.
SIZES = {
    "num_hidden_layers": ("encoder_layers",),
    "hidden_size": ("encoder_embed_dim",),
    "intermediate_size": ("encoder_ffn_embed_dim",),
    "num_attention_heads": ("encoder_attention_heads",),
    "decoder_num_hidden_layers": ("gen_decoder_layers", "decoder_layers"),
    "max_position_embeddings": ("max_positions", "tokens_per_sample"),
}
# The encoder's, where they are not given: so are the code's own defaults.
DECODER_SIZES = {
    "decoder_hidden_size": "decoder_embed_dim",
    "decoder_intermediate_size": "decoder_ffn_embed_dim",
    "decoder_num_attention_heads": "decoder_attention_heads",
}
RELATIVE_SIZES = {
    "relative_position_buckets": "rel_pos_bins",
    "relative_position_max_distance": "max_rel_pos",
}
DROPOUTS = {"hidden_dropout_prob": "dropout", "attention_probs_dropout_prob": "attention_dropout"}
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_fast": "gelu_pytorch_tanh",
    "gelu_accurate": "gelu_pytorch_tanh",
    "relu": "relu",
    "tanh": "tanh",
    "linear": "linear",
}
# Experiments that the code holds besides the method of the paper: models trained so are other models.
OTHER_MODELS = (
    "bottleneck_embed_dim",
    "decoder_cross_attn",
    "decoder_only_mask",
    "decoder_rel_pos",
    "fill_real_token",
    "lm_linear_head",
    "mix_token_emb",
    "no_emb_norm",
    "no_fill_mask",
    "no_mask_emb",
    "no_pos_align",
    "restore_encoder_mask",
    "share_pos_emb",
)


@dataclass
class FairseqDictionary:
    """The symbols of a `dict.txt` in the order of their ids, fairseq's four first ones and `<mask>` included."""

    symbols: list[str]

    @property
    def mask_token_id(self) -> int:
        return self.symbols.index(MASK_SYMBOL)

    def tokenizer(self, model_max_length: int) -> PreTrainedTokenizerFast:
        """Ids of text that is cut into symbols already, at white space, as fairseq's own `encode_line` takes it."""
        bos, _, eos, unk = FIRST_SYMBOLS
        ids = {symbol: index for index, symbol in enumerate(self.symbols)}
        backend = Tokenizer(models.WordLevel(ids, unk_token=unk))
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        backend.post_processor = processors.RobertaProcessing((eos, ids[eos]), (bos, ids[bos]))
        special = {"bos": bos, "cls": bos, "pad": "<pad>", "eos": eos, "sep": eos, "unk": unk, "mask": MASK_SYMBOL}
        return PreTrainedTokenizerFast(
            tokenizer_object=backend,
            model_max_length=model_max_length,
            **{f"{role}_token": AddedToken(symbol, normalized=False, special=True) for role, symbol in special.items()},
        )


def read_dictionary(path: str | Path) -> FairseqDictionary:
    """Reads `dict.txt`: a line `symbol count` for each id from 4 on; `<mask>` follows the last where it is not in it.

    Raises:
        ValueError: A line without a count, or a symbol that occurs twice; it names the line.
    """
    symbols = list(FIRST_SYMBOLS)
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        symbol, _, count = line.removesuffix(" #fairseq:overwrite").rpartition(" ")
        if not symbol or not count.isdigit():
            raise ValueError(f"{path}, line {number}: expected 'symbol count', got {line!r}")
        symbols.append(symbol)
    if MASK_SYMBOL not in symbols:
        symbols.append(MASK_SYMBOL)
    if len(set(symbols)) < len(symbols):
        twice = next(symbol for symbol in symbols if symbols.count(symbol) > 1)
        raise ValueError(f"{path}: the symbol {twice!r} occurs twice, so the order of ids is unclear")
    return FairseqDictionary(symbols)


def read_fairseq_checkpoint(path: str | Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """
    The weights and the model's arguments of a `.pt` file, without running anything that is in it.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is no such checkpoint, or holds objects other than tensors, plain containers and
            `argparse.Namespace`; it names them.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no checkpoint file {path}")
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(_refusal(path, error)) from None
    except Exception as error:  # bytes that are no checkpoint make the reader fail in any way
        raise ValueError(f"{path} is no whole checkpoint file of torch.save ({type(error).__name__})") from error
    if not isinstance(checkpoint, Mapping) or not isinstance(checkpoint.get("model"), Mapping):
        raise ValueError(f"{path} is no fairseq checkpoint: it has no 'model' with weights")
    return dict(checkpoint["model"]), _model_arguments(path, checkpoint)


def _refusal(path: Path, error: pickle.UnpicklingError) -> str:
    """What the restricted unpickler stopped at, in one line."""
    named = re.search(r"GLOBAL ([\w.]+)", str(error))
    stopped = re.search(r"Unsupported [^\n]{0,80}", str(error))
    what = named.group(1) if named else stopped.group(0) if stopped else "what no checkpoint holds"
    return (
        f"{path} is refused: it holds {what}, and reading that could run code; of objects only tensors, plain "
        "containers and argparse.Namespace are read"
    )


def _model_arguments(path: Path, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments under 'args' (a Namespace) or 'cfg' (a dict with 'model', of either form)."""
    arguments = checkpoint.get("args")
    if arguments is None and isinstance(checkpoint.get("cfg"), Mapping):
        arguments = checkpoint["cfg"].get("model")
    if isinstance(arguments, argparse.Namespace):
        arguments = vars(arguments)
    if not isinstance(arguments, Mapping):
        raise ValueError(f"{path} has the model's arguments neither in 'args' nor in 'cfg', so its sizes are unknown")
    return dict(arguments)


def settings_from_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """`MaeLmConfig`'s settings out of the code's arguments.

    Raises:
        ValueError: Arguments that give a size are missing, or say that it is another model; it lists them.
    """
    other = [f"{name}={arguments[name]}" for name in OTHER_MODELS if arguments.get(name)]
    if arguments.get("no_return_mask") is False:
        other.append("no_return_mask=False")
    if other:
        raise ValueError(f"the checkpoint was trained with {', '.join(other)}: that is not the model of the paper")

    names = SIZES | {ours: (name,) for ours, name in RELATIVE_SIZES.items() if arguments.get("rel_pos")}
    given = {
        ours: next((arguments[name] for name in choices if arguments.get(name) is not None), None)
        for ours, choices in names.items()
    }
    missing = [" or ".join(names[ours]) for ours, value in given.items() if value is None]
    if missing:
        raise ValueError(f"the checkpoint's arguments lack {', '.join(missing)}, so its sizes are unknown")
    optional = {ours: arguments[name] for ours, name in DECODER_SIZES.items() if arguments.get(name) is not None}
    settings = {ours: int(value) for ours, value in (given | optional).items()}
    settings.setdefault("relative_position_buckets", 0)
    settings |= {ours: arguments[name] for ours, name in DROPOUTS.items() if arguments.get(name) is not None}
    activation = arguments.get("activation_fn", "gelu")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation_fn={activation!r} is not known; known are {', '.join(ACTIVATIONS)}")
    return settings | {"hidden_act": ACTIVATIONS[activation]}


def convert_fairseq_checkpoint(
    path: str | Path, dictionary: str | Path | None = None
) -> tuple[MaeLmForMaskedLM, PreTrainedTokenizerFast | None]:
    """
    The model of a checkpoint file of the authors' code, in float32, and a tokenizer of its vocabulary.

    Args:
        path: The `.pt` file; sizes are taken from the arguments in it.
        dictionary: fairseq's `dict.txt`, which gives every id its symbol; by default the one beside `path`. Without
            one there is no tokenizer, and the last row of the embedding matrix is taken for `<mask>`.

    Raises:
        FileNotFoundError, ValueError: The file is refused, sizes are missing, weights are missing or unknown (all are
            listed), or the dictionary has another size than the embedding matrix.
    """
    path = Path(path)
    state_dict, arguments = read_fairseq_checkpoint(path)
    settings = settings_from_arguments(arguments)
    if EMBED_TOKENS not in state_dict:
        found = ", ".join(sorted(state_dict)[:3]) or "no weights at all"
        raise ValueError(f"{path} has no {EMBED_TOKENS}: it is no MAE-LM checkpoint of the authors' code ({found} ...)")
    rows = state_dict[EMBED_TOKENS].shape[0]
    if dictionary is None and (path.parent / DICTIONARY_FILE).is_file():
        dictionary = path.parent / DICTIONARY_FILE
        logger.info("vocabulary: %s, which lies beside the checkpoint", dictionary)
    symbols, mask_token_id = None, rows - 1
    if dictionary is None:
        logger.warning(
            "no %s: taking id %d for <mask>, which fairseq adds last, and writing no tokenizer",
            DICTIONARY_FILE,
            rows - 1,
        )
    else:
        symbols = read_dictionary(dictionary)
        _fit_to_rows(symbols, rows, dictionary)
        mask_token_id = symbols.mask_token_id
    model = convert_official_state_dict(
        state_dict,
        vocab_size=rows,
        mask_token_id=mask_token_id,
        bos_token_id=FIRST_SYMBOLS.index("<s>"),
        pad_token_id=FIRST_SYMBOLS.index("<pad>"),
        eos_token_id=FIRST_SYMBOLS.index("</s>"),
        **settings,
    )
    return model, None if symbols is None else symbols.tokenizer(model.config.max_position_embeddings)


def _fit_to_rows(dictionary: FairseqDictionary, rows: int, path: str | Path) -> None:
    """Names the rows that pad the matrix to a multiple of 8; refuses any other difference."""
    surplus = rows - len(dictionary.symbols)
    if surplus and not (0 < surplus < PADDED_TO and rows % PADDED_TO == 0):
        raise ValueError(
            f"{path} gives {len(dictionary.symbols)} symbols with {MASK_SYMBOL}, the embedding matrix has {rows} rows: "
            "it belongs to another checkpoint"
        )
    dictionary.symbols += [f"madeupword{index:04d}" for index in range(surplus)]
