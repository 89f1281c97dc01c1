"""Unseen domains: generalization (a domain left out) and adaptation (a domain without labels)."""
