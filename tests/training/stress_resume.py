"""Kills one run many times at random moments, continues it each time, and compares it with a run left alone.

    python tests/training/stress_resume.py --kills 20

Checkpoints are written at every second step, so that many of the kills meet one being written.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

import torch
from pretraining_helpers import log_of, start, tiny_recipe, weights_of


def steps_of(run: Path) -> int:
    log = run / "log.jsonl"
    return len(log.read_text().splitlines()) if log.exists() else 0


def main(kills: int, seed: int) -> int:
    moments = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = {"max_steps": 12 * kills, "checkpoint_every": 2, "evaluate_every": 50}
        whole, broken = tiny_recipe(folder, "whole", **settings), tiny_recipe(folder, "broken", **settings)
        process = start(whole)
        output, _ = process.communicate()
        if process.returncode != 0:
            print(output)
            return 1
        done = interrupted_saves = 0
        while done < kills:
            process, began = start(broken), steps_of(folder / "broken")
            while steps_of(folder / "broken") <= began + 1 and process.poll() is None:  # training again
                time.sleep(0.001)
            time.sleep(moments.uniform(0, 0.15))
            process.kill()
            process.communicate()
            if process.returncode == 0:
                print(f"the run ended after {done} kills: give it more steps")
                return 1
            done += 1
            unfinished = list((folder / "broken" / "checkpoints").glob(".unfinished-*"))
            interrupted_saves += len(unfinished)
            print(
                f"kill {done}: after step {steps_of(folder / 'broken')}" + ", while saving" * bool(unfinished),
                flush=True,
            )
        process = start(broken)
        output, _ = process.communicate()
        if process.returncode != 0:
            print(output)
            return 1
        same_log = log_of(folder / "whole") == log_of(folder / "broken")
        expected, got = weights_of(folder / "whole"), weights_of(folder / "broken")
        same_weights = all(torch.equal(expected[name], got[name]) for name in expected)
    print(f"{kills} kills, {interrupted_saves} while saving: log equal {same_log}, final weights equal {same_weights}")
    return 0 if same_log and same_weights else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    sys.exit(main(arguments.kills, arguments.seed))
