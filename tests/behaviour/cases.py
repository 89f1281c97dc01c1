"""Every model the promises are tested on: how to build it, and what it takes.

The tables of supported models in the docs are written from here (benchmarks/models_table.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import batchformer as bf

from ..selection import others_slow

CLASSES = 7


@dataclass(frozen=True)
class Case:
    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]  # of one input
    kind: str  # what the table of models groups it by
    places: tuple[tuple[str, Any], ...] = ()  # what attach is told; nothing: before the classifier it finds
    words: int = 0  # how many token ids there are, of a model that takes text
    needs_example: bool = False  # of inputs that no dry run can guess

    def attach(self, model: nn.Module, **keywords: Any) -> bf.Attachment:
        example = {"example_inputs": self.images(2)} if self.needs_example else {}
        return bf.attach(model, **dict(self.places), **example, **keywords)

    def model(self) -> nn.Module:
        """The same weights each time, so that a model and its twin agree."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = self.build()
            # some classifiers and branches start at (almost) zero, which would hide what reaches them
            for module in model.modules():
                if isinstance(module, nn.Linear) and module.weight.abs().max() < 1e-2:
                    nn.init.normal_(module.weight, std=0.1)
            for name, parameter in model.named_parameters():
                if "gamma" in name and parameter.abs().max() < 1e-2:
                    nn.init.constant_(parameter, 0.5)
            return model

    def images(self, count: int = 3) -> Tensor:
        """A batch: mostly images; texts, sounds or videos of models that take these."""
        generator = torch.Generator().manual_seed(count)
        if self.words:
            return torch.randint(2, self.words, (count, *self.shape), generator=generator)
        return torch.randn(count, *self.shape, generator=generator)


_CNNS = ("resnet", "convnext", "test_efficientnet", "mobilenet", "regnet", "densenet", "repvit")


def _timm(name: str, size: int = 224, places: dict[str, Any] | None = None, **arguments: Any) -> Case:
    def build() -> nn.Module:
        import timm

        return timm.create_model(name, num_classes=CLASSES, **arguments)

    kind = "timm CNNs" if name.startswith(_CNNS) else "timm ViTs and MLPs"
    return Case(f"timm-{name}{_said(places)}", build, (3, size, size), kind, tuple((places or {}).items()))


def _torchvision(name: str, size: int = 224, **arguments: Any) -> Case:
    def build() -> nn.Module:
        import torchvision

        return getattr(torchvision.models, name)(num_classes=CLASSES, **arguments)

    return Case(f"torchvision-{name}", build, (3, size, size), "torchvision")


def _transformers(
    name: str,
    places: dict[str, Any] | None = None,
    *,
    kind: str = "image classifiers",
    shape: tuple[int, ...] = (3, 32, 32),
    words: int = 0,
    needs_example: bool = False,
    **config: Any,
) -> Case:
    """One of transformers' models, made from a small configuration: nothing is downloaded."""

    def build() -> nn.Module:
        import transformers

        vocabulary = {"vocab_size": words} if words else {}
        settings = getattr(transformers, f"{name.split('For')[0]}Config")(num_labels=CLASSES, **vocabulary, **config)
        return getattr(transformers, name)(settings)

    said, given = f"transformers-{name}{_said(places)}", tuple((places or {}).items())
    return Case(said, build, shape, f"transformers {kind}", given, words, needs_example)


def _detector(kind: str, places: dict[str, Any], stages: tuple[int, ...] = (2, 3, 4), **config: Any) -> Case:
    """One of transformers' detectors with a small ResNet of its own: nothing is downloaded."""

    def build() -> nn.Module:
        import transformers

        backbone = transformers.ResNetConfig(
            embedding_size=8,
            hidden_sizes=[8, 8, 16, 16],
            depths=[1, 1, 1, 1],
            layer_type="basic",
            out_features=[f"stage{k}" for k in stages],
        )
        home = transformers
        if kind.startswith("SMCA"):
            from batchformer.models import smca_detr as home

        settings = getattr(home, f"{kind.split('For')[0]}Config")(
            backbone_config=backbone, num_labels=CLASSES, num_queries=5, image_size=96, **{**_SMALL, **config}
        )
        model = getattr(home, kind)(settings)
        for module in model.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)  # as DETR's authors start; transformers starts at almost nothing
        return model

    details = "".join(f"-{key}" for key in config if key in ("num_feature_levels", "two_stage"))
    name = f"transformers-{kind}{details}{_said(places)}"
    return Case(name, build, (3, 96, 96), "transformers detectors", tuple(places.items()))


