"""Analyses of a module: gradient influence (Fig. 6), Grad-CAM (Fig. 5), stream health, attention over the batch."""

from batchformer.analysis.batch_attention import (
    AttentionOverBatch,
    attention_over_batch,
    attention_weights,
    on_itself,
    relative_entropy,
)
from batchformer.analysis.features import (
    FeaturePair,
    between_samples,
    effective_rank,
    features_over_scenes,
    features_with_and_without,
    sample_signal,
)
from batchformer.analysis.grad_cam import grad_cam
from batchformer.analysis.gradient_influence import (
    GradientOnOthers,
    gradient_influence,
    gradient_on_others,
    influence_on_features,
    influence_on_images,
)
from batchformer.analysis.stream_health import StreamHealth, stream_health

__all__ = ["AttentionOverBatch", "FeaturePair", "GradientOnOthers", "StreamHealth", "attention_over_batch",
           "attention_weights", "between_samples", "effective_rank", "features_over_scenes",
           "features_with_and_without", "grad_cam", "gradient_influence", "gradient_on_others",
           "influence_on_features", "influence_on_images", "on_itself", "relative_entropy", "sample_signal",
           "stream_health"]  # fmt: skip
