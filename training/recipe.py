# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Recipes: complete descriptions of pretraining runs, as YAML files of few sections. Unknown keys are refused."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from maelm_hf import MaeLmConfig


class RecipeError(ValueError):
    """A recipe that cannot be run; the message names the key and the way out."""


@dataclasses.dataclass(kw_only=True)
class MixtureSource:
    """One of several sources; keys as in :class:`CorpusSection`.

    ``weight`` over the sum of all weights is the share of the run's tokens that comes from it
    (:class:`training.mixture.MixedBlocks` says how exactly).
    """

    source: str
    weight: float = 1.0
    config: str | None = None
    split: str = "train"
    text_column: str = "text"

    @property
    def name(self) -> str:
        """What logs call it."""
        return " ".join(filter(None, (self.source, self.config, self.split if self.split != "train" else None)))


@dataclasses.dataclass(kw_only=True)
class CorpusSection:
    """Where text comes from (see :mod:`training.corpus`): one source, or a mixture of several."""

    source: str = "docstrings"  # or docstrings:stdlib,torch, a text file, a folder of them, a `datasets` name or folder
    config: str | None = None  # configuration of a `datasets` name
    split: str = "train"
    text_column: str = "text"
    streaming: bool = False  # read a `datasets` source as training goes, without a copy on disk
    held_out_share: float = 0.01  # of the documents, chosen by the hash of their text
    mixture: list[MixtureSource] = dataclasses.field(default_factory=list)  # takes the place of source


@dataclasses.dataclass(kw_only=True)
class TokenizerSection:
    """An existing tokenizer, or one trained on the corpus (byte-level BPE)."""

    path: str | None = None  # folder or Hub name; None trains one, or with from_encoder takes the encoder's
    add_mask_token: bool = False  # to an existing one that has none
    vocab_size: int = 32768
    training_bytes: int = 100_000_000  # of text, evenly drawn from the training documents, of a mixture by weight


@dataclasses.dataclass(kw_only=True)
class DataSection:
    """Blocks, masks and batches. Batch sizes are global: they do not depend on the number of processes."""

    max_length: int = 512  # tokens a block, special tokens included
    mask_ratio: float = 0.15
    whole_word: bool = False
    mask_special_tokens: bool = False
    batch_size: int | None = None  # sequences a step, over all processes
    batch_tokens: int | None = None  # or: real tokens a step
    micro_batch_size: int | Literal["auto"] = "auto"  # sequences a forward pass, on one process
    packing: bool = False  # several blocks in a row, attention kept within each
    length_window: int = 64  # batches of like lengths are cut from the sorted blocks of this many batches
    num_workers: int = 0  # processes that make batches
    preprocessing_workers: int = 1  # processes that tokenize


@dataclasses.dataclass(kw_only=True)
class OptimizerSection:
    """AdamW for everything, or Muon for the hidden matrices and AdamW for the rest."""

    name: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = 2e-4  # of AdamW, at the end of the warm-up
    decoder_learning_rate: float | None = None  # of decoder and head, which are new on an encoder that is not
    muon_learning_rate: float = 0.01
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-6
    weight_decay: float = 0.01
    max_grad_norm: float = 2.0
    schedule: Literal["linear", "wsd"] = "linear"
    warmup_steps: int = 0
    decay_steps: int = 0  # of "wsd": the last steps, in which the rate falls to 0


@dataclasses.dataclass(kw_only=True)
class LabelledSection:
    """With from_encoder: a labelled task on which the encoder is scored before and after; names as in finetune."""

    task: str | None = None
    train: str | None = None  # own files, with task: text
    validation: str | None = None
    test: str | None = None
    text: str = "text"  # column
    pair: str | None = None
    label: str = "label"
    seeds: int = 1
    fine_tune: bool = True  # beside the linear probe of the frozen encoder
    epochs: float | None = None


