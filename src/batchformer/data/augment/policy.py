"""AutoAugment's policy for CIFAR-10 (Cubuk et al., 2019), as numbers.

The paper searched 25 sub-policies, each two operations with a probability and a magnitude from 0 to 9. The operations
and their ranges are those of `torchvision.transforms.v2.AutoAugment(AutoAugmentPolicy.CIFAR10)`, with the grey fill 128
of the code released with Balanced Softmax. A test compares the table with torchvision's entry by entry.
"""

import numpy as np

Step = tuple[str, float, int | None]

CIFAR10_POLICY: tuple[tuple[Step, Step], ...] = (
    (("Invert", 0.1, None), ("Contrast", 0.2, 6)),
    (("Rotate", 0.7, 2), ("TranslateX", 0.3, 9)),
    (("Sharpness", 0.8, 1), ("Sharpness", 0.9, 3)),
    (("ShearY", 0.5, 8), ("TranslateY", 0.7, 9)),
    (("AutoContrast", 0.5, None), ("Equalize", 0.9, None)),
    (("ShearY", 0.2, 7), ("Posterize", 0.3, 7)),
    (("Color", 0.4, 3), ("Brightness", 0.6, 7)),
    (("Sharpness", 0.3, 9), ("Brightness", 0.7, 9)),
    (("Equalize", 0.6, None), ("Equalize", 0.5, None)),
    (("Contrast", 0.6, 7), ("Sharpness", 0.6, 5)),
    (("Color", 0.7, 7), ("TranslateX", 0.5, 8)),
    (("Equalize", 0.3, None), ("AutoContrast", 0.4, None)),
    (("TranslateY", 0.4, 3), ("Sharpness", 0.2, 6)),
    (("Brightness", 0.9, 6), ("Color", 0.2, 8)),
    (("Solarize", 0.5, 2), ("Invert", 0.0, None)),
    (("Equalize", 0.2, None), ("AutoContrast", 0.6, None)),
    (("Equalize", 0.2, None), ("Equalize", 0.6, None)),
    (("Color", 0.9, 9), ("Equalize", 0.6, None)),
    (("AutoContrast", 0.8, None), ("Solarize", 0.2, 8)),
    (("Brightness", 0.1, 3), ("Color", 0.7, 0)),
    (("Solarize", 0.4, 5), ("AutoContrast", 0.9, None)),
    (("TranslateY", 0.9, 9), ("TranslateY", 0.7, 9)),
    (("AutoContrast", 0.9, None), ("Solarize", 0.8, 3)),
    (("Equalize", 0.8, None), ("Invert", 0.1, None)),
    (("TranslateY", 0.7, 9), ("AutoContrast", 0.9, None)),
)

GEOMETRIC = ("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate")
FACTORS = ("Brightness", "Color", "Contrast", "Sharpness")
_LEVELS = 9


def strength(op: str, level: int | None, sign: np.ndarray, height: int, width: int) -> np.ndarray:
    """What the operation is called with, one number per sample: pixels, slope, degrees, factor, bits or threshold.

    `sign` (+1 or -1) counts only for the operations that have a direction.
    """
    part = 0.0 if level is None else level / _LEVELS
    if op in ("ShearX", "ShearY"):
        return sign * (0.3 * part)
    if op == "TranslateX":
        return sign * (150.0 / 331.0 * width * part)
    if op == "TranslateY":
        return sign * (150.0 / 331.0 * height * part)
    if op == "Rotate":
        return sign * (30.0 * part)
    if op in FACTORS:
        # torchvision's magnitudes are float32; a factor of 1 - float32(.6) cuts to other bytes than one of .4
        return 1.0 + sign * float(np.float32(0.9 * part))
    if op == "Posterize":
        return np.full(len(sign), np.round(8 - 4 * part))
    if op == "Solarize":
        return np.full(len(sign), 255.0 * (1.0 - part))
    return np.zeros(len(sign))
