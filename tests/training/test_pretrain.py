"""Recipes, the training step against a plain loop, and what a run leaves behind."""

import errno
import json
import math
import shutil
import signal
import struct
from typing import ClassVar

import numpy as np
import pytest
import torch
import yaml
from accelerate.tracking import GeneralTracker
from accelerate.utils import DistributedType
from pretraining_helpers import log_of, start, tiny_recipe, weights_of
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer, PreTrainedTokenizerFast

from maelm_hf import DataCollatorForMaeLm, MaeLmConfig, MaeLmForMaskedLM
from maelm_hf.probing import RankReport
from training import checkpoint, pretrain
from training.data import BatchOrder, Cursor, StepDataset, evaluation_step
from training.flops import Row, forward_flops
from training.monitoring import tracker_of
from training.optimizers import build_optimizers, learning_rate_factor, load_optimizer_tensors, optimizer_tensors
from training.pretrain import main, run
from training.recipe import OptimizerSection, RecipeError, load_recipe, recipe_from_dict
from training.start import build_model, check_distribution
from training.text import prepare_text


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("pretrain")


@pytest.fixture(scope="module")
def finished(folder):
    """A run of twelve steps, its recipe and summary."""
    recipe = recipe_from_dict(tiny_recipe(folder, "finished", max_steps=12))
    return recipe, run(recipe)


class TestRecipe:
    def write(self, folder, **changes):
        path = folder / "recipe.yaml"
        path.write_text(yaml.safe_dump(tiny_recipe(folder, **changes)))
        return path

    def test_overrides_by_section_or_by_unique_name(self, folder):
        path = self.write(folder)
        recipe = load_recipe(
            path, ["--max_steps", "7", "--model.hidden_size=32", "--mask_ratio", "0.4", "--betas", "[0.9, 0.95]"]
        )
        assert (recipe.max_steps, recipe.model["hidden_size"], recipe.data.mask_ratio) == (7, 32, 0.4)
        assert recipe.optimizer.betas == (0.9, 0.95)
        assert recipe.data.max_length == 32  # the others stay

    def test_a_saved_recipe_is_the_same_recipe(self, folder):
        recipe = load_recipe(self.write(folder), ["--twin", "mlm"])
        recipe.save(folder / "saved.yaml")
        assert load_recipe(folder / "saved.yaml") == recipe

    def test_the_twin_is_plain_mlm(self, folder):
        recipe = load_recipe(self.write(folder), ["--twin", "mlm"])
        assert recipe.model["encoder_mask_fraction"] == 1
        assert recipe.model["decoder_num_hidden_layers"] == 0
        assert recipe.model["hidden_size"] == 16

    @pytest.mark.parametrize(
        ("overrides", "words"),
        [
            (["--max_step", "3"], "max_step.*did you mean max_steps"),
            (["--data.mask_ration", "0.3"], "mask_ration.*did you mean data.mask_ratio"),
            (["--model.hiden_size", "3"], "hiden_size.*did you mean .*hidden_size"),
            (["--model.vocab_size", "300"], "model.vocab_size comes from the tokenizer"),
            (["--max_steps", "many"], "max_steps must be of type int, got 'many'"),
            (["--max_steps", "2.5"], "max_steps must be of type int"),
            (["--max_steps", "true"], "max_steps must be of type int"),
            (["--streaming", "1"], "corpus.streaming must be of type bool"),
            (["--learning_rate", "fast"], "optimizer.learning_rate must be a number"),
            (["--optimizer.name", "adam"], "one of adamw, muon.*did you mean adamw"),
            (["--data", "3"], "data"),
            (["--max_steps", "0"], "max_steps must be positive"),
            (["--seed", "-1"], "seed must not be negative"),
            (["--batch_tokens", "2000"], "either data.batch_size"),
            (["--held_out_share", "0"], "held_out_share must be between 0 and 1"),
            (["--warmup_steps", "100"], "more than max_steps"),
            (["--schedule", "wsd"], "decay_steps"),
            (["--decoder_learning_rate", "1e-3"], "goes with adamw"),
            (["--optimizer.name", "adamw", "--decoder_learning_rate", "-1"], "decoder_learning_rate must be positive"),
            (["--precision", "fp16"], "fp16"),
            (["--mask_ratio", "15"], "data.mask_ratio must be between 0 and 1, got 15"),
            (["--mask_ratio", "0"], "data.mask_ratio must be between 0 and 1"),
            (["--learning_rate", "-1"], "optimizer.learning_rate must be positive, got -1"),
            (["--learning_rate", ".nan"], "optimizer.learning_rate must be positive, got nan"),
            (["--muon_learning_rate", "0"], "optimizer.muon_learning_rate must be positive"),
            (["--micro_batch_size", "0"], "data.micro_batch_size must be positive"),
            (["--weight_decay", "-0.1"], "optimizer.weight_decay must not be negative"),
            (["--betas", "[0.9, 1.0]"], r"optimizer.betas must be .* below 1, got \[0.9, 1.0\]"),
            (["--output_dir", "a: b: c"], "--output_dir 'a: b: c' is no YAML value"),
            (["max_steps", "3"], "expected --key value"),
            (["--max_steps"], "lacks a value"),
        ],
    )
    def test_errors_name_the_key(self, folder, overrides, words):
        with pytest.raises(RecipeError, match=words):
            load_recipe(self.write(folder), overrides)

    def test_unknown_keys_in_the_file(self, folder):
        path = self.write(folder)
        path.write_text(path.read_text() + "optimiser:\n  name: adamw\n")
        with pytest.raises(RecipeError, match=r"optimiser \(did you mean optimizer\?\)"):
            load_recipe(path)
        with pytest.raises(RecipeError, match="there is no recipe at"):
            load_recipe(folder / "nowhere.yaml")
        with pytest.raises(RecipeError, match="cannot be read as a recipe"):
            load_recipe(folder)
        path.write_text("output_dir: runs/a\nmax_steps: 5\ndata: 3\n")
        with pytest.raises(RecipeError, match="data must be a section of keys, got 3"):
            load_recipe(path, ["--data.max_length", "32"])

    def test_numbers_that_yaml_reads_as_text(self, folder):
        assert load_recipe(self.write(folder), ["--learning_rate", "2e-4"]).optimizer.learning_rate == 2e-4
        assert load_recipe(self.write(folder), ["--layer_norm_eps", "1e-6"]).model["layer_norm_eps"] == 1e-6

    def test_shipped_recipes_load(self):
        recipes = sorted((pretrain.Path(pretrain.__file__).parent / "recipes").glob("*.yaml"))
        assert recipes
        for path in recipes:
            load_recipe(path)


