# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""A published folder loads in a process that does not know this package, whatever it was made from."""

import json
import logging
import shutil

import pytest
import torch
from hub_helpers import TEXT, padded_batch, tiny_model
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer, Trainer, TrainingArguments
from typer.testing import CliRunner

from maelm_hf import (
    MaeLmForMaskedLM,
    MaeLmForSequenceClassification,
    MaeLmForTokenClassification,
    MaeLmModel,
)
from maelm_hf.cli import app
from maelm_hf.configuration_maelm import AUTO_MAP
from maelm_hf.hub import export_native, publish, publish_steps
from maelm_hf.hub.publish import build_folder, check_loads_elsewhere

HEADS = [name for name in AUTO_MAP if name.startswith("AutoModel")]

# Loads every folder of a list with every head named for it, and writes the encoder's states for the same batch.
LOAD = """
import json, sys
import torch, transformers
from safetensors.torch import load_file, save_file
jobs, batch_file, out_file = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3]
batch, states, loaded = load_file(batch_file), {}, {}
for job in jobs:
    where = {"trust_remote_code": True} if job["code"] else {}
    where |= {"subfolder": job["subfolder"]} if job.get("subfolder") else {}
    for head in job["heads"]:
        model = getattr(transformers, head).from_pretrained(job["folder"], **where).eval()
        loaded.setdefault(job["name"], {})[head] = type(model).__module__.split(".")[0] + ":" + type(model).__name__
        if head == "AutoModel":
            with torch.no_grad():
                states[job["name"]] = model(**batch).last_hidden_state
    if job.get("tokenizer"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(job["folder"], **where)
        loaded[job["name"]]["ids"] = tokenizer(job["tokenizer"])["input_ids"]
try:  # without leave
    transformers.AutoModel.from_pretrained(jobs[0]["folder"], trust_remote_code=False)
except ValueError as error:
    loaded["without leave"] = str(error)
save_file(states, out_file)
print(json.dumps(loaded))
"""


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def published(model, tokenizer, tmp_path_factory):
    """A dry run, in a folder whose name no Python module could have."""
    folder = tmp_path_factory.mktemp("published") / "v1.0 - a model.of-ours"
    assert publish(model, "org/mae-lm-tiny", tokenizer=tokenizer, dry_run=folder) == str(folder)
    return folder


