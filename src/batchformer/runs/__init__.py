"""One training run on disk: its folder, its checkpoints, its result file, and resuming."""