@dataclasses.dataclass(kw_only=True)
class Recipe:
    """One run. The same recipe, corpus and number of processes give the same weights, bit for bit on a CPU."""

    output_dir: str
    max_steps: int
    seed: int = 0
    from_encoder: str | None = None  # continue an encoder (folder or Hub name) instead of beginning a new one
    trust_remote_code: bool = False  # run code that from_encoder brings
    twin: Literal["none", "mlm"] = "none"  # mlm: the same run with [MASK] in the encoder and no decoder
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    attention: Literal["auto", "eager", "sdpa", "flex_attention", "flash_attention_2"] = "auto"
    activation_checkpointing: bool = False
    evaluate_every: int = 500
    evaluation_blocks: int = 1024  # of the held-out documents
    checkpoint_every: int = 500
    keep_checkpoints: int = 2
    probe_every: int = 0  # steps between effective-rank probes of held-out text; 0: never
    tracker: Literal["none", "tensorboard", "wandb", "trackio"] = "none"
    cache_dir: str = "~/.cache/maelm_hf"  # tokenizers and tokenized corpora, shared by runs
    model: dict[str, Any] = dataclasses.field(default_factory=dict)  # MaeLmConfig's names
    corpus: CorpusSection = dataclasses.field(default_factory=CorpusSection)
    tokenizer: TokenizerSection = dataclasses.field(default_factory=TokenizerSection)
    data: DataSection = dataclasses.field(default_factory=DataSection)
    optimizer: OptimizerSection = dataclasses.field(default_factory=OptimizerSection)
    labelled: LabelledSection = dataclasses.field(default_factory=LabelledSection)

    def __post_init__(self):
        _check_model_keys(self.model)
        if self.twin == "mlm":
            self.model = self.model | {"encoder_mask_fraction": 1.0, "decoder_num_hidden_layers": 0}
        if self.from_encoder is not None and self.tokenizer.path is None:
            self.tokenizer.path = self.from_encoder
        if self.from_encoder is None and self.labelled.task is not None:
            raise RecipeError("labelled.task scores an encoder before and after: give from_encoder, or leave it out.")
        positive = {
            "max_steps": self.max_steps,
            "evaluate_every": self.evaluate_every,
            "evaluation_blocks": self.evaluation_blocks,
            "checkpoint_every": self.checkpoint_every,
            "keep_checkpoints": self.keep_checkpoints,
            "tokenizer.training_bytes": self.tokenizer.training_bytes,
            "data.length_window": self.data.length_window,
            "data.preprocessing_workers": self.data.preprocessing_workers,
            "labelled.seeds": self.labelled.seeds,
            "optimizer.learning_rate": self.optimizer.learning_rate,
            "optimizer.muon_learning_rate": self.optimizer.muon_learning_rate,
            "optimizer.eps": self.optimizer.eps,
            "optimizer.max_grad_norm": self.optimizer.max_grad_norm,
        }
        if self.optimizer.decoder_learning_rate is not None:
            positive["optimizer.decoder_learning_rate"] = self.optimizer.decoder_learning_rate
        if self.data.micro_batch_size != "auto":
            positive["data.micro_batch_size"] = self.data.micro_batch_size
        for key, value in positive.items():
            if not 0 < value < math.inf:  # nan too
                raise RecipeError(f"{key} must be positive, got {value}.")
        for key, value in {
            "seed": self.seed,
            "probe_every": self.probe_every,
            "data.num_workers": self.data.num_workers,
            "optimizer.warmup_steps": self.optimizer.warmup_steps,
            "optimizer.decay_steps": self.optimizer.decay_steps,
            "optimizer.weight_decay": self.optimizer.weight_decay,
        }.items():
            if not 0 <= value < math.inf:
                raise RecipeError(f"{key} must not be negative, got {value}.")
        for key, value in {
            "data.mask_ratio": self.data.mask_ratio,
            "corpus.held_out_share": self.corpus.held_out_share,
        }.items():
            if not 0 < value < 1:
                raise RecipeError(f"{key} must be between 0 and 1, got {value}.")
        if not all(0 <= beta < 1 for beta in self.optimizer.betas):
            raise RecipeError(f"optimizer.betas must be at least 0 and below 1, got {list(self.optimizer.betas)}.")
        _check_mixture(self.corpus)
        if self.data.max_length < 4:
            raise RecipeError(f"data.max_length must be at least 4, got {self.data.max_length}.")
        if (self.data.batch_size is None) == (self.data.batch_tokens is None):
            raise RecipeError("give either data.batch_size (sequences a step) or data.batch_tokens (tokens a step).")
        size = self.data.batch_tokens if self.data.batch_size is None else self.data.batch_size
        if size <= 0:
            raise RecipeError(f"the batch must be positive, got {size}.")
        if self.data.batch_tokens is not None and self.data.batch_tokens < self.data.max_length:
            raise RecipeError(
                f"data.batch_tokens ({self.data.batch_tokens}) is below data.max_length ({self.data.max_length})."
            )
        if self.optimizer.schedule == "wsd" and self.optimizer.decay_steps == 0:
            raise RecipeError("optimizer.schedule 'wsd' needs optimizer.decay_steps, the steps of its final decay.")
        if self.optimizer.name == "muon" and self.optimizer.decoder_learning_rate is not None:
            raise RecipeError("optimizer.decoder_learning_rate goes with adamw: set it to null to train with muon.")
        if self.optimizer.name == "muon" and self.precision == "fp16":
            raise RecipeError("precision fp16 scales the gradients of one optimizer: use bf16 or fp32 with muon.")
        if self.optimizer.warmup_steps + self.optimizer.decay_steps > self.max_steps:
            raise RecipeError("optimizer.warmup_steps and decay_steps together are more than max_steps.")

    def as_dict(self) -> dict[str, Any]:
        """Plain containers, as YAML and JSON hold them."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    def save(self, path: Path) -> None:
        """Writes the recipe, defaults and overrides resolved, as YAML."""
        path.write_text(yaml.safe_dump(self.as_dict(), sort_keys=False))

    def course(self) -> dict[str, Any]:
        """Everything that changes the course of training, flat, by dotted key.

        Keys that only say where to write, how often to look, and with how many workers are left out: a run may be
        resumed with others.
        """
        flat: dict[str, Any] = {}
        for key, value in self.as_dict().items():
            if isinstance(value, dict):
                flat |= {f"{key}.{name}": item for name, item in value.items()}
            else:
                flat[key] = value
        beside = {*_BESIDE_THE_COURSE, *(f"labelled.{field.name}" for field in dataclasses.fields(LabelledSection))}
        return {key: value for key, value in flat.items() if key not in beside}


_BESIDE_THE_COURSE = {
    "output_dir",
    "evaluate_every",
    "evaluation_blocks",
    "checkpoint_every",
    "keep_checkpoints",
    "probe_every",
    "tracker",
    "cache_dir",
    "trust_remote_code",
    "tokenizer.add_mask_token",  # the tokenizer's digest is compared
    "data.num_workers",
    "data.preprocessing_workers",
}


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Reads a YAML recipe and applies command-line overrides.

    Args:
        path: the YAML file.
        overrides: ``["--key", "value", ...]`` or ``["--key=value", ...]``. A key in a section is ``section.key``, or
            ``key`` alone where no other section has one of that name. Values are read as YAML.

    Raises:
        RecipeError: unknown key (near misses are named), wrong type, or values that do not fit together.
    """
    path = Path(path)
    try:
        values = yaml.safe_load(path.read_text()) or {}
    except FileNotFoundError:
        raise RecipeError(f"there is no recipe at {path}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} cannot be read as a recipe: {error}.") from None
    except yaml.YAMLError as error:
        raise RecipeError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise RecipeError(f"{path} must hold a mapping of recipe keys, got {type(values).__name__}.")
    for key, value in _parse_overrides(overrides):
        section, _, name = _resolve_key(key).rpartition(".")
        target = values.setdefault(section, {}) if section else values
        if not isinstance(target, dict):
            raise RecipeError(f"{section} must be a section of keys, got {target!r}.")
        target[name] = value
    return recipe_from_dict(values)


