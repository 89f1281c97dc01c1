"""Options of the domain tasks, and the settings of the two code bases the papers' rows were trained with."""

from dataclasses import dataclass, field
from typing import Literal

from batchformer.errors import UserError
from batchformer.training.optimizers import refuse_negative_rates

# weight of the penalty in each code base: TLL's scripts for PACS, DomainBed's defaults
WEIGHTS = {"tll": {"coral": 1.0, "irm": 1.0, "vrex": 3.0}, "domainbed": {"coral": 1.0, "irm": 100.0, "vrex": 10.0}}
ANNEALED = ("irm", "vrex")


@dataclass
class AlgorithmOptions:
    """The training objective of domain generalization.

    Args:
        name: "erm" is only cross entropy; the others add a penalty, or mix styles inside the network.
        preset: default weights and annealing: those of "tll" or "domainbed".
        weight: of the penalty; null: that of the preset.
        anneal_steps: irm, vrex: steps with a weight of 1 before `weight` applies; null: that of the preset.
        reset_optimizer: irm, vrex: reset the moments after these steps, and with TLL's preset the schedule.
        mixed_domains: irm: cut the rows of both streams as the released code does, which mixes domains.
        both_streams: coral: covariances of plain and related rows together, as released; false: of plain rows.
        layers: mixstyle: the stages after which styles are mixed (the paper's for PACS; OfficeHome: the first two).
        chance: mixstyle: probability that a batch is mixed.
        alpha: mixstyle: both parameters of the Beta distribution.
    """

    name: Literal["erm", "coral", "irm", "vrex", "mixstyle"] = "erm"
    preset: Literal["tll", "domainbed"] = "tll"
    weight: float | None = None
    anneal_steps: int | None = None
    reset_optimizer: bool = True
    mixed_domains: bool = False
    both_streams: bool = True
    layers: list[str] = field(default_factory=lambda: ["layer1", "layer2", "layer3"])
    chance: float = 0.5
    alpha: float = 0.1

    def check(self) -> None:
        if self.weight is not None and not self.weight >= 0:
            raise UserError(f"model.algorithm.weight={self.weight} must be 0 or more; null takes that of the preset.")
        if self.anneal_steps is not None and self.anneal_steps < 0:
            raise UserError(f"model.algorithm.anneal_steps={self.anneal_steps} must be 0 or more.")
        if not 0 <= self.chance <= 1 or not self.alpha > 0:
            raise UserError(
                f"model.algorithm: chance={self.chance} must lie between 0 and 1, and alpha={self.alpha} above 0."
            )

    @property
    def penalises(self) -> bool:
        return self.name in WEIGHTS["tll"]

    @property
    def annealed(self) -> int:
        """Number of steps before `weight` applies."""
        if self.name not in ANNEALED:
            return 0
        return 500 if self.anneal_steps is None else self.anneal_steps

    def weight_at(self, step: int) -> float:
        if step < self.annealed:
            return 1.0
        return WEIGHTS[self.preset].get(self.name, 0.0) if self.weight is None else self.weight


@dataclass
class AdaptOptions:
    """The method of domain adaptation.

    Args:
        name: "source_only", "dann" (Ganin et al.) or "mdd" (Zhang et al.).
        margin: mdd: the factor of the adversary's loss on the source.
        weight: of the adversary's loss.
        bottleneck_dim: width of the bottleneck; null: 1024 for mdd, else 256.
        reversal: the coefficient of the reversed gradient approaches this; null: 0.1 for mdd, 1 for dann.
        reversal_steps: time constant in steps of the coefficient 2 c / (1 + exp(-step / reversal_steps)) - c.
    """

    name: Literal["source_only", "dann", "mdd"] = "mdd"
    margin: float = 4.0
    weight: float = 1.0
    bottleneck_dim: int | None = None
    reversal: float | None = None
    reversal_steps: int = 1000

    def check(self) -> None:
        if self.reversal_steps < 1 or not self.weight >= 0 or not self.margin > 0:
            raise UserError(
                f"model.adapt: reversal_steps={self.reversal_steps} must be 1 or more, weight={self.weight} 0 or more, "
                f"and margin={self.margin} above 0."
            )


@dataclass
class DomainOptimizerOptions:
    """Optimizer and learning rate.

    Args:
        name: "adam" (DomainBed) or "sgd" with Nesterov momentum 0.9 (TLL).
        lr: learning rate.
        weight_decay: of all weights.
        backbone_lr_factor: the backbone's learning rate is this times lr; the classifier's is lr.
        module_lr_factor: the module's is this times lr; 0 leaves it at its initial weights, as the code released
            for TLL does without notice.
        schedule: "constant", "cosine" over all steps, "inverse": lr (1 + gamma step)^(-0.75), or "step": a tenth after
            four fifths of the steps (the baseline of Table 6).
        gamma: inverse: rate of decay.
    """

    name: Literal["adam", "sgd"] = "sgd"
    lr: float = 1e-3
    weight_decay: float = 5e-4
    backbone_lr_factor: float = 1.0
    module_lr_factor: float = 1.0
    schedule: Literal["constant", "cosine", "inverse", "step"] = "cosine"
    gamma: float = 2e-4

    def check(self) -> None:
        refuse_negative_rates(self)
