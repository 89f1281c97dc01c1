"""Domain adaptation: labelled images of one domain, unlabelled ones of another, with or without BatchFormer."""

import math
from dataclasses import asdict
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import batchformer as bf
from batchformer.data.info import DataInfo
from batchformer.errors import UserError
from batchformer.losses import margin_disparity
from batchformer.models import create_backbone
from batchformer.models.domains import AdaptationNet
from batchformer.tasks.domains.options import AdaptOptions, DomainOptimizerOptions
from batchformer.tasks.domains.task import DomainTask
from batchformer.training.options import BatchFormerOptions, as_options, plain_values
from batchformer.training.task import Batch


class DomainAdaptation(DomainTask):
    """Trains with unlabelled target images; logs `train/loss risk transfer acc lr` and `val/accuracy`.

    BatchFormer's appendix, Table 8 (MDD, VisDA-2017): source and target rows attend to each other in one batch, before
    the bottleneck; related rows of a domain count as that domain's. "source_only" never sees the target, as in TLL.

    Args:
        backbone: any name timm knows.
        backbone_args: passed on to the backbone.
        method: "batchformer", or "baseline" for the same training without the module.
        batchformer: how the module is attached.
        adapt: source only, DANN or MDD.
        optimizer: optimizer and learning rate; TLL's for MDD are the defaults.
        options: those of `DomainTask` and of `NetworkTask`: `judge_by`, `oracle`, `seed`, ...
    """

    def __init__(
        self,
        backbone: str = "resnet101",
        backbone_args: dict[str, Any] | None = None,
        method: Literal["batchformer", "baseline"] = "batchformer",
        batchformer: BatchFormerOptions = BatchFormerOptions(),
        adapt: AdaptOptions = AdaptOptions(),
        optimizer: DomainOptimizerOptions = DomainOptimizerOptions(lr=4e-3, schedule="inverse", backbone_lr_factor=0.1),
        **options: Any,
    ) -> None:
        super().__init__(backbone, backbone_args, method, batchformer, optimizer, **options)
        self.adapt = adapt = as_options(AdaptOptions, adapt, "adapt")
        batchformer, optimizer = self.module_options, self.optimizer_options
        self.save_hyperparameters(plain_values(locals()))

    # ---- building

    def plain_net(self, data: DataInfo) -> nn.Module:
        adversary: Any = "none" if self.adapt.name == "source_only" else self.adapt.name
        backbone = create_backbone(self.backbone, 0, **self.backbone_args)
        return AdaptationNet(backbone, len(data.classes), adversary, self.adapt.bottleneck_dim)

    def attach_to(self, net: nn.Module) -> Any:
        options = {**asdict(self.module_options), "before": self.module_options.before or "bottleneck"}
        return bf.attach(net, dim=int(net.backbone.num_features), **options)  # type: ignore[union-attr, arg-type]

    @property
    def feature_layer(self) -> str:
        return "bottleneck"

    def check_data(self, data: Any) -> None:
        super().check_data(data)
        if not getattr(data, "adapt", True):
            raise UserError("domain adaptation needs the target's images in training: set data.adapt to true.")

    def load_part(self, part: str, source: str) -> None:
        super().load_part("backbone" if part == "network" else part, source)

    def new_parameters(self) -> list[nn.Parameter]:
        own = {id(parameter) for parameter in self.net.backbone.parameters()}  # type: ignore[union-attr]
        return [parameter for parameter in self.net.parameters() if id(parameter) not in own]

    def _is_backbone(self, layer: nn.Module) -> bool:
        return any(layer is each for each in self.net.backbone.modules())  # type: ignore[union-attr]

    # ---- training

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        options = self.adapt
        most = options.reversal if options.reversal is not None else (0.1 if options.name == "mdd" else 1.0)
        coefficient = 2 * most / (1 + math.exp(-self.trainer.global_step / options.reversal_steps)) - most
        self.net.coefficient.fill_(coefficient)  # type: ignore[operator]
        super().on_train_batch_start(batch, batch_idx)

    def step(self, batch: Batch) -> dict[str, Tensor]:
        source, target = batch["source"], batch["target"]
        seen = [source["images"]] if self.adapt.name == "source_only" else [source["images"], target["images"]]
        images = torch.cat(seen)
        logits, adversary = self.net(images)
        rows = [len(each) for each in seen] * (len(logits) // len(images))
        parts = logits.split(rows)
        of_source = torch.cat(parts[:: len(seen)])
        labels = bf.repeat_targets(source["labels"], of_source)
        risk = F.cross_entropy(of_source.float(), labels)
        found = {"loss": risk, "risk": risk}
        if adversary is not None:
            against = adversary.split(rows)
            disputed = torch.cat(against[::2]), torch.cat(against[1::2])
            found["transfer"] = self._transfer(of_source, torch.cat(parts[1::2]), *disputed)
            found["loss"] = risk + self.adapt.weight * found["transfer"]
        with torch.no_grad():
            found["acc"] = 100.0 * (parts[0].argmax(1) == source["labels"])
        return found

    def _transfer(self, source: Tensor, target: Tensor, of_source: Tensor, of_target: Tensor) -> Tensor:
        if self.adapt.name == "mdd":
            return margin_disparity(
                source.float(), of_source.float(), target.float(), of_target.float(), self.adapt.margin
            )
        logits = torch.cat([of_source, of_target]).squeeze(1).float()
        domains = torch.cat([logits.new_ones(len(of_source)), logits.new_zeros(len(of_target))])
        return F.binary_cross_entropy_with_logits(logits, domains)

    # ---- evaluation

    def export_notes(self) -> tuple[dict[str, str], str, str]:
        metadata, call, imports = super().export_notes()
        call = call.replace(f"num_classes={len(self.class_counts)}", "num_classes=0")
        adversary = "none" if self.adapt.name == "source_only" else self.adapt.name
        made = f"AdaptationNet({call}, {len(self.class_counts)}, {adversary!r}, {self.adapt.bottleneck_dim})"
        return metadata, made, f"{imports}\n  from batchformer.models.domains import AdaptationNet"
