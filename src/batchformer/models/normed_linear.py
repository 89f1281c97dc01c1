"""A classifier whose logits are cosines."""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

import batchformer as bf
from batchformer.errors import UserError


class NormedLinear(nn.Linear):
    """The cosine between a feature and the weight of each class, without bias, in [-1, 1].

    What LDAM puts in front of its margins; the released LDAM and RIDE code do the same (their weight is transposed).
    The scale of the softmax belongs to the loss.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def forward(self, input: Float[Tensor, "... features"]) -> Float[Tensor, "... classes"]:
        return F.linear(F.normalize(input, dim=-1), F.normalize(self.weight, dim=-1))


def use_normed_classifier(model: nn.Module) -> nn.Module:
    """Replace the classifier(s) of the model by cosine classifiers of the same size, in place.

    A model so changed is no longer the stock one: its classifier has no bias and normalises what it reads.
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
