# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Does memory grow with the corpus, and how full are packed rows?

Memory is that of a process which does nothing but read, tokenize and batch, watched from outside on Linux: its
anonymous and shared memory, which only the process itself can give back. The pages of memory-mapped files that it has
looked at are the kernel's, which drops them when it needs the room; their peak is given apart.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import accumulate, islice, takewhile
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer
from rich.console import Console

from maelm_hf import DataCollatorForMaeLm
from maelm_hf.cli import table
from maelm_hf.probing.settings import versions
from training.data import BatchOrder, Cursor, IndexedSteps
from training.monitoring import hardware
from training.recipe import Recipe, recipe_from_dict
from training.text import prepare_text


def memory(
    documents: Annotated[str, typer.Option(help="Sizes of the corpora, in documents.")] = "20000,200000,800000",
    words: Annotated[int, typer.Option(help="Words a document, on average.")] = 12,
    batches: Annotated[int, typer.Option(help="Batches of 64 sequences, packed, of the middle of an epoch.")] = 1000,
    out: Annotated[Path, typer.Option(help="Folder for the JSON and CSV.")] = Path("benchmarks"),
) -> None:
    """Peak memory of reading, tokenizing and batching corpora of several sizes, each in a process of its own."""
    rows = []
    for size in map(int, documents.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            write_corpus(Path(folder, "corpus.txt"), size, words)
            rows.append({"documents": size} | watch([sys.executable, "-m", __name__, folder, str(batches)]))
        rows[-1]["growth_mb"] = rows[-1]["peak_anonymous_mb"] - rows[0]["peak_anonymous_mb"]
    _report("memory", rows, out, {"documents": documents, "words": words, "batches": batches, "batch_size": 64})


def packing(
    lengths: Annotated[str, typer.Option(help="Lengths of rows, in tokens.")] = "64,128,512",
    vocab_sizes: Annotated[str, typer.Option(help="Sizes of the vocabulary.")] = "4096,32768",
    batch_size: Annotated[int, typer.Option(help="Rows a batch.")] = 64,
    source: Annotated[str, typer.Option(help="corpus.source")] = "docstrings",
    out: Annotated[Path, typer.Option(help="Folder for the JSON and CSV.")] = Path("benchmarks"),
) -> None:
    """The share of packed rows, of all batches of an epoch, that tokens fill; and of unpacked ones by like lengths."""
    rows = []
    for vocab_size in map(int, vocab_sizes.split(",")):
        for length in map(int, lengths.split(",")):
            recipe = data_recipe(source, vocab_size, max_length=length, batch_size=batch_size, packing=True)
            training = prepare_text(recipe, say=print).training
            row = {"vocabulary": vocab_size, "length": length, "blocks": len(training)}
            rows_of_epoch, _ = epoch_size(recipe, training.lengths)
            row |= {"packed rows": rows_of_epoch, "filled": training.tokens / (rows_of_epoch * length)}
            recipe.data.packing = False
            _, positions = epoch_size(recipe, training.lengths)
            rows.append(row | {"filled without packing": training.tokens / positions})
    _report("packing", rows, out, {"source": source, "batch_size": batch_size})


def data_recipe(
    source: str, vocab_size: int, cache_dir: str = Recipe.cache_dir, training_bytes: int = 10**8, **data: Any
) -> Recipe:
    """A recipe of which only the data is used."""
    return recipe_from_dict(
        {
            "output_dir": "none",
            "max_steps": 1,
            "cache_dir": cache_dir,
            "corpus": {"source": source},
            "tokenizer": {"vocab_size": vocab_size, "training_bytes": training_bytes},
            "data": data,
        }
    )


def epoch_size(recipe: Recipe, lengths: Sequence[int]) -> tuple[int, int]:
    """Rows of an epoch, and the positions of its batches, each as wide as its longest row."""
    rows = positions = 0
    order = BatchOrder(recipe, lengths)
    for _, _, batch in takewhile(lambda plan: plan[0].epoch == 0, order.batches(Cursor())):
        rows += len(batch)
        positions += len(batch) * max(int(lengths[row].sum()) for row in batch)
    return rows, positions


def write_corpus(path: Path, documents: int, words: int) -> None:
    """A document a line; the words are Zipf's, so that documents compress to tokens as text does."""
    draw = random.Random(0)
    vocabulary = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(2, 9))) for _ in range(20_000)]
    frequencies = list(accumulate(1 / (rank + 2) for rank in range(len(vocabulary))))
    with path.open("w") as stream:
        for number in range(documents):
            count = draw.randint(words // 2, 3 * words // 2)
            stream.write(f"{number} {' '.join(draw.choices(vocabulary, cum_weights=frequencies, k=count))}\n")


def watch(command: list[str]) -> dict[str, Any]:
    """Runs a process and returns the last line of its output, JSON, with the peaks of its memory in MB."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    status, peaks = Path(f"/proc/{process.pid}/status"), {"RssAnon": 0, "RssFile": 0, "RssShmem": 0}
    while process.poll() is None:
        try:
            lines = status.read_text().splitlines()
        except OSError:  # it ended just now
            continue
        for name, _, value in (line.partition(":") for line in lines):
            if name in peaks:
                peaks[name] = max(peaks[name], int(value.split()[0]))
        time.sleep(0.005)
    output = process.stdout.read()
    if process.returncode != 0:
        raise SystemExit(output)
    anonymous = (peaks["RssAnon"] + peaks["RssShmem"]) / 1024
    return json.loads(output.splitlines()[-1]) | {
        "peak_anonymous_mb": round(anonymous, 1),
        "peak_mapped_mb": round(peaks["RssFile"] / 1024, 1),
    }


def read_tokenize_and_batch(folder: str, batches: int) -> dict[str, Any]:
    """In a process of its own: the text of a run, and batches from the middle of an epoch and of the next one."""
    # Less text for the tokenizer than the smallest corpus has, so that all corpora give it as much.
    fixed = {"cache_dir": f"{folder}/cache", "training_bytes": 400_000}
    recipe = data_recipe(f"{folder}/corpus.txt", 4096, **fixed, max_length=128, batch_size=64, packing=True)
    found = {"imports_mb": _anonymous_mb()}
    started = time.perf_counter()
    text = prepare_text(recipe, say=lambda line: None)
    found |= {"prepared_s": round(time.perf_counter() - started, 1), "prepared_mb": _anonymous_mb()}
    collator = DataCollatorForMaeLm(text.tokenizer, recipe.data.mask_ratio, seed=0)
    data = IndexedSteps(recipe, text.training, collator, rank=0, world_size=1, micro_batch_tokens=16_384)
    for epoch in (0, 1):
        start = Cursor(epoch, data.order.windows // 2)
        for _ in islice(data.steps(start, num_workers=0, pin=False), batches // 2):
            pass
    files = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    return found | {"blocks": len(text.training), "batched_mb": _anonymous_mb(), "on_disk_mb": round(files / 2**20, 1)}


def _anonymous_mb() -> float:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return round(int(lines["RssAnon"].split()[0]) / 1024, 1)


def _report(name: str, rows: list[dict[str, Any]], out: Path, settings: dict[str, Any]) -> None:
    document = {
        "command": f"python -m training.benchmark {name}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": hardware(torch.device("cpu"), 1),
        "settings": settings,
        "versions": versions(),
        "table": rows,
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    frame = pd.DataFrame(rows)
    frame.to_csv(out / f"{name}.csv", index=False)
    console = Console(width=max(140, Console().width))
    console.print(table(frame, title=f"{name}, {document['hardware']}"))
    console.print(f"Written to {out / f'{name}.json'} and {out / f'{name}.csv'}")


if __name__ == "__main__":
    print(json.dumps(read_tokenize_and_batch(sys.argv[1], int(sys.argv[2]))))
