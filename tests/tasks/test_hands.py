"""Rendered hands, FreiHAND's files, and the task of hand meshes."""

import csv
import json

import numpy as np
import pytest
import torch
from PIL import Image

from batchformer.cli import main
from batchformer.data import FreiHand, RenderedHands
from batchformer.data.rendering import HandScenes, rasterise
from batchformer.data.sets import write_miniature
from batchformer.errors import UserError
from batchformer.models.rig import joints_of_freihand, read_rig
from batchformer.tasks import HandMesh
from batchformer.tasks.hands.predict import obj_text

from .conftest import make_trainer
from .test_pretraining_runs import SaveInside

SMALL = {
    "backbone": "resnet10t",
    "graphormer": {"dims": [16, 8, 8], "layers": 1, "heads": 2},
    "batchformer": {"heads": 2},
}


def data(**options) -> RenderedHands:
    sizes = {
        "train_images": 12,
        "test_images": 4,
        "image_size": 32,
        "batch_size": 4,
        "eval_batch_size": 2,
        "coarse": 40,
    }
    return RenderedHands(**{**sizes, "coarse": 40, **options})


@pytest.fixture(scope="module")
def scenes():
    return HandScenes(read_rig(), joints_of_freihand(), size=64)


class TestRenderer:
    def test_the_nearest_face_is_seen_at_each_pixel(self):
        torch.manual_seed(0)
        points = torch.rand(2, 12, 3) * torch.tensor([20.0, 20.0, 1.0]) - torch.tensor([2.0, 2.0, 0.0])
        faces = torch.tensor([[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]])
        face, inside = rasterise(points, faces, 16)
        for image in range(2):
            for row in range(16):
                for column in range(16):
                    best, depth = -1, np.inf
                    for number, corners in enumerate(points[image][faces].double().numpy()):
                        matrix = np.concatenate([corners[:, :2].T, np.ones((1, 3))])
                        weights = np.linalg.solve(matrix, [column + 0.5, row + 0.5, 1.0])
                        if weights.min() >= 0 and weights @ corners[:, 2] < depth:
                            best, depth, expected = number, weights @ corners[:, 2], weights
                    assert face[image, row, column] == best
                    if best >= 0:
                        np.testing.assert_allclose(inside[image, row, column].numpy(), expected, atol=1e-4)

    def test_a_scene_depends_on_seed_and_number_alone(self, scenes):
        together, alone = scenes(np.array([5, 9])), scenes(np.array([9]))
        for name, value in together.items():
            torch.testing.assert_close(value[1:], alone[name], atol=1e-5, rtol=1e-4)
        other = HandScenes(read_rig(), joints_of_freihand(), size=64, seed=1)(np.array([9]))
        assert not torch.allclose(other["joints"], alone["joints"])
        assert not torch.allclose(together["joints"][0], together["joints"][1])

    def test_joints_lie_on_the_hand_in_the_picture(self, scenes):
        """Most joints are inside the outline: behind their pixel there is a face."""
        made = scenes(np.arange(20))
        depth = made["vertices"][..., 2:]
        projected = torch.cat([made["vertices"][..., :2] / depth * made["focal"][0] + 32, depth], dim=-1)
        face, _ = rasterise(projected, scenes.skeleton.faces, 64)
        pixels = made["joints_2d"].floor().long().clamp(0, 63)
        on_hand = face[torch.arange(20)[:, None], pixels[..., 1], pixels[..., 0]] >= 0
        assert on_hand.float().mean() > 0.9
        behind = projected[..., :2].amin(1), projected[..., :2].amax(1)
        assert ((behind[1] - behind[0]).amax(1) > 20).all()  # the hand fills a good part of the picture

    def test_joints_bend_within_their_limits(self, scenes):
        made = [scenes._draws(k)["angles"] for k in range(50)]
        low, high = scenes._limits[..., 0], scenes._limits[..., 1]
        assert all((low - 1e-9 <= one).all() and (one <= high + 1e-9).all() for one in made)
        bending = high[:, 0] > low[:, 0]
        assert np.std(made, axis=0)[bending, 0].min() > 0.05


