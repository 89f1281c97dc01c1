"""MoCo-v2 and MoCo-v3: contrast of queries and keys of two views, with or without BatchFormer in the projector."""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

import batchformer as bf
from batchformer.attach.per_stream import BatchNormMode
from batchformer.data.info import DataInfo
from batchformer.data.loading.order import generator
from batchformer.errors import UserError
from batchformer.losses import contrastive_loss, pair_streams, queue_loss
from batchformer.losses.self_supervised import Pairs
from batchformer.metrics.gather import process_and_count
from batchformer.metrics.measures import SELF_SUPERVISED, Measure
from batchformer.models.moco import ContrastiveNet
from batchformer.nn.streams import plain_count
from batchformer.tasks.self_supervised.task import JudgeOptions, Pretraining
from batchformer.training.momentum import (
    MomentumEncoder,
    Queue,
    ShuffledRows,
    check_queue,
    of_all_processes,
    own_rows,
)
from batchformer.training.optimizers import AdamWOptions, build_optimizer, scaled_lr
from batchformer.training.options import BatchFormerOptions, as_options, plain_values
from batchformer.training.schedules import CosineAfterWarmupOptions, half_cosine, place_in_run
from batchformer.training.task import Batch


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
        shuffle: v2, several processes: compute keys for images of all of them, so that BatchNorm normalises queries and
            keys by other images, as published. Of no use with `trainer.sync_batchnorm`, and left out there.
        pairs: which streams of queries and keys are compared: "all" four, as released, or the "plain" ones alone.
        pair_loss: "sum" over the pairs or their "mean"; null: as released, the sum for v3 and the mean for v2.
        extra_layer: v2: a further layer of the head; null: where the module is, as released.
        batch_norm: of projector and predictor: "joint" normalises plain and related rows together, as released,
            "separate" each stream by itself; the plain pair is then that of the baseline.
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
    shuffle: bool = True
    pairs: Pairs = "all"
    pair_loss: Literal["sum", "mean"] | None = None
    extra_layer: bool | None = None
    batch_norm: BatchNormMode = "joint"
    frozen_module: bool = False
    frozen_patches: bool = True

    def check(self) -> None:
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

    views = 2
    analyses = ("neighbours",)
    measures: Sequence[Measure] = tuple(replace(one, primary=one.key == "knn") for one in SELF_SUPERVISED)

    def __init__(
        self,
        backbone: str = "resnet50",
        backbone_args: dict[str, Any] | None = None,
        method: Literal["batchformer", "baseline"] = "batchformer",
        batchformer: BatchFormerOptions = BatchFormerOptions(),
        contrast: ContrastOptions = ContrastOptions(),
        judge: JudgeOptions = JudgeOptions(),
        optimizer: AdamWOptions = AdamWOptions("lars", lr=0.6, lr_per=256, weight_decay=1e-6),
        schedule: CosineAfterWarmupOptions = CosineAfterWarmupOptions(warmup_epochs=10.0, warmup_lr=0.0, min_lr=0.0),
        **options: Any,
    ) -> None:
        super().__init__(backbone, backbone_args, method, judge, **options)
        self.module_options = batchformer = as_options(BatchFormerOptions, batchformer, "batchformer")
        self.contrast = contrast = as_options(ContrastOptions, contrast, "contrast")
        self.optimizer_options = optimizer = as_options(AdamWOptions, optimizer, "optimizer")
        self.schedule_options = schedule = as_options(CosineAfterWarmupOptions, schedule, "schedule")
        judge = self.judge
        self._step_numbers: tuple[int, ...] = (self.seed,)
        if batchformer.before is not None:
            raise UserError(
                f"model.batchformer.before={batchformer.before}: MoCo has the module in front of its projector, so "
                "leave this out."
            )
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
        keys: Any = copy.deepcopy(net)
        keys.predictor = nn.Sequential()
        self.keys = MomentumEncoder(keys, self.contrast.momentum)
        if self.contrast.version == "v2":
            self.queue = Queue(self.contrast.queue, self.contrast.out_dim)

    def attach_to(self, net: nn.Module) -> Any:
        options = {**asdict(self.module_options), "before": "projector", "batch_norm": self.contrast.batch_norm}
        handle = bf.attach(net, dim=int(net.encoder.num_features), **options)  # type: ignore[union-attr, arg-type]
        for parameter in handle.parameters():
            parameter.requires_grad_(not self.contrast.frozen_module)
        return handle

    def encoder(self, net: nn.Module) -> nn.Module:
        return net.encoder  # type: ignore[return-value]

    def load_part(self, part: str, source: str) -> None:
        super().load_part(part, source)
        self.keys.copy_from(self.net)

    def check_data(self, data: Any) -> None:
        super().check_data(data)
        if data.batch_size < 2:
            raise UserError("data.batch_size=1 leaves MoCo nothing to normalise or tell apart in a batch: choose more.")
        if self.contrast.version == "v2":
            check_queue(self.contrast.queue, self._streams * data.batch_size, "model.contrast.queue")

    @property
    def _streams(self) -> int:
        """Rows that an image has among the keys."""
        return 2 if self.attachment is not None and self.module_options.streams == "duplicate" else 1

    def configure_optimizers(self) -> torch.optim.Optimizer:
        options, lr = self.optimizer_options, scaled_lr(self.optimizer_options, self.trainer)
        handle = None if self.contrast.frozen_module else self.attachment
        return build_optimizer(options, self.net, self._rules, handle, lr, self.fused)

    # ---- training

    def on_train_start(self) -> None:
        super().on_train_start()
        if self.attachment is not None and self.contrast.frozen_module:
            self.attachment.expect_no_training()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        seed, _, step, part = self.random_numbers_of(batch_idx)
        self._step_numbers = seed, step, part  # without the process: the same in all of them
        # once for each update of the queries: the further parts of an accumulated step leave the keys as they are
        self.keys.set_momentum(1.0 if part else self.momentum_at(*place_in_run(self.trainer, "step")))

    def momentum_at(self, epoch: float, epochs: float) -> float:
        """v3: 1 - (1 - m) (1 + cos(pi e / E)) / 2; v2: m."""
        if self.contrast.version == "v2":
            return self.contrast.momentum
        return 1 - (1 - self.contrast.momentum) * half_cosine(epoch / epochs)

    def step(self, batch: Batch) -> dict[str, Tensor]:
        first, second = batch["views"]
        self.keys.follow(self.net)
        queries = self.net(first)
        if self.contrast.version == "v2":
            loss = self._against_queue(queries, self._shuffled_keys_of(second), len(first))
        else:
            loss = self._against_batch(queries, self.keys_of(second), len(first))
            loss = loss + self._against_batch(self.net(second), self.keys_of(first), len(first))
        return {"loss": loss, "spread": self.spread_of(queries[: len(first)])}

    @torch.no_grad()
    def keys_of(self, images: Tensor) -> Float[Tensor, "rows dim"]:
        """Keys of plain and, through the module that the queries have too, of related rows."""
        network: Any = self.keys.encoder
        features = network.encoder(images)
        if self.attachment is not None:
            features = self.attachment.points[0].module(features)
        if self.contrast.batch_norm == "joint" or self.attachment is None:
            return network.projector(features)
        plain = plain_count(len(features), self.module_options.streams) or len(features)
        return torch.cat([network.projector(stream) for stream in features.split(plain)])

    @torch.no_grad()
    def _shuffled_keys_of(self, images: Tensor) -> Float[Tensor, "rows dim"]:
        """`keys_of`, by BatchNorm's statistics of other images than those of the queries."""
        synchronised = any(isinstance(module, nn.SyncBatchNorm) for module in self.keys.modules())
        if not self.contrast.shuffle or synchronised or process_and_count()[1] == 1:
            return self.keys_of(images)
        exchange = ShuffledRows(len(images), generator(*self._step_numbers, "shuffled keys"), images.device)
        keys = self.keys_of(exchange.send(images))
        return torch.cat([exchange.bring_back(stream) for stream in keys.split(len(images))])

    def _against_batch(self, queries: Tensor, keys: Tensor, batch: int) -> Tensor:
        own = own_rows(batch, queries.device)
        return self._over_pairs(
            contrastive_loss(query, of_all_processes(key), own, self.contrast.temperature)
            for query, key in pair_streams(queries, keys, batch, self.contrast.pairs)
        )

    def _against_queue(self, queries: Tensor, keys: Tensor, batch: int) -> Tensor:
        stored = self.queue.keys.clone()  # pushed to below, before the backward pass
        loss = self._over_pairs(
            queue_loss(query, key, stored, self.contrast.temperature)
            for query, key in pair_streams(queries, keys, batch, self.contrast.pairs)
        )
        self.queue.push(of_all_processes(F.normalize(keys.float(), dim=1)))
        return loss

    def _over_pairs(self, losses: Iterable[Tensor]) -> Tensor:
        found = torch.stack(list(losses))
        way = self.contrast.pair_loss or ("sum" if self.contrast.version == "v3" else "mean")
        return found.sum() if way == "sum" else found.mean()

    # ---- evaluation

    def features(self, images: Tensor) -> Float[Tensor, "batch dim"]:
        return self.net.encoder(images)  # type: ignore[operator]