def recipe_from_dict(values: Mapping[str, Any]) -> Recipe:
    """A recipe from nested mappings; the same checks as :func:`load_recipe`."""
    return _build(Recipe, values, prefix="")


def _build(cls: type, values: Mapping[str, Any], prefix: str) -> Any:
    if not isinstance(values, Mapping):
        raise RecipeError(f"{prefix.rstrip('.')} must be a section of keys, got {values!r}.")
    hints = typing.get_type_hints(cls)
    for key in values:
        if key not in hints:
            raise RecipeError(f"unknown recipe key {prefix}{key}{_near(str(key), hints)}.")
    arguments = {}
    for key, value in values.items():
        if dataclasses.is_dataclass(hints[key]):
            arguments[key] = _build(hints[key], value, f"{prefix}{key}.")
        else:
            arguments[key] = _convert(value, hints[key], f"{prefix}{key}")
    for field in dataclasses.fields(cls):
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and field.name not in arguments:
            raise RecipeError(f"the recipe lacks {prefix}{field.name}.")
    return cls(**arguments)


def _convert(value: Any, hint: Any, key: str) -> Any:
    """The value as the field's type, or an error that names the key."""
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if hint is float:
        # YAML 1.1 reads 1e-3 (no dot) as a string.
        if isinstance(value, str):
            try:
                return float(value)
            except ValueError:
                raise RecipeError(f"{key} must be a number, got {value!r}.") from None
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    elif hint is int and isinstance(value, str | float):
        try:
            if float(value).is_integer():
                return int(float(value))
        except ValueError:
            pass
    elif hint in (int, str, bool, type(None)):
        if type(value) is hint:
            return value
    elif origin is Literal:
        if value in options:
            return value
        raise RecipeError(f"{key} must be one of {', '.join(options)}, got {value!r}{_near(str(value), options)}.")
    elif origin in (typing.Union, types.UnionType):
        for option in options:
            try:
                return _convert(value, option, key)
            except RecipeError:
                continue
    elif origin is list and isinstance(value, list):
        return [_build(options[0], item, f"{key}.{number}.") for number, item in enumerate(value)]
    elif origin is tuple and isinstance(value, list | tuple) and len(value) == len(options):
        return tuple(_convert(item, option, key) for item, option in zip(value, options, strict=True))
    elif origin is dict and isinstance(value, Mapping):
        return {name: _as_number(item) for name, item in value.items()}
    name = "list" if origin is list else hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
    raise RecipeError(f"{key} must be of type {name}, got {value!r}.")


