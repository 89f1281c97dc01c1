"""BatchFormer: a transformer encoder over the batch axis, between backbone and classifier (Algorithm 1)."""

from typing import Any, Literal, overload

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from batchformer.errors import UserError, check_choice
from batchformer.kernels.backend import Backend, Choice, Memory
from batchformer.nn.encoder import BatchEncoderLayer, Norm
from batchformer.nn.inputs import autocasts, is_whole
from batchformer.nn.streams import STREAMS, Streams, open_streams, repeat_targets
from batchformer.parallel.members import SCOPES, Members, Scope


class BatchFormer(nn.Module):
    """Maps the features of a mini-batch to plain and related features; in eval mode the identity.

    Algorithm 1 of the paper: in training `x` becomes `cat([x, encoder(x)])` along the batch axis and `y` becomes
    `cat([y, y])`; one classifier sees both. In eval mode `x` and `y` pass unchanged, so the module can be dropped.
    The released code uses torch's `TransformerEncoderLayer(dim, 4, dim, 0.5)`; the BalancedSoftmax code stacks the
    streams in the opposite order, which does not change a mean over rows.

    Args:
        dim: width of a feature.
        heads: attention heads; must divide `dim`.
        hidden_dim: width of the MLP; None means `dim`, as in the papers.
        dropout: on attention weights, MLP and residual branches.
        layers: encoder layers (the paper's appendix, Table 9 (arXiv: 19), finds no gain beyond one).
        norm: "post" as published, "pre", or "relative", which trains at any depth (see `BatchEncoderLayer`).
        group_size: attend within groups of this many samples (the papers' per-GPU batches on one device).
        streams: "duplicate" as published, "split" or "single"; see `batchformer.nn.streams`.
        layer_scale: initial value of a learnt factor on both branches of each layer; None, as published, for no factor.
        variant: "published", or "stable" for insertions at many depths: norm="relative" unless norm= is given.
        scope: "local" attends over the batch of this process, as published; "global" over the batch of all processes,
            in training (docs/scale.md). `group_size` then means groups of that batch, in rank order.
        process_group: the processes for scope="global", as a group or a number of consecutive ranks; None means all.
        backend: implementation of the attention: "triton" (our kernels), "sdpa" (torch's), "reference" (the definition
            as loops), or "auto", the fastest available one; see `backend_used` and docs/kernels.md.
        memory: "lean" saves only the input of each layer and recomputes the layer in the backward; or "fast".

    Its state dict is that of `torch.nn.TransformerEncoder`; one of a single `TransformerEncoderLayer` also loads.
    """

    def __init__(
        self,
        dim: int,
        heads: int = 4,
        hidden_dim: int | None = None,
        dropout: float = 0.5,
        layers: int = 1,
        norm: Norm = "post",
        group_size: int | None = None,
        streams: Streams = "duplicate",
        layer_scale: float | None = None,
        variant: Literal["published", "stable"] = "published",
        scope: Scope = "local",
        process_group: ProcessGroup | int | None = None,
        backend: Backend = "auto",
        memory: Memory = "fast",
    ) -> None:
        super().__init__()
        check_choice("variant", variant, ("published", "stable"))
        check_choice("streams", streams, STREAMS)
        check_choice("scope", scope, SCOPES)
        if variant == "stable" and norm == "post":
            norm = "relative"
        if not is_whole(layers):
            raise UserError(f"layers={layers!r} must be 1 or more; to train without the module use `disabled()`.")
        if process_group is not None and scope == "local":
            raise UserError('process_group= needs scope="global": pass that too, or leave it out.')
        self.dim, self.streams = dim, streams
        self.scope, self.members = scope, Members(process_group)
        self.enabled = True
        self.layers = nn.ModuleList(
            BatchEncoderLayer(dim, heads, hidden_dim, dropout, norm, group_size, layer_scale, backend, memory)
            for _ in range(layers)
        )

    @overload
    def forward(self, x: Tensor) -> Tensor: ...
    @overload
    def forward(self, x: Tensor, y: Any) -> tuple[Tensor, Any]: ...
    def forward(self, x: Float[Tensor, "batch *position dim"], y: Any = None) -> Any:
        if self.active:
            x = open_streams(x, self.relate, self.streams)
            y = repeat_targets(y, x) if y is not None else None
        return x if y is None else (x, y)

    @property
    def active(self) -> bool:
        """Whether the module relates rows: in training mode, unless disabled."""
        return self.training and self.enabled

    def backend_used(self) -> Choice:
        """The backend that `relate` uses under the current autocast, and why; `fused` if kernels run whole layers.

        It depends on the device and dtype of the weights (or the autocast dtype), not on the input.
        """
        weight = self._first_weight()
        choice = self.layers[0].backend_used(weight.new_empty(1, 1, self.dim))  # type: ignore[operator]
        if choice.backend == "triton" and self.scope == "global":
            between = "between processes where positions are exchanged, torch's attention where rows or heads are"
            return choice._replace(why=f"{choice.why}; {between}")
        return choice

    def relate(
        self,
        x: Float[Tensor, "batch *position dim"],
        valid: Bool[Tensor, " batch *position"] | None = None,
        grid: tuple[int, int] | None = None,
    ) -> Float[Tensor, "batch *position dim"]:
        """The related rows only: the encoder over the batch axis, separately at each position; in any mode.

        Where `valid` is False the input passes unchanged, and nothing attends to it. `grid` is the height and width of
        the map that flattened positions cover (known for a map (batch, height, width, dim)). It is used only for a
        check with scope="global": processes compare it, since position n of a 2 x 6 map is not position n of a 6 x 2
        map.
        """
        if x.ndim < 2 or x.shape[-1] != self.dim:
            raise UserError(
                f"BatchFormer(dim={self.dim}) got an input of shape {tuple(x.shape)}: it needs (batch, {self.dim}) or "
                f"(batch, positions, {self.dim})."
            )
        if not x.is_floating_point():
            raise UserError(
                f"BatchFormer needs floating-point features and got {x.dtype}: pass floats, for example x.float()."
            )
        rows = x[:, None] if x.ndim == 2 else x.flatten(1, -2)  # also without rows
        if grid is None and x.ndim == 4:
            grid = (x.shape[1], x.shape[2])
        if not autocasts(x):
            rows = rows.to(self._first_weight().dtype)  # half-precision features with a full-precision module
        if valid is None:
            return self._encode(rows, None, grid).to(x.dtype).reshape(x.shape)
        valid = self._check_valid(valid, x).reshape(rows.shape[:2])
        # Padding is replaced by zeros: its values, NaN included, affect nothing, and no gradient reaches them.
        related = self._encode(torch.where(valid[..., None], rows, 0.0), valid, grid)
        return torch.where(valid[..., None], related.to(x.dtype), x.reshape(rows.shape)).reshape(x.shape)

    def _encode(self, rows: Tensor, valid: Tensor | None, grid: tuple[int, int] | None) -> Tensor:
        if self.scope == "global" and self.active:
            from batchformer.parallel.relate import relate_across

            return relate_across(self.layers, rows, valid, self.members, grid=grid)
        if rows.numel():
            for layer in self.layers:
                rows = layer(rows, valid)
            return rows
        # Nothing to relate (one image, split). DDP still expects a gradient of every weight: zeros.
        return rows + sum(weight.sum().to(rows.dtype) for weight in self.parameters())

    def _first_weight(self) -> Tensor:
        # FSDP's first version replaces parameters by tensors, unless use_orig_params is set.
        weight = next(self.parameters(), None)
        return self.layers[0].norm1.weight if weight is None else weight  # type: ignore[return-value, union-attr]

    @staticmethod
    def _check_valid(valid: Tensor, x: Tensor) -> Tensor:
        if valid.shape != x.shape[:-1] or valid.dtype != torch.bool:
            raise UserError(
                f"valid must be a boolean tensor of the shape {tuple(x.shape[:-1])}, one value per position; got "
                f"{valid.dtype} {tuple(valid.shape)}."
            )
        return valid

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        bare = any(key.startswith(f"{prefix}self_attn.") for key in state_dict)
        if bare and len(self.layers) == 1:  # the papers' own layer, without the `layers.0.` of a stack
            for key in [key for key in state_dict if key.startswith(prefix)]:
                state_dict[f"{prefix}layers.0.{key.removeprefix(prefix)}"] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        scope = f", scope={self.scope!r} over {self.members!r}" if self.scope == "global" else ""
        return f"dim={self.dim}, streams={self.streams!r}{scope}"
