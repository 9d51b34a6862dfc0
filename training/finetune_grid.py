# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""The grid of a fine-tuning run: settings by seeds, finished cells skipped, cells side by side where devices allow."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from training import finetune_report as report
from training.console import console
from training.finetune_data import DEFAULT_EPOCHS, EPOCHS, DataOptions, data_digest, load_task, model_digest

LONGEST_BY_DEFAULT = 256


@dataclass(frozen=True)
class Plan:
    """The grid as asked for; None or "auto" is decided by `run_task`, printed with its reason, and kept on resume."""

    learning_rates: tuple[float, ...] = (2e-5,)
    batch_sizes: tuple[int, ...] = (32,)
    epochs: tuple[float, ...] | None = None
    seeds: int = 1
    frozen: bool = False
    early_stop: int = 0
    max_length: int | None = None
    attention: str = "auto"
    precision: str = "auto"
    metrics: str = "auto"
    jobs: int | None = None
    quiet: bool = False


def run_task(model: str, options: DataOptions, plan: Plan, out: Path) -> bool:
    """Runs what is missing of one task's grid and rewrites `out/results.json`. False where a cell failed."""
    data = load_task(options)
    digest = model_digest(model)
    _refuse_other_model(out, model, digest)
    folder = out / options.task
    for note in data.notes:
        console.print(note)
    _report_unlabelled(data)
    choices = _choices(model, digest, data, plan, folder)
    base = {"model": model, "model_digest": digest, "task": data.name, "data_digest": choices["data_digest"]}
    cells = list(_cells(base, choices, plan, data.name))
    (folder / "cells").mkdir(parents=True, exist_ok=True)
    missing = [cell for cell in cells if not (folder / "cells" / f"{cell.id}.json").is_file()]
    if len(missing) < len(cells):
        console.print(f"{options.task}: {len(cells) - len(missing)} of {len(cells)} cells are finished already")

    def write() -> None:
        _write_results(out, options.task, model, digest, data, choices)

    write()
    return not _run_cells(missing, options, plan, folder, write)


def _refuse_other_model(out: Path, model: str, digest: str) -> None:
    file = out / "results.json"
    if file.is_file():
        other = report.load_results(out)
        if other["model_digest"] != digest:
            raise ValueError(
                f"{out}: holds the results of other weights ({other['model']}); give {model} a folder of its own"
            )


def _report_unlabelled(data) -> None:
    for name, split in data.splits.items():
        if split.labels is None:
            console.print(f"{split.source}: the {name} split has no labels: it is predicted, not scored")


def _choices(model: str, digest: str, data, plan: Plan, folder: Path) -> dict:
    """Decided once for all cells and kept: a kernel measured anew could change a repeated cell's last digits."""
    file = folder / "choices.json"
    asked = {"model_digest": digest, "data_digest": data_digest(data), "max_length": plan.max_length}
    asked |= {"attention": plan.attention, "precision": plan.precision}
    kept = json.loads(file.read_text("utf-8")) if file.is_file() else []
    found = next((entry["choices"] for entry in kept if entry["asked"] == asked), None)
    if found is None:
        found = {"data_digest": asked["data_digest"]} | _decide(model, data, plan)
        report.write_json(file, [*kept, {"asked": asked, "choices": found}])
    for name in ("max_length", "attention", "precision"):
        console.print(f"{data.name}: {found[name + '_reason']}")
    return found


def _decide(model: str, data, plan: Plan) -> dict:
    import torch

    from training.finetune_cell import load_tokenizer

    tokenizer = load_tokenizer(model)
    length, length_reason, encoded = _decide_length(model, data, plan, tokenizer)
    bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    precision = {"auto": "bf16" if bf16 else "fp32"}.get(plan.precision, plan.precision)
    why = "as asked" if plan.precision != "auto" else "the GPU has bf16" if bf16 else "no GPU with bf16"
    if plan.attention != "auto":
        attention, attention_reason = plan.attention, f"attention {plan.attention}: as asked"
    else:
        attention, attention_reason = _measure_attention(model, data, plan, tokenizer, encoded, precision)
    return {
        "max_length": length,
        "max_length_reason": length_reason,
        "attention": attention,
        "attention_reason": attention_reason,
        "precision": precision,
        "precision_reason": f"precision {precision}: {why}",
    }


