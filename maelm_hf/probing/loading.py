# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""A model and what prepares its inputs, out of a name, a folder or a ready object."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .._torchvision import make_torchvision_importable

TIMM_PREFIX = "timm/"


@dataclass
class ProbedModel:
    """The module whose layers are read, in eval mode's place: its mode is the caller's business.

    Attributes:
        module: the encoder: a transformers model without its head, or the module as given.
        name: what reports call it.
        revision: the Hub commit it was loaded from, where there is one.
        source: the name or folder it was loaded from; None for a ready object.
        notes: what a reader of its numbers has to know, such as weights that the checkpoint lacks.
    """

    module: nn.Module
    name: str
    revision: str | None = None
    source: str | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def config(self) -> Any:
        """The transformers config, or None."""
        config = getattr(self.module, "config", None)
        return config if hasattr(config, "model_type") else None

    @property
    def device(self) -> torch.device:
        parameter = next(self.module.parameters(), None)
        return parameter.device if parameter is not None else torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        return next((p.dtype for p in self.module.parameters() if p.is_floating_point()), torch.float32)

    @property
    def takes_images(self) -> bool:
        """Whether its main input is pixels, as far as the model says so."""
        if getattr(self.module, "main_input_name", None) is not None:
            return self.module.main_input_name == "pixel_values"
        return hasattr(self.module, "patch_embed") or hasattr(self.module, "default_cfg")

    def takes_features(self, width: int) -> bool:
        """Whether it starts on vectors (..., width), as nn.TransformerEncoder does, as far as its weights say so."""
        if self.takes_images or any(isinstance(module, nn.Conv2d) for module in self.module.modules()):
            return False
        first = next((parameter for parameter in self.module.parameters() if parameter.ndim == 2), None)
        return first is not None and first.shape[1] == width  # a linear map's weight is (out, in)


def load_model(
    model: nn.Module | str | Path,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
) -> ProbedModel:
    """Load a model, or take a ready one.

    Args:
        model: a module, a Hub id, a folder that ``save_pretrained`` wrote, or ``timm/NAME``.
        revision: the Hub branch, tag or commit.
        trust_remote_code: run code that comes with the checkpoint.
        dtype: of the weights; ``None`` keeps the checkpoint's.
        device: ``None`` leaves a ready module where it is and loads a named one on the GPU where there is one. A ready
            module stays as it is: where dtype or device would change it, a copy is probed, which needs its memory once
            more meanwhile.

    Raises:
        FileNotFoundError: the model is not there, in one line that says what was tried.
        ValueError: a module whose parameters are sharded (FSDP2, tensor parallelism), or a revision of a timm model.
    """
    dtype = _as_dtype(dtype)
    if isinstance(model, nn.Module):
        _refuse_sharded(model)
        module = _without_head(model)
        name = getattr(getattr(model, "config", None), "name_or_path", "") or type(model).__name__
        revision = getattr(getattr(model, "config", None), "_commit_hash", None)
        if _would_change(module, dtype, device):
            # A move alone could be undone, but not for a module spread over several devices, and a cast rounds.
            module = copy.deepcopy(module).to(device=device, dtype=dtype)
        return ProbedModel(module, Path(name).name if Path(name).is_dir() else name, revision)
    if not isinstance(model, (str, Path)):
        raise TypeError(f"model must be a torch.nn.Module, a name or a folder, got {type(model).__name__}")
    source = str(model)
    notes: list[str] = []
    if source.startswith(TIMM_PREFIX):
        if revision is not None:
            raise ValueError(
                f"revision={revision!r} is not taken for {source}: timm keeps a model's weights apart by tag, "
                f"{source.partition('.')[0]}.TAG; or pass timm.create_model('hf-hub:ORG/NAME@REVISION') itself"
            )
        module = _load_timm(source)
    else:
        module, notes = _load_transformers(source, revision, trust_remote_code, dtype)
    module = module.to(device=device or default_device(), dtype=dtype).eval()
    name = Path(source).resolve().name if Path(source).is_dir() else source
    return ProbedModel(module, name, getattr(getattr(module, "config", None), "_commit_hash", None), source, notes)


