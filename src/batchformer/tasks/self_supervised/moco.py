"""MoCo-v2 and MoCo-v3: queries of one view find the keys of the other, with or without BatchFormer in the projector."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from torch import nn

import batchformer as bf
from batchformer.data.info import DataInfo
from batchformer.errors import UserError
from batchformer.losses.self_supervised import Pairs
from batchformer.models.moco import ContrastiveNet
from batchformer.tasks.self_supervised.task import JudgeOptions, Pretraining
from batchformer.training.optimizers import AdamWOptions, Rule, layer_rules
from batchformer.training.options import BatchFormerOptions, as_options, plain_values
from batchformer.training.schedules import CosineOptions


@dataclass
class ContrastOptions:
    """MoCo: version, heads, keys.

    Args:
        version: "v3": both views are queries and keys, against the keys of the batch; "v2": one view each way, against
            a queue of former keys.
        temperature: of the softmax over keys. v3: 1 for ResNets and 0.2 for ViTs; v2: 0.2.
        momentum: of the key encoder; v3 raises it to 1 along a cosine over the run, v2 keeps it.
        hidden_dim: width of projector and predictor.
        out_dim: width of the embeddings.
        layers: linear layers of v3's projector; null: 2, and 3 for vision transformers.
        queue: v2: number of stored keys, a multiple of the keys of a step.
        pairs: which streams of queries and keys are compared: "all" four, as released, or the "plain" ones alone.
        pair_loss: "sum" over the pairs, as released, or their "mean".
        extra_layer: v2: a further layer of the head; null: where the module is, as released.
        frozen_module: keep the module at its random initial weights, as the code released for v3 does unintentionally.
        frozen_patches: ViT: keep the patch projection at its initial weights, as published for stability.
    """

    version: Literal["v2", "v3"] = "v3"
    temperature: float = 1.0
    momentum: float = 0.99
    hidden_dim: int = 4096
    out_dim: int = 256
    layers: int | None = None
    queue: int = 65536
    pairs: Pairs = "all"
    pair_loss: Literal["sum", "mean"] = "sum"
    extra_layer: bool | None = None
    frozen_module: bool = False
    frozen_patches: bool = True

    def check(self) -> None:
        for name, known in (("version", ("v2", "v3")), ("pairs", ("all", "plain")), ("pair_loss", ("sum", "mean"))):
            if getattr(self, name) not in known:
                raise UserError(f"model.contrast.{name}={getattr(self, name)!r} must be one of {', '.join(known)}.")
        if not self.temperature > 0 or not 0 <= self.momentum < 1:
            raise UserError(
                f"model.contrast: temperature={self.temperature} must be above 0, and momentum={self.momentum} 0 or "
                "more and below 1."
            )


class MoCo(Pretraining):
    """Trains an encoder on pairs of views; logs `train/loss spread lr` and `val/knn linear`.

    BatchFormer, Table 8: the module is the first layer of the projector, one module for queries and keys, trained with
    the queries. Queries and keys then have plain and related rows, and the loss is over the pairs of them. In the
    released code of v3 the module is frozen at random by accident (`contrast.frozen_module`).

    Args:
        backbone: any name timm knows.
        backbone_args: passed on to the backbone.
        method: "batchformer", or "baseline" for the same training without the module.
        batchformer: how the module is made.
        contrast: MoCo's version and settings.
        judge: how the features (of the backbone, before the projector) are evaluated.
        optimizer: of the query network: lars and sgd for ResNets, adamw for ViTs.
        schedule: warm-up and cosine.
        options: `seed`, `channels_last`, `compile` and `cuda_graph` (see `NetworkTask`).
    """

    def __init__(
        self,
        backbone: str = "resnet50",
        backbone_args: dict[str, Any] | None = None,
        method: Literal["batchformer", "baseline"] = "batchformer",
        batchformer: BatchFormerOptions = BatchFormerOptions(),
        contrast: ContrastOptions = ContrastOptions(),
        judge: JudgeOptions = JudgeOptions(),
        optimizer: AdamWOptions = AdamWOptions("lars", lr=0.6, lr_per=256, weight_decay=1e-6),
        schedule: CosineOptions = CosineOptions(warmup_epochs=10.0, warmup_lr=0.0, min_lr=0.0),
        **options: Any,
    ) -> None:
        super().__init__(backbone, backbone_args, method, judge, **options)
        self.module_options = batchformer = as_options(BatchFormerOptions, batchformer)
        self.contrast = contrast = as_options(ContrastOptions, contrast)
        self.optimizer_options = optimizer = as_options(AdamWOptions, optimizer)
        self.schedule_options = schedule = as_options(CosineOptions, schedule)
        judge = self.judge
        self._rules: dict[str, Rule] = {}
        self.save_hyperparameters(plain_values(locals()))

    # ---- building

    def plain_net(self, data: DataInfo) -> nn.Module:
        encoder: Any = self.plain_backbone(data)
        options, is_vit = self.contrast, hasattr(encoder, "patch_embed")
        extra = self.method == "batchformer" if options.extra_layer is None else options.extra_layer
        if is_vit and options.version == "v3" and options.frozen_patches:
            encoder.patch_embed.requires_grad_(False)
        layers = options.layers or (3 if is_vit else 2)
        widths = options.hidden_dim, options.out_dim
        return ContrastiveNet(encoder, encoder.num_features, options.version, *widths, layers, is_vit, extra)

    def before_attach(self, net: nn.Module) -> None:
        self._rules = layer_rules(net, self.optimizer_options)

    def attach_to(self, net: nn.Module) -> Any:
        return bf.attach(net, **{**asdict(self.module_options), "before": "projector", "batch_norm": "joint"})
