"""Kills one run many times at random moments, continues it each time, and compares it with a run left alone.

    python tests/training/stress_resume.py --kills 20 --out results/stress_resume

Checkpoints are written at every second step, so that many of the kills meet one being written. Every fifth kill comes
a random time after the start of the process, whatever it does then; the others a random time after training began
again. ``--out`` writes ``outcome.json`` there: command, date, hardware, versions, every kill and where it hit, and
whether log and weights are equal to those of the run left alone. Exit status 0 means that they are.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from pretraining_helpers import ROOT, log_of, start, tiny_recipe, weights_of

sys.path.insert(0, str(ROOT))
from training.monitoring import hardware
from training.start import versions


def steps_of(run: Path) -> int:
    log = run / "log.jsonl"
    return len(log.read_text().splitlines()) if log.exists() else 0


def checkpoint_of(run: Path) -> int:
    """The step of the newest whole checkpoint, the one that a resumed run continues from; -1 if there is none."""
    return max((int(path.name[5:]) for path in run.glob("checkpoints/step-*")), default=-1)


def finish(recipe: dict[str, Any]) -> None:
    output, _ = (process := start(recipe)).communicate()
    if process.returncode != 0:
        raise SystemExit(output)


def kill(recipe: dict[str, Any], moments: random.Random, after_start: bool) -> dict[str, Any]:
    """Starts or continues the run, kills it, and says where it was hit."""
    run = Path(recipe["output_dir"])
    began, process, started = steps_of(run), start(recipe), time.monotonic()
    if after_start:
        time.sleep(moments.uniform(0, 6))
    else:
        while steps_of(run) <= began + 1 and process.poll() is None:  # training again
            time.sleep(0.001)
        time.sleep(moments.uniform(0, 0.15))
    process.kill()
    output, _ = process.communicate()
    if process.returncode == 0:
        raise SystemExit("the run ended before the last kill: give it more steps")
    if process.returncode > 0:
        raise SystemExit(output)
    return {
        "seconds_after_start": round(time.monotonic() - started, 2),
        "log_grew_by": steps_of(run) - began,
        "last_step_in_log": steps_of(run),
        "newest_checkpoint": checkpoint_of(run),
        "while_saving": any(run.glob("checkpoints/.unfinished-*")),
    }


def main(kills: int, seed: int, out: Path | None) -> int:
    moments, began, hits = random.Random(seed), time.monotonic(), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = {"max_steps": 12 * kills, "checkpoint_every": 2, "evaluate_every": 50}
        whole, broken = tiny_recipe(folder, "whole", **settings), tiny_recipe(folder, "broken", **settings)
        finish(whole)
        for number in range(1, kills + 1):
            hits.append(hit := kill(broken, moments, after_start=number % 5 == 0))
            print(f"kill {number}: {json.dumps(hit)}", flush=True)
        finish(broken)
        same_log = log_of(folder / "whole") == log_of(folder / "broken")
        expected, got = weights_of(folder / "whole"), weights_of(folder / "broken")
    same_weights = expected.keys() == got.keys() and all(torch.equal(expected[name], got[name]) for name in expected)
    outcome = {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.date.today().isoformat(),
        "hardware": hardware(torch.device("cpu"), 1),
        "versions": versions(),
        "minutes": round((time.monotonic() - began) / 60, 1),
        "steps": settings["max_steps"],
        "kills": len(hits),
        "kills_while_saving": sum(hit["while_saving"] for hit in hits),
        "log_equal": same_log,
        "final_weights_equal": same_weights,
        "hits": hits,
    }
    print(json.dumps({name: value for name, value in outcome.items() if name != "hits"}, indent=1))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "outcome.json").write_text(json.dumps(outcome, indent=1) + "\n")
    return 0 if same_log and same_weights else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for outcome.json")
    arguments = parser.parse_args()
    sys.exit(main(arguments.kills, arguments.seed, arguments.out))