class TestData:
    def test_test_scenes_are_others_and_fresh_ones_new_in_every_epoch(self):
        fixed, fresh = data(), data(fresh=True)
        first = next(iter(fixed.train_dataloader()))
        assert first["images"].shape == (4, 3, 32, 32)
        assert first["joints_2d"].abs().max() < 1.5

        def joints(module, epoch):
            loader = module.train_dataloader()
            loader.set_epoch(epoch)
            return torch.cat([batch["joints"] for batch in loader])

        assert torch.allclose(joints(fixed, 0).sum(0), joints(fixed, 1).sum(0), atol=1e-4)
        assert not torch.allclose(joints(fresh, 0).sum(0), joints(fresh, 1).sum(0), atol=1e-4)
        tested = torch.cat([batch["joints"] for batch in fixed.val_dataloader()])
        assert torch.cdist(tested.flatten(1), joints(fixed, 0).flatten(1)).min() > 1e-3

    def test_freihand_is_read_and_projects_to_its_pictures(self, tmp_path):
        root = write_miniature("freihand", tmp_path / "data")
        module = FreiHand(str(root), image_size=64, coarse=40, batch_size=2, eval_batch_size=4)
        module.setup()
        assert (module.train_images, module.test_images) == (8, 4)
        batch = next(iter(module.val_dataloader()))
        made = HandScenes(read_rig(), joints_of_freihand(), 64)(np.arange(4))
        torch.testing.assert_close(batch["joints_2d"], made["joints_2d"] / 32 - 1, atol=1e-4, rtol=1e-4)
        turned = next(iter(module.train_dataloader()))
        lengths = (turned["joints"][:, 0] - turned["joints"][:, 9]).norm(dim=1)
        known = (made["joints"][:, 0] - made["joints"][:, 9]).norm(dim=1)
        assert all((known - length).abs().min() < 1e-5 for length in lengths)  # turning keeps lengths

    def test_bad_folders_are_a_sentence_each(self, tmp_path):
        root = write_miniature("freihand", tmp_path / "data")
        extra = root / "evaluation" / "rgb" / "00000004.jpg"
        Image.new("RGB", (64, 64)).save(extra)
        with pytest.raises(UserError, match=r"00000004.jpg has none"):
            FreiHand(str(root)).setup()
        extra.unlink()
        (root / "training_xyz.json").write_text(json.dumps([[[0, 0, 0]] * 21]))
        with pytest.raises(UserError, match="do not belong together"):
            FreiHand(str(root)).setup()
        (root / "MANO_RIGHT.pkl").unlink()
        with pytest.raises(UserError, match=r"MANO_RIGHT.pkl"):
            FreiHand(str(root)).setup()


