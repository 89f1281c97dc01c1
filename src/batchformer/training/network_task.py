"""Tasks with one network that BatchFormer may be attached to."""

from abc import abstractmethod
from typing import Any, Literal

import torch
from torch import nn

from batchformer.data.info import DataInfo
from batchformer.errors import UserError
from batchformer.training.compiling import compile_in_place, convolve_again, cut_into_patches
from batchformer.training.reseed import reseed
from batchformer.training.task import Task
from batchformer.training.weights import load_weights


class NetworkTask(Task):
    """A network (`net`), with or without the module (`attachment`); both methods begin with the same weights.

    A subclass gives the network (`plain_net`) and the places of the module (`attach_to`).

    Args:
        backbone: name of the network.
        backbone_args: passed on to it.
        method: "batchformer", or "baseline" for the same training without the module.
        stream_loss: how the losses of both streams are put together.
        seed: decides initial weights and what is random in a step.
        channels_last: keep weights and images in channels-last layout.
        compile: on a CUDA device, torch.compile the network for training, and the extractor of Attentive CutMix;
            elsewhere no difference.
        cuda_graph: on a CUDA device, run each training step as one CUDA graph; elsewhere no difference. Not for
            detectors, whose boxes are matched on the host.
    """

    net: nn.Module
    attachment: Any

    def __init__(
        self,
        backbone: str,
        backbone_args: dict[str, Any] | None,
        method: Literal["batchformer", "baseline"],
        stream_loss: Literal["mean", "released"],
        seed: int = 0,
        channels_last: bool = False,
        compile: bool = False,
        cuda_graph: bool = False,
    ) -> None:
        super().__init__(seed, cuda_graph)
        if method not in ("batchformer", "baseline"):
            raise UserError(f'method={method!r} must be "batchformer" or "baseline".')
        self.backbone, self.backbone_args, self.method = backbone, dict(backbone_args or {}), method
        self.stream_loss: Literal["mean", "released"] = stream_loss
        self.channels_last, self.compile_net = channels_last, compile
        self.attachment = None
        self._patch_layers: list[nn.Conv2d] = []
        self.save_hyperparameters(
            {"seed": seed, "channels_last": channels_last, "compile": compile, "cuda_graph": cuda_graph}
        )

    # ---- what a subclass gives

    @abstractmethod
    def plain_net(self, data: DataInfo) -> nn.Module:
        """A fresh network without the module, for these data."""

    @abstractmethod
    def attach_to(self, net: nn.Module) -> Any:
        """Put the module into the network and return the handle."""

    def before_attach(self, net: nn.Module) -> None:
        """Called before the module is attached: read here what must be known of the plain network."""

    # ---- building

    def build(self, data: DataInfo) -> None:
        self.net = self.plain_net(data)
        self.before_attach(self.net)
        if self.method == "batchformer":
            reseed(self.seed, 1)
            self.attachment = self.attach_to(self.net)
        if self.channels_last:
            self.net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    @property
    def class_counts(self) -> list[int]:
        return self.data_info.get("class_counts", [])

    def expect_checkpoint(self) -> None:
        super().expect_checkpoint()
        self.compile_net = False
        for name in ("pretrained", "pretrained_cfg_overlay"):
            self.backbone_args.pop(name, None)

    def check_data(self, data: Any) -> None:
        """Vision transformers of timm are built for one size, and say so only when the first batch arrives."""
        size = getattr(data, "image_size", None)
        embedding: Any = getattr(self.net, "patch_embed", None)
        built: Any = getattr(embedding, "img_size", None)
        if size is None or not getattr(embedding, "strict_img_size", False) or built in (None, (size, size)):
            return
        other_way = f", or set data.image_size to {built[0]}" if built[0] == built[1] else ""
        raise UserError(
            f"{self.backbone} is built for images of {built[0]} x {built[1]} pixels, and data.image_size is {size}: "
            f"add --model.backbone_args.img_size {size}{other_way}."
        )

    def load_part(self, part: str, source: str) -> None:
        load_weights(self.net, part, source, attached=self.attachment is not None)

    # ---- training

    def on_fit_start(self) -> None:
        if self.compile_net and self.device.type == "cuda":
            self._patch_layers = cut_into_patches(self.net)
            compile_in_place(self.net)

    def on_train_end(self) -> None:
        super().on_train_end()
        convolve_again(self._patch_layers)
        self._patch_layers = []

    def _captured_format(self) -> torch.memory_format:
        return torch.channels_last if self.channels_last else torch.preserve_format

    @property
    def module_parameters(self) -> list[nn.Parameter]:
        return [] if self.attachment is None else list(self.attachment.parameters())

    # ---- export

    def plain_network(self) -> nn.Module:
        return self.plain_net(self.data_info)

    def trained_network(self, averaged: bool = False) -> nn.Module:
        if averaged:
            raise UserError(
                "this run kept no moving average of its weights: only image classification (the vit-* and deit-* "
                "recipes) can keep one, with --model.ema 0.9999."
            )
        return self.net