def _decide_length(model: str, data, plan: Plan, tokenizer) -> tuple:
    """The longest input in tokens, the reason, and the training split encoded to it."""
    import numpy as np

    from training.finetune_cell import encode, longest_input

    limit = longest_input(model, tokenizer)
    if plan.max_length is not None:
        if plan.max_length > limit:
            raise ValueError(f"--max-length {plan.max_length} is more than {model} takes: at most {limit}")
        length, why = plan.max_length, "as asked"
    elif data.kind == "squad":
        length, why = min(384, limit), "windows with up to 128 tokens of overlap"
    else:
        lengths = encode(data, "train", tokenizer, limit).lengths
        length = -(-int(np.quantile(lengths, 0.99)) // 8) * 8
        length = min(limit, LONGEST_BY_DEFAULT, max(length, 16))
        why = f"holds {(lengths <= length).mean():.1%} of the training texts whole"
    return length, f"max length {length}: {why}", encode(data, "train", tokenizer, length)


def _measure_attention(model: str, data, plan: Plan, tokenizer, encoded, precision: str) -> tuple[str, str]:
    """Times the kernels on three batches as training will see them: of short, middling and long examples."""
    import torch

    from maelm_hf.memory import keep_freed_memory
    from training.attention_choice import choose_attention
    from training.encoding import PadToLongest
    from training.finetune_cell import load_model

    by_length, size = encoded.lengths.argsort(kind="stable"), plan.batch_sizes[0]
    starts = [max(0, int(share * len(by_length)) - size // 2) for share in (0.25, 0.5, 0.9)]
    collate = PadToLongest(tokenizer)
    batches = [collate([encoded.examples[i] for i in by_length[start : start + size]]) for start in starts]
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    if device.type == "cpu":
        keep_freed_memory()
    network = load_model(model, data).to(device)
    return choose_attention(network, batches, precision)


def _cells(base: dict, choices: dict, plan: Plan, task: str) -> Iterator:
    from training.finetune_cell import Cell

    shared = base | {"max_length": choices["max_length"], "attention": choices["attention"]}
    if plan.frozen:
        yield from (Cell(**shared, mode="frozen", seed=seed) for seed in range(plan.seeds))
        return
    epochs = plan.epochs or (float(EPOCHS.get(task, DEFAULT_EPOCHS)),)
    for rate, batch, count, seed in product(plan.learning_rates, plan.batch_sizes, epochs, range(plan.seeds)):
        setting = {"learning_rate": rate, "batch_size": batch, "epochs": count}
        setting |= {"early_stop": plan.early_stop, "precision": choices["precision"]}
        yield Cell(**shared, mode="finetune", seed=seed, **setting)


def _run_cells(cells: list, options: DataOptions, plan: Plan, folder: Path, write: Callable[[], None]) -> int:
    """Runs the cells, several at a time where devices allow; returns how many failed. A failed cell stops no other."""
    import torch

    devices = torch.cuda.device_count()
    jobs = min(plan.jobs or max(1, devices), max(1, len(cells)))
    specs = {cell.id: _specification(cell, options, plan, folder) for cell in cells}
    failed = 0
    if jobs == 1 and devices <= 1:  # with several GPUs in sight Trainer would split every batch over them
        for number, cell in enumerate(cells, 1):
            console.print(f"cell {number} of {len(cells)}: {cell.id}")
            try:
                result = run_cell_of(specs[cell.id], plan.quiet)
            except RuntimeError as error:  # out of memory, for example: another setting may fit
                failed += 1
                console.print(f"cell {number} of {len(cells)}: failed: {str(error).splitlines()[0]}", markup=False)
                continue
            _finish(cell, result, folder)
            write()
        return failed
    with ThreadPoolExecutor(jobs) as pool:
        waiting = {
            pool.submit(_run_apart, specs[cell.id], number % jobs, jobs, devices): cell
            for number, cell in enumerate(cells)
        }
        for number, future in enumerate(as_completed(waiting), 1):
            cell, (result, log) = waiting[future], future.result()
            if result is None:
                failed += 1
                console.print(f"cell {number} of {len(cells)}: {cell.id} failed, see {log}")
            else:
                _finish(cell, result, folder)
                write()
                console.print(f"cell {number} of {len(cells)}: {cell.id} finished")
    return failed


def _specification(cell, options: DataOptions, plan: Plan, folder: Path) -> dict:
    work = str(folder / "work" / cell.id)
    return {"cell": asdict(cell), "data": options.to_json(), "metrics": plan.metrics, "work": work}


def _run_apart(spec: dict, slot: int, jobs: int, devices: int) -> tuple[dict | None, Path]:
    work = Path(spec["work"])
    shutil.rmtree(work, ignore_errors=True)
    report.write_json(work / "cell.json", spec)
    environment = dict(os.environ)
    if devices:
        environment["CUDA_VISIBLE_DEVICES"] = str(slot % devices)
    else:
        environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // jobs))
    with open(work / "log.txt", "w") as log:
        command = [sys.executable, "-m", "training.finetune", "cell", str(work / "cell.json")]
        code = subprocess.run(command, env=environment, stdout=log, stderr=log, check=False).returncode
    result = work / "result.json"
    return (json.loads(result.read_text("utf-8")) if code == 0 else None), work / "log.txt"


def run_cell_of(spec: dict, quiet: bool) -> dict:
    """Runs the cell a specification (see `_specification`) describes, and returns its result."""
    import torch

    from maelm_hf.memory import keep_freed_memory
    from training.finetune_cell import Cell, run_cell
    from training.linear_probe import probe_cell

    if not torch.accelerator.is_available():
        keep_freed_memory()
    cell, work = Cell(**spec["cell"]), Path(spec["work"])
    data = load_task(DataOptions.from_json(spec["data"]))
    work.mkdir(parents=True, exist_ok=True)
    if cell.mode == "frozen":
        return probe_cell(cell, data, work.parent.parent / f"features_{cell.features_id}.npz", spec["metrics"], quiet)
    return run_cell(cell, data, work, spec["metrics"], quiet)


def _finish(cell, result: dict, folder: Path) -> None:
    """Keeps the best model of the task; the cell's file comes last, so that a cell cut off before it is run again."""
    work = folder / "work" / cell.id
    if cell.mode == "finetune":
        value = result["scores"]["validation"][_deciding(result)]
        best = json.loads((folder / "best.json").read_text()) if (folder / "best.json").is_file() else None
        if best is not None and best["data_digest"] != cell.data_digest:
            best = None  # of other data: its value says nothing here
        if best is None or (value, best["cell"]) > (best["value"], cell.id):
            shutil.rmtree(folder / "model", ignore_errors=True)
            shutil.rmtree(folder / "predictions", ignore_errors=True)
            os.replace(work / "model", folder / "model")
            if (work / "predictions").is_dir():
                os.replace(work / "predictions", folder / "predictions")
            report.write_json(
                folder / "best.json",
                {"cell": cell.id, "value": value, "metric": _deciding(result), "data_digest": cell.data_digest},
            )
    report.write_json(folder / "cells" / f"{cell.id}.json", {"cell": asdict(cell), "setting": cell.setting} | result)
    shutil.rmtree(work, ignore_errors=True)


def _deciding(result: dict) -> str:
    return next(iter(result["scores"]["validation"]))


def _write_results(out: Path, task: str, model: str, digest: str, data, choices: dict) -> None:
    file = out / "results.json"
    results = report.load_results(out) if file.is_file() else {"schema": report.SCHEMA, "model": model, "tasks": {}}
    results |= {
        "model": model,
        "model_digest": digest,
        "command": "python -m training.finetune " + " ".join(sys.argv[1:]),
    }
    results["environment"] = report.environment()
    cells = [json.loads(path.read_text("utf-8")) for path in sorted((out / task / "cells").glob("*.json"))]
    wanted = (digest, choices["data_digest"])
    cells = [cell for cell in cells if (cell["cell"]["model_digest"], cell["cell"]["data_digest"]) == wanted]
    if not cells:
        return
    settings = report.group_settings(cells, data.metrics[0])
    results["tasks"][task] = {
        "kind": data.kind,
        "dataset": data.dataset,
        "data_digest": choices["data_digest"],
        "split_sizes": {name: len(split) for name, split in data.splits.items()},
        "metric": data.metrics[0],
        "metrics_by": cells[0]["metrics_by"],
        **{name: value for name, value in choices.items() if name != "data_digest"},
        "settings": settings,
        "best": settings[0],
        "test_unlabelled": "test" in data.splits and data.splits["test"].labels is None,
    }
    results["evaluation"] = report.evaluation_entries(results["tasks"])
    report.write_json(file, results)