class TestSchedule:
    def test_linear(self):
        section = OptimizerSection(warmup_steps=4)
        factors = [learning_rate_factor(step, 10, section) for step in range(1, 11)]
        assert factors[:4] == [0.25, 0.5, 0.75, 1]
        assert factors[4:] == pytest.approx([6 / 7, 5 / 7, 4 / 7, 3 / 7, 2 / 7, 1 / 7])

    def test_warmup_stable_decay(self):
        section = OptimizerSection(schedule="wsd", warmup_steps=2, decay_steps=3)
        factors = [learning_rate_factor(step, 10, section) for step in range(1, 11)]
        assert factors == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25])


class TestOptimizers:
    def model(self, recipe):
        torch.manual_seed(0)
        return MaeLmForMaskedLM(MaeLmConfig(vocab_size=300, mask_token_id=4, **recipe.model))

    def test_muon_takes_the_hidden_matrices_and_nothing_else(self, finished):
        model = self.model(finished[0])
        adamw, muon = build_optimizers(model, finished[0].optimizer)
        names = {parameter: name for name, parameter in model.named_parameters()}
        by_muon = {names[parameter] for group in muon.param_groups for parameter in group["params"]}
        by_adamw = {names[parameter] for group in adamw.param_groups for parameter in group["params"]}
        assert by_muon | by_adamw == set(names.values())
        assert not by_muon & by_adamw
        assert all(name.endswith(".weight") for name in by_muon)
        assert not [name for name in by_muon if "embedding" in name or "norm" in name.lower()]
        # Every two-dimensional weight that is neither an embedding nor a bias table is Muon's.
        left = [name for name in by_adamw if dict(model.named_parameters())[name].ndim == 2]
        assert all("embedding" in name or "relative" in name or "bias" in name for name in left), left

    def test_norms_and_biases_are_not_decayed(self, finished):
        model = self.model(finished[0])
        (adamw,) = build_optimizers(model, OptimizerSection())
        for group in adamw.param_groups:
            vectors = [parameter.ndim < 2 for parameter in group["params"]]
            assert set(vectors) == {group["weight_decay"] == 0}

    def test_decoder_and_head_may_have_a_rate_of_their_own(self, finished):
        model = self.model(finished[0])
        section = OptimizerSection(learning_rate=1e-4, decoder_learning_rate=1e-3, weight_decay=0.1)
        (adamw,) = build_optimizers(model, section)
        names = {parameter: name for name, parameter in model.named_parameters()}
        found = {
            names[p]: (group["peak_lr"], group["weight_decay"]) for group in adamw.param_groups for p in group["params"]
        }
        expected = {
            name: (1e-4 if name.startswith("encoder.") else 1e-3, 0.1 if parameter.ndim >= 2 else 0.0)
            for name, parameter in model.named_parameters()
        }
        assert found == expected

    @pytest.mark.parametrize("name", ["adamw", "muon"])
    def test_state_survives_as_tensors(self, finished, name):
        def steps(model, optimizers, seeds):
            for seed in seeds:
                torch.manual_seed(seed)
                for parameter in model.parameters():
                    parameter.grad = torch.randn_like(parameter)
                for optimizer in optimizers:
                    optimizer.step()

        section = OptimizerSection(name=name)
        model, other = self.model(finished[0]), self.model(finished[0])
        optimizers = build_optimizers(model, section)
        steps(model, optimizers, (1, 2))
        other.load_state_dict(model.state_dict())
        restored = build_optimizers(other, section)
        load_optimizer_tensors(other, restored, optimizer_tensors(model, optimizers))
        steps(model, optimizers, (3, 4))
        steps(other, restored, (3, 4))
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))

    def test_state_of_another_model_is_refused(self, finished):
        model = self.model(finished[0])
        optimizers = build_optimizers(model, OptimizerSection())
        with pytest.raises(ValueError, match="lacks: no_such_weight"):
            load_optimizer_tensors(model, optimizers, {"no_such_weight:exp_avg": torch.zeros(1)})


