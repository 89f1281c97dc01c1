"""The check of annotated shapes finds a wrong one, and leaves to the library what the library refuses itself."""

from __future__ import annotations

import pytest
import torch
from jaxtyping import Float, TypeCheckError, jaxtyped
from torch import Tensor

from batchformer.errors import UserError

from ..shapes import only_shapes


@jaxtyped(typechecker=only_shapes)
def doubled(x: Float[Tensor, "rows dim"], name: str = "x") -> Float[Tensor, "2*rows dim"]:
    if x.ndim == 1:
        raise UserError("x must have rows.")
    return torch.cat([x, x])


@jaxtyped(typechecker=only_shapes)
def transposed(x: Float[Tensor, "rows dim"]) -> Float[Tensor, "rows dim"]:
    return x.t()


def test_a_right_shape_passes_and_other_annotations_do_not_count() -> None:
    assert doubled(torch.zeros(3, 2), name=7).shape == (6, 2)  # type: ignore[arg-type]


def test_a_wrong_shape_is_found() -> None:
    with pytest.raises(TypeCheckError, match="transposed"):
        transposed(torch.zeros(3, 2))
    with pytest.raises(TypeCheckError, match="doubled"):
        doubled(torch.zeros(3, 2, 4))
    with pytest.raises(TypeCheckError, match="doubled"):
        doubled(torch.zeros(3, 2, dtype=torch.long))


def test_what_is_refused_in_a_sentence_is_refused_in_that_sentence() -> None:
    with pytest.raises(UserError, match="must have rows"):
        doubled(torch.zeros(3))
