"""Domains that were never seen with their labels: generalization (leave one out) and adaptation."""