def _as_number(value: Any) -> Any:
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _parse_overrides(arguments: Sequence[str]) -> list[tuple[str, Any]]:
    pairs, rest = [], list(arguments)
    while rest:
        option = rest.pop(0)
        if not option.startswith("--"):
            raise RecipeError(f"expected --key value, got {option!r}.")
        key, equals, text = option[2:].partition("=")
        if not equals:
            if not rest:
                raise RecipeError(f"--{key} lacks a value.")
            text = rest.pop(0)
        try:
            pairs.append((key, yaml.safe_load(text)))
        except yaml.YAMLError:
            raise RecipeError(f"--{key} {text!r} is no YAML value: put it in quotes of its own, '\"...\"'.") from None
    return pairs


def _sections() -> dict[str, list[str]]:
    sections = {
        name: [field.name for field in dataclasses.fields(hint)]
        for name, hint in typing.get_type_hints(Recipe).items()
        if dataclasses.is_dataclass(hint)
    }
    return sections | {"model": _model_keys()}


def _model_keys() -> list[str]:
    return [field.name for field in dataclasses.fields(MaeLmConfig)]


def _resolve_key(key: str) -> str:
    top = [field.name for field in dataclasses.fields(Recipe)]
    sections = _sections()
    if key in top and key not in sections:
        return key
    dotted = {f"{section}.{name}" for section, names in sections.items() for name in names}
    if key in dotted:
        return key
    matches = sorted(name for name in dotted if name.split(".")[1] == key)
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise RecipeError(f"--{key} is ambiguous: say --{' or --'.join(matches)}.")
    raise RecipeError(f"unknown recipe key --{key}{_near(key, [*top, *dotted, *(n.split('.')[1] for n in dotted)])}.")


def _check_model_keys(model: Mapping[str, Any]) -> None:
    known = _model_keys()
    for key in model:
        if key not in known:
            raise RecipeError(f"unknown recipe key model.{key}{_near(str(key), known)}.")
    for key in ("vocab_size", "mask_token_id", "pad_token_id", "bos_token_id", "eos_token_id"):
        if key in model:
            raise RecipeError(f"model.{key} comes from the tokenizer: remove it, and set tokenizer.vocab_size or path.")


def _check_mixture(corpus: CorpusSection) -> None:
    if not corpus.mixture:
        return
    for source in corpus.mixture:
        if not 0 < source.weight < math.inf:
            raise RecipeError(f"corpus.mixture: the weight of {source.name} must be positive, got {source.weight}.")
    names = [source.name for source in corpus.mixture]
    for name in names:
        if names.count(name) > 1:
            raise RecipeError(f"corpus.mixture names {name} twice: name it once, with the sum of the weights.")
    if corpus.streaming:
        raise RecipeError(
            "corpus.mixture draws documents by their index, and a stream has none: set corpus.streaming false, or name "
            "one corpus.source."
        )
    defaults = CorpusSection()
    for key in ("source", "config", "split", "text_column"):
        if getattr(corpus, key) != getattr(defaults, key):
            raise RecipeError(f"corpus.{key} is for a corpus without mixture: name it with the mixture's sources.")


def _near(key: str, known: typing.Iterable[str]) -> str:
    matches = list(dict.fromkeys(difflib.get_close_matches(key, list(known), n=3)))
    return f" (did you mean {' or '.join(matches)}?)" if matches else ""
