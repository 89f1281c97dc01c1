"""Mixing methods: `mixed = mix(images, targets)`, then `loss(model(mixed.images), mixed.targets())`."""

from batchformer.mix.attentive_cutmix import AttentiveCutMix, feature_map
from batchformer.mix.base import Draw, Mix, Mixed
from batchformer.mix.class_attention_readers import close
from batchformer.mix.mixup_cutmix import CutMix, MixSwitch, Mixup
from batchformer.mix.normalisation import Renormalize
from batchformer.mix.puzzle_mix import PuzzleMix
from batchformer.mix.saliency_mix import SaliencyMix, fine_grained_saliency
from batchformer.mix.transmix import TransMix

__all__ = ["AttentiveCutMix", "CutMix", "Draw", "Mix", "MixSwitch", "Mixed", "Mixup", "PuzzleMix", "Renormalize",
           "SaliencyMix", "TransMix", "close", "feature_map", "fine_grained_saliency"]  # fmt: skip
