"""Unseen classes: compositional zero-shot recognition (unseen pairs) and generalized zero-shot recognition."""
