"""Mixing methods: `mixed = mix(images, targets)`, then `loss(model(mixed.images), mixed.targets())`."""

from batchformer.mix.base import Draw, Mix
from batchformer.mix.cutmix import CutMix
from batchformer.mix.mixed import Mixed
from batchformer.mix.mixup import Mixup

__all__ = ["CutMix", "Draw", "Mix", "Mixed", "Mixup"]