def load_processor(model: ProbedModel, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """The tokenizer, image processor or timm transform that belongs to a model loaded by name."""
    if model.source is None:
        raise ValueError(
            f"{model.name} was passed as a module: pass its tokenizer, image processor or transform as well"
        )
    if model.source.startswith(TIMM_PREFIX):
        import timm

        return timm.data.create_transform(**timm.data.resolve_model_data_config(model.module), is_training=False)
    from transformers import AutoImageProcessor, AutoTokenizer

    loader = AutoImageProcessor if model.takes_images else AutoTokenizer
    try:
        return loader.from_pretrained(model.source, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        kind = "image processor" if model.takes_images else "tokenizer"
        raise FileNotFoundError(f"{model.source} has no {kind} that could be loaded: {_first_line(error)}") from error


def take_tower(model: ProbedModel, kind: str | None) -> None:
    """Put the tower that takes ``texts`` or ``images`` in the place of a model with both (CLIP), and note it."""
    name = {"texts": "text_model", "images": "vision_model"}.get(kind)
    tower = getattr(model.module, name, None) if name is not None else None
    if hasattr(model.config, "vision_config") and isinstance(tower, nn.Module):
        model.notes.append(f"{type(model.module).__name__} is probed by its {name}.")
        model.module = tower


def default_device() -> torch.device:
    """The accelerator where there is one (this process's own under a launcher), else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def _refuse_sharded(module: nn.Module) -> None:
    """The probe runs the encoder without its wrapper, which alone would gather the parameters."""
    if not torch.distributed.is_available():
        return
    from torch.distributed.tensor import DTensor

    sharded = next((name for name, value in module.named_parameters() if isinstance(value, DTensor)), None)
    if sharded is not None:
        raise ValueError(
            f"{type(module).__name__} is sharded ({sharded} is a DTensor) and the probe needs whole weights: "
            "save a checkpoint and probe that folder"
        )


def _would_change(module: nn.Module, dtype: torch.dtype | None, device: torch.device | str | None) -> bool:
    """Whether ``module.to(device, dtype)`` would move or cast anything."""
    tensors = [*module.parameters(), *module.buffers()]
    if device is not None:
        device = torch.empty(0, device=device).device  # "cuda" is the current one, by number
        if any(tensor.device != device for tensor in tensors):
            return True
    return dtype is not None and any(tensor.is_floating_point() and tensor.dtype != dtype for tensor in tensors)


def _without_head(model: nn.Module) -> nn.Module:
    """The encoder of a transformers model (its head would be computed for nothing), out of any wrapper."""
    model = getattr(model, "_orig_mod", model)  # torch.compile
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        model = model.module
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False) and hasattr(model, "get_encoder"):
        return model.get_encoder()
    base = getattr(model, "base_model", model)
    # DINOv3's own "base" takes hidden states: one that does not take the model's input is no encoder of its own.
    takes_input = getattr(model, "main_input_name", None) in inspect.signature(base.forward).parameters
    return base if isinstance(base, nn.Module) and takes_input else model


def _load_transformers(
    source: str, revision: str | None, trust_remote_code: bool, dtype: torch.dtype | None
) -> tuple[nn.Module, list[str]]:
    make_torchvision_importable()
    from transformers import AutoModel

    path = Path(source).expanduser()
    if path.is_absolute() or source.startswith((".", "~")):
        if not path.is_dir():
            raise FileNotFoundError(f"model folder {source} does not exist")
        source = str(path)
    if path.is_dir() and not (path / "config.json").is_file():
        raise FileNotFoundError(f"model folder {source} holds no config.json: pass one that save_pretrained wrote")
    try:
        with _quiet_transformers():  # its load report lists the head's weights, which are left out on purpose
            loaded, report = AutoModel.from_pretrained(
                source,
                revision=revision,
                trust_remote_code=trust_remote_code,
                dtype=dtype or "auto",
                output_loading_info=True,
            )
    except (OSError, ValueError) as error:
        raise FileNotFoundError(f"model {source!r} could not be loaded: {_first_line(error)}") from error
    missing = sorted(key for key in report["missing_keys"] if "pooler" not in key)
    notes = []
    if missing:
        shown = ", ".join(missing[:3]) + (" ..." if len(missing) > 3 else "")
        notes.append(f"The checkpoint lacks {len(missing)} weights of the model, which are random here: {shown}.")
    return _without_head(loaded), notes


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    from transformers.utils import logging

    verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()


def _load_timm(source: str) -> nn.Module:
    make_torchvision_importable()
    try:
        import timm
    except ImportError as error:
        raise ImportError(f"{source} needs timm: pip install 'maelm-hf[vision]'") from error
    name = source.removeprefix(TIMM_PREFIX)
    if name.partition(".")[0] not in timm.list_models():
        raise FileNotFoundError(f"timm has no model {name!r}: timm.list_models() names them")
    try:
        return timm.create_model(name, pretrained=True, num_classes=0)
    except (OSError, RuntimeError) as error:
        raise FileNotFoundError(f"the weights of {source} could not be loaded: {_first_line(error)}") from error


def _as_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"dtype {dtype!r} is no torch dtype: use float32, bfloat16 or float16")
    return found


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
