"""A step of `plantvillage-czsl-trained` (ResNet-50 at 128 px, 128 images) in the loop of `batchformer fit` and bare.

    python -m benchmarks.zero_shot_step --data-root DIR [--only cge cge+batchformer] [--seconds 5] [--out DIR]

`ms` is with loader, augmentation on the device and logging, `bare_ms` the replay of the CUDA graph, `of_bare` their
ratio: see `loop_rate.py` and `_busy.py`. The weights are random, which changes no time.
"""

from __future__ import annotations

from benchmarks.domains_step import main
from benchmarks.zero_shot_study import STUDIES

RECIPE = "plantvillage-czsl-trained"
SHOWN = ["visual-product", "compcos+batchformer", "cge", "cge+batchformer"]

if __name__ == "__main__":
    raise SystemExit(main("zero_shot_step", __doc__, RECIPE, STUDIES[RECIPE].variants, SHOWN))
