"""One transformer encoder layer whose sequence is the mini-batch (BatchFormer, eq. 1 and 2)."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from batchformer.errors import UserError
from batchformer.nn.attention import BatchAttention


class BatchEncoderLayer(nn.Module):
    """x^ = LN(MSA(x) + x);  x' = LN(MLP(x^) + x^)   (eq. 1, 2: `norm="post"`, as the released code).

    `norm="pre"` puts the LayerNorm before each block instead: x^ = x + MSA(LN(x)); x' = x^ + MLP(LN(x^)).
    Dropout acts on the attention weights, inside the MLP and on both residual branches, as in the papers' layer,
    `torch.nn.TransformerEncoderLayer(dim, heads, dim, 0.5)`; parameters have its names, shapes and initial values.
    `layer_scale` (not in the papers) multiplies each branch by a learnt vector that starts at this value.
    """

    def __init__(
        self,
        dim: int,
        heads: int = 4,
        hidden_dim: int | None = None,
        dropout: float = 0.5,
        norm: Literal["post", "pre"] = "post",
        group_size: int | None = None,
        layer_scale: float | None = None,
    ) -> None:
        super().__init__()
        if norm not in ("post", "pre"):
            raise UserError(f'norm={norm!r} must be "post" (as published) or "pre".')
        if not 0.0 <= dropout <= 1.0:
            raise UserError(f"dropout={dropout} must lie between 0 and 1.")
        hidden_dim = dim if hidden_dim is None else hidden_dim
        self.norm, self.dropout = norm, dropout
        self.self_attn = BatchAttention(dim, heads, dropout, group_size)
        self.linear1 = nn.Linear(dim, hidden_dim)
        self.linear2 = nn.Linear(hidden_dim, dim)
        self.norm1 = nn.LayerNorm(dim)
        self.norm2 = nn.LayerNorm(dim)
        if layer_scale is None:
            self.register_parameter("scale1", None)
            self.register_parameter("scale2", None)
        else:
            self.scale1 = nn.Parameter(torch.full((dim,), layer_scale))
            self.scale2 = nn.Parameter(torch.full((dim,), layer_scale))

    def forward(
        self, x: Float[Tensor, "batch position dim"], valid: Bool[Tensor, "batch position"] | None = None
    ) -> Float[Tensor, "batch position dim"]:
        if self.norm == "post":
            x = self.norm1(x + self._branch(self.self_attn(x, valid), self.scale1))
            return self.norm2(x + self._branch(self._mlp(x), self.scale2))
        x = x + self._branch(self.self_attn(self.norm1(x), valid), self.scale1)
        return x + self._branch(self._mlp(self.norm2(x)), self.scale2)

    def _branch(self, x: Tensor, scale: Tensor | None) -> Tensor:
        x = self._drop(x)
        return x if scale is None else x * scale

    def _mlp(self, x: Tensor) -> Tensor:
        return self.linear2(self._drop(F.relu(self.linear1(x))))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)

    def extra_repr(self) -> str:
        return f"norm={self.norm!r}, dropout={self.dropout}"
