# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""From a checkpoint to a folder that loads without this package, and from there to the Hub."""

import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

from huggingface_hub import get_token
from huggingface_hub.utils import validate_repo_id
from safetensors.torch import load_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .. import configuration_maelm, modeling_maelm
from ..modeling_maelm import MaeLmPreTrainedModel
from . import load_elsewhere
from .card import CARD_FILE, Measurements, write_card
from .folder import CONFIG_FILE, load_maelm, local_folder, read_config, write_tokenizer
from .folder_check import refuse_unsafe_files
from .push import find_token, push_folder
from .training_run import TRAINING_STATE, finished_model, measured_at, step_checkpoints, step_of, summary_of

logger = logging.getLogger(__name__)

CODE_FILES = tuple(Path(module.__file__) for module in (configuration_maelm, modeling_maelm))
# Of the largest hidden state: the same weights and code on the same machine, in another process.
TOLERANCE = 1e-5


def publish(
    model_or_dir: PreTrainedModel | str | Path,
    repo_id: str,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    training_summary: str | Path | None = None,
    results: str | Path | None = None,
    rank_report: str | Path | None = None,
    license: str | None = None,
    data_license: str | None = None,
    language: str | None = None,
    private: bool | None = None,
    revision: str | None = None,
    subfolder: str | None = None,
    token: str | None = None,
    exist_ok: bool = True,
    commit_message: str | None = None,
    dry_run: str | Path | None = None,
) -> str:
    """
    Builds a folder that loads without this package, proves it in a fresh process, and pushes it in one commit.

    The folder holds the weights as safetensors, the config with its complete `auto_map`, the two files of code, the
    tokenizer, a card, evaluation results, and whatever else lay in a folder that was given. An export of
    `export_native`, or any other stock model, is published as it is, without code.

    Args:
        model_or_dir: A model; a folder that `save_pretrained`, `export_native` or a training checkpoint wrote; the
            folder of a pretraining run (its finished model); or a Hub name.
        repo_id: `organisation/name`, or `name` for your own account.
        tokenizer: To put beside a model; a folder's own is taken from it.
        training_summary: `summary.json` of the run that trained it, for the card; by default the one that lies where
            a run leaves it.
        results: `results.json` of a fine-tuning run, for the card.
        rank_report: The folder of a rank report, for the card.
        license: Of the weights, as the Hub names it ("apache-2.0").
        data_license: Of the training data, in words.
        language: Of the training data, by its code ("en").
        private: Whether a repository that is created is private; `None` for the account's default.
        revision: The branch to push to; it is created where it is missing.
        subfolder: Where in the repository the model goes; it then loads with `subfolder=`.
        token: For the Hub; by default the one of `hf auth login` or `HF_TOKEN`.
        exist_ok: Whether to add a commit to a repository that exists; `False` refuses a name that is taken.
        commit_message: By default "Upload NAME".
        dry_run: A folder to write instead of pushing; it must be empty or missing.

    Returns:
        The commit's address, or the folder of a dry run.

    Raises:
        ValueError: A file looks like a secret, a cache, a pickle or training state (each is named); the folder does not
            load in a fresh process; or an argument does not fit.
        FileNotFoundError, FileExistsError: Of the paths given.
        PublishError: The Hub refused, or failed for good.
    """
    secret = token or get_token() if dry_run is not None else find_token(token)
    with tempfile.TemporaryDirectory() if dry_run is None else nullcontext(dry_run) as folder:
        folder = Path(folder)
        build_folder(
            model_or_dir,
            repo_id,
            folder,
            tokenizer=tokenizer,
            training_summary=training_summary,
            results=results,
            rank_report=rank_report,
            license=license,
            data_license=data_license,
            language=language,
            revision=revision,
            subfolder=subfolder,
            secret=secret,
        )
        check_loads_elsewhere(folder, subfolder or "")
        if dry_run is not None:
            return str(folder)
        commit = push_folder(
            folder,
            repo_id,
            token=secret,
            private=private,
            revision=revision,
            exist_ok=exist_ok,
            commit_message=commit_message or f"Upload {repo_id.rpartition('/')[2]}",
        )
    return commit.commit_url


