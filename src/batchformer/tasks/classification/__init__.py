"""Image classification with DeiT's recipe and the mix methods, with or without BatchFormer."""
