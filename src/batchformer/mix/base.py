"""The interface of all mixing methods: the random numbers of a batch, the mixed batch, and its targets."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.data import get_worker_info

from batchformer.errors import UserError, check_choice, warn_once
from batchformer.nn.inputs import as_number, is_whole

Images = Float[Tensor, "batch channels height width"]
SoftLabels = Float[Tensor, "batch classes"]
Targets = Int[Tensor, " batch"] | SoftLabels


@dataclass(eq=False, repr=False)
class Mixed:
    """A mixed batch: images and targets. "Image A" is the image of the row itself, "image B" the one mixed into it.

    Args:
        images: the mixed images.
        labels: what `soft_labels` made of the targets, one row per image, not mixed yet.
        partner: which row of the batch image B is.
        share: how much of the mixed image is image B.
        mask: share of image B at each pixel (0 or 1 for methods that cut), None where it is the same everywhere.
    """

    images: Images
    labels: SoftLabels
    partner: Int[Tensor, " batch"]
    share: Float[Tensor, " batch"]
    mask: Float[Tensor, "#batch 1 height width"] | None = None

    def label_share(self) -> Float[Tensor, " batch"]:
        """Weight of image B in the target: the share in pixels, unless a method overrides it (TransMix)."""
        return self.share

    def targets(self) -> SoftLabels:
        """(1 - label_share) y_A + label_share y_B, for a loss that takes soft targets; no gradient flows into it."""
        return torch.lerp(self.labels, self.labels[self.partner], self.label_share()[:, None])

    def __len__(self) -> int:
        return len(self.images)


def soft_labels(targets: Targets, num_classes: int, smoothing: float = 0.0) -> SoftLabels:
    """Class ids or soft targets as rows of `num_classes`, a part `smoothing` of each spread over all classes.

    As timm and the released TransMix code do it: 1 - s + s/K for the true class, s/K for the others.
    """
    if targets.ndim == 1 and not targets.is_floating_point():
        on_host = targets.device.type == "cpu"  # on other devices the check would synchronise the host
        if on_host and len(targets) and not 0 <= int(targets.min()) <= int(targets.max()) < num_classes:
            raise UserError(
                f"the targets hold class ids from {int(targets.min())} to {int(targets.max())}, and num_classes="
                f"{num_classes}: ids must lie between 0 and {num_classes - 1}."
            )
        rows = torch.zeros(len(targets), num_classes, dtype=torch.float32, device=targets.device)
        rows.scatter_(1, targets[:, None].long(), 1.0)
    elif targets.ndim == 2 and targets.shape[1] == num_classes:
        rows = targets.detach().float()
    else:
        raise UserError(
            f"targets of the shape {tuple(targets.shape)} and type {targets.dtype} cannot be mixed: pass class ids "
            f"(batch,) or soft targets (batch, {num_classes})."
        )
    return rows * (1 - smoothing) + smoothing / num_classes if smoothing else rows


Partner = Literal["random", "flip"]


@dataclass(frozen=True)
class Draw:
    """All random numbers of one batch, on the device of the images. One row where the batch shares a draw.

    `share` is that of image B as drawn, 1 - lambda of the papers, and 0 where `prob` skipped the images; `centre` is
    uniform over the image, (row, column) as fractions of its height and width.
    """

    partner: Int[Tensor, " batch"]
    share: Float[Tensor, " #batch"]
    centre: Float[Tensor, "#batch 2"]


class MixKeywords(TypedDict, total=False):
    """The keyword options of `Mix`, for subclasses that add others and pass these on."""

    alpha: float
    prob: float
    label_smoothing: float
    per_sample: bool
    partner: Partner
    generator: torch.Generator | None


class Mix(ABC):
    """Base class of methods that mix the images of a batch in pairs; subclasses implement `apply`.

        mixed = mix(images, targets)
        loss = criterion(model(mixed.images), mixed.targets())

    All random numbers of a batch are drawn in `draw`; `apply` is tensor code without host synchronisation, so it can be
    compiled or captured in a CUDA graph (Puzzle-Mix, which differentiates a model, excepted). Draws are made on the
    generator's device (without one, by torch's global CPU generator) and copied: with a CPU generator the same seed
    gives the same batch on every device.

    Args:
        num_classes: width of the targets.
        alpha: lambda ~ Beta(alpha, alpha).
        prob: how likely a batch (with `per_sample`, an image) is mixed.
        label_smoothing: the part of every label spread over all classes before mixing.
        per_sample: an own lambda (and box) for every image instead of one for the batch, as all released code has it.
        partner: "random" is a random permutation of the batch, "flip" pairs the first image with the last, as timm and
            TransMix's code do. Both take odd batches.
        generator: a `torch.Generator` on the CPU or the images' device.
    """

    def __init__(
        self,
        num_classes: int,
        *,
        alpha: float = 1.0,
        prob: float = 1.0,
        label_smoothing: float = 0.0,
        per_sample: bool = False,
        partner: Partner = "random",
        generator: torch.Generator | None = None,
    ) -> None:
        name = type(self).__name__
        if not is_whole(num_classes):
            # the repr of a model would print all its layers
            given = f"a {type(num_classes).__name__}" if isinstance(num_classes, nn.Module) else repr(num_classes)
            raise UserError(f"{name}: num_classes={given} must be a positive whole number.")
        if not 0 < as_number(alpha) <= torch.finfo(torch.float32).max:  # Beta(inf, inf) gives no numbers
            raise UserError(f"{name}: alpha={alpha!r} must be above 0 and finite; use prob=0 to switch mixing off.")
        if not 0 <= as_number(prob) <= 1:
            raise UserError(f"{name}: prob={prob!r} must lie between 0 and 1.")
        if not 0 <= as_number(label_smoothing) < 1:
            raise UserError(f"{name}: label_smoothing={label_smoothing!r} must be at least 0 and below 1.")
        check_choice(f"{name}: partner", partner, ("random", "flip"))
        if generator is not None and not isinstance(generator, torch.Generator):
            raise UserError(
                f"{name}: generator={generator!r} must be a torch.Generator; one with a seed is "
                f"torch.Generator().manual_seed(42)."
            )
        self.num_classes, self.alpha, self.prob = int(num_classes), float(alpha), float(prob)
        self.label_smoothing, self.per_sample = float(label_smoothing), per_sample
        self.partner: Partner = partner
        self.generator = generator
        self._seed = None if generator is None else generator.initial_seed()

    def __call__(self, images: Images, targets: Targets) -> Mixed:
        self.check(images, targets)
        labels = soft_labels(targets, self.num_classes, self.label_smoothing)
        return self.apply(images, labels, self.draw(images))

    def draw(self, images: Images) -> Draw:
        """Draw all random numbers of the batch."""
        self.warn_of_copied_generator()
        batch, device = len(images), images.device
        at = self.generator.device if self.generator is not None else torch.device("cpu")
        # explicit float32: with a default dtype of half precision, a box would have only 256 positions
        rows = batch if self.per_sample else 1
        numbers = torch.rand(rows, 3, generator=self.generator, device=at, dtype=torch.float32)
        share = sample_beta(self.alpha, len(numbers), self.generator, at)
        share = share.where(numbers[:, 2] < self.prob, torch.zeros_like(share))
        if self.partner == "random":
            partner = torch.randperm(batch, generator=self.generator, device=at)
        else:
            partner = torch.arange(batch - 1, -1, -1, device=device)
        wait = at.type != "cpu"  # copies from the host are asynchronous; copies to the host must not be
        return Draw(
            partner=partner.to(device, non_blocking=not wait),
            share=share.to(device, non_blocking=not wait),
            centre=numbers[:, :2].contiguous().to(device, non_blocking=not wait),
        )

    @abstractmethod
    def apply(self, images: Images, labels: SoftLabels, draw: Draw) -> Mixed:
        """The images and soft labels of a batch, mixed as drawn."""

    def check(self, images: Tensor, targets: Tensor) -> None:
        name = type(self).__name__
        for what, given in (("images", images), ("targets", targets)):
            if not isinstance(given, Tensor):
                raise UserError(f"{name} takes tensors, and the {what} are a {type(given).__name__}: stack them first.")
        if images.ndim != 4 or not images.is_floating_point() or 0 in images.shape[1:]:
            raise UserError(
                f"{name} takes float images (batch, channels, height, width) and got {tuple(images.shape)} of "
                f"{images.dtype}: stack and convert them first."
            )
        if len(images) < 2:
            raise UserError(
                f"{name} mixes the images of a batch with each other, and this batch has {len(images)}: leave the "
                f"last, smaller batch out (drop_last=True) or train on it unmixed."
            )
        count = len(targets) if targets.ndim else 1
        if count != len(images):
            raise UserError(f"{name} got {len(images)} images and {count} targets: one for each is needed.")
        if images.device != targets.device:
            raise UserError(
                f"{name}: the images are on {images.device} and the targets on {targets.device}: move both to the same."
            )

    def warn_of_copied_generator(self) -> None:
        """Warn once in each DataLoader worker that still has an unchanged copy of the mix's generator.

        Without a generator there is no problem: torch gives every worker, in every epoch, a seed of its own.
        """
        own = self.generator
        if own is not None and get_worker_info() is not None and own.initial_seed() == self._seed:
            warn_once(
                "a mix draws from a generator of its own in a DataLoader's worker, and every worker begins with the "
                "same copy of it, whenever workers are started: leave generator= out (torch seeds each worker), or "
                "seed it in worker_init_fn."
            )

    def close(self) -> None:  # noqa: B027 (nothing to do is the rule)
        """Remove what the method installed in a model; most install nothing."""

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(num_classes={self.num_classes}, alpha={self.alpha:g}, prob={self.prob:g})"


def need_module(name: str, what: str, given: object) -> None:
    """Check the first argument of the methods that take a network before the number of classes."""
    if not isinstance(given, nn.Module):
        raise UserError(
            f"{name} takes {what}, an nn.Module, and then the number of classes, and the first it got is of the type "
            f"{type(given).__name__}."
        )


def sample_beta(alpha: float, count: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
    """`count` numbers from Beta(alpha, alpha), none of them 0 or 1."""
    options: dict[str, Any] = {"device": device, "dtype": torch.float32}
    if alpha < 0.1:  # both gamma variables may underflow, and torch would return 0.5
        gamma = torch._standard_gamma(torch.full((count, 2), alpha + 1, **options), generator=generator)
        numbers = torch.rand(count, 2, generator=generator, **options)
        apart = gamma.log().diff(dim=1) + torch.log1p(-numbers).diff(dim=1) / alpha
        limits = torch.finfo(torch.float32)
        return apart[:, 0].sigmoid().clamp(limits.tiny, 1 - limits.eps)
    # Beta is a two-dimensional Dirichlet; torch.distributions calls the same function, but without a generator.
    return torch._sample_dirichlet(torch.full((count, 2), alpha, **options), generator=generator)[:, 0]


def refuse_in_worker(name: str) -> None:
    """Raise in a DataLoader worker: it has a stale copy of the model, which methods that run the model cannot use."""
    if get_worker_info() is not None:
        raise UserError(
            f"{name} runs the model that is trained, and a DataLoader's worker has only a copy of it: mix in the "
            f"training step, not in collate_fn."
        )
