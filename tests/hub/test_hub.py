# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Push and load against a loopback Hub (hub_server.py): what arrives is what was sent, and failures are in words."""

import json

import pytest
import torch
from hub_helpers import TEXT, padded_batch, tiny_model
from hub_server import HubServer, User
from safetensors.torch import load_file, save_file

from maelm_hf import MaeLmForSequenceClassification

# Made up; of no service.
TOKEN = "hf_" + "Q7w" * 11
OTHER, READER = "hf_" + "Z9x" * 11, "hf_" + "R4t" * 11


@pytest.fixture(scope="module")
def hub():
    users = {
        TOKEN: User("me", ("org",)),
        OTHER: User("somebody"),
        READER: User("reader", ("org",), may_write=False),
    }
    with HubServer(users) as server:
        yield server


def online(hub: HubServer, **more: str) -> dict[str, str]:
    return {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0", **more}


# Runs the steps it is given, in order; a step is [name, function, arguments, options, faults of the server].
PUSH = """
import json, logging, os, sys, urllib.request
logging.basicConfig(level=logging.DEBUG)
import transformers
from transformers import AutoModelForMaskedLM, AutoTokenizer, Trainer, TrainingArguments
import maelm_hf
from maelm_hf.hub import publish, push
from pathlib import Path

push.FIRST_WAIT = 0.01
steps, results = json.loads(sys.argv[1]), {}

def push_folder(folder, repo_id, **options):
    return push.push_folder(Path(folder), repo_id, commit_message="Upload", **options).commit_url

def plain(folder, repo_id, token):
    AutoModelForMaskedLM.from_pretrained(folder).push_to_hub(repo_id, token=token)
    AutoTokenizer.from_pretrained(folder).push_to_hub(repo_id, token=token)

def trainer(folder, repo_id, token, out):
    # By the environment: transformers writes a hub_token= into training_args.bin, and uploads it.
    os.environ["HF_TOKEN"] = token
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    arguments = TrainingArguments(out, hub_model_id=repo_id, report_to=[], use_cpu=True)
    Trainer(model, arguments, processing_class=AutoTokenizer.from_pretrained(folder)).push_to_hub()
    del os.environ["HF_TOKEN"]

functions = {"publish": publish, "push_folder": push_folder, "plain": plain, "trainer": trainer}
for name, function, arguments, options, faults in steps:
    request = urllib.request.Request(os.environ["HF_ENDPOINT"] + "/__faults__", json.dumps(faults).encode())
    urllib.request.urlopen(request)
    try:
        results[name] = functions[function](*arguments, **options)
    except Exception as error:
        results[name] = f"{type(error).__name__}: {error}"
print(json.dumps(results))
"""

LOAD = """
import json, sys
import torch
from huggingface_hub import HfApi
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer
jobs, batch_file, out_file = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3]
batch, states, notes = load_file(batch_file), {}, {}
for name, repo_id, options in jobs:
    try:
        model = AutoModel.from_pretrained(repo_id, trust_remote_code=True, **options).eval()
    except OSError as error:
        notes[name] = str(error).splitlines()[0]
        continue
    with torch.no_grad():
        states[name] = model(**batch).last_hidden_state
    notes[name] = type(model).__name__
if len(sys.argv) > 4:
    repo_id, token = sys.argv[4:]
    tokenizer = AutoTokenizer.from_pretrained(repo_id, trust_remote_code=True, token=token)
    notes["ids"] = tokenizer("we publish the weights")["input_ids"]
    notes["parameters"] = HfApi().get_safetensors_metadata(repo_id, token=token).parameter_count
save_file(states, out_file)
print(json.dumps(notes))
"""


def test_push_and_load(hub, tokenizer, run_python, tmp_path):
    """One process pushes (so that the package is imported once), one loads, one loads again without network."""
    model, step_0 = tiny_model(seed=0), tiny_model(seed=1)
    classifier = tiny_model(MaeLmForSequenceClassification, seed=2)
    for name, saved in {"model": model, "step_0": step_0, "classifier": classifier}.items():
        saved.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    model.save_pretrained(tmp_path / "shards", max_shard_size="60KB")
    assert len(list((tmp_path / "shards").glob("model-*-of-*.safetensors"))) > 1
    (tmp_path / "unsent").mkdir()
    save_file({"weight": torch.randn(8)}, tmp_path / "unsent" / "model.safetensors")
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "notes.md").write_text("text")

    here = {name: str(tmp_path / name) for name in ("model", "step_0", "classifier", "shards", "small", "unsent")}
    commit, create = "/commit/", "/api/repos/create"
    plan = [
        # name, function, arguments, options, faults
        ("published", "publish", [here["model"], "org/tiny.v1-base"], {"private": True, "token": TOKEN}, []),
        ("branch", "push_folder", [here["step_0"], "org/tiny.v1-base"], {"token": TOKEN, "revision": "step-0"}, []),
        ("plain", "plain", [here["model"], "org/plain", TOKEN], {}, []),
        ("trainer", "trainer", [here["classifier"], "me/trained", TOKEN, str(tmp_path / "run")], {}, []),
        ("shards", "push_folder", [here["shards"], "org/sharded"], {"token": TOKEN}, []),
        ("one file", "push_folder", [here["model"], "org/sharded"], {"token": TOKEN}, []),
        ("same again", "push_folder", [here["model"], "org/sharded"], {"token": TOKEN}, []),
        (
            "busy",
            "push_folder",
            [here["small"], "org/busy"],
            {"token": TOKEN},
            [
                {"method": "POST", "path": create, "status": 500},
                {"method": "POST", "path": commit, "status": 429, "times": 2, "headers": {"Retry-After": "1"}},
            ],
        ),
        (
            "down",
            "push_folder",
            [here["small"], "org/down"],
            {"token": TOKEN},
            [{"method": "POST", "path": commit, "status": 500, "times": 99}],
        ),
        (
            "storage",
            "push_folder",
            [here["unsent"], "org/storage"],
            {"token": TOKEN},
            [{"method": "PUT", "path": "/__lfs__/", "status": 400}],
        ),
        ("taken", "push_folder", [here["small"], "org/busy"], {"token": TOKEN, "exist_ok": False}, []),
        ("no rights", "push_folder", [here["small"], "org/busy"], {"token": OTHER}, []),
        ("reader", "push_folder", [here["small"], "org/new"], {"token": READER}, []),
        ("wrong token", "push_folder", [here["small"], "org/new"], {"token": "hf_" + "0" * 34}, []),
        ("no token", "publish", [here["model"], "org/new"], {}, []),
    ]
    stdout, stderr = run_python.output(PUSH, json.dumps(plan), package=True, **online(hub))
    results = json.loads(stdout.strip().splitlines()[-1])

    assert hub.errors == []

    # One commit each, and what was there is there.
    repo = hub.repos["org/tiny.v1-base"]
    assert results["published"] == f"{hub.url}/org/tiny.v1-base/commit/{repo.branches['main']}"
    assert repo.private
    assert repo.messages == ["initial commit", "Upload tiny.v1-base", "Upload"]
    assert {"README.md", "modeling_maelm.py", "model.safetensors"} <= set(repo.commits[repo.branches["main"]])
    sharded = hub.repos["org/sharded"]
    weights = [path for path in sharded.commits[sharded.branches["main"]] if "safetensors" in path]
    assert weights == ["model.safetensors"]
    assert sharded.messages == ["initial commit", "Upload", "Upload"]
    # Failures that pass, and those that do not, each in one line that says why.
    assert results["busy"].startswith(f"{hub.url}/org/busy/commit/")
    for name, words in {
        "down": "could not upload the folder to org/down: the Hub answered 500, 5 times; what was uploaded is kept",
        "storage": "could not upload the folder to org/storage: the Hub answered 400",
        "taken": "could not create the repository org/busy: the name is taken (409)",
        "no rights": "the token has no right to write there (403)",
        "reader": "could not create the repository org/new: the token has no right to write there (403)",
        "wrong token": "the Hub does not accept the token (401)",
        "no token": "no token for the Hub",
    }.items():
        assert results[name].startswith("PublishError: "), results[name]
        assert words in results[name]
        assert "\n" not in results[name]
    assert "org/new" not in hub.repos
    # No token in any output, with all logging on, nor in what was pushed.
    for token in (TOKEN, OTHER, READER):
        assert token not in stdout + stderr
        assert not any(token.encode() in blob for blob in hub.blobs.values())

    # --- loading, without the package ---------------------------------------------------------------------------------
    batch = padded_batch()
    save_file(batch, tmp_path / "batch.safetensors")
    with torch.no_grad():
        expected = {
            name: encoder(**batch).last_hidden_state
            for name, encoder in {
                "published": model.encoder,
                "branch": step_0.encoder,
                "plain": model.encoder,
                "trainer": classifier.encoder,
                "sharded": model.encoder,
            }.items()
        }
    jobs = [
        ("published", "org/tiny.v1-base", {"token": TOKEN}),
        ("branch", "org/tiny.v1-base", {"token": TOKEN, "revision": "step-0"}),
        ("plain", "org/plain", {}),
        ("trainer", "me/trained", {}),
        ("sharded", "org/sharded", {}),
        ("private without token", "org/tiny.v1-base", {"token": False, "cache_dir": str(tmp_path / "empty")}),
        ("private of others", "org/tiny.v1-base", {"token": OTHER, "cache_dir": str(tmp_path / "empty")}),
    ]
    files = str(tmp_path / "batch.safetensors"), str(tmp_path / "states.safetensors")
    notes = run_python(LOAD, json.dumps(jobs), *files, "org/tiny.v1-base", TOKEN, **online(hub))
    states = load_file(files[1])
    assert set(states) == set(expected)
    for name, value in expected.items():
        assert (states[name] - value)[batch["attention_mask"].bool()].abs().max() < 1e-5, name
    for name in ("private without token", "private of others"):
        assert "is not a local folder and is not a valid model identifier" in notes[name]
    assert notes["ids"] == tokenizer(TEXT[2][: len("we publish the weights")])["input_ids"]
    assert notes["parameters"] == {"F32": sum(parameter.numel() for parameter in model.parameters())}
    assert any("range" in headers for method, path, headers in hub.requests if method == "GET")
    for _, path, headers in hub.requests:  # the storage of large files never sees a token
        assert not ("/__lfs__/" in path and "authorization" in headers)

    asked = len(hub.requests)
    offline = online(hub, HF_HUB_OFFLINE="1")
    again = run_python(LOAD, json.dumps(jobs[:2]), *files, **offline)
    assert again == {"published": "MaeLmModel", "branch": "MaeLmModel"}
    assert (load_file(files[1])["branch"] - states["branch"]).abs().max() == 0
    assert len(hub.requests) == asked


