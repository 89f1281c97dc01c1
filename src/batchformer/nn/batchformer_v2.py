"""BatchFormerV2: batch attention at every token or pixel, inside the network (V2, section 3)."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from jaxtyping import Bool, Float
from torch import Tensor

from batchformer.errors import check_choice
from batchformer.nn.batchformer import BatchFormer
from batchformer.nn.streams import carry_streams, open_streams


class BatchFormerV2(BatchFormer):
    """Maps tokens (B, N, C) or maps (B, C, H, W) to plain rows followed by related rows; in eval mode the identity.

    V2, eq. 1 and Fig. 3: at each of the N positions the B samples form a sequence for the encoder of BatchFormer, whose
    weights are shared by all positions. The first insertion doubles the batch, later ones (`opens=False`) act only on
    the related rows. The released detection code does this; the released DeiT code never doubles the batch but sends
    half of it through the module (here `streams="split"`), which is not what the paper describes.

    Args:
        opens: whether this insertion opens the streams or continues those opened by an earlier one.
        channels: channel layout of a four-dimensional input, "first" (B, C, H, W) or "last" (B, H, W, C).
        keywords: those of `BatchFormer`. The papers use 4 heads for detection and the backbone's number for ViTs.
    """

    def __init__(
        self,
        dim: int,
        heads: int = 4,
        *,
        opens: bool = True,
        channels: Literal["first", "last"] = "first",
        **keywords: Any,
    ) -> None:
        super().__init__(dim, heads, **keywords)
        check_choice("channels", channels, ("first", "last"))
        self.opens, self.channels = opens, channels

    def forward(  # type: ignore[override]
        self,
        x: Float[Tensor, "batch ..."],
        valid: Bool[Tensor, "batch ..."] | None = None,
        opens: bool | None = None,
        grid: tuple[int, int] | None = None,
    ) -> Float[Tensor, "rows ..."]:
        """`valid` (B, N), or (B, H, W) for maps, is False at padded positions: they pass unchanged and are masked.

        A position that is valid in one sample only attends to itself. Default: no mask, as published. `opens` overrides
        that of the constructor if one module serves several insertions. `grid` as in `relate`.
        """
        if not self.active:
            return x
        is_map = x.ndim == 4 and self.channels == "first"
        if valid is not None:
            self._check_valid(valid, x.movedim(1, -1) if is_map else x)

        def relate(rows: Tensor) -> Tensor:  # the last rows of the batch, with their part of the mask
            return self.relate(rows, None if valid is None else valid[valid.shape[0] - rows.shape[0] :], grid)

        pass_on = open_streams if (self.opens if opens is None else opens) else carry_streams
        return pass_on(x, partial(with_channels_last, relate) if is_map else relate, self.streams)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, opens={self.opens}"


def with_channels_last(relate: Callable[[Tensor], Tensor], x: Float[Tensor, "batch dim ..."]) -> Tensor:
    """`relate` on a map or signal (B, C, ...); the result has the memory layout of the input.

    A model may call `.view` on the result, and its convolutions run in the layout of their input.
    """
    out = relate(x.movedim(1, -1)).movedim(-1, 1)
    return out.contiguous() if x.is_contiguous() else out
