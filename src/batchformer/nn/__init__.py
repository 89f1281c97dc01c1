"""The modules of the papers: batch attention, the encoder layer, BatchFormer, the two streams."""

from batchformer.nn.attention import BatchAttention, batch_attention, reference_batch_attention
from batchformer.nn.batchformer import BatchFormer
from batchformer.nn.batchformer_v2 import BatchFormerV2
from batchformer.nn.encoder import BatchEncoderLayer
from batchformer.nn.streams import plain_rows, repeat_targets
from batchformer.nn.two_stream_loss import StreamGuard, TwoStreamLoss

__all__ = ["BatchAttention", "BatchEncoderLayer", "BatchFormer", "BatchFormerV2", "StreamGuard", "TwoStreamLoss",
           "batch_attention", "plain_rows", "reference_batch_attention", "repeat_targets"]  # fmt: skip
