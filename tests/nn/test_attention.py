"""The fast batch attention against its definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchformer.nn import attention, batch_attention, reference_batch_attention


@settings(max_examples=40, deadline=None)
@given(
    batch=st.integers(1, 9),
    positions=st.integers(1, 4),
    heads=st.integers(1, 3),
    width=st.integers(1, 5),
    group=st.one_of(st.none(), st.integers(1, 12)),
    masked=st.booleans(),
    seed=st.integers(0, 99),
)
def test_outputs_and_gradients_agree_with_the_reference(
    batch: int, positions: int, heads: int, width: int, group: int | None, masked: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, positions, heads, width)
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) * 3 for _ in range(4)]
    valid = torch.rand(batch, positions, generator=generator) < 0.6 if masked else None
    weight, results = tensors.pop(), []
    for function in (batch_attention, reference_batch_attention):
        q, k, v = (t.clone().requires_grad_() for t in tensors)
        out = function(q, k, v, group_size=group, valid=valid)
        results.append((out, *torch.autograd.grad((out * weight).sum(), (q, k, v))))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-10)


def test_more_sequences_than_one_fused_call_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = torch.randn(3, 4, 7, 2, 3)
    expected = reference_batch_attention(q, k, v)
    monkeypatch.setattr(attention, "_SEQUENCES_PER_CALL", 6)
    torch.testing.assert_close(batch_attention(q, k, v), expected)
