"""Fine-grained saliency: equal to its description pixel by pixel, and to OpenCV's where that is installed."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_sample_image

from batchformer.errors import UserError
from batchformer.mix import saliency_mix
from batchformer.mix.normalisation import unit_range
from batchformer.mix.saliency_mix import fine_grained_saliency, most_salient

from .slow_saliency import slow_saliency


def batch(*images: np.ndarray) -> torch.Tensor:
    return torch.stack([torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1) for image in images])


@pytest.fixture(scope="module")
def photographs() -> list[np.ndarray]:
    return [load_sample_image("china.jpg"), load_sample_image("flower.jpg")]


@pytest.mark.parametrize(("height", "width"), [(17, 30), (26, 9)])
def test_every_pixel_is_that_of_the_description(photographs, height, width):
    crops = [image[100 : 100 + 5 * height : 5, 200 : 200 + 5 * width : 5] for image in photographs]
    ours = fine_grained_saliency(batch(*crops)).numpy()
    for crop, fast in zip(crops, ours, strict=True):
        np.testing.assert_array_equal(np.round(255 * fast), 255 * slow_saliency(crop))


@pytest.mark.parametrize("size", [(32, 32), (224, 224), (61, 97), (427, 640)])
def test_agrees_with_opencv_on_photographs(photographs, size):
    cv2 = pytest.importorskip("cv2")
    if not hasattr(cv2, "saliency"):
        pytest.skip("this OpenCV has no saliency module (opencv-contrib)")
    detector = cv2.saliency.StaticSaliencyFineGrained_create()
    images = [cv2.resize(image, size[::-1], interpolation=cv2.INTER_AREA) for image in photographs]
    ours = fine_grained_saliency(batch(*images)).numpy()
    for image, fast in zip(images, ours, strict=True):
        theirs = detector.computeSaliency(np.ascontiguousarray(image[:, :, ::-1]))[1]
        steps = 0 if image.size // 3 <= 65_793 else 2
        assert np.round(255 * np.abs(fast - theirs)).max() <= steps


def test_opencv_reads_the_bytes_of_floats_as_pixels(photographs):
    """Which is what the released SaliencyMix code has it do: why the default here departs from it."""
    cv2 = pytest.importorskip("cv2")
    if not hasattr(cv2, "saliency"):
        pytest.skip("this OpenCV has no saliency module (opencv-contrib)")
    detector = cv2.saliency.StaticSaliencyFineGrained_create()
    for photograph in photographs:
        image = cv2.resize(photograph, (64, 64), interpolation=cv2.INTER_AREA)
        normalised = ((image / 255 - 0.5) / 0.25).astype(np.float32)
        of_bytes, of_floats = (detector.computeSaliency(one)[1].flatten() for one in (image, normalised))
        assert abs(np.corrcoef(of_bytes, of_floats)[0, 1]) < 0.1


def test_an_image_alone_has_the_map_it_has_in_a_batch(photographs):
    images = batch(*(image[:48, :40] for image in photographs))
    together = fine_grained_saliency(images)
    for row in range(2):
        torch.testing.assert_close(fine_grained_saliency(images[row : row + 1])[0], together[row], rtol=0, atol=0)


def test_floats_and_bytes_give_the_same_map(photographs):
    images = batch(*(image[:40, :40] for image in photographs))
    torch.testing.assert_close(fine_grained_saliency(images / 255), fine_grained_saliency(images), rtol=0, atol=0)


def test_autocast_changes_nothing(photographs):
    images = batch(*(image[:40, :40] for image in photographs))
    with torch.autocast("cpu", torch.bfloat16):
        under = fine_grained_saliency(images)
    torch.testing.assert_close(under, fine_grained_saliency(images), rtol=0, atol=0)


def test_a_lone_bright_spot_is_the_most_salient_place():
    # so faint that it shifts the mean of no surround by a level: the dark around a bright spot is salient too
    images = torch.full((2, 1, 30, 44), 100, dtype=torch.uint8)
    images[0, 0, 7:10, 30:33] = 115
    images[1, 0, 20:23, 14:17] = 85
    assert most_salient(fine_grained_saliency(images)).tolist() == [[8, 31], [21, 15]]


def test_of_equal_peaks_the_first_is_taken():
    values = torch.zeros(2, 3, 4)
    values[0, 1, 3] = values[0, 2, 0] = 1
    assert most_salient(values).tolist() == [[1, 3], [0, 0]]


@pytest.mark.parametrize("size", [(1, 9), (5, 1), (2, 2)])
def test_a_flat_image_has_no_saliency_and_no_nan(size):
    assert fine_grained_saliency(torch.full((2, 3, *size), 0.5)).eq(0).all()


def test_normalisation_is_undone(photographs):
    images = batch(*(image[:16, :16] for image in photographs)) / 255
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.3, 0.25)
    normalised = (images - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    torch.testing.assert_close(unit_range(normalised, mean, std), images)
    stretched = unit_range(7 * images - 3)
    assert stretched.amin((1, 2, 3)).eq(0).all()
    torch.testing.assert_close(stretched.amax((1, 2, 3)), torch.ones(2))


def test_an_image_that_is_neither_grey_nor_rgb_is_refused():
    with pytest.raises(UserError, match="4 channels"):
        fine_grained_saliency(torch.rand(1, 4, 8, 8))
    with pytest.raises(UserError, match=r"not of \(3, 8, 8\) of torch.float32"):
        fine_grained_saliency(torch.rand(3, 8, 8))
    with pytest.raises(UserError, match=r"bytes or floats .* of torch.int32"):
        fine_grained_saliency(torch.ones(1, 3, 8, 8, dtype=torch.int32))
    with pytest.raises(UserError, match="3 channels"):
        unit_range(torch.rand(1, 3, 8, 8), (0.5,), (0.5,))


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(32, 32), (224, 224), (300, 500)])
def test_the_gpu_computes_the_same_map(photographs, size):
    images = torch.nn.functional.interpolate(batch(*photographs).float(), size, mode="area").round().to(torch.uint8)
    assert saliency_mix._kernel(torch.device("cuda", 0)) is not None
    there = fine_grained_saliency(images.cuda())
    torch.testing.assert_close(there.cpu(), fine_grained_saliency(images), rtol=0, atol=1e-6)
    torch.testing.assert_close(most_salient(there).cpu(), most_salient(fine_grained_saliency(images)))
