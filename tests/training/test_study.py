"""The study of the released pair: its arms, the reading of its measurements, and the folders it releases."""

import json
import re

import numpy as np
import pytest
import torch
from pretraining_helpers import tiny_recipe
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer

from training import study, study_results
from training.pretrain import run
from training.recipe import recipe_from_dict
from training.release import publish_into, round_to_bf16
from training.study_measure import FILL_MASK, fill_mask, loss_on, sample_loss

_WARM = {"optimizer__warmup_steps": 1}
SECONDS = {"MLM": 1.0, "MAE-LM": 1.25, "decoder, [MASK] kept": 1.5}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with one finished run, `mae-lm`."""
    folder = tmp_path_factory.mktemp("study")
    run(
        recipe_from_dict(
            tiny_recipe(folder, "mae-lm", max_steps=3, model__relative_position_buckets=0, data__max_length=64, **_WARM)
        )
    )
    return folder


class TestArms:
    def test_they_differ_in_what_they_are_compared_by_alone(self, tmp_path):
        recipes = {name: study.recipe_of(name, SECONDS, tmp_path) for name in study.ARMS}
        courses = {name: recipe.course() for name, recipe in recipes.items()}

        def differing(one, other):
            keys = courses[one] | courses[other]
            return {key for key in keys if courses[one].get(key) != courses[other].get(key)}

        assert differing("mlm", "mae-lm") == {"twin", "model.decoder_num_hidden_layers", *_FRACTION, "max_steps"}
        assert differing("mlm-30", "mlm-50") == {"data.mask_ratio"}
        assert differing("mae-lm-15", "mae-lm-50") == {"data.mask_ratio"}
        assert differing("mae-lm-15", "control-15") == _FRACTION
        assert differing("mlm", "mlm-15") == {"max_steps", "optimizer.decay_steps"}

    def test_the_long_arms_get_the_same_time(self, tmp_path):
        steps = {name: study.recipe_of(name, SECONDS, tmp_path).max_steps for name in study.LONG_ARMS}
        times = [count * SECONDS[study.ARMS[name].objective] for name, count in steps.items()]
        assert times[1] == pytest.approx(times[0], rel=0.01)

    def test_a_branch_needs_its_long_arm(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="pretrain mlm first"):
            study.start_branch("mlm-15", tmp_path)

    def test_a_branch_takes_checkpoint_and_logs_and_is_begun_once(self, tmp_path):
        step = f"step-{study.COOLED_FROM:09d}"
        (tmp_path / "mlm" / "checkpoints" / step).mkdir(parents=True)
        (tmp_path / "mlm" / "checkpoints" / step / "state.json").write_text("{}")
        for log in ("log.jsonl", "evaluations.jsonl"):
            (tmp_path / "mlm" / log).write_text("{}\n")
        study.start_branch("mlm-15", tmp_path)
        assert [path.name for path in (tmp_path / "mlm-15" / "checkpoints").iterdir()] == [step]
        (tmp_path / "mlm-15" / "log.jsonl").write_text("its own\n")
        study.start_branch("mlm-15", tmp_path)
        assert (tmp_path / "mlm-15" / "log.jsonl").read_text() == "its own\n"

    def test_an_unknown_arm(self):
        with pytest.raises(ValueError, match="unknown arm 'bert': the arms are mlm"):
            study.arms_named(["bert"])


_FRACTION = {"model.encoder_mask_fraction"}


class TestCurves:
    def test_curves_know_their_phase(self, finished):
        names, seconds, at_end = {"mae-lm": "MAE-LM"}, {"MAE-LM": 30.0}, {"mae-lm": 0.6}
        curves = study_results.curve_rows(finished, finished / "none", names, seconds, ("spam",), at_end)
        log = [json.loads(line) for line in (finished / "mae-lm" / "log.jsonl").read_text().splitlines()]
        assert list(curves["step"]) == [0, 3]
        assert list(curves["phase"]) == ["stable", "end"]
        assert curves["tokens"].iloc[-1] == sum(row["tokens"] for row in log)
        assert (curves["cpu_minutes"].iloc[-1], curves["frozen_mean"].iloc[-1]) == (1.5, 0.6)

    def test_a_run_that_cools_down_has_a_phase_of_its_own(self, finished, tmp_path):
        run_folder = tmp_path / "mae-lm"
        run_folder.mkdir()
        recipe = (finished / "mae-lm" / "recipe.yaml").read_text()
        recipe = re.sub(r"schedule: \w+", "schedule: wsd", re.sub(r"decay_steps: \w+", "decay_steps: 2", recipe))
        (run_folder / "recipe.yaml").write_text(recipe)
        (run_folder / "log.jsonl").write_text("".join(f'{{"step": {step}, "tokens": 8}}\n' for step in (1, 2, 3)))
        losses = "".join(f'{{"step": {step}, "loss": 4.0, "accuracy": 0.1}}\n' for step in (1, 2, 3))
        (run_folder / "evaluations.jsonl").write_text(losses)
        curves = study_results.curve_rows(tmp_path, tmp_path, {"mae-lm": "MAE-LM"}, {"MAE-LM": 60.0}, (), {})
        assert list(curves["phase"]) == ["stable", "stable", "decay", "end"]
        assert list(curves["tokens"]) == [0, 8, 16, 24]


class TestRelease:
    def test_rounded_weights_load_in_float32(self, finished, tmp_path):
        rounded = round_to_bf16(finished / "mae-lm" / "final", tmp_path / "rounded")
        stored, trained = load_file(rounded), load_file(finished / "mae-lm" / "final" / "model.safetensors")
        assert all(torch.equal(stored[name], tensor.bfloat16()) for name, tensor in trained.items())
        model = AutoModelForMaskedLM.from_pretrained(rounded.parent)
        assert model.dtype == torch.float32
        name, parameter = next(iter(model.named_parameters()))
        assert torch.equal(parameter, stored[name].float())

    def test_the_released_folder_holds_them_as_they_were_rounded(self, finished, tmp_path):
        rounded = round_to_bf16(finished / "mae-lm" / "final", tmp_path / "rounded")
        folder = publish_into(tmp_path / "cards", "tiny", rounded.parent, license="mit")
        released, expected = load_file(folder / "model.safetensors"), load_file(rounded)
        assert released.keys() == expected.keys()
        assert all(torch.equal(released[name], tensor) for name, tensor in expected.items())
        model = AutoModel.from_pretrained(folder)
        assert (model.dtype, json.loads((folder / "config.json").read_text())["dtype"]) == (torch.float32, "float32")
        card = (folder / "README.md").read_text()
        assert 'AutoModel.from_pretrained("cards/tiny", trust_remote_code=True)' in card

    def test_loss_of_a_sample_text(self, finished, tmp_path):
        text = tmp_path / "sample.txt"
        text.write_text("the encoder sees real tokens\nwhile a shallow decoder predicts those hidden behind masks\n")
        found = sample_loss(finished / "mae-lm" / "final", text)
        assert found == sample_loss(str(finished / "mae-lm" / "final"), text)
        tokenizer = AutoTokenizer.from_pretrained(finished / "mae-lm" / "final")
        lengths = [len(tokenizer(line)["input_ids"]) - 2 for line in text.read_text().splitlines()]
        assert (
            sum(0.15 * length - 1 for length in lengths)
            < found["hidden_tokens"]
            < sum(0.15 * length + 1 for length in lengths)
        )
        assert 0 < found["loss"] < 2 * np.log(len(tokenizer))
        many = loss_on(finished / "mae-lm" / "final", 70 * text.read_text().splitlines())  # in three batches
        assert many == {
            key: pytest.approx(value * (70 if key == "hidden_tokens" else 1)) for key, value in found.items()
        }

    def test_the_likeliest_words(self, finished):
        model = AutoModelForMaskedLM.from_pretrained(finished / "mae-lm" / "final").eval()
        tokenizer = AutoTokenizer.from_pretrained(finished / "mae-lm" / "final")
        found = fill_mask(finished / "mae-lm" / "final")
        assert [entry["text"] for entry in found] == list(FILL_MASK)
        for entry in found:
            ids = tokenizer(entry["text"].replace("[MASK]", tokenizer.mask_token), return_tensors="pt")
            with torch.inference_mode():
                logits = model(**ids).logits[ids["input_ids"] == tokenizer.mask_token_id]
            (best,) = logits.topk(5).indices.tolist()
            assert entry["words"] == [tokenizer.decode([index]).strip() for index in best]
