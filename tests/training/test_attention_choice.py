# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""The attention kernel is chosen by a measurement that is like the training it is for, and that leaves no trace."""

import pytest
import torch

from maelm_hf import MaeLmConfig, MaeLmForMaskedLM
from training.attention_choice import CANDIDATES, REPEATS, choose_attention


@pytest.fixture
def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return MaeLmForMaskedLM(MaeLmConfig(vocab_size=20, mask_token_id=4, decoder_num_hidden_layers=1, **sizes)).eval()


BATCH = {"input_ids": torch.tensor([[0, 4, 7, 2]]), "labels": torch.tensor([[-100, 9, -100, -100]])}


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_kernels_are_timed_in_the_precision_of_training(model, precision, dtype):
    seen = []

    def look(module, args, output):
        seen.append((model.config._attn_implementation, output.dtype))

    model.encoder.layers[0].intermediate.register_forward_hook(look)
    chosen, reason = choose_attention(model, [BATCH], precision)
    assert chosen in CANDIDATES
    assert f"in {precision}" in reason
    assert [name for name, _ in seen] == list(CANDIDATES) * (1 + REPEATS)
    assert {kind for _, kind in seen} == {dtype}


def test_measuring_leaves_no_trace(model):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    choose_attention(model, [BATCH])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.training
    assert model.config._attn_implementation == "sdpa"
    assert all(parameter.grad is None for parameter in model.parameters())


def run_out_of_memory(model, kernels):
    def look(module, args):
        if model.config._attn_implementation in kernels:
            raise torch.OutOfMemoryError("CUDA out of memory")

    model.encoder.layers[0].register_forward_pre_hook(look)


def test_a_kernel_that_does_not_fit_into_memory_is_not_chosen(model):
    run_out_of_memory(model, ["eager"])
    chosen, reason = choose_attention(model, [BATCH])
    assert chosen == "sdpa"
    assert "eager out of memory" in reason
    assert all(parameter.grad is None for parameter in model.parameters())


def test_where_no_kernel_fits_the_error_says_what_to_do(model):
    run_out_of_memory(model, CANDIDATES)
    with pytest.raises(torch.OutOfMemoryError, match="make the micro-batch smaller"):
        choose_attention(model, [BATCH])
