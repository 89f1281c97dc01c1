"""The networks of long-tailed recognition: ResNets for CIFAR, ResNet-10, and a cosine classifier."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

import batchformer as bf
from batchformer.errors import UserError
from batchformer.hub import no_weights_of


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut without parameters.

    Where the block halves the image and doubles the channels the shortcut is option A of the paper: every second pixel,
    and zeros for the new channels, half of them on either side as in the implementation the long-tail papers use.
    """

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.stride = stride
        self.new_channels = channels - in_channels

    def forward(self, x: Float[Tensor, "batch in height width"]) -> Float[Tensor, "batch out h w"]:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.stride > 1:
            x = x[:, :, :: self.stride, :: self.stride]
        if self.new_channels > 0:
            before = self.new_channels // 2
            x = F.pad(x, (0, 0, 0, 0, before, self.new_channels - before))
        return F.relu(out + x)


class CifarResNet(nn.Module):
    """ResNet-(6n + 2) for 32 x 32 images: He et al., "Deep Residual Learning", section 4.2.

    A 3x3 stem, three stages of n blocks with 16, 32 and 64 channels, average pooling, a linear layer. Convolution and
    linear weights start Kaiming-normal, as in the implementation the Balanced Softmax code took over; the paper of
    ResNet does not initialise the linear layer so. Any image size works. The names timm gives its models
    (`forward_features`, `forward_head`, `get_classifier`, `num_features`) are here too.
    """

    def __init__(
        self, blocks: int, num_classes: int = 10, in_chans: int = 3, widths: tuple[int, ...] = (16, 32, 64)
    ) -> None:
        super().__init__()
        self.num_classes, self.num_features, self.widths = num_classes, widths[-1], tuple(widths)
        self.conv1 = nn.Conv2d(in_chans, widths[0], 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        channels = widths[0]
        for stage, width in enumerate(widths, start=1):
            strides = [1 if stage == 1 else 2] + [1] * (blocks - 1)
            layer = []
            for stride in strides:
                layer.append(BasicBlock(channels, width, stride))
                channels = width
            self.add_module(f"layer{stage}", nn.Sequential(*layer))
        self.stages = len(widths)
        self.fc = nn.Linear(channels, num_classes) if num_classes else nn.Identity()  # as in timm: features
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight)

    def forward_features(self, x: Float[Tensor, "batch channels height width"]) -> Float[Tensor, "batch features h w"]:
        x = F.relu(self.bn1(self.conv1(x)))
        for stage in range(1, self.stages + 1):
            x = self.get_submodule(f"layer{stage}")(x)
        return x

    def forward_head(
        self, x: Float[Tensor, "batch features h w"], pre_logits: bool = False
    ) -> Float[Tensor, "batch n"]:
        x = x.mean((2, 3))
        return x if pre_logits else self.fc(x)

    def forward(self, x: Float[Tensor, "batch channels height width"]) -> Float[Tensor, "batch classes"]:
        return self.forward_head(self.forward_features(x))

    def get_classifier(self) -> nn.Module:
        return self.fc


def resnet20(num_classes: int = 10, **arguments: Any) -> CifarResNet:
    """The ResNet-20 of CIFAR: 3 blocks in each stage."""
    return CifarResNet(3, num_classes, **arguments)


def resnet32(num_classes: int = 10, **arguments: Any) -> CifarResNet:
    """The ResNet-32 of CIFAR: 5 blocks in each stage."""
    return CifarResNet(5, num_classes, **arguments)


def resnet44(num_classes: int = 10, **arguments: Any) -> CifarResNet:
    """The ResNet-44 of CIFAR: 7 blocks in each stage."""
    return CifarResNet(7, num_classes, **arguments)


def resnet56(num_classes: int = 10, **arguments: Any) -> CifarResNet:
    """The ResNet-56 of CIFAR: 9 blocks in each stage."""
    return CifarResNet(9, num_classes, **arguments)


def resnet10(num_classes: int = 1000, **arguments: Any) -> nn.Module:
    """The ResNet-10 of long-tailed recognition (Liu et al., OLTR): one basic block per stage, 512 features.

    Built from timm's `ResNet`, so its keys are those of timm's resnet18 with fewer blocks. timm's own `resnet10t` has
    a deep stem and average-pooled shortcuts: another network.
    """
    from timm.models.resnet import BasicBlock, ResNet

    return ResNet(block=BasicBlock, layers=(1, 1, 1, 1), num_classes=num_classes, **arguments)  # type: ignore[arg-type]


def resnet18_small_images(num_classes: int = 10, **arguments: Any) -> nn.Module:
    """timm's ResNet-18 with the stem of contrastive learning on CIFAR: a 3x3 convolution of stride 1, no max pooling.

    Its keys are those of resnet18; the first convolution has another shape.
    """
    import timm

    net: Any = timm.create_model("resnet18", pretrained=False, num_classes=num_classes, **arguments)
    net.conv1 = nn.Conv2d(net.conv1.in_channels, 64, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(net.conv1.weight, mode="fan_out", nonlinearity="relu")
    net.maxpool = nn.Identity()
    return net


def resnet50_stride_in_1x1(num_classes: int = 1000, pretrained: bool = False, **arguments: Any) -> nn.Module:
    """ResNet-50 as first published (He et al., 2016; Keras): a stage halves its maps in the first 1 x 1 convolution.

    torchvision and timm do it in the 3 x 3 convolution. The keys are the same and weights of one load silently into the
    other, at a loss of accuracy; so a network of this kind is not exported under these keys.
    """
    import timm

    if pretrained:
        raise no_weights_of("resnet50_stride_in_1x1")  # timm's are for the other stride
    net: Any = timm.create_model("resnet50", pretrained=False, num_classes=num_classes, **arguments)
    for stage in (net.layer2, net.layer3, net.layer4):
        first = stage[0]
        first.conv1.stride, first.conv2.stride = first.conv2.stride, first.conv1.stride
    return net


class NormedLinear(nn.Linear):
    """Cosine classifier: `scale` times the cosine between a feature and the weight of each class, without bias.

    Used by LDAM before its margins, with a scale of 1: that of the softmax belongs to its loss; and by RIDE with 30, as
    in its released code (whose weight is transposed). Under autocast it is computed in float32: with the eight bits of
    bfloat16 the cosines of many classes would be equal.
    """

    def __init__(self, in_features: int, out_features: int, scale: float = 1.0) -> None:
        super().__init__(in_features, out_features, bias=False)
        self.scale = scale

    def forward(self, input: Float[Tensor, "... features"]) -> Float[Tensor, "... classes"]:
        with torch.autocast(input.device.type, enabled=False):
            cosines = F.linear(F.normalize(input.to(self.weight.dtype), dim=-1), F.normalize(self.weight, dim=-1))
        return cosines if self.scale == 1 else self.scale * cosines


def use_normed_classifier(model: nn.Module) -> nn.Module:
    """Replace the classifier(s) of the model by cosine classifiers of the same size, in place.

    The model is then no longer the stock one: its classifier has no bias and normalises its input.
    """
    for path in bf.find_classifiers(model):
        parent_path, _, name = path.rpartition(".")
        classifier = model.get_submodule(path)
        if not isinstance(classifier, nn.Linear):
            raise UserError(
                f"LDAM needs a linear classifier to turn into cosines, but {path} is {type(classifier).__name__}: "
                f"choose another loss or backbone."
            )
        setattr(model.get_submodule(parent_path), name, NormedLinear(classifier.in_features, classifier.out_features))
    return model
