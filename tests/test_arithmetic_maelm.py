"""The model file's own dropout and cross-entropy, against PyTorch's and against counts."""

import pytest
import torch
import torch.nn.functional as F

from maelm_hf import MaeLmConfig, MaeLmForMaskedLM
from maelm_hf.modeling_maelm import MaeLmDropout, cross_entropy, rows_of_a_chunk

CLASSES = 40_000  # a chunk has 13 rows of them


def logits_and_labels(dtype: torch.dtype, rows: int = 30) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = (6 * torch.randn(rows, CLASSES, generator=generator)).to(dtype).requires_grad_()
    labels = torch.randint(CLASSES, (rows,), generator=generator)
    labels[::4] = -100
    return logits, labels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("divisor", [None, 7])
def test_cross_entropy_over_several_chunks_is_pytorchs(dtype, divisor):
    logits, labels = logits_and_labels(dtype)
    assert logits.shape[0] > 2 * rows_of_a_chunk(logits)
    loss = cross_entropy(logits, labels, divisor)
    loss.backward()

    expected_logits = logits.detach().float().requires_grad_()
    expected = F.cross_entropy(expected_logits, labels, reduction="sum") / (divisor or (labels != -100).sum())
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    assert loss.dtype == torch.float32
    assert logits.grad.dtype == dtype
    # What is left is the rounding of each element to the logits' type.
    torch.testing.assert_close(
        logits.grad.float(), expected_logits.grad, rtol=torch.finfo(dtype).eps + 1e-4, atol=torch.finfo(dtype).tiny
    )
    assert (logits.grad[::4] == 0).all()


def test_cross_entropy_of_certain_and_impossible_labels_is_finite():
    logits = torch.zeros(2, 5).index_fill_(1, torch.tensor([0]), 1000.0).requires_grad_()
    loss = cross_entropy(logits, torch.tensor([0, 3]), None)
    loss.backward()
    assert loss.item() == pytest.approx(500.0)
    assert torch.isfinite(logits.grad).all()


def test_cross_entropy_without_labels_is_zero_with_zero_gradient():
    logits, labels = logits_and_labels(torch.bfloat16, rows=3)
    loss = cross_entropy(logits, torch.full_like(labels, -100), None)
    loss.backward()
    assert loss.item() == 0
    assert not logits.grad.any()


@pytest.mark.parametrize("label", [-1, -101, 5])
def test_cross_entropy_refuses_labels_out_of_bounds_as_pytorch_does(label):
    logits, labels = torch.randn(3, 5), torch.tensor([2, label, -100])
    with pytest.raises(IndexError, match=f"Target {label} is out of bounds"):
        F.cross_entropy(logits, labels)
    with pytest.raises(RuntimeError, match=f"index {label} is out of bounds"):
        cross_entropy(logits, labels, None)


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_dropout_in_bf16_drops_that_share_and_keeps_the_mean(probability):
    torch.manual_seed(0)
    count = 1_000_003  # not a multiple of what one draw covers
    values = torch.ones(count, dtype=torch.bfloat16, requires_grad=True)
    output = MaeLmDropout(probability)(values)
    output.float().sum().backward()

    standard_error = (probability * (1 - probability) / count) ** 0.5
    assert (output == 0).float().mean().item() == pytest.approx(probability, abs=5 * standard_error + 2**-16)
    kept = output[output != 0]
    assert kept.unique().numel() == 1
    assert kept[0].item() == pytest.approx(1 / (1 - probability), rel=2**-8)
    torch.testing.assert_close(values.grad, output.detach(), rtol=0, atol=0)  # the same elements, the same scale


def test_dropout_in_bf16_is_that_of_its_seed_and_independent_of_place():
    def draw(seed):
        torch.manual_seed(seed)
        return MaeLmDropout(0.5)(torch.ones(64, 4096, dtype=torch.bfloat16)) != 0

    assert torch.equal(draw(0), draw(0))
    assert not torch.equal(draw(0), draw(1))
    kept = draw(2).float()
    correlations = torch.corrcoef(kept) - torch.eye(64)  # of rows; 1 / sqrt(4096) = .016 by chance
    assert correlations.abs().max() < 5 / 4096**0.5
    neighbours = torch.corrcoef(torch.stack([kept[:, :-1].flatten(), kept[:, 1:].flatten()]))[0, 1]
    assert neighbours.abs() < 5 / kept.numel() ** 0.5


def test_dropout_leaves_evaluation_and_probability_zero_alone():
    values = torch.randn(10, 10).bfloat16()
    assert MaeLmDropout(0.5).eval()(values) is values
    assert MaeLmDropout(0.0)(values) is values


def test_dropout_of_values_that_are_not_contiguous():
    torch.manual_seed(0)
    values = torch.randn(32, 48).bfloat16().t()
    output = MaeLmDropout(0.5)(values)
    kept = output != 0
    torch.testing.assert_close(output[kept], (2 * values)[kept], rtol=0, atol=0)
    assert 0.4 < kept.float().mean() < 0.6


def test_under_autocast_on_a_cpu_hidden_states_are_bf16_and_close_to_fp32():
    torch.manual_seed(0)
    config = MaeLmConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=64,
        relative_position_buckets=8,
        relative_position_max_distance=16,
        decoder_num_hidden_layers=2,
        mask_token_id=4,
    )
    model = MaeLmForMaskedLM(config).eval()
    ids = torch.randint(5, 50, (3, 12))
    ids[:, ::5] = 4
    expected = model(input_ids=ids, output_hidden_states=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(input_ids=ids, output_hidden_states=True)
    assert {state.dtype for state in output.hidden_states} == {torch.bfloat16}
    for state, reference in zip(output.hidden_states, expected.hidden_states, strict=True):
        error = (state.float() - reference).norm() / reference.norm()
        assert error < 0.02, error
