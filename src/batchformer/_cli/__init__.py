"""The commands of ``batchformer``, one file each; every one is imported only when it is asked for."""
