"""The Triton kernels of this room compute what the tensor operations beside them do."""

from pathlib import Path

from tests.interpreter import interpreted


def test_kernels_agree_with_the_tensor_operations():
    assert interpreted(Path(__file__).with_name("interpret_kernels.py")) == [
        *("cut 4x4", "cut 3x5", "cut 1x6", "cut 8x8"),
        *("saliency 40x33", "saliency 9x70"),
    ]
