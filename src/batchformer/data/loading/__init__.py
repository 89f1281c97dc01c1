"""Order, seeds and loaders: which samples make up which batch, as pure functions of (seed, epoch, step, index)."""
