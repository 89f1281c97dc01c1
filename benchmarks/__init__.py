"""Speed and memory, side by side with others, and studies: `python -m benchmarks.NAME` from the repository root."""
