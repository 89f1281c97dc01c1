"""The picture of the mixing is on the page of the run that has it."""

from made_up import classification, write
from PIL import Image

from batchformer.report.page import write_report


def test_a_run_with_a_picture_of_its_mixing_shows_it(tmp_path):
    write(tmp_path, [classification("vit-cifar100-32-transmix", "baseline", 0, 54)])
    page = write_report([tmp_path], tmp_path / "without.html").read_text()
    assert "Mixing</h3>" not in page
    folder = next(tmp_path.glob("*/result.json")).parent / "mixing"
    folder.mkdir()
    Image.new("RGB", (900, 300)).save(folder / "mixed.png")
    (folder / "pictures.json").write_text('[{"file": "mixed.png", "title": "TransMix", "caption": "What it shows."}]')
    page = write_report([tmp_path], tmp_path / "with.html").read_text()
    assert "<h3>Mixing</h3>" in page
    assert "What it shows." in page
    assert page.count("data:image/png;base64,") == 1