class TestRun:
    def test_against_a_plain_loop(self, folder, monkeypatch):
        """The same weights as mean loss over hidden tokens, clipping, AdamW: one forward a step, no Accelerate."""
        no_dropout = {"model__hidden_dropout_prob": 0.0, "model__attention_probs_dropout_prob": 0.0}
        values = tiny_recipe(folder, "accumulated", max_steps=6, optimizer__name="adamw", **no_dropout)
        recipe = recipe_from_dict(values)
        monkeypatch.setattr(pretrain, "_ACCURACY_EVERY", 3)
        run(recipe)

        text = prepare_text(recipe, say=lambda _: None)
        torch.manual_seed(recipe.seed)
        model = build_model(recipe, text.tokenizer, None)
        model.set_attn_implementation("eager")
        collator = DataCollatorForMaeLm(text.tokenizer, 0.15, seed=recipe.seed)
        decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
        others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
        optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}],
            betas=(0.9, 0.98),
            eps=1e-6,
        )
        order = BatchOrder(recipe, text.training.lengths)
        losses, accuracies = [], []
        for number, (_, _, batch_rows) in enumerate(order.batches(Cursor()), start=1):
            indices = np.concatenate(batch_rows)
            rows = text.training.input_ids(indices)
            batch = collator(
                [{"input_ids": row, "sample_index": index} for row, index in zip(rows, indices.tolist(), strict=True)]
            )
            names = ("input_ids", "attention_mask", "labels")
            loss, logits = model(**{name: batch[name] for name in names}, return_dict=False)[:2]
            loss.backward()
            answers = batch["labels"][batch["labels"] != -100]
            accuracies.append((logits.argmax(-1) == answers).float().mean().item())
            torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0)
            for group in optimizer.param_groups:
                group["lr"] = 0.002 * (number / 4 if number <= 4 else (7 - number) / 3)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if number == 6:
                break
        rows = log_of(folder / "accumulated")
        assert [row["loss"] for row in rows] == pytest.approx(losses, rel=1e-5)
        expected = [accuracy if number % 3 == 0 else None for number, accuracy in enumerate(accuracies, start=1)]
        assert [row["accuracy"] for row in rows] == [pytest.approx(accuracy) for accuracy in expected]
        trained = weights_of(folder / "accumulated")
        for name, parameter in model.state_dict().items():
            if name in trained:
                torch.testing.assert_close(trained[name], parameter, rtol=1e-4, atol=2e-5)

    def test_leaves_a_loadable_model_and_an_account(self, finished):
        recipe, summary = finished
        run_folder = pretrain.Path(recipe.output_dir)
        for path in (run_folder / "final", run_folder / "checkpoints" / "step-000000012"):
            encoder, tokenizer = AutoModel.from_pretrained(path), AutoTokenizer.from_pretrained(path)
            assert encoder.config.mask_token_id == tokenizer.mask_token_id
            assert len(tokenizer) == encoder.config.vocab_size
            assert torch.isfinite(encoder(**tokenizer("the encoder sees", return_tensors="pt")).last_hidden_state).all()
        on_disk = json.loads((run_folder / "summary.json").read_text())
        assert on_disk == json.loads(json.dumps(summary.__dict__))
        rows = log_of(run_folder)
        assert on_disk["tokens"] == sum(row["tokens"] for row in rows)
        assert on_disk["hidden_tokens"] == sum(row["hidden_tokens"] for row in rows)
        assert on_disk["hardware"].endswith(", 1 process")
        assert (run_folder / "loss.png").read_bytes()[1:4] == b"PNG"
        assert load_recipe(run_folder / "recipe.yaml") == recipe
        assert (
            recipe.course()
            == json.loads((run_folder / "checkpoints" / "step-000000012" / "state.json").read_text())["course"]
        )

    def test_evaluation_is_loss_and_accuracy_of_the_hidden_tokens(self, finished):
        recipe, summary = finished
        text = prepare_text(recipe, say=lambda _: None)
        model = AutoModelForMaskedLM.from_pretrained(pretrain.Path(recipe.output_dir) / "final").eval()
        collator = DataCollatorForMaeLm(text.tokenizer, 0.15, seed=recipe.seed)
        loss = right = tokens = 0
        chosen = evaluation_step(
            StepDataset(text.sources[0].held_out, collator, rank=0, world_size=1, micro_batch_tokens=128), 16
        ).sample_index
        for index in chosen:
            (row,) = text.sources[0].held_out.input_ids(torch.tensor([index]))
            batch = collator([{"input_ids": row, "sample_index": index, "epoch": 2**62}])
            with torch.no_grad():
                logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            hidden = batch["labels"] != -100
            labels = batch["labels"][hidden]
            loss += torch.nn.functional.cross_entropy(logits[hidden], labels, reduction="sum").item()
            right += (logits[hidden].argmax(-1) == labels).sum().item()
            tokens += len(labels)
        assert summary.held_out_loss == pytest.approx(loss / tokens, rel=1e-5)
        assert summary.held_out_accuracy == pytest.approx(right / tokens, abs=1e-9)

    def test_learns(self, folder):
        recipe = recipe_from_dict(
            tiny_recipe(
                folder,
                "learning",
                max_steps=150,
                evaluate_every=150,
                checkpoint_every=150,
                model__hidden_size=32,
                model__initializer_range=0.06,
            )
        )
        run(recipe)
        rows = log_of(folder / "learning")
        first, last = (sum(row["loss"] for row in part) / 10 for part in (rows[:10], rows[-10:]))
        assert first == pytest.approx(math.log(300), abs=0.6)
        assert last < first - 1.5

    def test_the_twin_trains_on_the_same_batches(self, folder, finished):
        summary = run(recipe_from_dict(tiny_recipe(folder, "twin", max_steps=12, twin="mlm")))
        assert summary.parameters < finished[1].parameters
        batches, twins = ([row["batch"] for row in log_of(folder / name)] for name in ("finished", "twin"))
        assert batches == twins

    def test_running_a_finished_run_again_changes_nothing(self, finished):
        before, log = weights_of(pretrain.Path(finished[0].output_dir)), log_of(pretrain.Path(finished[0].output_dir))
        again = run(finished[0])
        assert again == finished[1]
        assert log_of(pretrain.Path(finished[0].output_dir)) == log
        after = weights_of(pretrain.Path(finished[0].output_dir))
        assert all(torch.equal(before[name], after[name]) for name in before)

    def test_automatic_choices_are_printed_with_reasons_and_kept(self, folder, capsys):
        values = tiny_recipe(folder, "auto", max_steps=2, precision="auto", attention="auto", optimizer__warmup_steps=1)
        values["data"]["micro_batch_size"] = "auto"
        first = run(recipe_from_dict(values))
        printed = capsys.readouterr().out
        for name in ("precision", "micro_batch_size", "attention"):
            value, reason = first.choices[name]["value"], first.choices[name]["reason"]
            assert f"{name}: {value} ({reason})" in printed
        again = run(recipe_from_dict(values))
        assert again.choices == first.choices
        assert "kept from the checkpoint" in capsys.readouterr().out


