"""MAE: predict the pixels of masked patches, with or without BatchFormerV2 in the decoder."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

import batchformer as bf
from batchformer.data.info import DataInfo
from batchformer.errors import UserError
from batchformer.losses import masked_pixel_loss
from batchformer.models.mae import MaskedAutoencoder
from batchformer.tasks.self_supervised.task import JudgeOptions, Pretraining
from batchformer.training.optimizers import AdamWOptions
from batchformer.training.options import InnerModuleOptions, as_options, plain_values
from batchformer.training.schedules import CosineAfterWarmupOptions
from batchformer.training.task import Batch

_EVALUATION_SEED = 0


@dataclass
class DecoderModuleOptions(InnerModuleOptions):
    """Position and settings of BatchFormerV2. The paper does not give the number of heads for MAE.

    Args:
        decoder_blocks: after these blocks of the decoder, counted from 0, or "all" as published.
        encoder_blocks: also after these blocks of the encoder.
    """

    decoder_blocks: list[int] | Literal["all"] = "all"
    encoder_blocks: list[int] | None = None


@dataclass
class DecoderOptions:
    """The autoencoder around the backbone.

    Args:
        dim: width of the decoder.
        depth: its blocks.
        heads: attention heads of a block.
        mask_ratio: fraction of masked patches.
        normalise_pixels: the targets of each patch have mean 0 and variance 1.
    """

    dim: int = 512
    depth: int = 8
    heads: int = 16
    mask_ratio: float = 0.75
    normalise_pixels: bool = True


class MAE(Pretraining):
    """Trains a masked autoencoder; logs `train/loss loss_plain loss_related spread lr` and `val/linear knn loss`.

    V2, Table 10: BatchFormerV2 after every layer of the decoder. Masks and targets are those of both streams, and the
    loss is the mean over them. At a position one image may show its patch where another is masked, so content of other
    images is visible to the related rows; at test time the encoder is the plain one. No code was released for it.

    Args:
        backbone: a VisionTransformer of timm.
        backbone_args: passed on to the backbone: img_size, patch_size, ...
        method: "batchformer", or "baseline" for the same training without the module.
        batchformer: how and where the module is attached.
        decoder: the autoencoder around the backbone, and its mask.
        judge: how the features (the class token of unmasked images) are evaluated.
        optimizer: AdamW; as published betas 0.9 and 0.95, and 1.5e-4 for a batch of 256.
        schedule: warm-up and cosine.
        options: `seed`, `channels_last`, `compile` and `cuda_graph` (see `NetworkTask`).
    """

    analyses = ("neighbours", "reconstructions")

    def __init__(
        self,
        backbone: str = "vit_base_patch16_224",
        backbone_args: dict[str, Any] | None = None,
        method: Literal["batchformer", "baseline"] = "batchformer",
        batchformer: DecoderModuleOptions = DecoderModuleOptions(),
        decoder: DecoderOptions = DecoderOptions(),
        judge: JudgeOptions = JudgeOptions(neighbours=0),
        optimizer: AdamWOptions = AdamWOptions(lr=1.5e-4, lr_per=256, weight_decay=0.05, betas=(0.9, 0.95)),
        schedule: CosineAfterWarmupOptions = CosineAfterWarmupOptions(warmup_epochs=40.0, warmup_lr=0.0, min_lr=0.0),
        **options: Any,
    ) -> None:
        super().__init__(backbone, backbone_args, method, judge, **options)
        self.module_options = batchformer = as_options(DecoderModuleOptions, batchformer, "batchformer")
        self.decoder_options = decoder = as_options(DecoderOptions, decoder, "decoder")
        self.optimizer_options = optimizer = as_options(AdamWOptions, optimizer, "optimizer")
        self.schedule_options = schedule = as_options(CosineAfterWarmupOptions, schedule, "schedule")
        judge = self.judge
        self.save_hyperparameters(plain_values(locals()))

    # ---- building

    def plain_net(self, data: DataInfo) -> nn.Module:
        options = self.decoder_options
        return MaskedAutoencoder(
            self.plain_backbone(data), options.dim, options.depth, options.heads, options.mask_ratio
        )

    def attach_to(self, net: nn.Module) -> Any:
        options, keywords = self.module_options, self.module_options.keywords()
        chosen = keywords.pop("decoder_blocks")
        decoder = range(len(net.decoder_blocks)) if chosen == "all" else chosen  # type: ignore[arg-type]
        after = [f"encoder.blocks.{k}" for k in keywords.pop("encoder_blocks", ())]
        after += [f"decoder_blocks.{k}" for k in decoder]
        if not after:
            raise UserError("model.batchformer has no place: set decoder_blocks or encoder_blocks.")
        if options.share and options.encoder_blocks:
            raise UserError("model.batchformer.share needs places of one width: the decoder's or the encoder's alone.")
        size = [side * patch for side, patch in zip(net.grid, net.patch, strict=True)]  # type: ignore[arg-type, call-overload]
        example = {"images": torch.zeros(2, 3, *size), "noise": torch.rand(2, net.patches)}  # type: ignore[call-overload]
        return bf.attach(net, after=after, example_inputs=example, **keywords)

    def encoder(self, net: nn.Module) -> nn.Module:
        return bf.detach(net).encoder if bf.attachment_of(net) is not None else net.encoder  # type: ignore[return-value]

    # ---- training

    def step(self, batch: Batch) -> dict[str, Tensor]:
        images = batch["images"]
        noise = torch.rand(len(images), self.net.patches, device=images.device)  # type: ignore[call-overload]
        losses = self.losses(images, noise)
        found = {"loss": losses.mean()}
        if self.attachment is None:
            return found
        found["loss_plain"] = self.attachment.plain(losses.detach())
        if (related := self.attachment.related(losses.detach())) is not None:
            found["loss_related"] = related
        return found

    def losses(self, images: Tensor, noise: Float[Tensor, "batch patches"]) -> Float[Tensor, " rows"]:
        net: Any = self.net
        normalise = self.decoder_options.normalise_pixels
        return masked_pixel_loss(net(images, noise), net.patchify(images), net.mask(noise), normalise)

    # ---- evaluation

    def features(self, images: Tensor) -> Float[Tensor, "batch dim"]:
        """The class token of the encoder on all patches, as MAE's linear probe reads it."""
        encoder: Any = self.net.encoder
        return encoder.forward_features(images)[:, 0]

    def evaluate(self, batch: Batch, name: str) -> Mapping[str, Tensor]:
        super().evaluate(batch, name)
        images, generator = batch["images"], torch.Generator().manual_seed(_EVALUATION_SEED)
        noise = torch.rand(len(images), self.net.patches, generator=generator).to(images.device)  # type: ignore[call-overload]
        return {"loss": self.losses(images, noise).mean()}
