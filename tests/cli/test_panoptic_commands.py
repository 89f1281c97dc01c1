"""Both stages of panoptic segmentation from the command line: the shipped recipes in small, and what predict draws."""

import csv
import importlib.util
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from PIL import ExifTags, Image
from safetensors.torch import load_file

from batchformer.cli import main
from batchformer.data.images import output_names
from batchformer.data.sets import write_miniature
from batchformer.data.sets.coco_panoptic import read_segment_ids
from batchformer.errors import UserError
from batchformer.recipes import about, find_recipe, read_recipe

SMALL = {
    **dict(about("coco128-panoptic").small_overrides()),
    "trainer.max_epochs": "1",
    "trainer.limit_train_batches": "2",
    "trainer.accelerator": "cpu",
}
WORDS = [word for key, value in SMALL.items() for word in (f"--{key}", value)]
STAGES = ("detr-coco-panoptic", "coco128-panoptic")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_miniature("coco-panoptic", tmp_path_factory.mktemp("panoptic") / "data")


@pytest.fixture(scope="module")
def stages(data, tmp_path_factory):
    """(recipe, method) -> run folders of the detector and of the head, trained two steps each."""
    made = {}

    def of(name, method):
        if (name, method) not in made:
            out = tmp_path_factory.mktemp(name)
            common = ["--data-root", str(data), "--method", method, *WORDS]
            assert main(["fit", f"{name}-boxes", *common, "--out", str(out / "boxes")]) == 0
            found = ["--model.detector_from", str(out / "boxes")]
            assert main(["fit", name, *common, *found, "--out", str(out / "head")]) == 0
            made[name, method] = out / "boxes", out / "head"
        return made[name, method]

    return of


def test_the_detector_of_table_5_begins_with_imagenet_weights_as_that_of_table_1():
    weights = [
        read_recipe(find_recipe(name)[1])["run"]["init_from"]["backbone"]
        for name in ("detr-coco-panoptic-boxes", "detr-coco")
    ]
    assert weights == ["pretrained", "pretrained"]


