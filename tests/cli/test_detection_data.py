"""`batchformer data` about data with boxes."""

import pytest

from batchformer.cli.data import layout_table
from batchformer.data.sets import miniature_names, write_miniature


def test_every_layout_that_has_a_miniature_is_described():
    described = {line.split()[0] for line in layout_table().splitlines() if line.strip()}
    assert set(miniature_names()) <= described


@pytest.mark.parametrize(("recipe", "tested"), [("detr-coco", 8), ("coco128-smca-detr", 24)])  # on the training images
def test_boxes_are_counted(recipe, tested, say, tmp_path):
    root = write_miniature("coco", tmp_path / "coco")
    code, out, _ = say("data", recipe, "--data-root", root)
    assert code == 0
    assert f"24 training and {tested} test images" in out
    assert "test boxes" in out
    assert "most boxes:" in out
    assert "many (>" not in out  # of long tails alone
    assert ("results are those on the training images" in out) == (tested == 24)
