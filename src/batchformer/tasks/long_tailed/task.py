"""Long-tailed recognition: one backbone, one loss for imbalanced classes, with or without BatchFormer."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from batchformer.data import ClassificationData
from batchformer.data.info import DataInfo
from batchformer.data.loading.order import Sampler
from batchformer.errors import UserError
from batchformer.metrics.measures import LONG_TAILED, Measure
from batchformer.tasks.long_tailed.algorithm import POWERS, Algorithm, LossOptions, Sampling
from batchformer.tasks.long_tailed.balms import Balms, BalmsOptions
from batchformer.tasks.long_tailed.decoupled import BalancedRetraining, DecoupledLoss, DecoupledOptions
from batchformer.tasks.long_tailed.paco import PaCo, PacoOptions
from batchformer.tasks.long_tailed.rescaled import LearntScales, TauNormalized
from batchformer.tasks.long_tailed.ride import Ride, RideOptions
from batchformer.training.classifier_task import ClassifierTask
from batchformer.training.optimizers import OptimizerOptions
from batchformer.training.options import BatchFormerOptions, as_options, plain_values
from batchformer.training.schedules import ScheduleOptions
from batchformer.training.task import Batch

#: the values of `model.algorithm`, and the class of each
ALGORITHMS: dict[str, type[Algorithm]] = {
    "plain": Algorithm,
    "ride": Ride,
    "paco": PaCo,
    "decoupled": DecoupledLoss,
    "crt": BalancedRetraining,
    "lws": LearntScales,
    "tau_norm": TauNormalized,
    "balms": Balms,
}


class LongTailed(ClassifierTask):
    """Trains a classifier on imbalanced classes; logs `train/loss acc lr` and `val/accuracy many medium few loss`.

    The paper's setting (section 4.1): BatchFormer before the classifier, its learning rate a tenth of the network's,
    the loss over both streams; at test time the plain network. Accuracies are in percent and count plain rows only;
    the released code counts both streams in training.

    Args:
        backbone: resnet20, resnet32, resnet44, resnet56 (CIFAR), resnet10, or any name timm knows.
        backbone_args: passed on to the backbone.
        method: "batchformer", or "baseline" for the same training without the module.
        batchformer: how the module is attached.
        algorithm: the method: "plain" trains one network with `loss`; "ride" several experts, each with `loss`;
            "paco" is parametric contrastive learning. On the features of a trained network (`--init-from`): "decoupled"
            trains a new classifier with `loss`, "crt" one with cross entropy and class-balanced sampling, "lws" a scale
            for each class; "tau_norm" divides the weights by a power of their lengths. "balms" learns how to draw the
            training images, there or end to end.
        ride: options of RIDE.
        sampling: how training images are drawn: "instance", each once an epoch; "class_balanced", every class equally
            often; "square_root", in proportion to the root of its images. null: as the method has it: class-balanced
            for crt, lws and RIDE's router, else by instance. The loss still counts the images there are: with
            class_balanced Balanced Softmax favours rare classes twice, take cross_entropy.
        loss: which loss.
        stream_loss: "mean" over the rows of both streams (Algorithm 1), or "released": 1.5 (L_plain + L_related), three
            times the mean, as the published code has it. With one stream (baseline, streams single or split) both are
            the loss itself.
        loss_weight: the whole loss is multiplied by this; 3 gives the baseline the scale that "released" gives to two
            streams, the control for it.
        paco: options of "paco".
        optimizer: SGD and its learning rates.
        schedule: learning rate per epoch.
        decoupled: how the classifier is trained on the features of a trained network.
        balms: the meta sampler.
        options: `seed`, `channels_last`, `compile` and `cuda_graph` (see `NetworkTask`).
    """

    measures: Sequence[Measure] = LONG_TAILED
    main_picture: ClassVar[Mapping[str, Any]] = {"bars": ["accuracy", "many", "medium", "few"]}
    analyses = ("class_failures", "gradient_influence", "grad_cam")
    checkpoint_key_of_0_1 = "long_tailed"

    def __init__(
        self,
        backbone: str = "resnet32",
        backbone_args: dict[str, Any] | None = None,
        method: Literal["batchformer", "baseline"] = "batchformer",
        batchformer: BatchFormerOptions = BatchFormerOptions(),
        algorithm: Literal["plain", "ride", "paco", "decoupled", "crt", "lws", "tau_norm", "balms"] = "plain",
        ride: RideOptions = RideOptions(),
        sampling: Sampling | None = None,
        loss: LossOptions = LossOptions(),
        stream_loss: Literal["mean", "released"] = "mean",
        loss_weight: float = 1.0,
        paco: PacoOptions = PacoOptions(),
        optimizer: OptimizerOptions = OptimizerOptions(),
        schedule: ScheduleOptions = ScheduleOptions(),
        decoupled: DecoupledOptions = DecoupledOptions(),
        balms: BalmsOptions = BalmsOptions(),
        **options: Any,
    ) -> None:
        if algorithm not in ALGORITHMS:
            raise UserError(f"model.algorithm={algorithm!r} must be one of {', '.join(ALGORITHMS)}.")
        self.measures = ALGORITHMS[algorithm].measures  # before weights are averaged, which adds one
        super().__init__(backbone, backbone_args, method, stream_loss, **options)
        self.module_options = batchformer = as_options(BatchFormerOptions, batchformer, "batchformer")
        self.ride_options = ride = as_options(RideOptions, ride, "ride")
        self.loss_options = loss = as_options(LossOptions, loss, "loss")
        self.paco_options = paco = as_options(PacoOptions, paco, "paco")
        self.optimizer_options = optimizer = as_options(OptimizerOptions, optimizer, "optimizer")
        self.schedule_options = schedule = as_options(ScheduleOptions, schedule, "schedule")
        self.decoupled_options = decoupled = as_options(DecoupledOptions, decoupled, "decoupled")
        self.balms_options = balms = as_options(BalmsOptions, balms, "balms")
        self.loss_weight, self.sampling = loss_weight, sampling
        if sampling is not None and sampling not in POWERS:
            raise UserError(f"model.sampling={sampling!r} must be one of {', '.join(POWERS)}.")
        self.algorithm = ALGORITHMS[algorithm]()
        self.shardable = self.algorithm.shardable
        self.views = self.algorithm.views(self)
        self.save_hyperparameters(plain_values(locals()))

    # ---- building

    def plain_net(self, data: DataInfo) -> nn.Module:
        return self.algorithm.plain_net(self, data)

    @property
    def normed_classifier(self) -> bool:
        return self.loss_options.name == "ldam"

    def before_attach(self, net: nn.Module) -> None:
        self.algorithm.before_attach(self, net)

    def networks(self) -> list[nn.Module]:
        return self.algorithm.networks(self)

    def attach_to(self, net: nn.Module) -> Any:
        return self.algorithm.attach_to(self, net)

    def build(self, data: DataInfo) -> None:
        super().build(data)
        self.algorithm.build(self, data)

    def build_criterion(self, data: DataInfo) -> nn.Module:
        return self.algorithm.criterion(self, data)

    def check_data(self, data: Any) -> None:
        super().check_data(data)
        self.algorithm.check_data(self, data)

    def load_part(self, part: str, source: str) -> None:
        self.algorithm.load_part(self, part, source)

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage == "fit" and self.built:
            self.algorithm.before_training(self)

    def on_fit_start(self) -> None:
        self.algorithm.before_training(self)
        super().on_fit_start()

    def sampler(self, data: Any) -> Sampler | None:
        return self.algorithm.sampler(self, data)

    def training_loader(self, data: Any) -> Any:
        return self.algorithm.training_loader(self, data)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.algorithm.optimizer(self)

    # ---- training

    def step(self, batch: Batch) -> dict[str, Tensor]:
        return self.algorithm.step(self, batch)

    def begin_epoch(self) -> None:
        self.algorithm.begin_epoch(self)
        super().begin_epoch()

    def after_step(self) -> None:
        super().after_step()
        self.algorithm.after_step(self)

    def check_trainer(self) -> None:
        super().check_trainer()
        data = getattr(self.trainer, "datamodule", None)
        if data is not None and self.algorithm.chooses_samples(self) and not isinstance(data, ClassificationData):
            raise UserError(
                f"the method draws the training images itself, which {type(data).__name__} does not let it do: use a "
                "data module of batchformer.data, or draw by instance: model.sampling instance, which balms and "
                "model.decoupled.features cached cannot."
            )

    # ---- evaluation

    def test_logits(self, images: Tensor) -> Float[Tensor, "batch classes"]:
        """Logits of the plain network, nothing added; cosines are scaled as in training."""
        return self.algorithm.test_logits(self, super().test_logits(images))

    def evaluate(self, batch: Batch, name: str) -> Mapping[str, Tensor]:
        self.algorithm.observe(self, batch, name)
        return super().evaluate(batch, name)

    def results(self, name: str) -> dict[str, Tensor]:
        return {**super().results(name), **self.algorithm.results(self, name)}

    def sections(self) -> list[dict[str, Any]]:
        return [*super().sections(), *self.algorithm.sections(self)]

    def export_notes(self) -> tuple[dict[str, str], str, str]:
        return self.algorithm.export_notes(self) or super().export_notes()