def _said(places: dict[str, Any] | None) -> str:
    """The places, as a part of the case's name."""
    named = {key: value for key, value in (places or {}).items() if key != "heads"}
    return "".join(f"-{key}-{'+'.join(map(str, v)) if isinstance(v, list) else v}" for key, v in named.items())


def _resnet20() -> nn.Module:
    from batchformer.models import resnet20

    return resnet20(num_classes=CLASSES, widths=(8, 16))


def _experts() -> nn.Module:
    from batchformer.models import expert_network

    return expert_network("resnet20", CLASSES, widths=(8, 16))


def _mvit() -> nn.Module:
    from timm.models.mvitv2 import MultiScaleVit, MultiScaleVitCfg

    strides = {"stride_q": ((1, 1), (2, 2)), "stride_kv": ((2, 2), (1, 1)), "stride_kv_adaptive": None}
    settings = MultiScaleVitCfg(depths=(1, 2), embed_dim=(16, 32), num_heads=(1, 2), **strides)
    return MultiScaleVit(settings, img_size=(32, 32), num_classes=CLASSES)


def _torchvision_resnet() -> nn.Module:
    from torchvision.models.resnet import BasicBlock, ResNet

    return ResNet(BasicBlock, [1, 1, 1, 1], num_classes=CLASSES)


def _sequential() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, CLASSES),
    )


# The real architectures, as few and as narrow layers as they allow: what a promise depends on is how a model is put
# together, not its size. Small pictures where it takes any size, the real one where it does not.
_NARROW = {"layers": (1, 1, 1, 1), "channels": (8, 8, 16, 16)}
_CONVNEXT = {"depths": (1, 1, 1, 1), "dims": (8, 16, 16, 32)}
_TWO_HEADS = {"embed_dim": 32, "num_heads": 2}
_VIT = {"img_size": 32, "depth": 3, **_TWO_HEADS}
_ONE_BLOCK = {**_VIT, "depth": 1}  # where the insertion is before the classifier
_TWO_BLOCKS = {**_VIT, "depth": 2}
_PATCH_14 = {**_TWO_BLOCKS, "img_size": 28}
_SWIN = {"img_size": 56, "depths": (2, 2), "embed_dim": 16, "num_heads": (2, 2)}
_PVT_V2 = {"depths": (1, 2, 1, 1), "embed_dims": (8, 16, 16, 32), "num_heads": (1, 2, 2, 2)}
CASES = [
    _timm("resnet18", 32, **_NARROW),
    _timm("resnet50", 32, **_NARROW),
    _timm("convnext_atto", 32, **_CONVNEXT),
    _timm("test_efficientnet", 32),
    _timm("mobilenetv3_small_050", 32),
    _timm("regnetx_002", 32, depth=4, wa=8, wm=1.3),
    _timm("densenet121", 32, block_config=(1, 1, 1, 1), growth_rate=32),
    _timm("vit_tiny_patch16_224", 32, **_ONE_BLOCK),
    _timm("deit_tiny_distilled_patch16_224", 32, **_ONE_BLOCK),
    _timm("swin_tiny_patch4_window7_224", 56, **{**_SWIN, "depths": (2,), "num_heads": (2,)}),
    _timm("cait_xxs24_224", 32, **_ONE_BLOCK),
    _timm("xcit_nano_12_p16_224", 32, **_ONE_BLOCK),
    _timm("pvt_v2_b0", 32, **{**_PVT_V2, "depths": (1, 1, 1, 1)}),
    _timm("mixer_s32_224", 64, img_size=64),
    _timm("levit_128s", 64, img_size=64, depth=(1, 1, 1)),
    _timm("efficientformer_l1", depths=(1, 1, 1, 2), embed_dims=(8, 8, 16, 16)),
    _timm("repvit_m1", 32, depth=(1, 1, 1, 1), embed_dim=(8, 16, 16, 32)),
    Case("torchvision-ResNet", _torchvision_resnet, (3, 32, 32), "torchvision"),
    _torchvision("MobileNetV2", 32, inverted_residual_setting=[[1, 8, 1, 1], [2, 8, 2, 2], [2, 16, 1, 2]]),
    _torchvision(
        "VisionTransformer", 32, image_size=32, patch_size=16, num_layers=2, num_heads=2, hidden_dim=32, mlp_dim=32
    ),
    Case("resnet20-cifar", _resnet20, (3, 32, 32), "your own modules"),
    Case("ride-cifar", _experts, (3, 32, 32), "your own modules", (("share", True),)),
    Case("sequential", _sequential, (3, 16, 16), "your own modules"),
]