def build_folder(
    model_or_dir: PreTrainedModel | str | Path,
    repo_id: str,
    folder: Path,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    training_summary: str | Path | None = None,
    results: str | Path | None = None,
    rank_report: str | Path | None = None,
    license: str | None = None,
    data_license: str | None = None,
    language: str | None = None,
    revision: str | None = None,
    subfolder: str | None = None,
    secret: str | None = None,
) -> None:
    """Writes what `publish` pushes into `folder`; arguments and errors are its own. `secret` is the token in use."""
    validate_repo_id(repo_id)
    if subfolder is not None and (Path(subfolder).is_absolute() or ".." in Path(subfolder).parts):
        raise ValueError(f"subfolder={subfolder!r} leaves the repository; give a plain name")
    source = None
    if isinstance(model_or_dir, (str, Path)):
        given = finished_model(Path(model_or_dir)) if Path(model_or_dir).is_dir() else model_or_dir
        source = local_folder(given, secret)
        refuse_unsafe_files(source, secret, left_out=_left_out(source))
    elif not isinstance(model_or_dir, PreTrainedModel):
        raise TypeError(f"model_or_dir is a {type(model_or_dir).__name__}: give a model, its folder or a Hub name")
    measured = _measurements(source, training_summary, results, rank_report)

    model_folder = _empty_folder(folder) / (subfolder or "")
    has_tokenizer = _write_model(model_or_dir if source is None else source, tokenizer, model_folder)
    config = read_config(model_folder)
    if config["model_type"] == "maelm" and subfolder is not None:
        for file in CODE_FILES:  # transformers looks for code in the root, wherever the weights are
            shutil.copyfile(file, folder / file.name)
    if measured or license or data_license or language or not (folder / CARD_FILE).exists():
        write_card(
            folder,
            repo_id,
            config,
            measured,
            has_tokenizer=has_tokenizer,
            revision=revision,
            subfolder=subfolder,
            license=license,
            data_license=data_license,
            language=language,
        )
    else:
        logger.info(
            "%s of the folder is kept; with a measured file, a licence or a language a new card is written", CARD_FILE
        )
    refuse_unsafe_files(folder, secret)


def publish_steps(run_dir: str | Path, repo_id: str, *, dry_run: str | Path | None = None, **options) -> dict[str, str]:
    """
    Publishes every step checkpoint of a pretraining run, step 0 included, each as a branch `step-N` of one repository.

    Args:
        run_dir: `output_dir` of the run.
        repo_id: As in `publish`.
        dry_run: A folder that gets one folder `step-N` for each instead.
        **options: Others of `publish`, but for `revision`.

    Returns:
        Branch -> what `publish` returns.
    """
    published = {}
    for step, checkpoint in step_checkpoints(Path(run_dir)).items():
        branch = f"step-{step}"
        where = None if dry_run is None else Path(dry_run) / branch
        published[branch] = publish(checkpoint, repo_id, revision=branch, dry_run=where, **options)
    return published