class TestTask:
    @pytest.mark.parametrize("method", ["baseline", "batchformer"])
    def test_two_steps_train_and_evaluation_is_in_millimetres(self, method):
        task = HandMesh(**SMALL, method=method)
        trainer = make_trainer(max_epochs=1, limit_train_batches=2)
        trainer.fit(task, datamodule=data())
        metrics = trainer.callback_metrics
        assert 1 < metrics["val/pa_mpvpe"] < 200
        total = sum(metrics[f"train/loss_{part}"] for part in ("joints", "vertices", "2d"))
        assert metrics["train/loss"] == pytest.approx(float(total), rel=1e-4)

    def test_the_loss_is_the_sum_of_its_published_parts(self):
        torch.manual_seed(0)
        task = HandMesh(**SMALL, method="baseline")
        module = data()
        task.construct(module.info)
        batch = next(iter(module.val_dataloader()))
        truth = task.truth(batch)
        found = {
            "joints": torch.randn(2, 21, 3), "mesh_joints": torch.randn(2, 21, 3), "coarse": torch.randn(2, 40, 3),
            "vertices": torch.randn(2, len(task.topology.vertices), 3), "camera": torch.randn(2, 3),
        }  # fmt: skip
        losses = task.losses(found, truth)
        expected, image = 0.0, 0.0
        for name in ("joints", "mesh_joints"):
            for k in range(2):
                for j in range(21):
                    off = found[name][k, j] - found[name][k, 0] - truth["joints"][k, j]
                    expected += float((off**2).sum()) / (2 * 21 * 3)
                    s, tx, ty = found["camera"][k]
                    place = torch.stack([s * (found[name][k, j, 0] + tx), s * (found[name][k, j, 1] + ty)])
                    image += float(((place - truth["joints_2d"][k, j]) ** 2).sum()) / (2 * 21 * 2)
        assert float(losses["loss_joints"]) == pytest.approx(expected, rel=1e-4)
        assert float(losses["loss_2d"]) == pytest.approx(image, rel=1e-4)
        full = (found["vertices"] - truth["vertices"]).abs().mean()
        coarse = (found["coarse"] - truth["vertices"][:, task.topology.chosen]).abs().mean()
        assert float(losses["loss_vertices"]) == pytest.approx(float(0.5 * full + 0.5 * coarse), rel=1e-4)

    def test_a_run_resumed_inside_an_epoch_has_the_bits_of_one_never_stopped(self, tmp_path):
        def train(resume=None, *callbacks):
            task = HandMesh(**SMALL)
            trainer = make_trainer(max_epochs=1, limit_val_batches=0, callbacks=list(callbacks))
            trainer.fit(task, datamodule=data(), ckpt_path=resume)
            return {name: value.clone() for name, value in task.state_dict().items()}

        whole = train(None, SaveInside(tmp_path / "inside.ckpt"))
        resumed = train(tmp_path / "inside.ckpt")
        assert all(torch.equal(resumed[name], value) for name, value in whole.items())

    def test_meshes_are_drawn_over_pictures_and_written(self, tmp_path, capsys):
        keys = {
            "model.backbone": "resnet10t", "model.graphormer.dims": "[16, 8, 8]", "model.graphormer.layers": "1",
            "model.graphormer.heads": "2", "model.batchformer.heads": "2", "data.train_images": "4",
            "data.test_images": "2", "data.image_size": "32", "data.batch_size": "2", "trainer.max_epochs": "1",
        }  # fmt: skip
        run, out = tmp_path / "run", tmp_path / "out"
        words = [word for key, value in keys.items() for word in (f"--{key}", value)]
        assert main(["fit", "hands-tiny", *words, "--no-analysis", "--out", str(run)]) == 0
        Image.new("RGB", (50, 40), (200, 150, 120)).save(tmp_path / "hand.jpg")
        assert main(["predict", str(run), str(tmp_path / "hand.jpg"), "--out", str(out)]) == 0, capsys.readouterr().err
        assert Image.open(out / "hand.png").size == (64, 32)
        vertices = [line for line in (out / "hand.obj").read_text().splitlines() if line.startswith("v ")]
        assert len(vertices) == len(read_rig().vertices)
        assert (out / "hand.glb").read_bytes().startswith(b"glTF")
        assert main(["predict", str(run), str(tmp_path / "hand.jpg"), "--out", str(tmp_path / "hand.jpg")]) == 2
        (tmp_path / "more").mkdir()
        for name in ("hand.jpg", "broken.jpg"):
            (tmp_path / "more" / name).write_bytes((tmp_path / "hand.jpg").read_bytes() if name == "hand.jpg" else b"")
        given = [str(tmp_path / "hand.jpg"), str(tmp_path / "more")]
        assert main(["predict", str(run), *given, "--out", str(out)]) == 1  # its own files it replaces
        rows = [row[1:] for row in csv.reader((out / "predictions.csv").open())]
        assert [name for name, _ in rows] == ["mesh", "hand.obj", "", "hand-2.obj"]
        assert "cannot be read" in rows[2][1]
        for name in ("hand.png", "hand.obj", "hand.glb", "predictions.csv"):
            theirs = tmp_path / "theirs" / name
            theirs.parent.mkdir(exist_ok=True)
            theirs.write_bytes(b"theirs")
            assert main(["predict", str(run), given[0], "--out", str(theirs.parent)]) == 2
            assert "not written by this command" in capsys.readouterr().err
            assert [file.read_bytes() for file in theirs.parent.iterdir()] == [b"theirs"]
            theirs.unlink()


def test_obj_counts_vertices_from_one():
    assert obj_text(np.eye(3), np.array([[0, 1, 2]])).splitlines()[-1] == "f 1 2 3"