# BatchFormerV2 at every token or pixel. XCiT and the inner blocks of PVT noted the batch size before: they run wide.
TOKEN_CASES = [
    _timm("vit_tiny_patch16_224", 32, {"blocks": [1]}, **_VIT),
    _timm("vit_tiny_patch16_224", 32, {"blocks": "all"}, **_VIT),
    _timm("deit_tiny_distilled_patch16_224", 32, {"after": ["blocks.1", "blocks.2"]}, **_VIT),
    _timm("cait_xxs24_224", 32, {"after": ["blocks.0"]}, **_TWO_BLOCKS),
    _timm("xcit_nano_12_p16_224", 32, {"after": ["blocks.1", "blocks.2"]}, **_VIT),
    _timm("pvt_v2_b0", 32, {"after": ["stages.1.blocks.0"]}, **_PVT_V2),
    _timm("swin_tiny_patch4_window7_224", 56, {"after": ["layers.0"]}, **_SWIN),
    Case(
        "timm-mvitv2-after-stages.1.blocks.0",
        _mvit,
        (3, 32, 32),
        "timm ViTs and MLPs",
        (("after", ["stages.1.blocks.0"]), ("heads", 2)),
    ),
    _timm("beit_base_patch16_224", 32, {"after": ["blocks.0"]}, **_TWO_BLOCKS),
    _timm("eva02_tiny_patch14_224", 28, {"after": ["blocks.0"]}, **_PATCH_14),
    _timm("vit_small_patch14_reg4_dinov2", 28, {"after": ["blocks.0"]}, **_PATCH_14),
    _timm("convnext_atto", 32, {"after": ["stages.1"]}, **_CONVNEXT),
    _timm("resnet18", 32, {"after": ["layer2", "layer3"]}, **_NARROW),
]


_TOKENS = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
_ONE_LAYER = {**_TOKENS, "num_hidden_layers": 1}  # where the insertion is before the classifier
_WINDOWS = {"image_size": 32, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}
_STAGES = {"hidden_sizes": [8, 16], "depths": [1, 1]}
_PVT = {**_STAGES, "num_encoder_blocks": 2, "num_attention_heads": [1, 2], "image_size": 32}

