"""What a trained module does: the gradient influence of samples on each other (paper, section 3.3 and Fig. 6)."""

from batchformer.analysis.gradient_influence import gradient_influence, influence_on_features, influence_on_images

__all__ = ["gradient_influence", "influence_on_features", "influence_on_images"]
