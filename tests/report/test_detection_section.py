"""The pictures of a detector are on the page of the run that has them."""

import re

import pytest
from made_up import classification, write
from PIL import Image

from batchformer.report import compare_runs, format_table, verdict
from batchformer.report.page import write_report


def test_a_run_with_pictures_of_its_detections_shows_them(tmp_path):
    write(tmp_path, [classification("coco128-detr", "batchformer", 0, 54)])
    page = write_report([tmp_path], tmp_path / "without.html").read_text()
    assert "<h3>Predictions</h3>" not in page
    folder = next(tmp_path.glob("*/result.json")).parent / "detection"
    folder.mkdir()
    Image.new("RGB", (900, 300)).save(folder / "boxes.png")
    (folder / "pictures.json").write_text('[{"file": "boxes.png", "title": "Boxes", "caption": "What it shows."}]')
    page = write_report([tmp_path], tmp_path / "with.html").read_text()
    assert "<h3>Predictions</h3>" in page
    assert "What it shows." in page
    assert page.count("data:image/png;base64,") == 1


def of_objects(kind, recipe, method, seed):
    """A run of a detector: COCO's numbers, and classes without any box."""
    value = {"baseline": 40.0, "batchformer": 42.0}[method] + 0.1 * seed
    more = {
        "pq": {"sq": 79.0, "rq": 53.0, "pq_things": 44.0, "pq_stuff": 36.0, "ap": 31.0, "pq_batch": None},
        "ap": {"ap50": 60.0, "ap75": 43.0, "ap_small": 20.0, "ap_medium": 44.0, "ap_large": None},
    }[kind]
    run = classification(recipe, method, seed, 50)
    classes = len(run["class_counts"])
    run |= {"metrics": {"all": value, kind: value, **more}, "class_counts": [0] * (classes - 1) + [7]}
    run["per_class"] = [None] * (classes - 1) + [value]
    run["history"] = [{"epoch": 0, "train_loss": 3.0, "all": 9.0}, {"epoch": 1, "train_loss": 2.0, "all": value}]
    model = {**run["config"]["model"], "detector_from": f"runs/{method}-seed{seed}"}
    run["config"] = {**run["config"], "model": model, "task": {"pq": "panoptic", "ap": "detection"}[kind]}
    return run


@pytest.mark.parametrize(
    ("kind", "label", "name", "other"),
    [
        ("ap", "AP", "average precision of boxes", "AP small"),
        ("pq", "PQ", "panoptic quality", "PQ things"),
    ],
)
def test_runs_of_detectors_are_judged_by_the_numbers_of_coco(tmp_path, kind, label, name, other):
    results = [of_objects(kind, f"coco128-{kind}", m, s) for m in ("baseline", "batchformer") for s in range(3)]
    table = compare_runs(results)
    assert table.primary.label == label
    assert not {"AP large", "PQ, module on"} & {measure.label for measure in table.measures}  # not known in any run
    assert f"+2.00 points of {name}" in verdict(table).sentence
    assert format_table(table).startswith("AP, %" if kind == "ap" else "measure, %")  # beside PQ are SQ, RQ and AP
    write(tmp_path, results)
    page = write_report([tmp_path], tmp_path / "page.html").read_text()
    shown = re.sub(r"<style>.*?</style>|<pre>.*?</pre>", "", page, flags=re.DOTALL)
    assert f'<th scope="row">{other}</th>' in shown
    assert ("difference in AP, points" if kind == "ap" else ">difference, points<") in shown
    seen = re.sub(r"<[^>]+>", " ", shown)
    assert "numbers of the last epoch" in seen
    assert "accuracy" not in seen.lower()
    assert "Fig. 6" not in shown
    assert "Read with care" not in shown  # every head stands on a detector of its own


def test_a_page_of_several_kinds_names_them_all(tmp_path):
    results = [of_objects(kind, f"coco128-{kind}", "baseline", 0) for kind in ("ap", "pq")]
    page = write_report([write(tmp_path, results)], tmp_path / "page.html").read_text()
    assert "Average precision of boxes, %; panoptic quality, %" in page


def test_numbers_on_the_images_trained_on_are_told(tmp_path):
    run = of_objects("ap", "coco128-detr", "baseline", 0)
    run["config"]["data"] = {"class_path": "batchformer.data.CocoDetection", "init_args": {"evaluate_on": "train"}}
    page = write_report([write(tmp_path, [run])], tmp_path / "page.html").read_text()
    assert "Evaluated on the images trained on" in page


def test_the_loss_of_a_detector_has_no_line_of_chance(tmp_path):
    losses = {"plain_loss": [9.0, 3.0], "related_loss": [9.5, 4.0]}
    for kind, runs in {
        "ap": [of_objects("ap", "coco128-detr", "batchformer", 0) | {"streams": losses}],
        "top1": [classification("vit-cifar100-32", "batchformer", 0, 54) | {"streams": losses}],
    }.items():
        page = write_report([write(tmp_path / kind, runs)], tmp_path / f"{kind}.html").read_text()
        assert "Training loss of both streams" in page
        assert ("dotted: chance" in page) == (kind == "top1")
