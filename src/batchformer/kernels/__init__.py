"""The fast path of batch attention and of the layer around it, in Triton.

Nothing here is imported before it is used, and Triton only after `choose.why_not_triton` has found it; the slow,
obvious reference is in `batchformer.nn.attention`.
"""
