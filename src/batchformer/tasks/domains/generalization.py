"""Domain generalization: train on some domains, test on one that was left out, with or without BatchFormer."""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import batchformer as bf
from batchformer.data.info import DataInfo
from batchformer.errors import UserError
from batchformer.losses import coral_penalty, irm_penalty, rows_by_domain, vrex_penalty
from batchformer.models import create_backbone
from batchformer.models.domains import FeatureRecorder, check_feature_maps, insert_mix_style
from batchformer.tasks.domains.options import AlgorithmOptions, DomainOptimizerOptions
from batchformer.tasks.domains.task import DomainTask
from batchformer.training.options import BatchFormerOptions, as_options, plain_values
from batchformer.training.task import Batch


class DomainGeneralization(DomainTask):
    """Trains on the source domains; logs `train/loss risk penalty acc lr` and `val/accuracy source/accuracy`.

    BatchFormer's Tables 6 and 7: the module before the classifier, the loss over both streams, the plain network at
    test time. Penalties are computed per domain over the rows of both streams. In the released code for TLL the module
    was never given to the optimizer (`optimizer.module_lr_factor: 0` is the same), and the domains of IRM were mixed
    (`algorithm.mixed_domains: true`). With several processes each computes the penalty of its own rows.

    Args:
        backbone: any name timm knows, or resnet50_stride_in_1x1.
        backbone_args: passed on to the backbone: pretrained, drop_rate (TLL: 0.1 with frozen BatchNorm), ...
        method: "batchformer", or "baseline" for the same training without the module.
        batchformer: how the module is attached.
        algorithm: what is minimised.
        optimizer: optimizer and learning rate.
        options: those of `DomainTask` and of `NetworkTask`: `judge_by`, `oracle`, `seed`, ...
    """

    analyses = ("class_failures", "gradient_influence", "domain_planes")
    penalty_weight: Tensor

    def __init__(
        self,
        backbone: str = "resnet50",
        backbone_args: dict[str, Any] | None = None,
        method: Literal["batchformer", "baseline"] = "batchformer",
        batchformer: BatchFormerOptions = BatchFormerOptions(),
        algorithm: AlgorithmOptions = AlgorithmOptions(),
        optimizer: DomainOptimizerOptions = DomainOptimizerOptions(),
        **options: Any,
    ) -> None:
        super().__init__(backbone, backbone_args, method, batchformer, optimizer, **options)
        self.algorithm = algorithm = as_options(AlgorithmOptions, algorithm, "algorithm")
        batchformer, optimizer = self.module_options, self.optimizer_options
        self.save_hyperparameters(plain_values(locals()))
        self.register_buffer("penalty_weight", torch.ones(()), persistent=False)
        self._recorder: FeatureRecorder | None = None

    def build(self, data: DataInfo) -> None:
        if self.algorithm.penalises and len(data.get("domains", ())) < 2:
            raise UserError(
                f"model.algorithm.name={self.algorithm.name} compares source domains and there is one only: add a "
                f"domain, or choose erm or mixstyle."
            )
        super().build(data)

    def check_data(self, data: Any) -> None:
        super().check_data(data)
        if getattr(data, "adapt", False):
            raise UserError("domain generalization never sees the target in training: set data.adapt to false.")
        each = data.batch_size // len(self.data_info.domains)
        if self.algorithm.name in ("irm", "coral") and each < 2:
            raise UserError(
                f"data.batch_size {data.batch_size} holds one image of each source domain, and {self.algorithm.name} "
                f"needs two or more: raise it."
            )
        if self.algorithm.name == "mixstyle":
            check_feature_maps(self.net, self.algorithm.layers, data.image_size)

    def plain_net(self, data: DataInfo) -> nn.Module:
        return create_backbone(self.backbone, len(data.classes), **self.backbone_args)

    def before_attach(self, net: nn.Module) -> None:
        options = self.algorithm
        if options.name == "mixstyle":
            insert_mix_style(net, options.layers, options.chance, options.alpha)
        if options.name == "coral":
            self._recorder = FeatureRecorder(net.get_submodule(bf.find_classifiers(net)[0]))
            self._recorder.put()

    # ---- training

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        options, step = self.algorithm, self.trainer.global_step
        self.penalty_weight.fill_(options.weight_at(step))
        if options.annealed and options.reset_optimizer and step == options.annealed:
            for optimizer in self.trainer.optimizers:  # in place: a captured step holds these tensors
                for state in optimizer.state.values():
                    for value in state.values():
                        if isinstance(value, Tensor):
                            value.zero_()
        super().on_train_batch_start(batch, batch_idx)

    def schedule_began_at(self, step: int) -> int:
        options = self.algorithm
        anew = options.preset == "tll" and options.reset_optimizer and step >= options.annealed
        return options.annealed if anew else 0

    def step(self, batch: Batch) -> dict[str, Tensor]:
        logits = self(batch["images"])
        labels = bf.repeat_targets(batch["labels"], logits)
        losses = F.cross_entropy(logits.float(), labels, reduction="none")
        found = {"risk": losses.mean()}
        if self.algorithm.penalises:
            found["penalty"] = self._penalty(logits, labels, losses, len(logits) // len(batch["labels"]))
            found["loss"] = found["risk"] + self.penalty_weight * found["penalty"]
        else:
            found["loss"] = found["risk"]
        with torch.no_grad():
            plain = (logits, labels) if self.attachment is None else self.attachment.plain((logits, labels))
            found["acc"] = 100.0 * (plain[0].argmax(1) == plain[1])
        return found

    def _penalty(self, logits: Tensor, labels: Tensor, losses: Tensor, streams: int) -> Tensor:
        options, domains = self.algorithm, len(self.data_info.domains)
        if options.name == "vrex":
            return vrex_penalty(rows_by_domain(losses, domains, streams).mean(1))
        if options.name == "irm":
            parts = [rows_by_domain(rows, domains, streams, options.mixed_domains) for rows in (logits, labels)]
            return irm_penalty(*parts)
        assert self._recorder is not None
        features = self._recorder.take()
        if not options.both_streams and self.attachment is not None:
            features, streams = self.attachment.plain(features), 1
        return coral_penalty(rows_by_domain(features, domains, streams))
