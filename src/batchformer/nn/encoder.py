"""One transformer encoder layer whose sequence is the mini-batch (BatchFormer, eq. 1 and 2)."""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from batchformer.errors import UserError, check_choice
from batchformer.kernels.backend import MEMORIES, Backend, Choice, Memory, why_not_fused
from batchformer.nn.attention import BatchAttention
from batchformer.nn.inputs import autocasts, has_hooks, is_whole

Norm = Literal["post", "pre", "relative"]
NORMS: tuple[Norm, ...] = ("post", "pre", "relative")


class BatchEncoderLayer(nn.Module):
    """x^ = LN(MSA(x) + x);  x' = LN(MLP(x^) + x^)   (eq. 1, 2: `norm="post"`, as the released code).

    `norm="pre"` puts the LayerNorm before each block instead: x^ = x + MSA(LN(x)); x' = x^ + MLP(LN(x^)).
    `norm="relative"` (ours, for insertions at many depths; docs/stability.md) measures each branch by the token itself:
    x^ = keep(x + s |x| LN(MSA(x / |x|))), where |x| is the root mean square of the token, s the layer scale, and keep
    gives the sum the |x| the token had. So the size of a token stays the same at any depth and dropout.
    Dropout acts on the attention weights, inside the MLP and on both residual branches, as in the papers' layer,
    `torch.nn.TransformerEncoderLayer(dim, heads, dim, 0.5)`; parameters have its names, shapes and initial values.
    `layer_scale` (not in the papers) multiplies each branch by a learnt vector that starts at this value; with
    "relative" None means 0.1. `backend` as in `BatchAttention`; where that is our kernels, a post-norm layer is fused
    around its matrix products. `memory="lean"` stores the input alone and computes the layer again in the backward.
    """

    def __init__(
        self,
        dim: int,
        heads: int = 4,
        hidden_dim: int | None = None,
        dropout: float = 0.5,
        norm: Norm = "post",
        group_size: int | None = None,
        layer_scale: float | None = None,
        backend: Backend = "auto",
        memory: Memory = "fast",
    ) -> None:
        super().__init__()
        check_choice("memory", memory, MEMORIES)
        check_choice("norm", norm, NORMS)
        if not 0.0 <= dropout <= 1.0:
            raise UserError(f"dropout={dropout} must lie between 0 and 1.")
        if hidden_dim is not None and not is_whole(hidden_dim):
            raise UserError(f"hidden_dim={hidden_dim!r} must be 1 or more (or None for the width of the features).")
        if layer_scale is not None and not layer_scale >= 0:
            raise UserError(f"layer_scale={layer_scale} must be 0 or more; None leaves it to the norm.")
        hidden_dim = dim if hidden_dim is None else hidden_dim
        self.norm, self.dropout = norm, dropout
        self.memory: Memory = memory
        self.self_attn = BatchAttention(dim, heads, dropout, group_size, backend)
        self.linear1 = nn.Linear(dim, hidden_dim)
        self.linear2 = nn.Linear(hidden_dim, dim)
        self.norm1 = nn.LayerNorm(dim)
        self.norm2 = nn.LayerNorm(dim)
        if layer_scale is None and norm == "relative":
            layer_scale = 0.1
        self.layer_scale = layer_scale
        if layer_scale is None:
            self.register_parameter("scale1", None)
            self.register_parameter("scale2", None)
        else:
            self.scale1 = nn.Parameter(torch.empty(dim))
            self.scale2 = nn.Parameter(torch.empty(dim))
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset the layer scales, where weights are made late (meta device, FSDP); the parts reset themselves."""
        if self.layer_scale is not None:
            nn.init.constant_(self.scale1, self.layer_scale)
            nn.init.constant_(self.scale2, self.layer_scale)

    def forward(
        self,
        x: Float[Tensor, "batch position dim"],
        valid: Bool[Tensor, "batch position"] | None = None,
        across: Any = None,
    ) -> Float[Tensor, "batch position dim"]:
        """`across`: attention over other processes' rows too (`BatchAttention.forward`); all else stays per row."""
        if across is None and x.numel():
            if self.backend_used(x).fused:
                return self._fused(x, valid)
            if self.memory == "lean" and torch.is_grad_enabled():
                return checkpoint(self._unfused, x, valid, use_reentrant=False)
        return self._unfused(x, valid, across)

    def _unfused(self, x: Tensor, valid: Tensor | None, across: Any = None) -> Tensor:
        if self.norm == "post":
            x = self.norm1(x + self._branch(self.self_attn(x, valid, across), self.scale1))  # eq. 1
            return self.norm2(x + self._branch(self._mlp(x), self.scale2))  # eq. 2
        if self.norm == "pre":
            x = x + self._branch(self.self_attn(self.norm1(x), valid, across), self.scale1)
            return x + self._branch(self._mlp(self.norm2(x)), self.scale2)
        size = _size(x)
        attended = self.self_attn((x / size).to(x.dtype), valid, across)
        x = self._keep(x, size, self.norm1(self._drop(attended)) * self.scale1)
        return self._keep(x, size, self.norm2(self._drop(self._mlp((x / size).to(x.dtype)))) * self.scale2)

    @staticmethod
    def _keep(x: Tensor, size: Tensor, branch: Tensor) -> Tensor:
        mixed = x + size * branch
        return (mixed * (size / _size(mixed))).to(x.dtype)

    def _branch(self, x: Tensor, scale: Tensor | None) -> Tensor:
        x = self._drop(x)
        return x if scale is None else x * scale

    def _mlp(self, x: Tensor) -> Tensor:
        return self.linear2(self._drop(F.relu(self.linear1(x))))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)

    def backend_used(self, x: Float[Tensor, "batch position dim"]) -> Choice:
        """The backend `forward` would use for this input, and why; `fused` where kernels run the layer as a whole."""
        choice = self.self_attn.backend_used(x)
        if choice.backend != "triton":
            return choice
        obstacle = self._why_not_fused(x)
        return Choice("triton", choice.why if obstacle is None else f"attention alone: {obstacle}", obstacle is None)

    def _why_not_fused(self, x: Tensor) -> str | None:
        if self.norm != "post" or self.scale1 is not None:
            return f"norm={self.norm!r}, or a layer scale, is not fused"
        parts = self._parts()
        if tuple(map(type, parts)) != _PART_TYPES:
            return "a part of the layer was replaced"
        if any(part._parameters.get("bias", part) is None for part in parts[1:]):
            return "a part of the layer has no bias"
        if x.dtype != parts[1].weight.dtype and not autocasts(x):
            return "input and weights are of different types"
        if any(map(has_hooks, parts)):
            return "parts of the layer have hooks, which need them to be called"
        return why_not_fused(parts[0].dim, parts[3].out_features)

    def _parts(self) -> tuple[Any, ...]:
        """In the order of `_PART_TYPES`; from `_modules`, as the attributes of a module are slow to look up."""
        parts: Any = self._modules
        attention = parts["self_attn"]
        out_proj = attention._modules.get("out_proj")  # there is none in what wraps an attention
        return attention, out_proj, parts["norm1"], parts["linear1"], parts["linear2"], parts["norm2"]

    def _fused(self, x: Tensor, valid: Tensor | None) -> Tensor:
        from batchformer.kernels import dispatch

        attention, out_proj, norm1, linear1, linear2, norm2 = self._parts()
        dropout = self.dropout if self.training else 0.0
        autocast = torch.is_autocast_enabled(x.device.type)
        dtype = torch.get_autocast_dtype(x.device.type) if autocast else x.dtype
        # under autocast a LayerNorm gives single precision
        out_dtype = torch.float32 if autocast else x.dtype
        settings = dispatch.LayerSettings(
            attention.heads, attention.group_size, dropout, norm1.eps, norm2.eps, dtype, out_dtype
        )
        weights = [_parameter(attention, "in_proj_weight"), _parameter(attention, "in_proj_bias")]
        for part in (out_proj, norm1, linear1, linear2, norm2):
            weights += _parameter(part, "weight"), _parameter(part, "bias")
        return dispatch.encoder_layer(x, dispatch.LayerWeights(*weights), settings, valid, self.memory == "lean")

    def extra_repr(self) -> str:
        return f"norm={self.norm!r}, dropout={self.dropout}"


_PART_TYPES = (BatchAttention, nn.Linear, nn.LayerNorm, nn.Linear, nn.Linear, nn.LayerNorm)


def _parameter(module: nn.Module, name: str) -> Any:
    """The attribute, looked up where modules keep parameters first; FSDP may put tensors in their place."""
    found = module._parameters
    return found[name] if name in found else getattr(module, name)


def _size(x: Float[Tensor, "batch position dim"]) -> Float[Tensor, "batch position 1"]:
    """Root mean square of each token, at least in single precision: squares of half-precision tokens overflow."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x.square().mean(-1, keepdim=True).add(1e-12).sqrt()
