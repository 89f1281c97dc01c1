"""Run the graph cut's kernel by Triton's interpreter, against the tensor operations; prints the grids that agree."""

import torch

from batchformer.mix import grid_cut
from batchformer.mix.grid_cut_kernel import cut_grid_in_one_launch

for height, width in ((4, 4), (3, 5), (1, 6), (8, 8)):
    draw = torch.Generator().manual_seed(height)
    gain = torch.randint(-100, 101, (2, height, width), generator=draw, dtype=torch.int32)
    right = torch.randint(60, (2, height, width - 1), generator=draw, dtype=torch.int32)
    down = torch.randint(60, (2, height - 1, width), generator=draw, dtype=torch.int32)
    room = grid_cut._edges(right, down).permute(2, 0, 1).contiguous()
    cells, unfinished = cut_grid_in_one_launch(gain.flatten(1), room, width)
    assert unfinished.eq(0).all()
    assert cells.view_as(gain).equal(grid_cut.cut_grid(gain, right, down))
    print(f"{height}x{width}")