# transformers' image classifiers, at the classifier and inside. PVT noted the batch size before: it runs wide.
TRANSFORMERS_CASES = [
    _transformers("ViTForImageClassification", **_ONE_LAYER),
    _transformers("ViTForImageClassification", {"blocks": [0, 1]}, **_TOKENS),
    _transformers("DeiTForImageClassificationWithTeacher", **_ONE_LAYER),
    _transformers("DeiTForImageClassificationWithTeacher", {"blocks": [0]}, **_TOKENS),
    _transformers("BeitForImageClassification", {"blocks": [0]}, **_TOKENS),
    _transformers("Dinov2ForImageClassification", **_ONE_LAYER),
    _transformers("Dinov2ForImageClassification", {"blocks": "all"}, **_TOKENS),
    _transformers("Dinov2WithRegistersForImageClassification", {"blocks": [0]}, **_TOKENS),
    _transformers("SwinForImageClassification", **_WINDOWS),
    _transformers("SwinForImageClassification", {"blocks": [0]}, **_WINDOWS),
    _transformers("Swinv2ForImageClassification", {"after": ["swinv2.encoder.layers.0.blocks.0"]}, **_WINDOWS),
    _transformers("ConvNextForImageClassification", num_stages=2, **_STAGES),
    _transformers("ConvNextForImageClassification", {"after": ["convnext.encoder.stages.0"]}, num_stages=2, **_STAGES),
    _transformers(
        "ResNetForImageClassification",
        {"after": ["resnet.encoder.stages.0"]},
        embedding_size=8,
        layer_type="basic",
        **_STAGES,
    ),
    _transformers("PvtV2ForImageClassification", {"after": ["pvt_v2.encoder.layers.0"]}, **_PVT),
]

# Beyond images, all of transformers. Wav2Vec2 skips whole layers and masks its input at random: both are off here.
_LAYERS = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
_TEXT = {"kind": "text classifiers", "shape": (12,), "words": 50, "max_position_embeddings": 32}
_DISTILBERT = {**_TEXT, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 16}
_SOUND = {"kind": "audio classifiers", "needs_example": True}
_WAV2VEC2 = {
    **_LAYERS,
    **_SOUND,
    "shape": (400,),
    "conv_dim": (8, 8),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 16,
    "layerdrop": 0.0,
    "apply_spec_augment": False,
}
_AST = {**_LAYERS, **_SOUND, "shape": (32, 24), "max_length": 32, "num_mel_bins": 24}
_VIDEO = {
    **_LAYERS,
    "kind": "video classifiers",
    "needs_example": True,
    "shape": (4, 3, 16, 16),
    "image_size": 16,
    "patch_size": 8,
    "num_frames": 4,
}
_SEGFORMER = {
    "kind": "segmentation models",
    "shape": (3, 64, 64),
    "hidden_sizes": [8, 16, 16, 32],
    "depths": [1, 1, 1, 1],
    "num_attention_heads": [1, 1, 2, 2],
    "decoder_hidden_size": 16,
}
BEYOND_CASES = [
    _transformers("BertForSequenceClassification", **_TEXT, **_LAYERS),
    _transformers("BertForSequenceClassification", {"after": ["bert.encoder.layer.0"]}, **_TEXT, **_LAYERS),
    _transformers("RobertaForSequenceClassification", **_TEXT, **_LAYERS),
    _transformers("RobertaForSequenceClassification", {"after": ["roberta.encoder.layer.0"]}, **_TEXT, **_LAYERS),
    _transformers("DistilBertForSequenceClassification", **_DISTILBERT),
    _transformers("DistilBertForSequenceClassification", {"after": ["distilbert.transformer.layer.0"]}, **_DISTILBERT),
    _transformers("Wav2Vec2ForSequenceClassification", **_WAV2VEC2),
    _transformers("Wav2Vec2ForSequenceClassification", {"after": ["wav2vec2.encoder.layers.0"]}, **_WAV2VEC2),
    _transformers("ASTForAudioClassification", **_AST),
    _transformers("ASTForAudioClassification", {"after": ["audio_spectrogram_transformer.layers.0"]}, **_AST),
    _transformers("CLIPForImageClassification", vision_config=_TOKENS),
    _transformers("CLIPForImageClassification", {"after": ["vision_model.encoder.layers.0"]}, vision_config=_TOKENS),
    _transformers("VideoMAEForVideoClassification", **_VIDEO),
    _transformers("VideoMAEForVideoClassification", {"after": ["videomae.encoder.layer.0"]}, **_VIDEO),
    _transformers("SegformerForSemanticSegmentation", {"after": ["segformer.stages.1"]}, **_SEGFORMER),
]