class No64BitFloats(TorchDispatchMode):
    """Refuses what mps would: every new float64 tensor."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float64:
                raise TypeError(f"{function} makes a float64 tensor")
        return result


class TestDevices:
    def test_steps_and_evaluations_need_no_float64(self, folder, finished, monkeypatch):
        for name in ("step", "evaluate"):
            original = getattr(pretrain.Pretraining, name)

            def as_on_mps(self, *arguments, original=original):
                with No64BitFloats():
                    return original(self, *arguments)

            monkeypatch.setattr(pretrain.Pretraining, name, as_on_mps)
        run(recipe_from_dict(tiny_recipe(folder, "no-float64", max_steps=12)))
        assert log_of(folder / "no-float64") == log_of(folder / "finished")


class TestWatching:
    def test_mask_tokens_in_the_text_are_counted_once_a_step_through_a_resume(self, folder):
        """A word-level tokenizer reads [MASK] in a text as the token. Every block holds one, and six tokens."""
        lines = [f"[MASK] word{number} a b" for number in range(60)]
        (folder / "masks.txt").write_text("\n".join(lines) + "\n")
        specials = ["<pad>", "<s>", "</s>", "<unk>", "[MASK]"]
        words = [*specials, "a", "b", *(f"word{number}" for number in range(60))]
        backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        backend.post_processor = processors.TemplateProcessing("<s> $A </s>", None, [("<s>", 1), ("</s>", 2)])
        roles = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token", "mask_token"), specials, strict=True))
        PreTrainedTokenizerFast(tokenizer_object=backend, **roles).save_pretrained(folder / "words")

        values = tiny_recipe(folder, "masks", max_steps=12, data__num_workers=1)
        values["corpus"]["source"] = str(folder / "masks.txt")
        values["tokenizer"] = {"path": str(folder / "words")}
        summary = run(recipe_from_dict(values))
        assert summary.stray_mask_tokens == summary.tokens / 6 > 0
        newest = folder / "masks" / "checkpoints" / "step-000000012"
        (newest / "manifest.json").unlink()
        again = run(recipe_from_dict(values))  # from step 10
        assert again.stray_mask_tokens == summary.stray_mask_tokens

    def test_the_rank_probe_reports_and_changes_nothing(self, folder, finished):
        run(recipe_from_dict(tiny_recipe(folder, "probed", max_steps=12, probe_every=6)))
        report = RankReport.load(folder / "probed" / "probes" / "step-000000006")
        rows = {f"{row['layer']}/{row['population']}": row["effective_rank"] for row in report.rows}
        logged = [json.loads(line) for line in (folder / "probed" / "ranks.jsonl").read_text().splitlines()]
        assert [row["step"] for row in logged] == [6, 12]
        assert logged[0] == {"step": 6} | rows
        expected, got = weights_of(folder / "finished"), weights_of(folder / "probed")
        assert all(torch.equal(expected[name], got[name]) for name in expected)

    def test_a_tracker_gets_the_numbers(self, folder, monkeypatch):
        class Recorder(GeneralTracker):
            name = "recorder"
            requires_logging_directory = False
            logged: ClassVar[list] = []

            @property
            def tracker(self):
                return self.logged

            def store_init_configuration(self, values):
                self.logged.append(("config", values))

            def log(self, values, step=None, **_):
                self.logged.append((step, values))

        monkeypatch.setattr(pretrain, "tracker_of", lambda recipe: Recorder())
        run(recipe_from_dict(tiny_recipe(folder, "tracked", max_steps=12, probe_every=12)))
        config = dict(Recorder.logged)["config"]
        assert config["optimizer.name"] == "muon"
        rows = log_of(folder / "tracked")
        losses = {step: values["train/loss"] for step, values in Recorder.logged if "train/loss" in values}
        assert losses == {row["step"]: row["loss"] for row in rows}
        last = [values for step, values in Recorder.logged if step == 12]
        assert any("held_out/accuracy" in values for values in last)
        assert any(name.startswith("rank/") for values in last for name in values)

    def test_tensorboard_gets_the_numbers(self, folder):
        """Read back from its file, as https://www.tensorflow.org/tutorials/load_data/tfrecord lays it out."""
        event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2", reason="needs tensorboardX")
        run(recipe_from_dict(tiny_recipe(folder, "tensorboard", max_steps=24, tracker="tensorboard")))
        scalars: dict[str, dict[int, float]] = {}
        for path in (folder / "tensorboard" / "maelm").rglob("events.out.tfevents.*"):
            data = path.read_bytes()
            while data:
                (length,) = struct.unpack("<Q", data[:8])
                event = event_pb2.Event.FromString(data[12 : 12 + length])
                data = data[16 + length :]
                for value in event.summary.value:
                    scalars.setdefault(value.tag, {})[event.step] = value.simple_value
        rows = [json.loads(line) for line in (folder / "tensorboard" / "log.jsonl").read_text().splitlines()]
        for name in ("loss", "learning_rate", "grad_norm", "tokens", "padding", "tokens_per_second", "share_of_peak"):
            logged = {row["step"]: pytest.approx(row[name], rel=1e-6) for row in rows}  # fp32
            assert scalars[f"train/{name}"] == logged, name
        assert list(scalars["train/accuracy"]) == [20]
        assert list(scalars["held_out/accuracy"]) == list(scalars["held_out/loss"]) == [12, 24]

    def test_share_of_peak_is_the_models_operations_over_those_of_matrix_products(self, folder, finished):
        recipe, summary = finished
        text = prepare_text(recipe, say=lambda _: None)
        config = AutoModel.from_pretrained(summary.model).config
        peak, seconds, total = summary.choices["matmul_peak"]["value"], 0.0, 0.0
        rows = [json.loads(line) for line in (pretrain.Path(recipe.output_dir) / "log.jsonl").read_text().splitlines()]
        batches = BatchOrder(recipe, text.training.lengths).batches(Cursor())
        for row, (_, _, batch) in zip(rows, batches, strict=False):
            mean_row = Row(row["tokens"] / len(batch), row["hidden_tokens"] / len(batch))
            operations = len(batch) * forward_flops(config, mean_row).training
            took = row["tokens"] / row["tokens_per_second"]
            assert row["share_of_peak"] == pytest.approx(operations / took / peak)
            seconds, total = seconds + took, total + operations
        assert summary.share_of_peak == pytest.approx(total / seconds / peak)
        assert 0 < summary.share_of_peak < 1
        assert (
            "operations a second, measured on 1024 x 1024 matrices in fp32" in summary.choices["matmul_peak"]["reason"]
        )

    def test_a_tracker_that_is_not_installed(self, folder, monkeypatch):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(RecipeError, match="pip install wandb"):
            tracker_of(recipe_from_dict(tiny_recipe(folder, tracker="wandb")))


