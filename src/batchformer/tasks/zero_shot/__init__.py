"""Unseen classes: compositional and generalized zero-shot learning."""
