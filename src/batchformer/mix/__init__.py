"""Mixing methods: `mixed = mix(images, targets)`, then `loss(model(mixed.images), mixed.targets())`."""

from batchformer.mix.attentive_cutmix import AttentiveCutMix
from batchformer.mix.base import Draw, Mix
from batchformer.mix.class_attention_record import close
from batchformer.mix.cutmix import CutMix
from batchformer.mix.feature_maps import feature_map
from batchformer.mix.mixed import Mixed
from batchformer.mix.mixup import Mixup
from batchformer.mix.normalisation import Renormalize
from batchformer.mix.puzzle_mix import PuzzleMix
from batchformer.mix.saliency import fine_grained_saliency
from batchformer.mix.saliency_mix import SaliencyMix
from batchformer.mix.switch import MixSwitch
from batchformer.mix.transmix import TransMix

__all__ = [
    "AttentiveCutMix",
    "CutMix",
    "Draw",
    "Mix",
    "MixSwitch",
    "Mixed",
    "Mixup",
    "PuzzleMix",
    "Renormalize",
    "SaliencyMix",
    "TransMix",
    "close",
    "feature_map",
    "fine_grained_saliency",
]
