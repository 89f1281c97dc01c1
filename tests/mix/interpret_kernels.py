"""Run the kernels of this room by Triton's interpreter, against the tensor operations; prints the sizes that agree."""

import torch

from batchformer.mix import graph_cut, saliency_mix
from batchformer.mix.triton_kernels import centre_surround_in_one_launch, cut_grid_in_one_launch

draw = torch.Generator().manual_seed(0)
for height, width in ((4, 4), (3, 5), (1, 6), (8, 8)):
    gain = torch.randint(-100, 101, (2, height, width), generator=draw, dtype=torch.int32)
    right = torch.randint(60, (2, height, width - 1), generator=draw, dtype=torch.int32)
    down = torch.randint(60, (2, height - 1, width), generator=draw, dtype=torch.int32)
    room = graph_cut._edges(right, down).permute(2, 0, 1).contiguous()
    cells, unfinished = cut_grid_in_one_launch(gain.flatten(1), room, width)
    assert unfinished.eq(0).all()
    assert cells.view_as(gain).equal(graph_cut.cut_grid(gain, right, down))
    print(f"cut {height}x{width}")

for height, width in ((40, 33), (9, 70)):
    grey = torch.randint(256, (2, height, width), generator=draw).float()
    integral = torch.nn.functional.pad(
        grey.int().cumsum(1, dtype=torch.int32).cumsum(2, dtype=torch.int32), (1, 0, 1, 0)
    )
    for fast, slow in zip(
        centre_surround_in_one_launch(grey, integral.contiguous(), saliency_mix.SURROUNDS),
        saliency_mix._centre_surround(grey),
        strict=True,
    ):
        assert fast.equal(slow)
    print(f"saliency {height}x{width}")