def test_a_killed_upload_goes_on_where_it_was(hub, run_python, tmp_path):
    """One of two weight files arrives, the process is killed during the other; the next run sends that one alone."""
    folder = tmp_path / "shards"
    folder.mkdir()
    for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        save_file({"weight": torch.randn(1000)}, folder / name)
    (folder / "README.md").write_text("# Two shards\n")
    plan = json.dumps([("push", "push_folder", [str(folder), "org/killed"], {"token": TOKEN}, [])])

    hub.hanging.clear()
    hang = [{"method": "PUT", "path": "/__lfs__/", "skip": 1}]
    first = json.dumps([("push", "push_folder", [str(folder), "org/killed"], {"token": TOKEN}, hang)])
    process = run_python.start(PUSH, first, package=True, **online(hub))
    try:
        assert hub.hanging.wait(timeout=120)
    finally:
        process.kill()
        process.communicate()
    uploaded = [path for method, path, _ in hub.requests if method == "PUT"]
    assert hub.repos["org/killed"].messages == ["initial commit"]

    result = run_python(PUSH, plan, package=True, **online(hub))["push"]
    assert result.startswith(f"{hub.url}/org/killed/commit/")
    assert len([path for method, path, _ in hub.requests if method == "PUT"]) == len(uploaded) + 1
    assert hub.repos["org/killed"].messages == ["initial commit", "Upload"]
    files = hub.repos["org/killed"].commits[hub.repos["org/killed"].branches["main"]]
    for path in folder.iterdir():
        assert hub.blobs[files[path.name][1]] == path.read_bytes()
