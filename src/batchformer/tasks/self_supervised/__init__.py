"""Learning without labels: MoCo-v2, MoCo-v3 and MAE, with or without batch attention, and probes of what was learnt."""