class TestRefusals:
    def test_another_recipe_in_the_same_folder(self, folder, finished):
        with pytest.raises(RecipeError, match=r"another recipe: data.mask_ratio \(was 0.15, is 0.4\)"):
            run(recipe_from_dict(tiny_recipe(folder, "finished", max_steps=12, data__mask_ratio=0.4)))

    def test_a_stable_phase_may_end_elsewhere_and_a_begun_decay_may_not(self, folder):
        wsd = {"optimizer__schedule": "wsd", "optimizer__decay_steps": 4}
        run(recipe_from_dict(tiny_recipe(folder, "stable", max_steps=15, keep_checkpoints=9, **wsd)))
        run(recipe_from_dict(tiny_recipe(folder, "straight", max_steps=12, **wsd | {"optimizer__decay_steps": 2})))
        step = "checkpoints/step-000000010"  # stable of 15 - 4, and of 12 - 2
        shutil.copytree(folder / "stable" / step, folder / "branch" / step)
        run(recipe_from_dict(tiny_recipe(folder, "branch", max_steps=12, **wsd | {"optimizer__decay_steps": 2})))
        expected, found = weights_of(folder / "straight"), weights_of(folder / "branch")
        assert all(torch.equal(expected[name], tensor) for name, tensor in found.items())
        with pytest.raises(RecipeError, match=r"max_steps \(was 15, is 20\)"):
            run(recipe_from_dict(tiny_recipe(folder, "stable", max_steps=20, **wsd)))
        with pytest.raises(RecipeError, match=r"optimizer.decay_steps \(was 2, is 3\)"):
            run(recipe_from_dict(tiny_recipe(folder, "branch", max_steps=12, **wsd | {"optimizer__decay_steps": 3})))

    def test_another_corpus(self, folder):
        values = tiny_recipe(folder, "text", max_steps=5)
        corpus = folder / "other.txt"
        corpus.write_text((folder / "corpus.txt").read_text())
        values["corpus"]["source"] = str(corpus)
        run(recipe_from_dict(values))
        corpus.write_text(corpus.read_text() + "one more line\n")
        with pytest.raises(RecipeError, match="the corpus is not the one"):
            run(recipe_from_dict(values))

    def test_a_damaged_checkpoint(self, folder, capsys):
        values = tiny_recipe(folder, "damaged", max_steps=12)
        run(recipe_from_dict(values))
        expected, log = weights_of(folder / "damaged"), log_of(folder / "damaged")
        weights = folder / "damaged" / "checkpoints" / "step-000000012" / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-4])
        capsys.readouterr()
        run(recipe_from_dict(values))
        printed = capsys.readouterr().out
        assert "step-000000012 is refused: model.safetensors has" in printed
        assert "continuing from" in printed
        assert "step-000000010" in printed
        assert log_of(folder / "damaged") == log
        assert all(torch.equal(expected[name], tensor) for name, tensor in weights_of(folder / "damaged").items())

    def test_nothing_but_damaged_checkpoints(self, folder):
        """Not a fresh start, which would cut the logs."""
        values = tiny_recipe(folder, "ruined", max_steps=6)
        run(recipe_from_dict(values))
        log = (folder / "ruined" / "log.jsonl").read_text()
        for weights in (folder / "ruined" / "checkpoints").glob("*/model.safetensors"):
            weights.write_bytes(weights.read_bytes()[:-4])
        for _ in range(2):
            with pytest.raises(RecipeError, match=r"every checkpoint in .*ruined.checkpoints is damaged: restore one"):
                run(recipe_from_dict(values))
        assert (folder / "ruined" / "log.jsonl").read_text() == log

    def test_blocks_longer_than_the_model(self, folder):
        values = tiny_recipe(folder, "long", model__max_position_embeddings=16)
        with pytest.raises(RecipeError, match="max_position_embeddings"):
            run(recipe_from_dict(values))

    def test_a_config_that_contradicts_itself(self, folder):
        with pytest.raises(RecipeError, match=r"hidden_size.*num_attention_heads"):
            run(recipe_from_dict(tiny_recipe(folder, "odd", model__num_attention_heads=3)))

    def test_what_the_launcher_cannot_share_among_processes(self, folder):
        recipe = recipe_from_dict(tiny_recipe(folder, probe_every=2))
        with pytest.raises(RecipeError, match=r"FSDP shards them: set probe_every 0, and .*maelm probe rank"):
            check_distribution(recipe, DistributedType.FSDP)
        check_distribution(recipe, DistributedType.MULTI_GPU)
        check_distribution(recipe_from_dict(tiny_recipe(folder)), DistributedType.FSDP)

    def test_the_command_line_says_errors_in_one_line(self, folder, capsys):
        path = folder / "cli.yaml"
        path.write_text(yaml.safe_dump(tiny_recipe(folder)))
        assert main([str(path), "--max_step", "3"]) == 1
        error = capsys.readouterr().err
        assert error.startswith("error: unknown recipe key --max_step (did you mean max_steps")
        assert error.count("\n") == 1

    def test_no_such_tokenizer(self, folder, capsys):
        path = folder / "cli.yaml"
        path.write_text(yaml.safe_dump(tiny_recipe(folder)))
        assert main([str(path), "--tokenizer.path", str(folder / "nowhere")]) == 1
        error = capsys.readouterr().err
        assert f"error: tokenizer.path '{folder / 'nowhere'}' is neither a tokenizer's folder nor" in error
        assert error.splitlines()[-1].startswith("error: ")


