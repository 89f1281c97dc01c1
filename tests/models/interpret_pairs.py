"""Run the kernels of pairs by Triton's interpreter, against their definitions; prints the sizes that agree."""

import torch

from batchformer.models.pair_kernels import gated_sums, relu_sums

draw = torch.Generator().manual_seed(0)
for rows, classes, dim in ((9, 5, 6), (70, 66, 200), (3, 150, 130)):
    u, v, w, given = (torch.randn(s, generator=draw) for s in ((rows, dim), (classes, dim), (dim,), (rows, classes)))
    pairs = u[:, None] + v
    torch.testing.assert_close(relu_sums(u, v, w), (pairs.relu() * w).sum(2))
    passed = (pairs > 0) * given[..., None]
    torch.testing.assert_close(gated_sums(u, v, given.T), passed.sum(1))
    torch.testing.assert_close(gated_sums(v, u, given), passed.sum(0))
    print(rows, classes, dim)
