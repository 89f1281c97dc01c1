"""Options of compositional zero-shot recognition: the method that scores pairs, and the optimizer."""

from dataclasses import dataclass, field
from typing import Literal

from batchformer.errors import UserError
from batchformer.training.optimizers import refuse_negative_rates

NEEDS_WORDS = ("cge", "compcos", "label_embedding")


@dataclass
class PairMethodOptions:
    """How pairs are scored. Options of other methods have no effect.

    Args:
        name: "cge" (graph of words and pairs), "compcos" (cosines), "visual_product" (a classifier of attributes and
            one of objects), "label_embedding" (triplets).
        world: "closed": the pairs of training and of the set that is evaluated may be predicted; "open": all
            combinations of an attribute and an object.
        embed_dim: width that images are embedded in; null: the word vectors', or for cge none, the feature itself.
        hidden_dim: hidden layer of the image embedder (CompCos: 768); null: one linear layer. Not of cge.
        graph_dims: cge: widths of the hidden graph convolutions.
        dropout: of the image embedder's hidden layer, and of cge's graph convolutions.
        scale: compcos: factor of the cosines (MIT-States 20, UT-Zappos 50, C-GQA 100).
        margin: compcos, open world: of unfeasible pairs; label_embedding: of the triplets.
        margin_epochs: compcos, open world: epochs in which the margin rises.
        feasibility_threshold: compcos, open world: pairs less feasible than this are never predicted; "val": the best
            of 50 thresholds on the validation set, as published; null: none.
        log_scores: visual_product: add log probabilities; false: multiply probabilities, as released.
    """

    name: Literal["cge", "compcos", "visual_product", "label_embedding"] = "cge"
    world: Literal["closed", "open"] = "closed"
    embed_dim: int | None = None
    hidden_dim: int | None = None
    graph_dims: list[int] = field(default_factory=lambda: [4096])
    dropout: float = 0.5
    scale: float = 20.0
    margin: float = 0.4
    margin_epochs: int = 15
    feasibility_threshold: float | Literal["val"] | None = None
    log_scores: bool = True

    def check(self) -> None:
        sizes = {"embed_dim": self.embed_dim, "hidden_dim": self.hidden_dim, "margin_epochs": self.margin_epochs}
        sizes |= {"graph_dims": min(self.graph_dims, default=1)}
        for key, size in sizes.items():
            if size is not None and size < 1:
                raise UserError(f"model.pairs.{key}={getattr(self, key)} must be 1 or more.")
        if not 0 <= self.dropout < 1:
            raise UserError(f"model.pairs.dropout={self.dropout} must be 0 or more and less than 1.")
        if not self.scale > 0:
            raise UserError(f"model.pairs.scale={self.scale} must be above 0.")
        if self.feasibility_threshold is not None and (self.name, self.world) != ("compcos", "open"):
            raise UserError(
                "model.pairs.feasibility_threshold is of compcos in the open world (model.pairs.world open): leave it "
                "out."
            )


@dataclass
class PairOptimizerOptions:
    """Adam with three learning rates, as released for CGE.

    Args:
        lr: learning rate of the scorer.
        weight_decay: of all weights.
        backbone_lr_factor: the backbone's learning rate is this times lr, where it is trained.
        module_lr_factor: the module's is this times lr (released: 1; its author advises less for small data sets).
        schedule: "constant" as released, or "cosine" over all steps.
    """

    lr: float = 5e-5
    weight_decay: float = 5e-5
    backbone_lr_factor: float = 0.1
    module_lr_factor: float = 1.0
    schedule: Literal["constant", "cosine"] = "constant"

    def check(self) -> None:
        refuse_negative_rates(self)
