"""Run the kernel of resized crops by Triton's interpreter, against the tensor operations; prints what agrees."""

import torch

from batchformer.data.augment import resample
from batchformer.data.augment.resample_kernel import resample_in_one_launch

draw = torch.Generator().manual_seed(0)
for rows, columns, size in ((32, 32, 224), (20, 28, 33), (9, 16, 70), (64, 64, 40)):
    images = torch.randint(256, (3, 3, rows, columns), generator=draw, dtype=torch.uint8)
    height, width = (torch.randint(2, length + 1, (3,), generator=draw) for length in (rows, columns))
    mirror = torch.tensor([True, False, True])
    across = resample._weights((columns - width) // 2, width, size, columns, mirror)
    down = resample._weights(rows - height, height, size, rows)
    for count in (3, 1):  # a region for every image, one for all
        weights = across[:, :count], down[:, :count]
        assert resample_in_one_launch(images, *weights).equal(resample._resample(images, *weights))
    print(f"{rows}x{columns} to {size}")