def test_the_head_leaves_detector_and_module_as_they_were(stages):
    boxes, head = (
        torch.load(run / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
        for run in stages(STAGES[1], "batchformer")
    )
    for key, value in boxes.items():
        name = key.removeprefix("net.")
        assert torch.equal(value, head[f"net.{name}" if name.startswith("batchformer") else f"net.detr.{name}"]), key
    assert any(key.startswith("net.batchformer") for key in boxes)


@pytest.mark.slow
def test_joint_training_needs_no_detector_and_moves_everything(data, tmp_path):
    words = ["--data-root", str(data), *WORDS, "--model.train", "joint", "--out", str(tmp_path / "run")]
    assert main(["fit", STAGES[1], *words, "--trainer.limit_train_batches", "1"]) == 0
    first = torch.load(tmp_path / "run/checkpoints/last.ckpt", weights_only=True)
    moved = set(first["optimizer_states"][0]["state"])
    groups = first["optimizer_states"][0]["param_groups"]
    assert {group["name"] for group in groups} == {"rest", "backbone"}
    assert moved == {number for group in groups for number in group["params"]}


def test_test_finds_the_numbers_of_the_result_file(say, stages):
    code, out, err = say("test", stages(STAGES[1], "batchformer")[1])
    assert code == 0, err
    assert "result.json has exactly these numbers" in out


def test_export_loads_into_the_stock_network_with_a_mask_head(say, stages, tmp_path):
    code, out, err = say("export", stages(STAGES[1], "batchformer")[1], "--out", tmp_path / "plain.safetensors")
    assert code == 0, err
    names = {}
    exec(next(line for line in out.splitlines() if "model = with_mask_head" in line).strip(), names)
    weights = load_file(tmp_path / "plain.safetensors")
    names["model"].load_state_dict(weights, strict=True)
    assert isinstance(names["model"], transformers.DetrForSegmentation)
    assert not [key for key in weights if "batchformer" in key]


def test_the_head_wants_a_detector_that_fits(say, stages, data, tmp_path):
    boxes, _ = stages(STAGES[0], "baseline")
    common = ("fit", STAGES[1], "--data-root", data, *WORDS, "--out", tmp_path / "run")
    for more, words in [
        ((), "--init-from detector="),
        (("--model.detector_from", boxes), "trained without BatchFormerV2"),
        (
            ("--model.detector_from", boxes, "--method", "baseline", "--model.detector_args.d_model", "64"),
            "another one",
        ),
        (("--model.detector_from", boxes, "--method", "baseline", "--data.masks", "false"), "learns from masks"),
        (("--model.detector_from", boxes, "--data.batch_size", "0"), "must be at least 1, got 0"),
        (
            ("--model.detector_from", boxes, "--method", "baseline", "--data.batch_size", "9"),
            "fewer than one batch of 9",
        ),
    ]:
        code, _, err = say(*common, *more)
        assert code == 2
        assert words in err
        assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_goes_on_after_the_detector_it_began_with_is_gone(say, stages, data, tmp_path):
    detector = shutil.copytree(stages(STAGES[1], "batchformer")[0], tmp_path / "boxes")
    run = ("fit", STAGES[1], "--data-root", data, *WORDS, "--model.detector_from", detector, "--out", tmp_path / "run")
    assert say(*run)[0] == 0
    shutil.rmtree(detector)
    result = (tmp_path / "run" / "result.json").rename(tmp_path / "before.json")
    code, _, err = say(*run, "--resume")
    assert code == 0, err
    after = json.loads((tmp_path / "run" / "result.json").read_text())
    assert after["metrics"] == json.loads(result.read_text())["metrics"]


def test_boxes_are_drawn_and_listed_in_terms_of_coco(say, stages, data, tmp_path):
    out, photos = tmp_path / "seen", sorted((data / "val2017").iterdir())[:2]
    command = ("predict", stages(STAGES[1], "batchformer")[0], *photos, "--out", out, "--threshold", 0.1)
    assert say(*command)[0] == 0
    code, said, err = say(*command)  # its own files it replaces
    assert code == 0, err
    assert "on 2 images" in said
    entries = json.loads((out / "predictions.json").read_text())
    assert {entry["image_id"] for entry in entries} == {int(path.stem) for path in photos}
    assert {entry["category_id"] for entry in entries} <= {1, 3, 17, 44, 90, 187, 193}
    assert len(entries) == 2 * 10
    rows = list(csv.DictReader((out / "predictions.csv").open()))
    assert [float(row["score"]) for row in rows] == [entry["score"] for entry in entries]
    for path in photos:
        drawn, plain = Image.open(out / f"{path.stem}.png"), Image.open(path).convert("RGB")
        assert not np.array_equal(np.asarray(drawn), np.asarray(plain.resize(drawn.size, Image.Resampling.BICUBIC)))


@pytest.mark.parametrize("kind", ["boxes", "segments"])
def test_nothing_drawn_says_why_and_an_unreadable_image_costs_no_other(say, stages, data, tmp_path, kind):
    run, out = stages(STAGES[1], "batchformer")[kind == "segments"], tmp_path / "seen"
    photo = shutil.copy(sorted((data / "val2017").iterdir())[0], tmp_path / "b.jpg")
    (broken := tmp_path / "a.jpg").write_bytes(b"no image")
    code, said, err = say("predict", run, broken, photo, "--out", out, "--threshold", 1)
    assert code == 1
    assert "1 of 2 images could not be read" in err
    assert "0 objects drawn on 1 image" in said
    assert "lower --threshold to see more" in said
    rows = list(csv.DictReader((out / "predictions.csv").open()))
    assert (rows[0]["path"], "cannot be read" in rows[0]["error"]) == (str(broken), True)
    assert {(row["path"], row["error"]) for row in rows[1:]} <= {(str(photo), "")}
    assert [path.name for path in out.glob("*.png")] == ["b.png"]
    if kind == "boxes":
        best = max(rows[1:], key=lambda row: float(row["score"]))
        assert f"the best score is {float(best['score']):.2g} ({best['class']} in {photo})" in said


def test_segments_are_drawn_and_listed_in_the_panoptic_format(say, stages, data, tmp_path):
    out, photo = tmp_path / "seen", sorted((data / "val2017").iterdir())[0]
    command = ("predict", stages(STAGES[1], "batchformer")[1], photo, "--out", out, "--threshold", 0.1)
    assert say(*command)[0] == 0
    code, _, err = say(*command)  # its own files it replaces
    assert code == 0, err
    content = json.loads((out / "predictions.json").read_text())
    (entry,) = content["annotations"]
    ids = read_segment_ids(out / "segments" / entry["file_name"])
    assert ids.shape == Image.open(photo).size[::-1]
    assert {segment["id"]: segment["area"] for segment in entry["segments_info"]} == {
        int(k): int((ids == k).sum()) for k in np.unique(ids) if k
    }
    assert len(content["categories"]) == 7
    assert sum(category["isthing"] for category in content["categories"]) == 5
    assert (out / f"{photo.stem}.png").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["boxes", "segments"])
