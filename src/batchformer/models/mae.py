"""The masked autoencoder (He et al., "Masked Autoencoders Are Scalable Vision Learners") around timm's ViT."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

import batchformer as bf
from batchformer.errors import UserError

_OUTER_STD = 0.02


class MaskedAutoencoder(nn.Module):
    """Encodes the patches that are not masked, and predicts all of them from these.

    The encoder is timm's ViT as it is, so that its weights are exported under stock keys; its classifier is not used.
    The decoder gets the encoded patches at their places and a learnt token at the masked ones. Position embeddings are
    fixed sines and cosines in both. (A ViTMAE of transformers 5.22 that is built from a config has positions of 0.)

    The mask is a function of `noise`, one number for each patch: those with the smallest are kept. So the caller
    decides what is random, and a doubled batch can have the same mask twice. BatchFormerV2 goes behind the blocks of
    the decoder (V2, Table 10) or of the encoder, with `bf.attach(mae, after=["decoder_blocks.0", ...])`; predictions
    then have two rows for each image in training.

    Args:
        encoder: a VisionTransformer of timm with position embeddings.
        decoder_dim, decoder_depth, decoder_heads: of the decoder; as published 512, 8 and 16.
        mask_ratio: fraction of masked patches.
    """

    decoder_positions: Float[Tensor, "1 tokens dim"]

    def __init__(
        self,
        encoder: nn.Module,
        decoder_dim: int = 512,
        decoder_depth: int = 8,
        decoder_heads: int = 16,
        mask_ratio: float = 0.75,
    ) -> None:
        super().__init__()
        from timm.models.vision_transformer import Block, VisionTransformer

        if not isinstance(encoder, VisionTransformer) or encoder.pos_embed is None:
            raise UserError(
                f"a masked autoencoder needs a VisionTransformer of timm with position embeddings, not "
                f"{type(encoder).__name__}: take vit_tiny_patch16_224, vit_base_patch16_224 or the like."
            )
        if not 0 < mask_ratio < 1:
            raise UserError(f"mask_ratio={mask_ratio} must be above 0 and below 1: 0.75 is the published value.")
        if decoder_dim % decoder_heads or decoder_dim % 4:
            raise UserError(f"decoder_dim={decoder_dim} must be divisible by decoder_heads={decoder_heads} and by 4.")
        self.encoder, self.mask_ratio = encoder, mask_ratio
        self.grid: tuple[int, int] = encoder.patch_embed.grid_size  # type: ignore[assignment]
        self.patch: tuple[int, int] = encoder.patch_embed.patch_size  # type: ignore[assignment]
        self.patches = self.grid[0] * self.grid[1]
        self.kept = int(self.patches * (1 - mask_ratio))
        if self.kept < 1:
            raise UserError(f"mask_ratio={mask_ratio} leaves none of {self.patches} patches: mask fewer.")
        size = tuple(side * patch for side, patch in zip(self.grid, self.patch, strict=True))
        if (built := encoder.patch_embed.img_size) not in (None, size):
            raise UserError(
                f"images of {built[0]} x {built[1]} pixels are no whole patches of {self.patch[0]} x {self.patch[1]}: "
                f"choose another img_size or patch_size."
            )
        prefix, dim = encoder.num_prefix_tokens, encoder.embed_dim
        self.decoder_embed = nn.Linear(dim, decoder_dim)
        self.mask_token = nn.Parameter(torch.empty(1, 1, decoder_dim))
        self.register_buffer("decoder_positions", positions(self.grid, decoder_dim, prefix), persistent=False)
        self.decoder_blocks = nn.ModuleList(
            Block(decoder_dim, decoder_heads, mlp_ratio=4.0, qkv_bias=True) for _ in range(decoder_depth)
        )
        self.decoder_norm = nn.LayerNorm(decoder_dim, eps=1e-6)
        self.decoder_pred = nn.Linear(decoder_dim, 3 * self.patch[0] * self.patch[1])
        self._initialise()

    def _initialise(self) -> None:
        """As published: Xavier for linear layers and the patch projection, fixed positions."""
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                nn.init.xavier_uniform_(layer.weight)
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)
        encoder: Any = self.encoder
        projection = encoder.patch_embed.proj.weight
        nn.init.xavier_uniform_(projection.view(len(projection), -1))
        nn.init.normal_(self.mask_token, std=_OUTER_STD)
        for token in (encoder.cls_token, getattr(encoder, "reg_token", None)):
            if token is not None:
                nn.init.normal_(token, std=_OUTER_STD)
        with torch.no_grad():
            prefix = encoder.pos_embed.shape[1] - self.patches  # 0 where the class token has no position
            encoder.pos_embed.copy_(positions(self.grid, encoder.embed_dim, prefix))
        encoder.pos_embed.requires_grad_(False)

    def forward(
        self, images: Float[Tensor, "batch 3 height width"], noise: Float[Tensor, "batch patches"]
    ) -> Float[Tensor, "rows patches pixels"]:
        """The pixels of every patch, in the order of `patchify`."""
        order = noise.argsort(dim=1)
        return self.decode(self.encode(images, order[:, : self.kept]), order.argsort(dim=1))

    def encode(self, images: Tensor, kept: Int[Tensor, "batch kept"]) -> Float[Tensor, "rows tokens dim"]:
        """The encoded class token and kept patches."""
        encoder: Any = self.encoder
        x = encoder._pos_embed(encoder.patch_embed(images))
        prefix = encoder.num_prefix_tokens
        x = torch.cat([x[:, :prefix], _take(x[:, prefix:], kept)], dim=1)
        return encoder.norm(encoder.blocks(encoder.norm_pre(x)))

    def decode(self, x: Float[Tensor, "rows tokens dim"], places: Int[Tensor, "batch patches"]) -> Tensor:
        """`places`: of every patch its position among the kept ones and then the masked ones."""
        prefix = self.encoder.num_prefix_tokens
        x = self.decoder_embed(x)
        masked = self.mask_token.to(x.dtype).expand(len(x), self.patches - self.kept, -1)
        patches = _take(torch.cat([x[:, prefix:], masked], dim=1), bf.repeat_targets(places, x))
        x = torch.cat([x[:, :prefix], patches], dim=1) + self.decoder_positions
        for block in self.decoder_blocks:
            x = block(x)
        return self.decoder_pred(self.decoder_norm(x))[:, prefix:]

    def mask(self, noise: Float[Tensor, "batch patches"]) -> Float[Tensor, "batch patches"]:
        """1 where a patch is masked."""
        return (noise.argsort(dim=1).argsort(dim=1) >= self.kept).float()

    def patchify(self, images: Float[Tensor, "batch 3 height width"]) -> Float[Tensor, "batch patches pixels"]:
        """Patches row by row; in each the pixels row by row, and of a pixel its three channels."""
        (rows, columns), (height, width) = self.grid, self.patch
        x = images.reshape(len(images), 3, rows, height, columns, width)
        return x.permute(0, 2, 4, 3, 5, 1).reshape(len(images), rows * columns, -1)

    def unpatchify(self, patches: Float[Tensor, "batch patches pixels"]) -> Float[Tensor, "batch 3 height width"]:
        (rows, columns), (height, width) = self.grid, self.patch
        x = patches.reshape(len(patches), rows, columns, height, width, 3).permute(0, 5, 1, 3, 2, 4)
        return x.reshape(len(patches), 3, rows * height, columns * width)


def positions(grid: tuple[int, int], dim: int, prefix: int) -> Float[Tensor, "1 tokens dim"]:
    """Sines and cosines of column and row, half of the channels each; `prefix` tokens in front have zeros."""
    from timm.layers import build_sincos2d_pos_embed

    table = build_sincos2d_pos_embed(list(grid), dim=dim, interleave_sin_cos=False)
    return torch.cat([torch.zeros(prefix, dim), table])[None]


def _take(x: Float[Tensor, "batch n dim"], chosen: Int[Tensor, "batch k"]) -> Float[Tensor, "batch k dim"]:
    return x.gather(1, chosen[:, :, None].expand(-1, -1, x.shape[2]))
