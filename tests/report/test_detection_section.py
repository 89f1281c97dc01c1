"""The pictures of a detector are on the page of the run that has them."""

from made_up import classification, write
from PIL import Image

from batchformer.report.page import write_report


def test_a_run_with_pictures_of_its_detections_shows_them(tmp_path):
    write(tmp_path, [classification("coco128-detr", "batchformer", 0, 54)])
    page = write_report([tmp_path], tmp_path / "without.html").read_text()
    assert "found in the images</h3>" not in page
    folder = next(tmp_path.glob("*/result.json")).parent / "detection"
    folder.mkdir()
    Image.new("RGB", (900, 300)).save(folder / "boxes.png")
    (folder / "pictures.json").write_text('[{"file": "boxes.png", "title": "Boxes", "caption": "What it shows."}]')
    page = write_report([tmp_path], tmp_path / "with.html").read_text()
    assert "<h3>What is found in the images</h3>" in page
    assert "What it shows." in page
    assert page.count("data:image/png;base64,") == 1
