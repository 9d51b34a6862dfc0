# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""The frozen encoder: a linear classifier on its features, which are computed once.

Features are the last layer's mean over real tokens and its first token; for tagging, the first piece of each word.
The classifier is scikit-learn's logistic regression (ridge regression for scores) on standardised features, its
strength chosen by cross-validation inside train, so validation and test stay untouched. Of tags there are many classes
and many examples: their strength is chosen on one fifth of the training tokens, in steps that stop at 100. The seed
deals the folds, and, for tagging, the training tokens that are kept.
"""

import time
import warnings
from pathlib import Path

import numpy as np
import torch
from tqdm.auto import tqdm
from transformers import AutoModel, PreTrainedTokenizerBase

from training.encoding import IGNORED, Encoded, PadToLongest
from training.finetune_cell import Cell, encode, load_tokenizer, quiet_loading, refuse_missing
from training.metrics import Metrics
from training.tabular import TaskData

STRENGTHS = (0.001, 0.01, 0.1, 1.0)
FOLDS = 5
TRAIN_TOKENS = 30_000
TAG_STEPS = 100  # 30,000 tokens of 100 tags take a CPU a minute
BATCH = 32
POOLS = ("mean", "first")


def compute_features(
    model_name: str,
    data: TaskData,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    attention: str,
    quiet: bool = False,
) -> dict[str, np.ndarray]:
    """Features of every split, fp32, in the order of the split: `{"train/mean": (n, hidden), "train/first": ...}`.

    For tagging `{"train/words": (words, hidden), "train/tags": (words)}`. No dropout, no gradients.
    """
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    with quiet_loading():
        model, loaded = AutoModel.from_pretrained(
            model_name, dtype=torch.float32, attn_implementation=attention, output_loading_info=True
        )
    refuse_missing(model_name, loaded)
    model = model.to(device).eval()
    collate = PadToLongest(tokenizer)
    features: dict[str, np.ndarray] = {}
    for split in data.splits:
        encoded = encode(data, split, tokenizer, max_length)
        if data.kind == "tokens" and split == "train":
            encoded = _enough_to_draw_from(encoded)
        encoded, order = encoded.longest_first()
        inverse = np.argsort(order)
        found: dict[str, list] = {name: [] for name in (("words", "tags") if data.kind == "tokens" else POOLS)}
        for start in tqdm(range(0, len(encoded), BATCH), desc=f"features of {split}", leave=False, disable=quiet):
            batch = collate(encoded.examples[start : start + BATCH])
            labels = batch.pop("labels", None)
            batch = {name: value.to(device) for name, value in batch.items()}
            with torch.inference_mode():
                hidden = model(**batch).last_hidden_state  # (batch, longest, hidden)
            if data.kind == "tokens":
                kept = labels != IGNORED
                found["words"].append(hidden[kept.to(device)].float().cpu().numpy())
                found["tags"].append(labels[kept].numpy())
                continue
            real = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
            found["mean"].append(((hidden * real).sum(1) / real.sum(1)).float().cpu().numpy())
            found["first"].append(hidden[:, 0].float().cpu().numpy())
        for name, parts in found.items():
            joined = np.concatenate(parts)
            features[f"{split}/{name}"] = joined if data.kind == "tokens" else joined[inverse]
    return features


def _enough_to_draw_from(encoded: Encoded) -> Encoded:
    """Sentences with several times the tagged tokens that a seed keeps, always the same: of a million words the
    features would fill the memory.
    """
    order = np.random.default_rng(0).permutation(len(encoded))
    tagged = np.cumsum([sum(label != IGNORED for label in encoded[i]["labels"]) for i in order])
    return Encoded([encoded[i] for i in order[: np.searchsorted(tagged, 4 * TRAIN_TOKENS) + 1]])


def probe_cell(
    cell: Cell, data: TaskData, features_file: Path, metrics_backend: str = "auto", quiet: bool = False
) -> dict:
    """Fits and scores the frozen encoder of one cell. `{"scores": {split: {metric}}, "pooled": {pool: {split:
    {metric}}}, ...}`.

    The pool (mean or first token) with the better cross-validated score gives `scores`; both are kept in `pooled`.
    Features are read from `features_file`, or computed and written there.
    """
    if data.kind == "squad":
        raise ValueError("--frozen scores single labels and tags: question answering has no linear probe here")
    started = time.perf_counter()
    if features_file.is_file():
        with np.load(features_file) as saved:
            features = dict(saved)
    else:
        tokenizer = load_tokenizer(cell.model)
        features = compute_features(cell.model, data, tokenizer, cell.max_length, cell.attention, quiet)
        scratch = features_file.with_suffix(".part.npz")
        np.savez(scratch, **features)
        scratch.replace(features_file)
    feature_seconds = time.perf_counter() - started
    metrics = Metrics(("accuracy",) if data.kind == "tokens" else data.metrics, metrics_backend)
    pooled, cross_validated, strengths = {}, {}, {}
    for pool in ("words",) if data.kind == "tokens" else POOLS:
        model, cross_validated[pool], strengths[pool] = fit_probe(cell, data, features, pool)
        pooled[pool] = {}
        for split, part in data.splits.items():
            if split == "train" or part.labels is None:
                continue
            labels = features[f"{split}/tags"] if data.kind == "tokens" else part.labels
            pooled[pool][split] = metrics(model.predict(features[f"{split}/{pool}"]), labels)
    best = max(cross_validated, key=cross_validated.__getitem__)
    return {
        "scores": pooled[best],
        "pool": best,
        "pooled": pooled,
        "cross_validated": cross_validated,
        "strength": strengths,
        "seconds": round(time.perf_counter() - started, 2),
        "feature_seconds": round(feature_seconds, 2),
        "metrics_by": metrics.reason,
    }


def fit_probe(cell: Cell, data: TaskData, features: dict[str, np.ndarray], pool: str):
    """The classifier of one cell and pool, its cross-validated score and its strength."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.model_selection import GridSearchCV, KFold, ShuffleSplit, StratifiedKFold
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    inputs = features[f"train/{pool}"]
    targets = np.asarray(features["train/tags"] if data.kind == "tokens" else data.splits["train"].labels)
    if data.kind == "tokens" and len(targets) > TRAIN_TOKENS:
        kept = np.random.default_rng(cell.seed).choice(len(targets), TRAIN_TOKENS, replace=False)
        inputs, targets = inputs[kept], targets[kept]
    rarest = np.unique(targets, return_counts=True)[1].min() if data.kind == "classification" else FOLDS
    folds_kind = StratifiedKFold if data.kind == "classification" else KFold
    if data.kind == "regression":
        model, grid = Ridge(), {"ridge__alpha": [1 / strength for strength in STRENGTHS]}
    else:
        steps = TAG_STEPS if data.kind == "tokens" else 1000
        model, grid = LogisticRegression(max_iter=steps), {"logisticregression__C": list(STRENGTHS)}
    folds = folds_kind(n_splits=int(min(FOLDS, max(2, rarest))), shuffle=True, random_state=cell.seed)
    if data.kind == "tokens":
        folds = ShuffleSplit(n_splits=1, test_size=1 / FOLDS, random_state=cell.seed)
    if data.kind == "classification" and rarest < 2:
        folds = KFold(
            n_splits=FOLDS, shuffle=True, random_state=cell.seed
        )  # a class with one example cannot stand in every fold
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        search = GridSearchCV(make_pipeline(StandardScaler(), model), grid, cv=folds)
        search.fit(inputs, targets)
    strength = next(iter(search.best_params_.values()))
    return search.best_estimator_, float(search.best_score_), float(strength)
