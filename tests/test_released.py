"""The released checkpoints, as they lie in `model_cards/`: each loads in every way its card promises, and computes the
loss that the card gives.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer, BertForMaskedLM, BertModel, pipeline

from maelm_hf import DataCollatorForMaeLm
from maelm_hf.hub import export_native
from training.study_measure import FILL_MASK

CARDS = Path(__file__).resolve().parents[1] / "model_cards"
RELEASED = [CARDS / name for name in ("mae-lm-mini", "mlm-mini")]
pytestmark = pytest.mark.parametrize("folder", RELEASED, ids=lambda path: path.name)
TOLERANCE = 1e-3  # nats, of the card's loss


def sample_batch(folder):
    """The lines of the sample and their masks, as the card's loss was measured."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    lines = [tokenizer(line) for line in (CARDS / "sample.txt").read_text("utf-8").splitlines()]
    batch = DataCollatorForMaeLm(tokenizer, 0.15, seed=0)(lines)
    return {name: batch[name] for name in ("input_ids", "attention_mask", "labels")}


def loss_on_the_card(folder):
    (found,) = re.findall(r"\| Loss on hidden tokens of model_cards/sample.txt \(nats\) \| ([\d.]+) \|", card(folder))
    return float(found)


def card(folder):
    return (folder / "README.md").read_text("utf-8")


def loss_of(logits, labels):
    """Cross-entropy by hand, in float64."""
    hidden = labels != -100
    log_probabilities = logits[hidden].double().log_softmax(-1)
    return -log_probabilities.gather(1, labels[hidden].unsqueeze(1)).mean().item()


def test_small_files_in_bf16(folder):
    weights = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert (folder / "model.safetensors").stat().st_size < 40e6


def test_with_the_package(folder):
    batch = sample_batch(folder)
    model = AutoModelForMaskedLM.from_pretrained(folder).eval()
    with torch.inference_mode():
        loss = loss_of(model(**batch).logits, batch["labels"])
    assert loss == pytest.approx(loss_on_the_card(folder), abs=TOLERANCE)


def test_with_the_code_of_its_folder_alone(folder, tmp_path):
    batch = sample_batch(folder)
    save_file({name: tensor.contiguous() for name, tensor in batch.items()}, tmp_path / "batch.safetensors")
    script = f"""
import sys
class MaelmIsMissing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "maelm_hf":
            raise ImportError
sys.meta_path.insert(0, MaelmIsMissing())
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMaskedLM
model = AutoModelForMaskedLM.from_pretrained({str(folder)!r}, trust_remote_code=True).eval()
with torch.inference_mode():
    logits = model(**load_file("batch.safetensors")).logits
save_file({{"logits": logits.contiguous()}}, "logits.safetensors")
"""
    environment = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "PATH": ""}
    subprocess.run([sys.executable, "-P", "-c", script], check=True, cwd=tmp_path, env=environment)
    logits = load_file(tmp_path / "logits.safetensors")["logits"]
    assert loss_of(logits, batch["labels"]) == pytest.approx(loss_on_the_card(folder), abs=TOLERANCE)


def test_as_stock_bert(folder, tmp_path):
    export_native(folder, tmp_path / "stock")
    batch = sample_batch(folder)
    clean = batch["input_ids"].where(batch["labels"] == -100, batch["labels"])
    inputs = {"input_ids": clean, "attention_mask": batch["attention_mask"]}
    ours, stock = AutoModel.from_pretrained(folder).eval(), AutoModel.from_pretrained(tmp_path / "stock").eval()
    assert type(stock) is BertModel
    real = inputs["attention_mask"].bool()
    with torch.inference_mode():
        torch.testing.assert_close(
            stock(**inputs).last_hidden_state[real], ours(**inputs).last_hidden_state[real], rtol=1e-4, atol=1e-4
        )
    if ours.config.encoder_mask_fraction == 1:  # the stock class has the head too
        model = BertForMaskedLM.from_pretrained(tmp_path / "stock").eval()
        masked = {name: batch[name] for name in ("input_ids", "attention_mask")}
        with torch.inference_mode():
            loss = loss_of(model(**masked).logits, batch["labels"])
        assert loss == pytest.approx(loss_on_the_card(folder), abs=TOLERANCE)


def test_the_card_says_whether_sensible_words_for_a_mask_are_among_the_five_likeliest(folder):
    fill = pipeline("fill-mask", model=str(folder), top_k=5, device="cpu")
    found = []
    for sentence, sensible in FILL_MASK.items():
        text = sentence.replace("[MASK]", fill.tokenizer.mask_token)
        words = [guess["token_str"].strip() for guess in fill(text)]
        found.append(bool(set(words) & set(sensible)))
        quoted, expected = (", ".join(f"`{word}`" for word in listed) for listed in (words, sensible))
        among = "among them" if found[-1] else "none of them"
        assert f"| `{text}` | {quoted} | {expected}: {among} |" in card(folder)
    assert sum(found) >= 2  # of three easy sentences
