"""The fast path of batch attention and of the layer around it, in Triton.

Only `backend` is imported before the kernels are used, and Triton only after `backend.why_not_triton` has found it; the
slow reference is in `batchformer.nn.attention`.
"""
