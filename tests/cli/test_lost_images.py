"""Images are opened when they are needed: one that cannot be read ends a run, and leaves only what can go on."""

import pytest

from batchformer.cli import main
from batchformer.data.images import open_image

FIT = ["fit", "folder-lt", "--data-root", "own", "--out", "run", "--model.backbone", "resnet20", "--no-analysis",
       "--init-from", "scratch",
       "--data.image_size", "16", "--data.workers", "0", "--trainer.precision", "32-true",
       "--trainer.max_epochs", "2", "--trainer.enable_progress_bar", "false"]  # fmt: skip


@pytest.fixture
def image(tmp_path, monkeypatch):
    """A training image of a small data set in the current folder."""
    monkeypatch.chdir(tmp_path)
    assert main(["data", "miniature", "folder", "own"]) == 0
    return tmp_path / "own/train/class_0/0003.jpg"


def _complaint(said):
    code, _, err = said
    assert (code, err.count("\n")) == (2, 1), err
    return err


def test_before_the_first_checkpoint_nothing_is_left_and_the_same_command_starts_again(say, image, tmp_path):
    whole = image.read_bytes()
    image.write_bytes(b"no image")
    complaint = _complaint(say(*FIT))
    assert f"image {image.relative_to(tmp_path)} cannot be read" in complaint
    assert "nothing of this run is kept in run: afterwards give the same command again" in complaint
    assert not (tmp_path / "run").exists()

    image.write_bytes(whole)
    assert say(*FIT)[0] == 0


def test_any_process_names_an_image_that_it_cannot_read(say, image, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    image.write_bytes(b"no image")
    assert image.name in _complaint(say(*FIT))


def test_after_a_checkpoint_the_run_is_kept_and_goes_on_when_the_image_is_back(say, image, tmp_path, monkeypatch):
    whole = image.read_bytes()

    def lost_after_a_checkpoint(path, *how):
        if (tmp_path / "run/checkpoints/last.ckpt").is_file():
            image.unlink(missing_ok=True)
        return open_image(path, *how)

    with monkeypatch.context() as patch:
        patch.setattr("batchformer.data.loading.samples.open_image", lost_after_a_checkpoint)
        complaint = _complaint(say(*FIT))
    assert f"image {image.relative_to(tmp_path)} does not exist: put it back" in complaint
    assert "run is kept: continue with --resume once all images are back" in complaint

    image.write_bytes(whole)
    code, _, err = say(*FIT, "--resume")
    assert code == 0, err
    assert "Resuming from run/checkpoints/last.ckpt" in err


def test_what_somebody_else_put_into_the_folder_stays(say, image, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/notes.txt").write_text("mine")
    (tmp_path / "run/config.yaml").write_text("{}")
    image.write_bytes(b"no image")
    _complaint(say(*FIT, "--overwrite"))
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["notes.txt"]
