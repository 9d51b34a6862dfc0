# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Pretraining, top to bottom: text, model, optimizer, steps, checkpoints.

    python -m training.pretrain training/recipes/demo.yaml --max_steps 200 --model.hidden_size 256
    accelerate launch --num_processes 8 -m training.pretrain training/recipes/base.yaml
    python -m training.pretrain training/recipes/base.yaml --estimate      what it would cost (--help: options)
    python -m training.pretrain --from-encoder NAME --data MY_TEXT         continue an encoder (training/adapt.py)

The same command continues a run that was killed, from its last checkpoint; on a CPU, bit for bit as if it had not been.
Nothing random is carried from step to step: masks and the order of data are functions of (seed, epoch, sample), and
dropout noise of (seed, step, process).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, InitProcessGroupKwargs, broadcast_object_list, gather_object
from tqdm.auto import tqdm

from maelm_hf import DataCollatorForMaeLm, MaeLmForMaskedLM
from maelm_hf.memory import keep_freed_memory
from maelm_hf.probing import probe_rank

from . import adapt, estimate, zero2
from .checkpoint import WRITE_ERRORS, CheckpointError, newest_name, reason, save_checkpoint
from .choices import Choices, autocast_of, choose_micro_batch, choose_precision, fastest_attention, measure_peak
from .corpus import CorpusError
from .data import IndexedSteps, Step
from .evaluation import HeldOut, right_answers
from .flops import Row, forward_flops
from .launch import check_processes, start_missing_processes
from .monitoring import (
    Progress,
    RunLog,
    Summary,
    hardware,
    plot_loss,
    summarise,
    tracker_of,
    tracker_settings,
    try_to_write,
)
from .optimizers import (
    build_optimizers,
    learning_rate_factor,
    load_optimizer_tensors,
    optimizer_tensors,
    set_learning_rate,
)
from .recipe import Recipe, RecipeError, load_recipe
from .start import build_model, check_distribution, find_resumable, versions
from .streaming import StreamedSteps
from .text import Text, prepare_text

_TRACKED = (
    *("loss", "accuracy", "learning_rate", "grad_norm", "hidden_tokens", "tokens", "padding", "epoch"),
    *("tokens_per_second", "share_of_peak"),
)
_ACCURACY_EVERY = 20  # steps: the largest of a vocabulary's logits is no small work on a CPU


class TrainingDivergedError(RuntimeError):
    """The loss is not finite; the message names the step, its samples and the last good checkpoint."""


def run(recipe: Recipe) -> Summary:
    """Pretrains, or continues to pretrain, what the recipe describes.

    Writes to ``recipe.output_dir``: ``recipe.yaml`` (resolved), ``checkpoints/``, ``log.jsonl`` (a line a step),
    ``evaluations.jsonl``, ``loss.png``, ``summary.json``, and ``final/``, which ``AutoModel`` and ``AutoTokenizer``
    load.

    Raises:
        RecipeError, CorpusError: the recipe cannot be run, or is not the one that ``output_dir`` was begun with.
        TrainingDivergedError: the loss is not finite.
        CheckpointError: the final model cannot be written.
    """
    # bf16 autocast is entered around forward alone: Accelerate's own would also copy all logits to fp32.
    accelerator = Accelerator(
        cpu=not torch.accelerator.is_available(),  # several processes of torchrun on CPUs find each other only then
        mixed_precision="fp16" if recipe.precision == "fp16" else "no",
        log_with=tracker_of(recipe),
        project_dir=recipe.output_dir,
        # The first process may tokenize for hours while the others wait.
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(days=2))],
    )
    check_processes(os.environ, accelerator.num_processes)
    check_distribution(recipe, accelerator.distributed_type, accelerator.state.deepspeed_plugin)
    if accelerator.device.type == "cpu" and keep_freed_memory():
        accelerator.print("memory: what a step frees is kept for the next one")
    # Once, and once more on nodes that do not share the cache.
    with accelerator.main_process_first(), accelerator.local_main_process_first():
        text = prepare_text(recipe, accelerator.print)
    checkpoint, state = find_resumable(recipe, text, accelerator)
    torch.manual_seed(recipe.seed)
    model = build_model(recipe, text.tokenizer, checkpoint).to(accelerator.device)
    pretraining = Pretraining(recipe, accelerator, text, model, checkpoint, state)
    return pretraining.train()


