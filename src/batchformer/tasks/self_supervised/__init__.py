"""Self-supervised learning: MoCo-v2, MoCo-v3 and MAE, with or without batch attention, and linear probes."""
