"""Mixing methods: `mixed = mix(images, targets)`, then `loss(model(mixed.images), mixed.targets())`."""

from batchformer.mix.base import Draw, Mix
from batchformer.mix.cutmix import CutMix
from batchformer.mix.mixed import Mixed
from batchformer.mix.mixup import Mixup
from batchformer.mix.switch import MixSwitch
from batchformer.mix.transmix import TransMix

__all__ = ["CutMix", "Draw", "Mix", "MixSwitch", "Mixed", "Mixup", "TransMix"]