def test_what_is_found_in_a_photo_lies_where_viewers_show_it(say, stages, data, tmp_path, kind):
    run = stages(STAGES[1], "batchformer")[kind == "segments"]
    upright = Image.open(sorted((data / "val2017").iterdir())[0]).convert("RGB").resize((48, 80))
    note = Image.Exif()
    note[ExifTags.Base.Orientation] = 6
    for name, picture, kept in (
        ("upright", upright, None),
        ("phone", upright.transpose(Image.Transpose.ROTATE_90), note),
    ):
        (tmp_path / name).mkdir()
        picture.save(tmp_path / name / "1.png", **({} if kept is None else {"exif": kept}))
        found = say("predict", run, tmp_path / name / "1.png", "--out", tmp_path / name / "seen", "--threshold", 0.1)
        assert found[0] == 0, found[2]
    for file in ("1.png", "predictions.csv"):
        one, other = ((tmp_path / name / "seen" / file).read_bytes() for name in ("upright", "phone"))
        assert one == other.replace(b"/phone/", b"/upright/")


def test_wrong_calls_of_predict_are_told(say, stages, tiny_run, data, tmp_path):
    boxes, segments = stages(STAGES[1], "batchformer")
    photo = tmp_path / "photo.png"
    Image.new("RGB", (40, 30), 77).save(photo)
    (page := tmp_path / "page.jpg").write_text("<html>not found</html>")
    before = photo.read_bytes()
    (tmp_path / "album").mkdir()
    drawn = Path(shutil.copy(photo, tmp_path / "album"))
    for arguments, words in [
        ((boxes, photo, "--out", drawn.parent), f"{drawn} was not written by this command"),
        ((boxes, photo, "--out", tmp_path), "would be overwritten"),
        ((boxes, photo, "--out", photo), "is a file"),
        ((boxes, photo, "--topk", 3), "which takes: --threshold"),
        ((boxes, photo, "--threshold", 1.5), "from 0 to 1"),
        ((boxes, tmp_path / "nothing.jpg"), "There is no image"),
        ((boxes, photo, page, "--strict", "--out", tmp_path / "new"), "page.jpg cannot be read"),
        ((segments, photo, page, "--strict", "--out", tmp_path / "new"), "page.jpg cannot be read"),
        ((tiny_run, photo, "--threshold", 0.5), "which takes: --topk"),
    ]:
        code, _, err = say("predict", *arguments)
        assert code == 2
        assert words in err
    assert photo.read_bytes() == drawn.read_bytes() == before
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_the_example_draws_two_runs_for_the_report(say, stages, data, monkeypatch, tmp_path, capsys):
    file = Path(__file__).parents[2] / "examples" / "detection_pictures.py"
    spec = importlib.util.spec_from_file_location("detection_pictures_example", file)
    example = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, example)  # where its dataclass looks for its own module
    spec.loader.exec_module(example)

    def draw(*arguments):
        monkeypatch.setattr(sys, "argv", ["example", *map(str, arguments)])
        example.main()

    both = [stages(STAGES[0], method)[1] for method in ("baseline", "batchformer")]
    draw(*both, "--images", 2)
    assert "Mean on objects" in capsys.readouterr().out
    index = json.loads((both[1] / "detection" / "pictures.json").read_text())
    assert [entry["file"] for entry in index] == ["masks.png", "batch-attention.png", "features.png"]
    code, _, err = say("report", both[1], "--out", tmp_path / "page.html")
    assert code == 0, err
    assert (tmp_path / "page.html").read_text().count("data:image/png;base64,") == 3
    draw(*both, "--photos", data / "val2017", "--images", 1, "--out", tmp_path / "own")
    assert [path.name for path in (tmp_path / "own").glob("*.png")] == [
        "masks.png"
    ]  # one image has no other to look at
    for arguments, words in [
        ([both[0]], "two run folders"),
        (["--photos", data / "val2017"], "two run folders"),
        ([*both, "--photos", tmp_path / "nowhere"], "nowhere is not a folder"),
        ([*both, "--images", 0], "--images 0"),
        ([*both, "--threshold", 50], "--threshold 50"),
    ]:
        with pytest.raises(UserError, match=words):
            draw(*arguments)


@pytest.mark.parametrize("same", [True, False])
def test_names_of_thousands_of_images_are_found_without_going_through_all_of_them(same):
    """The work was the cube of the number of images where all have one name, the square where none have."""
    work = []

    class Stem(str):
        __hash__ = str.__hash__

        def __eq__(self, other):
            work.append(other)
            return str.__eq__(self, other)

        def __format__(self, how):
            work.append(how)
            return str.__format__(self, how)

    images = [SimpleNamespace(stem=Stem("image" if same else f"image{k}")) for k in range(200)]
    names = output_names(images)
    assert names == (["image", *(f"image-{k}" for k in range(2, 201))] if same else [f"image{k}" for k in range(200)])
    assert len(work) < 10 * len(images)