# transformers' detectors. Masks, positions and queries are made before the insertion: they run wide, the backbone once.
_SMALL = {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "d_model": 32}
_POINTS = {"encoder_n_points": 1, "decoder_n_points": 1}
_TWO_STAGE = {"with_box_refine": True, "two_stage": True, "two_stage_num_proposals": 5}
DETECTOR_CASES = [
    _detector("DetrForObjectDetection", {"encoder_layers": [0]}),
    _detector("DetrForObjectDetection", {"encoder_layers": "all", "share": True, "mask_padding": True}),
    _detector("ConditionalDetrForObjectDetection", {"after": ["model.encoder.layers.1"]}),
    _detector(
        "DeformableDetrForObjectDetection", {"encoder_layers": [0]}, stages=(4,), num_feature_levels=1, **_POINTS
    ),
    _detector("DeformableDetrForObjectDetection", {"encoder_layers": [0]}, num_feature_levels=4, **_POINTS),
    _detector(
        "DeformableDetrForObjectDetection",
        {"encoder_layers": "all"},
        stages=(3, 4),
        num_feature_levels=2,
        **_POINTS,
        **_TWO_STAGE,
    ),
    _detector("SMCADetrForObjectDetection", {"encoder_layers": [0]}),
    _detector("DetrForSegmentation", {"after": ["detr.model.encoder.layers.0"]}, stages=(1, 2, 3, 4)),
]

# Of each mechanism one, whatever its size; the other models are slow. What attach puts on a model decides:
MECHANISMS = {
    "sequential": "before the classifier",
    "resnet20-cifar": "before the classifier, BatchNorm in the backbone",
    "timm-deit_tiny_distilled_patch16_224": "before two classifiers",
    "torchvision-VisionTransformer": "a classifier inside a container",
    "timm-vit_tiny_patch16_224-blocks-all": "after every block",
    "timm-xcit_nano_12_p16_224-after-blocks.1+blocks.2": "doubled input: the parent noted the batch size",
    "timm-pvt_v2_b0-after-stages.1.blocks.0": "doubled input of an inner parent, maps as tokens",
    "timm-swin_tiny_patch4_window7_224-after-layers.0": "maps with channels last, windows",
    "timm-resnet18-after-layer2+layer3": "maps, BatchNorm of each stream",
    "transformers-ViTForImageClassification-blocks-0+1": "outputs by name, after blocks",
    "transformers-DeiTForImageClassificationWithTeacher": "outputs by name, two classifiers",
    "transformers-DetrForObjectDetection-encoder_layers-0": "a detector: doubled masks and queries",
    "transformers-DeformableDetrForObjectDetection-num_feature_levels-two_stage-encoder_layers-all": "two stages",
    "transformers-DetrForSegmentation-after-detr.model.encoder.layers.0": "a detector inside another model",
    "transformers-BertForSequenceClassification-after-bert.encoder.layer.0": "token ids, the model's own dummy_inputs",
    "transformers-Wav2Vec2ForSequenceClassification-after-wav2vec2.encoder.layers.0": "a signal, example_inputs",
}
ALL_CASES = [*CASES, *TOKEN_CASES, *TRANSFORMERS_CASES, *BEYOND_CASES, *DETECTOR_CASES]


def parameters(cases: list[Case]) -> list[Any]:
    """Cases for `parametrize`, slow but for those of `MECHANISMS`."""
    return others_slow(cases, {case.name for case in cases if case.name in MECHANISMS}, key=lambda case: case.name)


assert {case.name for case in ALL_CASES} > set(MECHANISMS)


def tensors(outputs: Any) -> tuple[Tensor, ...]:
    """What a model gives, as a tuple of tensors with a batch axis: logits, of some models several."""
    if isinstance(outputs, Mapping):
        outputs = tuple(outputs.values())
    return tuple(t for t in outputs if t.ndim) if isinstance(outputs, tuple) else (outputs,)


def without_randomness(model: nn.Module) -> nn.Module:
    """Dropout and drop-path at zero, batch statistics as in training."""
    for module in model.modules():
        for attribute in ("p", "drop_prob", "drop_rate", "dropout"):
            if isinstance(getattr(module, attribute, None), float):
                setattr(module, attribute, 0.0)
    return model
