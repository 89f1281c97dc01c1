"""Object detection and panoptic segmentation with the DETR family, with or without BatchFormerV2."""