class TestFaults:
    @pytest.mark.parametrize("moment", ["between two steps", "in the middle of a step"])
    def test_sigterm_saves_and_exits_0_within_a_step(self, folder, moment):
        terminate = {
            "between two steps": (
                "write = monitoring.RunLog.write\n"
                "def write_and_ask(self, row):\n"
                "    write(self, row)\n"
                "    if self.path.name == 'log.jsonl' and row['step'] == 6:\n"
                "        os.kill(os.getpid(), signal.SIGTERM)\n"
                "monitoring.RunLog.write = write_and_ask\n"
            ),
            "in the middle of a step": (
                "move = pretrain.Pretraining._on_device\n"
                "def move_and_ask(self, batch):\n"
                "    if hasattr(self, 'log') and self.progress.step == 5:\n"
                "        os.kill(os.getpid(), signal.SIGTERM)\n"
                "    return move(self, batch)\n"
                "pretrain.Pretraining._on_device = move_and_ask\n"
            ),
        }[moment]
        name = f"terminated {moment}"
        process = start(tiny_recipe(folder, name, data__num_workers=1), before=terminate)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output
        steps = [row["step"] for row in log_of(folder / name)]
        assert steps == list(range(1, 8))
        assert (folder / name / "checkpoints" / "step-000000007").is_dir()
        summary = json.loads((folder / name / "summary.json").read_text())
        assert not summary["finished"]

    def poisoned(self, monkeypatch, step: int, what: str):
        """The real step, with one parameter's gradient or the model's weights spoiled at a step."""
        original = pretrain.Pretraining.step

        def spoiled(self, data):
            if self.progress.step + 1 == step:
                parameter = next(self.model.parameters())
                if what == "weights":
                    parameter.data.fill_(float("nan"))
                else:
                    handle = parameter.register_hook(lambda gradient: gradient * float("inf"))
                    try:
                        return original(self, data)
                    finally:
                        handle.remove()
            return original(self, data)

        monkeypatch.setattr(pretrain.Pretraining, "step", spoiled)

    def test_a_loss_that_is_no_number_stops(self, folder, monkeypatch):
        self.poisoned(monkeypatch, 8, "weights")
        with pytest.raises(pretrain.TrainingDivergedError, match="loss of step 8 is nan") as caught:
            run(recipe_from_dict(tiny_recipe(folder, "diverged")))
        assert "step-000000005" in str(caught.value)
        samples = str(caught.value).split("samples are [")[1].split("]")[0].split(",")
        assert len(samples) in range(6, 11)
        assert [row["step"] for row in log_of(folder / "diverged")] == list(range(1, 8))

    def test_a_gradient_that_is_no_number_is_skipped_and_counted(self, folder, monkeypatch):
        self.poisoned(monkeypatch, 8, "gradient")
        summary = run(recipe_from_dict(tiny_recipe(folder, "skipped", max_steps=12)))
        assert summary.skipped_steps == 1
        rows = log_of(folder / "skipped")
        assert [row["step"] for row in rows if row["grad_norm"] is None] == [8]
        assert all(torch.isfinite(tensor).all() for tensor in weights_of(folder / "skipped").values())

    def test_a_full_disk_is_said_and_training_goes_on(self, folder, monkeypatch, capsys):
        fsync = checkpoint._sync

        def full(path):
            if "step-000000010" in str(path):
                raise OSError(errno.ENOSPC, "No space left on device")
            fsync(path)

        monkeypatch.setattr(checkpoint, "_sync", full)
        summary = run(recipe_from_dict(tiny_recipe(folder, "full", max_steps=12)))
        captured = capsys.readouterr()
        assert "step 10 could not be written (No space left on device)" in captured.out + captured.err
        assert "step-000000005 is kept" in captured.out + captured.err
        assert summary.finished
        kept = sorted(path.name for path in (folder / "full" / "checkpoints").iterdir())
        assert kept == ["step-000000005", "step-000000012"]

    def test_a_disk_too_full_for_the_final_model(self, folder):
        """With a limit of the operating system, set at the end: all but the weights fit."""
        limit = (
            "import resource\n"
            "finish = pretrain.Pretraining.finish\n"
            "def finish_on_a_full_disk(self):\n"
            "    resource.setrlimit(resource.RLIMIT_FSIZE, (2**17, 2**17))\n"
            "    return finish(self)\n"
            "pretrain.Pretraining.finish = finish_on_a_full_disk\n"
        )
        process = start(tiny_recipe(folder, "no-room", max_steps=5, model__hidden_size=128), before=limit)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 1, output
        last = output.splitlines()[-1]
        assert "training.checkpoint.CheckpointError: " in last
        assert "final could not be written (" in last
        assert "File too large" in last
        assert "step-000000005" in last


def test_signal_handlers_are_put_back(finished):
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