class Pretraining:
    """The parts of a run and its loop."""

    def __init__(
        self,
        recipe: Recipe,
        accelerator: Accelerator,
        text: Text,
        model: MaeLmForMaskedLM,
        checkpoint: Path | None,
        state: dict[str, Any],
    ):
        self.recipe, self.accelerator, self.text = recipe, accelerator, text
        self.folder = Path(recipe.output_dir)
        self.progress = Progress(**state.get("progress", {}))
        self.parameters = model.num_parameters()
        self.signalled = False  # this process was asked to stop, at whatever moment
        self.stop_requested = False  # one was, and all know since the last step
        self.tracker_failed = False
        self.collator = DataCollatorForMaeLm(
            text.tokenizer,
            recipe.data.mask_ratio,
            seed=recipe.seed,
            whole_word=recipe.data.whole_word,
            mask_special_tokens=recipe.data.mask_special_tokens,
        )
        self.choices = Choices(accelerator.print, state.get("choices"))
        self.autocast = self._choose(model)
        self.cursor = self.data.start
        if state:
            cursors = state["cursors"]  # of every process; alike, but for a stream
            self.cursor = type(self.cursor)(**cursors[accelerator.process_index % len(cursors)])
        if recipe.activation_checkpointing:
            model.activation_checkpointing_enable()
        self.zero2 = accelerator.distributed_type == DistributedType.DEEPSPEED
        if self.zero2:
            zero2.configure(accelerator.state.deepspeed_plugin, recipe)
            zero2.autocast_inside(model, self.autocast)
        optimizers = build_optimizers(model, recipe.optimizer)
        self.model, *self.optimizers = accelerator.prepare(model, *optimizers)
        if checkpoint is not None:
            tensors = safetensors.torch.load_file(checkpoint / "optimizer.safetensors")
            if self.zero2:
                zero2.load_optimizer_tensors(self.model, tensors)
            else:
                load_optimizer_tensors(self._unwrapped(), self.optimizers, tensors)
            if accelerator.scaler is not None:
                accelerator.scaler.load_state_dict(state["scaler"])

    def _choose(self, model: MaeLmForMaskedLM) -> Callable[[], AbstractContextManager]:
        """Settles precision, micro-batch and attention kernel, the same on all processes."""
        recipe, device, data = self.recipe, self.accelerator.device, self.recipe.data

        def agreed(choose):
            return lambda: broadcast_object_list([choose()])[0]

        precision = self.choices.make("precision", recipe.precision, agreed(lambda: choose_precision(device)))
        autocast = autocast_of(precision, device)
        micro_batch = self.choices.make(
            "micro_batch_size", data.micro_batch_size, agreed(lambda: choose_micro_batch(recipe, model, device))
        )
        process = {
            "rank": self.accelerator.process_index,
            "world_size": self.accelerator.num_processes,
            "micro_batch_tokens": micro_batch * data.max_length,
        }
        text = self.text
        self.held_out = HeldOut(recipe, text, self.collator, **process)
        if text.training is None:
            self.data = StreamedSteps(recipe, text.corpora[0].documents, text.tokenizer, self.collator, **process)
        else:
            self.data = IndexedSteps(recipe, text.training, self.collator, **process)
        first = self._on_device(next(self.data.steps(self.data.start, num_workers=0, pin=False)).micro_batches[0])
        attention = self.choices.make(
            "attention", recipe.attention, agreed(lambda: fastest_attention(model, first, precision))
        )
        model.set_attn_implementation(attention)
        peak = self.choices.make("matmul_peak", "auto", agreed(lambda: measure_peak(device, precision)))
        self.peak = peak * self.accelerator.num_processes
        return autocast

    def train(self) -> Summary:
        """Steps until ``max_steps``, with evaluations and checkpoints between them."""
        recipe, progress, main = self.recipe, self.progress, self.accelerator.is_main_process
        if main:
            self.folder.mkdir(parents=True, exist_ok=True)
            try_to_write(self.folder / "recipe.yaml", recipe.save, tqdm.write)
            self.accelerator.init_trackers(
                "maelm",
                config={key: str(value) for key, value in recipe.course().items()},
                init_kwargs=tracker_settings(recipe),
            )
            done = progress.step or -1  # what was seen of an encoder before its first step is looked at again
            self.log = RunLog(self.folder / "log.jsonl", done, tqdm.write)
            self.evaluations = RunLog(self.folder / "evaluations.jsonl", done, tqdm.write)
            self.ranks = RunLog(self.folder / "ranks.jsonl", done, tqdm.write)
        if progress.step == 0:
            self.save()
        previous_handler = signal.signal(signal.SIGTERM, self._request_stop)
        pin = self.accelerator.device.type == "cuda"
        steps = self.data.steps(self.cursor, recipe.data.num_workers, pin)
        bar = tqdm(total=recipe.max_steps, initial=progress.step, unit="step", disable=not main, dynamic_ncols=True)
        try:
            if recipe.from_encoder is not None and progress.step == 0:
                self.evaluate(bar)
                if recipe.probe_every:
                    self.probe()
            while progress.step < recipe.max_steps and not self.stop_requested:
                row = self.step(next(steps))
                if main:
                    self.log.write(row)
                    speed = f"{row['tokens_per_second']:,.0f} tokens/s, {row['share_of_peak']:.0%} of peak"
                    bar.set_postfix_str(f"loss {row['loss']:.3f}, {speed}")
                    bar.update()
                    self.track({f"train/{name}": row[name] for name in _TRACKED if row[name] is not None})
                last = progress.step == recipe.max_steps
                if last or progress.step % recipe.evaluate_every == 0:
                    self.evaluate(bar)
                if recipe.probe_every and (last or progress.step % recipe.probe_every == 0):
                    self.probe()
                if last or self.stop_requested or progress.step % recipe.checkpoint_every == 0:
                    self.save()
        finally:
            bar.close()
            signal.signal(signal.SIGTERM, previous_handler)
            if main:
                self.log.close()
                self.evaluations.close()
                self.ranks.close()
        return self.finish()

    def step(self, step: Step) -> dict[str, Any]:
        """One optimizer step; returns the log's row."""
        started = time.perf_counter()
        recipe, accelerator, number = self.recipe, self.accelerator, self.progress.step + 1
        factor = learning_rate_factor(number, recipe.max_steps, recipe.optimizer)
        set_learning_rate(self.optimizers, factor)
        torch.manual_seed(_seed(recipe.seed, number, accelerator.process_index))

        # Counted over all processes before backward, so that every hidden token of the step weighs the same.
        counts = [step.hidden_tokens, step.tokens, step.positions, step.rows, step.stray_mask_tokens, self.signalled]
        counts = accelerator.reduce(torch.tensor(counts, dtype=torch.int64, device=accelerator.device), "sum")
        share = counts[0] / accelerator.num_processes  # DDP averages the gradients of the processes

        self.model.train()
        counts_right = number % _ACCURACY_EVERY == 0
        losses, right = [], torch.zeros((), dtype=torch.int64, device=accelerator.device)
        for number_of_micro_batch, batch in enumerate(step.micro_batches, start=1):
            is_last = number_of_micro_batch == len(step.micro_batches)
            with nullcontext() if is_last else accelerator.no_sync(self.model):
                with self.autocast():
                    batch = self._on_device(batch)
                    output = self.model(**batch, num_items_in_batch=share)
                    loss = output.loss
                if counts_right:
                    right += right_answers(output.logits.detach(), batch)
                del output  # backward frees the logits as it goes
                if self.zero2:
                    zero2.backward(self.model, loss, is_last)
                else:
                    accelerator.backward(loss)
            losses.append(loss.detach())
        if self.zero2:
            norm = zero2.clip_and_step(self.model)  # of itself it leaves out steps that are not finite, as below
        else:
            norm = accelerator.clip_grad_norm_(self.model.parameters(), recipe.optimizer.max_grad_norm)
        if hasattr(norm, "full_tensor"):  # of sharded gradients
            norm = norm.full_tensor()
        mean_loss = accelerator.reduce(torch.stack(losses).sum(), "mean")
        # The step's transfers from the device; two, because not every device has a type that holds both exactly.
        loss, norm = torch.stack([mean_loss.float(), norm.float()]).tolist()
        hidden_tokens, tokens, positions, rows, stray_mask_tokens, stop = counts.tolist()

        if not math.isfinite(loss):
            raise TrainingDivergedError(
                f"the loss of step {number} is {loss}; its samples are {step.sample_index} of epoch "
                f"{step.cursor.epoch}; the last good checkpoint is "
                f"{newest_name(self.folder / 'checkpoints') or 'none'}."
            )
        if math.isfinite(norm) or accelerator.scaler is not None:  # with fp16 the scaler skips, and lowers its scale
            for optimizer in self.optimizers:
                optimizer.step()
        self.progress.skipped_steps += not math.isfinite(norm)
        for optimizer in self.optimizers:
            optimizer.zero_grad()

        self.stop_requested = stop > 0
        self.cursor = step.following
        self.progress.step = number
        self.progress.epoch = step.cursor.epoch
        self.progress.tokens += tokens
        self.progress.positions += positions
        self.progress.hidden_tokens += hidden_tokens
        self.progress.stray_mask_tokens += stray_mask_tokens
        by_source = dict(zip((source.name for source in self.text.sources), step.tokens_by_source, strict=False))
        for name, count in by_source.items():
            self.progress.tokens_by_source[name] = self.progress.tokens_by_source.get(name, 0) + count
        row = Row(tokens / rows, hidden_tokens / rows)
        flops = rows * forward_flops(self._unwrapped().config, row).training
        accuracy = accelerator.reduce(right, "sum").item() / hidden_tokens if counts_right else None
        seconds = time.perf_counter() - started
        self.progress.seconds += seconds
        self.progress.flops += flops
        return {
            "step": number,
            "epoch": step.cursor.epoch,
            "loss": loss,
            "learning_rate": recipe.optimizer.learning_rate * factor,
            "grad_norm": norm if math.isfinite(norm) else None,
            "hidden_tokens": hidden_tokens,
            "tokens": tokens,
            "padding": 1 - tokens / positions,
            "batch": step.digest(),
            "accuracy": accuracy,
            "tokens_per_second": tokens / seconds,
            "share_of_peak": flops / seconds / self.peak,
        } | ({"tokens_by_source": by_source} if by_source else {})

    def evaluate(self, bar: tqdm) -> None:
        """Loss and accuracy on hidden tokens of held-out documents, the same tokens each time."""
        found = self.held_out.evaluate(self.model, self.accelerator, self.autocast)
        if self.accelerator.is_main_process:
            row = {"step": self.progress.step} | found
            self.evaluations.write(row)
            numbers = {"": row} | {f"/{name}": values for name, values in row.get("sources", {}).items()}
            self.track(
                {f"held_out/{key}{of}": values[key] for of, values in numbers.items() for key in ("loss", "accuracy")}
            )
            by_source = ", ".join(f"{name} {values['loss']:.4f}" for name, values in row.get("sources", {}).items())
            bar.write(
                f"step {row['step']}: held-out loss {row['loss']:.4f}{by_source and f' ({by_source})'}, accuracy "
                f"{row['accuracy']:.4f}"
            )

    def probe(self) -> None:
        """The rank probe on held-out text: ``probes/STEP`` holds its report, ``ranks.jsonl`` a line."""
        report = probe_rank(
            self._unwrapped(),
            self.text.tokenizer,
            self.held_out.texts(),
            self.recipe.data.mask_ratio,
            max_length=self.recipe.data.max_length,
            seed=self.recipe.seed,
            progress=False,
        )
        if self.accelerator.is_main_process:
            ranks = {f"{row['layer']}/{row['population']}": row["effective_rank"] for row in report.rows}
            folder = self.folder / "probes" / f"step-{self.progress.step:09d}"
            try_to_write(folder, report.save, tqdm.write)
            self.ranks.write({"step": self.progress.step} | ranks)
            self.track({f"rank/{name}": rank for name, rank in ranks.items()})

    def track(self, values: dict[str, float]) -> None:
        """Hands numbers of this step to the tracker; one that cannot write them does not stop the run."""
        try:
            self.accelerator.log(values, step=self.progress.step)
        except OSError as error:
            if not self.tracker_failed:
                tqdm.write(f"warning: the tracker cannot write ({reason(error)}). Training goes on.")
            self.tracker_failed = True

    def save(self) -> None:
        """Writes a checkpoint; where that fails, says so, and training goes on with the previous one."""
        weights = self.accelerator.get_state_dict(self.model)
        if self.zero2:
            tensors = zero2.optimizer_tensors(self.model)
        else:
            tensors = optimizer_tensors(self._unwrapped(), self.optimizers)
        cursors = gather_object([asdict(self.cursor)])
        if self.accelerator.is_main_process:
            state = {
                "progress": asdict(self.progress),
                "cursors": cursors,
                "course": self.recipe.course(),
                "choices": self.choices.as_dict(),
                "digests": self.text.digests,
                "scaler": self.accelerator.scaler and self.accelerator.scaler.state_dict(),
                "num_processes": self.accelerator.num_processes,
                "versions": versions(),
            }

            def write(folder: Path) -> None:
                self._write_model(folder, weights)
                safetensors.torch.save_file(tensors, folder / "optimizer.safetensors")
                (folder / "state.json").write_text(json.dumps(state, indent=1))
                self.recipe.save(folder / "recipe.yaml")

            try:
                save_checkpoint(self.folder / "checkpoints", self.progress.step, write, self.recipe.keep_checkpoints)
            except CheckpointError as error:
                tqdm.write(f"warning: {error} Training goes on.")
        self.accelerator.wait_for_everyone()

    def finish(self) -> Summary:
        """The loadable model, the figure and the summary."""
        progress, finished = self.progress, self.progress.step >= self.recipe.max_steps
        weights = self.accelerator.get_state_dict(self.model) if finished else {}
        summary = summarise(
            self.recipe,
            self.text,
            progress,
            peak=self.peak,
            parameters=self.parameters,
            choices=self.choices.as_dict(),
            hardware=hardware(self.accelerator.device, self.accelerator.num_processes),
            versions=versions(),
        )
        if self.accelerator.is_main_process:
            if finished:
                try:
                    self._write_model(self.folder / "final", weights)
                    if self.recipe.from_encoder is not None:
                        self._write_encoder(self.folder / "encoder", weights)
                except WRITE_ERRORS as error:
                    raise CheckpointError(
                        f"{self.folder / 'final'} could not be written ({reason(error)}); the same command "
                        f"writes it again from {newest_name(self.folder / 'checkpoints')}."
                    ) from error
            try_to_write(self.folder / "loss.png", lambda path: plot_loss(self.folder, path), tqdm.write)
            text = json.dumps(asdict(summary), indent=1)
            try_to_write(self.folder / "summary.json", lambda path: path.write_text(text), tqdm.write)
        for tracker in self.accelerator.trackers:  # end_training() would close the process group of a next run too
            tracker.finish()
        self.accelerator.wait_for_everyone()
        return summary

    def _write_model(self, folder: Path, weights: dict[str, torch.Tensor]) -> None:
        transformers.utils.logging.disable_progress_bar()  # one more bar beside the run's own
        model = self._unwrapped()
        # Of weights that were gathered or copied, the tied matrix is there twice.
        weights = {name: tensor for name, tensor in weights.items() if name not in model.all_tied_weights_keys}
        model.save_pretrained(folder, state_dict=weights)
        self.text.tokenizer_as_loaded.save_pretrained(folder)

    def _write_encoder(self, folder: Path, weights: dict[str, torch.Tensor]) -> None:
        """The continued encoder as the stock model that it is, with its tokenizer."""
        own = {name.removeprefix("encoder."): value for name, value in weights.items() if name.startswith("encoder.")}
        self._unwrapped().encoder.save_pretrained(folder, state_dict=own)
        self.text.tokenizer_as_loaded.save_pretrained(folder)

    def _unwrapped(self) -> MaeLmForMaskedLM:
        return self.accelerator.unwrap_model(self.model)

    def _on_device(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor.to(self.accelerator.device, non_blocking=True) for name, tensor in batch.items()}

    def _request_stop(self, *_: object) -> None:
        self.signalled = True


def _seed(*parts: int) -> int:
    """A 63-bit seed of the named numbers."""
    digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if arguments else 2
    arguments = adapt.recipe_arguments(arguments)
    if "--estimate" in arguments:
        return estimate.main([argument for argument in arguments if argument != "--estimate"])
    try:
        recipe = load_recipe(arguments[0], arguments[1:])
        status = start_missing_processes(arguments)
        if status is not None:
            return status
        adapt.check_task(recipe.labelled)
        summary = run(recipe)
        if summary.finished and recipe.from_encoder is not None and PartialState().is_main_process:
            adapt.report(recipe)
    except (RecipeError, CorpusError, CheckpointError, TrainingDivergedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if not summary.finished:
        print(f"stopped by SIGTERM after step {summary.steps}; the same command continues.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
