"""Long-tailed recognition: a loss for imbalanced classes, with or without BatchFormer."""
