"""Exported networks give the outputs of the trained one in the programs they are for, or are not left."""

import json

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file

from batchformer.cli import export_network, main
from batchformer.cli.export_folder import _crop
from batchformer.cli.export_network import answers_of, plain_network_of
from batchformer.cli.finished_run import load_run
from batchformer.data import DigitsLT, ImageFolders
from batchformer.errors import UserError
from batchformer.recipes import about

from ..selection import others_slow

FOLDER = ["--data.batch_size", "8", "--data.image_size", "32", "--data.workers", "0"]
SMALL = ["--trainer.max_epochs", "1", "--trainer.limit_train_batches", "2", "--no-analysis", "--model.backbone"]
NETWORK, CLASSES = "test_resnet", [f"class_{label}" for label in range(8)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A timm network on images in folders, of classes with names."""
    place = tmp_path_factory.mktemp("export")
    assert main(["data", "miniature", "folder", str(place / "photos")]) == 0
    words = ["--data-root", str(place / "photos"), *FOLDER, *SMALL, NETWORK, "--model.backbone_args", "{}"]
    words += ["--init-from", "scratch"]
    assert main(["fit", "folder-lt", *words, "--out", str(place / "run")]) == 0
    return place / "run"


@pytest.fixture(scope="module")
def plain(run):
    return plain_network_of(load_run(str(run)))


def close(answers, plain, half):
    largest = plain.expected[0].abs().max()
    assert torch.allclose(answers.float(), plain.expected[0], rtol=0, atol=float(largest) * (0.02 if half else 1e-4))


def images(plain, half):
    return plain.inputs[0].half() if half else plain.inputs[0]


@pytest.mark.parametrize("half", others_slow([False, True], {True}), ids=["float32", "float16"])
def test_onnx_runs_in_onnxruntime_with_any_batch_size(say, run, plain, tmp_path, half):
    onnxruntime = pytest.importorskip("onnxruntime")
    code, out, err = say("export", run, "--format", "onnx", "--out", tmp_path / "m.onnx", *["--half"] * half)
    assert code == 0, err
    assert "on 4 test images" in out
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    (answers,) = session.run(None, {"images": images(plain, half).numpy()})
    assert answers.dtype == (np.float16 if half else np.float32)
    close(torch.from_numpy(answers), plain, half)
    assert session.run(None, {"images": images(plain, half)[:1].numpy()})[0].shape == (1, len(CLASSES))
    stored = session.get_modelmeta().custom_metadata_map
    assert json.loads(stored["class_names"]) == CLASSES
    found = float((torch.from_numpy(answers) - plain.expected[0]).abs().max())
    assert found <= float(stored["max_difference"]) < 0.1


@pytest.mark.parametrize("half", others_slow([False, True], {True}), ids=["float32", "float16"])
def test_pt2_is_loaded_by_torch_alone(say, run, plain, tmp_path, half):
    code, _, err = say("export", run, "--format", "pt2", "--out", tmp_path / "m.pt2", *["--half"] * half)
    assert code == 0, err
    extra = {"metadata.json": ""}
    program = torch.export.load(tmp_path / "m.pt2", extra_files=extra).module()
    (answers,) = program(images(plain, half))
    assert answers.dtype == (torch.float16 if half else torch.float32)
    close(answers, plain, half)
    assert len(program(images(plain, half)[:3])[0]) == 3
    assert json.loads(extra["metadata.json"])["checked_on"] == "4 test images"


def test_half_weights_are_half_and_say_how_much_they_differ(say, run, plain, tmp_path):
    code, out, err = say("export", run, "--half", "--out", tmp_path / "half.safetensors")
    assert code == 0, err
    assert "by at most" in out
    with safe_open(tmp_path / "half.safetensors", "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} <= {torch.float16, torch.int64}  # noqa: SIM118
        stored = file.metadata()
    network = timm.create_model(NETWORK, num_classes=len(CLASSES)).eval()
    network.load_state_dict(load_file(tmp_path / "half.safetensors"))
    with torch.inference_mode():
        close(network(plain.inputs[0]), plain, True)
    assert 0 < float(stored["max_difference"]) < 0.1


@pytest.mark.parametrize("half", [False, True], ids=["float32", "float16"])
def test_timm_loads_the_folder_as_its_own_with_labels_and_transform(say, run, plain, tmp_path, half):
    words = ["--format", "folder", "--out", tmp_path / "net", "--license", "cc-by-4.0", *["--half"] * half]
    code, out, err = say("export", run, *words)
    assert code == 0, err
    names = {}
    exec("\n".join(line.strip() for line in out.split("To load it:")[1].splitlines()), names)
    network = names["model"].eval()
    with torch.inference_mode():
        answers = network(plain.inputs[0])
    close(answers, plain, half)
    assert half or torch.equal(answers, plain.expected[0])
    config = json.loads((tmp_path / "net/config.json").read_text())
    assert config["label_names"] == CLASSES
    assert "license" not in config["pretrained_cfg"]

    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(network))
    image = Image.fromarray((np.arange(90 * 60 * 3) % 251).astype(np.uint8).reshape(90, 60, 3))
    ours = load_run(str(run)).data.predict_transform(image)
    assert torch.allclose(transform(image), ours, atol=0.02)


@pytest.mark.parametrize("kind", ["small", "enlarged", "squeezed"])
def test_timm_resizes_and_crops_as_the_evaluation_of_other_data_does(run, kind):
    if kind == "squeezed":
        data = ImageFolders(str(run.parent / "photos"), image_size=32, augment="domains")
    else:
        data = DigitsLT(image_size=8 if kind == "small" else 16)
    data.setup("fit")
    statistics = {"mean": tuple(map(float, data.mean)), "std": tuple(map(float, data.std))}
    transform = timm.data.create_transform((3, data.image_size, data.image_size), **statistics, **_crop(data))
    image = Image.fromarray((np.arange(90 * 60 * 3) % 251).astype(np.uint8).reshape(90, 60, 3))
    image = image if kind == "squeezed" else image.resize((8, 8))
    assert torch.allclose(transform(image), data.predict_transform(image), atol=0.05)


def test_the_card_tells_data_measures_command_and_licence(say, run, tmp_path):
    assert say("export", run, "--format", "folder", "--out", tmp_path / "net", "--license", "cc-by-4.0")[0] == 0
    card, result = (tmp_path / "net/README.md").read_text(), json.loads((run / "result.json").read_text())
    assert 'license: "cc-by-4.0"' in card
    assert 'library_name: "timm"' in card
    assert f"| All | {result['metrics']['accuracy']:.2f} % |" in card
    assert result["command"] in card
    assert result["data"]["fingerprint"] in card
    assert f"class_0 ({result['class_counts'][0]})" in card
    assert "bit for bit" in card
    assert say("export", run, "--format", "folder", "--out", tmp_path / "net")[0] == 0  # its own folder is replaced
    assert 'license: "unknown"' in (tmp_path / "net/README.md").read_text()


def test_a_network_of_this_package_is_a_folder_with_the_code_that_makes_it(say, tiny_run, tmp_path):
    code, out, err = say("export", tiny_run, "--format", "folder", "--out", tmp_path / "net")
    assert code == 0, err
    names = {}
    exec("\n".join(line.strip() for line in out.split("To load it:")[1].splitlines()), names)
    plain = plain_network_of(load_run(str(tiny_run)))
    with torch.inference_mode():
        assert torch.equal(names["model"].eval()(plain.inputs[0]), plain.expected[0])


@pytest.mark.parametrize("kind", others_slow(["onnx", "pt2", "safetensors", "folder"], {"safetensors", "folder"}))
def test_what_differs_is_not_left(say, run, tmp_path, monkeypatch, kind):
    """No difference at all is allowed, and the float16 network has some."""
    monkeypatch.setitem(export_network.TOLERANCE, True, 0.0)
    code, _, err = say("export", run, "--format", kind, "--half", "--out", tmp_path / "net")
    assert code == 2
    assert "does not reproduce the outputs of the trained network: they differ by" in err
    assert list(tmp_path.iterdir()) == []


def test_the_largest_difference_that_is_allowed_is_taken_and_a_larger_one_refused():
    expected = torch.tensor([1e4])
    plain = export_network.Plain(torch.nn.Identity(), (), [expected], "", "", "", {})
    assert plain.difference([expected - 1], False, "the file") == 1.0 == export_network.TOLERANCE[False] * 1e4
    with pytest.raises(UserError, match="the file does not reproduce"):
        plain.difference([expected - 2], False, "the file")


def test_without_the_data_random_images_are_compared_and_it_says_so(say, run, tmp_path):
    code, out, err = say("export", run, "--out", tmp_path / "m.safetensors", "--data-root", tmp_path / "nothing")
    assert code == 0, err
    assert "on 4 random images its outputs equal" in out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--format", "onx"], "--format onx: expected one of safetensors, onnx, pt2, folder. Did you mean onnx?"),
        (["--license", "mit"], "--license is for the model card"),
        (["--format", "folder", "--out", "mine"], "mine was not written by this command and is not replaced"),
    ],
)
def test_wrong_calls(say, run, tmp_path, monkeypatch, words, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/letter.txt").write_text("dear")
    code, _, err = say("export", run, *words)
    assert (code, err.count("\n")) == (2, 1)
    assert expected in err
    assert (tmp_path / "mine/letter.txt").read_text() == "dear"


@pytest.mark.slow
def test_transformers_loads_a_detector_as_its_own_with_labels(say, tmp_path):
    import transformers

    assert main(["data", "miniature", "coco", str(tmp_path / "coco")]) == 0
    words = [word for pair in about("detr-coco").small_overrides() for word in (f"--{pair[0]}", pair[1])]
    run = tmp_path / "run"
    words += ["--data-root", str(tmp_path / "coco"), "--out", str(run), *SMALL[:-1]]
    assert main(["fit", "detr-coco", *words]) == 0
    code, out, err = say("export", run, "--format", "folder", "--out", tmp_path / "net")
    assert code == 0, err
    assert "transformers loads it" in out
    network = transformers.DetrForObjectDetection.from_pretrained(tmp_path / "net").eval()
    plain = plain_network_of(load_run(str(run)))
    with torch.inference_mode():
        assert all(map(torch.equal, answers_of(network(*plain.inputs)), plain.expected))
    names = json.loads((run / "result.json").read_text())["class_names"]
    assert network.config.id2label == dict(enumerate(names))