def test_the_folder_holds_weights_code_the_whole_map_tokenizer_and_card(published):
    files = {path.relative_to(published).as_posix() for path in published.rglob("*") if path.is_file()}
    assert files == {
        "README.md",
        "config.json",
        "configuration_maelm.py",
        "model.safetensors",
        "modeling_maelm.py",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert json.loads((published / "config.json").read_text())["auto_map"] == AUTO_MAP


def test_with_the_package_it_loads_without_remote_code(published, model):
    batch = padded_batch()
    loaded = AutoModelForMaskedLM.from_pretrained(published)
    assert type(loaded) is MaeLmForMaskedLM
    with torch.no_grad():
        assert torch.equal(loaded(**batch).logits, model(**batch).logits)


def test_every_way_to_a_folder_loads_without_the_package(published, model, tokenizer, run_python, tmp_path):
    """publish, publish into a subfolder, plain save_pretrained of two heads, Trainer's save, and the stock export."""
    batch = padded_batch()
    save_file(batch, tmp_path / "batch.safetensors")
    jobs, expected = [], {}

    def job(name, folder, encoder, heads=("AutoModel",), code=True, **more):
        jobs.append({"name": name, "folder": str(folder), "heads": list(heads), "code": code} | more)
        with torch.no_grad():
            expected[name] = encoder(**batch).last_hidden_state

    job("published", published, model.encoder, HEADS, tokenizer=TEXT)
    build_folder(model, "org/tiny", tmp_path / "below", tokenizer=tokenizer, subfolder="large v2")
    job("subfolder", tmp_path / "below", model.encoder, ["AutoModel", "AutoModelForMaskedLM"], subfolder="large v2")

    for model_class in (MaeLmModel, MaeLmForTokenClassification):
        saved = tiny_model(model_class, seed=1)
        saved.save_pretrained(tmp_path / model_class.__name__)
        job(model_class.__name__, tmp_path / model_class.__name__, getattr(saved, "encoder", saved), HEADS)

    trained = tiny_model(MaeLmForSequenceClassification, seed=2)
    arguments = TrainingArguments(output_dir=str(tmp_path / "run"), report_to=[], use_cpu=True)
    Trainer(trained, arguments, processing_class=tokenizer).save_model(str(tmp_path / "trainer.out"))
    heads = ["AutoModel", "AutoModelForSequenceClassification", "AutoModelForMaskedLM"]
    job("trainer", tmp_path / "trainer.out", trained.encoder, heads, tokenizer=TEXT)

    stock = tiny_model(relative_position_buckets=0, seed=3)
    export_native(stock, tmp_path / "bert", tokenizer=tokenizer)
    job("stock", tmp_path / "bert", stock.encoder, ["AutoModel"], code=False, tokenizer=TEXT)

    out = tmp_path / "states.safetensors"
    loaded = run_python(LOAD, json.dumps(jobs), str(tmp_path / "batch.safetensors"), str(out))

    states, real = load_file(out), batch["attention_mask"].bool()
    for name, value in expected.items():
        assert (states[name] - value)[real].abs().max() < 1e-5, name
    for name in ("published", "MaeLmModel", "MaeLmForTokenClassification"):
        expected_classes = {head: f"transformers_modules:{AUTO_MAP[head].partition('.')[2]}" for head in HEADS}
        assert {head: loaded[name][head] for head in HEADS} == expected_classes
    assert loaded["stock"]["AutoModel"] == "transformers:BertModel"
    assert "contains custom code which must be executed" in loaded["without leave"]
    for name in ("published", "trainer", "stock"):
        assert loaded[name]["ids"] == tokenizer(TEXT)["input_ids"]


def test_a_folder_keeps_its_own_card_and_other_files_and_loses_foreign_code(model, tmp_path):
    model.save_pretrained(tmp_path / "ours")
    (tmp_path / "ours" / "README.md").write_text("# My own words\n")
    (tmp_path / "ours" / "samples").mkdir()
    (tmp_path / "ours" / "samples" / "a.txt").write_text("text")
    (tmp_path / "ours" / "modeling_maelm.py").write_text("raise RuntimeError('altered')\n")
    folder = tmp_path / "out"
    build_folder(tmp_path / "ours", "org/tiny", folder)
    assert (folder / "README.md").read_text() == "# My own words\n"
    assert (folder / "samples" / "a.txt").read_text() == "text"
    build_folder(tmp_path / "ours", "org/tiny", tmp_path / "licensed", license="mit")
    assert "license: mit" in (tmp_path / "licensed" / "README.md").read_text()
    assert "altered" not in (folder / "modeling_maelm.py").read_text()
    assert (tmp_path / "ours" / "modeling_maelm.py").read_text().startswith("raise")


def test_code_of_another_package_is_refused_and_not_run(tmp_path):
    export_native(tiny_model(relative_position_buckets=0), tmp_path / "other")
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    marker = tmp_path / "ran"
    (tmp_path / "other" / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModel": "code.Model"}}))
    (tmp_path / "other" / "code.py").write_text(f"open({str(marker)!r}, 'w')")
    with pytest.raises(ValueError, match=r"brings code of another package \(auto_map\)"):
        build_folder(tmp_path / "other", "org/tiny", tmp_path / "out")
    assert not marker.exists()


def test_an_export_is_published_as_stock_without_code(tmp_path):
    export_native(tiny_model(relative_position_buckets=0), tmp_path / "bert")
    folder = tmp_path / "out"
    build_folder(tmp_path / "bert", "org/tiny", folder)
    assert not list(folder.glob("*.py"))
    assert (folder / "model.safetensors").read_bytes() == (tmp_path / "bert" / "model.safetensors").read_bytes()
    assert "trust_remote_code" not in (folder / "README.md").read_text()


def write_run(run, tokenizer):
    """A run as training/pretrain.py leaves it: two checkpoints with the state to continue from, and no final model."""
    for step in (0, 20):
        checkpoint = run / "checkpoints" / f"step-{step:09d}"
        tiny_model(seed=step).save_pretrained(checkpoint)
        tokenizer.save_pretrained(checkpoint)
        save_file({"exp_avg": torch.zeros(2)}, checkpoint / "optimizer.safetensors")
        state = {"progress": {"step": step, "tokens": 640 * step, "seconds": 2.0 * step}}
        (checkpoint / "state.json").write_text(json.dumps(state))
        (checkpoint / "manifest.json").write_text("{}")
        (checkpoint / "recipe.yaml").write_text("seed: 3\ndata: {mask_ratio: 0.15}\n")
    rows = [{"step": 20, "loss": 5.25, "accuracy": 0.125}]
    (run / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def test_step_checkpoints_become_branches_step_0_included_without_training_state(tokenizer, tmp_path):
    run = write_run(tmp_path / "run", tokenizer)
    where = publish_steps(run, "org/tiny", dry_run=tmp_path / "out")
    assert where == {name: str(tmp_path / "out" / name) for name in ("step-0", "step-20")}
    for step in (0, 20):
        folder = tmp_path / "out" / f"step-{step}"
        names = {path.name for path in folder.iterdir()}
        assert not names & {"optimizer.safetensors", "state.json", "manifest.json", "recipe.yaml"}
        loaded = MaeLmForMaskedLM.from_pretrained(folder)
        for name, value in tiny_model(seed=step).state_dict().items():
            assert torch.equal(loaded.state_dict()[name], value)
    card = (tmp_path / "out" / "step-20" / "README.md").read_text()
    assert 'revision="step-20"' in card
    assert "| Held-out loss on hidden tokens (nats) | 5.25 |" in card
    assert "| Tokens | 12,800 |" in card
    assert "| Mask ratio | 0.15 |" in card


def test_the_finished_model_of_a_run_is_found_with_its_summary(model, tmp_path, caplog):
    model.save_pretrained(tmp_path / "run" / "final")
    (tmp_path / "run" / "summary.json").write_text(json.dumps({"steps": 4321, "corpus": "a corpus of ours"}))
    with caplog.at_level(logging.INFO, logger="maelm_hf"):
        build_folder(tmp_path / "run", "org/tiny", tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| Steps | 4,321 |" in card
    assert "a corpus of ours." in card
    assert "which lies beside the model" in caplog.text


def test_a_folder_that_does_not_load_elsewhere_is_refused(published, tmp_path):
    broken = shutil.copytree(published, tmp_path / "broken")
    code = (broken / "modeling_maelm.py").read_text()
    (broken / "modeling_maelm.py").write_text(code + "\nimport maelm_hf\n")
    with pytest.raises(ValueError, match=r"does not load in a process without maelm_hf: .*maelm_hf"):
        check_loads_elsewhere(broken)


def test_a_folder_that_computes_something_else_is_refused(published, tmp_path):
    altered = shutil.copytree(published, tmp_path / "altered")
    code = (altered / "modeling_maelm.py").read_text()
    assert code.count("self.scaling = self.head_size**-0.5") == 1
    (altered / "modeling_maelm.py").write_text(code.replace("self.head_size**-0.5", "self.head_size**-0.25"))
    with pytest.raises(ValueError, match="hidden states differ by"):
        check_loads_elsewhere(altered)


def test_arguments_that_do_not_fit_are_refused_before_anything_is_written(model, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(ValueError, match="Repo id"):
        publish(model, "a/b/c", dry_run=out)
    with pytest.raises(ValueError, match=r"subfolder='\.\./x' leaves the repository"):
        publish(model, "org/tiny", subfolder="../x", dry_run=out)
    with pytest.raises(TypeError, match="model_or_dir is a Linear"):
        publish(torch.nn.Linear(1, 1), "org/tiny", dry_run=out)
    with pytest.raises(FileNotFoundError, match="no such run"):
        publish(tmp_path / "no such run", "org/tiny", dry_run=out)
    with pytest.raises(FileNotFoundError, match=r"summary\.json"):
        publish(model, "org/tiny", training_summary=tmp_path, dry_run=out)
    assert not out.exists()
    out.mkdir()
    (out / "mine.txt").write_text("kept")
    with pytest.raises(FileExistsError, match="not an empty folder"):
        publish(model, "org/tiny", dry_run=out)
    assert [path.name for path in out.iterdir()] == ["mine.txt"]


def test_commands_publish_export_and_convert(tokenizer, tmp_path):
    stock = tiny_model(relative_position_buckets=0)
    stock.save_pretrained(tmp_path / "ours")
    tokenizer.save_pretrained(tmp_path / "ours")
    runner = CliRunner()
    done = runner.invoke(app, ["export", str(tmp_path / "ours"), str(tmp_path / "bert"), "--to", "bert"])
    assert done.exit_code == 0, done.output
    assert "model.safetensors" in done.output
    done = runner.invoke(app, ["publish", str(tmp_path / "bert"), "org/tiny", "--dry-run", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert "README.md" in done.output
    batch = padded_batch()
    with torch.no_grad():
        states = AutoModel.from_pretrained(tmp_path / "out")(**batch).last_hidden_state
        expected = stock.encoder(**batch).last_hidden_state
    assert (states - expected)[batch["attention_mask"].bool()].abs().max() < 1e-5
    assert AutoTokenizer.from_pretrained(tmp_path / "out")(TEXT)["input_ids"] == tokenizer(TEXT)["input_ids"]

    torch.save({"model": {}, "args": None}, tmp_path / "a.pt")
    done = runner.invoke(app, ["convert", str(tmp_path / "a.pt"), str(tmp_path / "converted")])
    assert isinstance(done.exception, ValueError)
    assert "a.pt" in str(done.exception)
