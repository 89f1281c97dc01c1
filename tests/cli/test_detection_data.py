"""`batchformer data` about data with boxes."""

import pytest

from batchformer.cli.data import LAYOUTS
from batchformer.data.miniature import NAMES, write


def test_every_layout_that_has_a_miniature_is_described():
    described = {line.split()[0] for line in LAYOUTS.splitlines() if line.strip()}
    assert set(NAMES) <= described


@pytest.mark.parametrize(("recipe", "tested"), [("detr-coco", 8), ("coco128-smca-detr", 24)])  # on the training images
def test_boxes_are_counted(recipe, tested, say, tmp_path):
    root = write("coco", tmp_path / "coco")
    code, out, _ = say("data", recipe, "--data-root", root)
    assert code == 0
    assert f"24 training and {tested} test images" in out
    assert "test boxes" in out
    assert "most boxes:" in out