def check_loads_elsewhere(folder: Path, subfolder: str = "") -> dict[str, dict]:
    """
    Loads the folder in a fresh process without network in which `maelm_hf` cannot be imported: every head that it
    names, and the tokenizer. The encoder must compute there what it computes here, to 1e-5 of the largest state.

    Returns:
        Auto class -> the class that was loaded, and the weights it lacked (those of a head that is not trained yet).

    Raises:
        ValueError: It does not load, lacks weights of the class that saved it, or computes something else.
    """
    with tempfile.TemporaryDirectory() as scratch:
        # No token and no cache of this user: what a stranger has.
        hidden = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_CACHE", "HF_MODULES_CACHE", "PYTHONPATH")
        environment = {name: value for name, value in os.environ.items() if name not in hidden}
        done = subprocess.run(
            [sys.executable, "-P", load_elsewhere.__file__, str(folder.resolve()), subfolder, scratch],
            cwd=scratch,
            env=environment | {"HF_HOME": scratch, "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            raise ValueError(f"{folder} does not load in a process without maelm_hf: {lines[-1]}")
        loaded = json.loads((Path(scratch) / "loaded.json").read_text(encoding="utf-8"))
        states = load_file(Path(scratch) / "states.safetensors")["states"]

    config = read_config(folder / subfolder)
    saved_by = (config.get("architectures") or [None])[0]
    for name, entry in loaded.items():
        if entry["class"] == saved_by and entry.get("missing"):
            raise ValueError(f"{folder} lacks weights of {saved_by} ({name}): {', '.join(entry['missing'])}")
    if config["model_type"] == "maelm":
        model = load_maelm(folder / subfolder)
        expected = load_elsewhere.real_states(getattr(model, "encoder", model), model.config)
        difference, largest = (states - expected).abs().max().item(), expected.abs().max().item()
        if not difference <= TOLERANCE * max(1.0, largest):
            raise ValueError(
                f"{folder} computes something else without maelm_hf: hidden states differ by {difference:g}"
            )
    logger.info("%s loads without maelm_hf: %s", folder, ", ".join(sorted(loaded)))
    return loaded


def _measurements(source: Path | None, training_summary, results, rank_report) -> Measurements:
    """What the caller names, and what a run left beside the model."""
    if training_summary is None and source is not None and summary_of(source) is not None:
        training_summary = summary_of(source)
        logger.info("training summary of the card: %s, which lies beside the model", training_summary)
    measured = Measurements.read(training_summary, results, rank_report)
    if training_summary is None and source is not None and step_of(source) is not None:
        measured.training, measured.recipe = measured_at(source)
    return measured


def _left_out(source: Path) -> tuple[str, ...]:
    return TRAINING_STATE if step_of(source) is not None else ()


def _write_model(model: PreTrainedModel | Path, tokenizer: PreTrainedTokenizerBase | None, folder: Path) -> bool:
    """Weights, config, code and tokenizer, and all else that a source folder holds; whether there is a tokenizer."""
    source = model if isinstance(model, Path) else None
    folder.mkdir(parents=True, exist_ok=True)
    if source is not None:
        config = read_config(source)
        is_maelm = config.get("model_type") == "maelm"
        if config.get("auto_map") and not is_maelm:
            raise ValueError(f"{source} brings code of another package (auto_map); publish handles maelm_hf's alone")
        written_anew = ("model*.safetensors*", CONFIG_FILE) if is_maelm else ()
        ignored = shutil.ignore_patterns(*_left_out(source), *written_anew)
        shutil.copytree(
            source,
            folder,
            dirs_exist_ok=True,
            ignore=lambda directory, names: ignored(directory, names) if Path(directory) == source else set(),
        )
        model = load_maelm(source) if is_maelm else None
    if model is not None:
        if not isinstance(model, MaeLmPreTrainedModel) and getattr(model.config, "auto_map", None):
            raise ValueError(f"{type(model).__name__} is code of another package; publish handles maelm_hf's alone")
        model.save_pretrained(folder)
    config = read_config(folder)
    if config["model_type"] == "maelm":
        _complete_code(folder, config)
    return write_tokenizer(tokenizer, source, folder)


def _complete_code(folder: Path, config: dict) -> None:
    """This package's own files and its whole map, whatever code the folder or the model came with."""
    for file in CODE_FILES:
        shutil.copyfile(file, folder / file.name)
    config["auto_map"] = dict(configuration_maelm.AUTO_MAP)
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _empty_folder(path: Path) -> Path:
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FileExistsError(f"{path} exists and is not an empty folder; give another")
    path.mkdir(parents=True, exist_ok=True)
    return path
