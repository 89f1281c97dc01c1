"""Rendered hands, FreiHAND's files, and the task of hand meshes."""

import csv
import json
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.spatial.transform import Rotation

from batchformer.analysis.drawing import LESS, MARGIN, MORE, PAPER
from batchformer.analysis.hand_pictures import WORST, draw_hands, error_colours, hand_meshes_of
from batchformer.cli import main
from batchformer.data import FreiHand, RenderedHands
from batchformer.data.rendering import HandScenes, draw_mesh, rasterise
from batchformer.data.sets import write_miniature
from batchformer.data.sets.hands import HandSamples
from batchformer.errors import UserError
from batchformer.metrics.hands import align, mean_pose
from batchformer.models.graphormer import fit_camera, project
from batchformer.models.rig import joints_of_freihand, read_rig
from batchformer.tasks import HandMesh
from batchformer.tasks.hands.predict import obj_text, write_for_server

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

    def test_the_random_numbers_of_a_scene_are_those_of_every_version(self, scenes):
        """Their sums: a result of today can be compared with one of yesterday if the pictures are the same."""
        sums = {"angles": 0.795839, "lengths": 24.625298, "scale": 0.984566, "view": 1.324978, "cover": 0.769612,
                "offset": 0.1097, "skin": 1.089601, "lamp": -0.839421, "lamp_colour": 1.672355, "ambient": 0.193964,
                "coarse": 50.888784, "fine": 2337.816201, "mottle": 0.082307}  # fmt: skip
        drawn = scenes._draws(9)
        assert {name: float(np.sum(values)) for name, values in drawn.items()} == pytest.approx(sums, abs=1e-5)

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

    def test_skin_is_lit_by_the_lamp_and_by_what_is_around(self):
        """Lambert's law with normals that are interpolated between the vertices, at some pixels."""

        class EvenSkin(HandScenes):
            def _draws(self, index):
                return {**super()._draws(index), "mottle": np.zeros(24)}

        scenes = EvenSkin(read_rig(), joints_of_freihand(), size=64)
        made, drawn, faces = scenes(np.array([3])), scenes._draws(3), scenes.skeleton.faces
        depth = made["vertices"][..., 2:]
        projected = torch.cat([made["vertices"][..., :2] / depth * made["focal"][0] + 32, depth], dim=-1)
        face, inside = (each[0] for each in rasterise(projected, faces, 64))
        vertices, normals = made["vertices"][0].numpy(), np.zeros(made["vertices"][0].shape)
        for a, b, c in faces.tolist():
            normals[[a, b, c]] += np.cross(vertices[b] - vertices[a], vertices[c] - vertices[a])
        normals /= np.linalg.norm(normals, axis=1, keepdims=True)
        for row, column in (face >= 0).nonzero()[::37].tolist():
            normal = inside[row, column].numpy() @ normals[faces[face[row, column]].numpy()]
            lit = max(0.0, normal @ drawn["lamp"] / np.linalg.norm(normal)) * drawn["lamp_colour"]
            seen = np.clip(drawn["skin"] * (lit + drawn["ambient"]), 0, 1)
            np.testing.assert_allclose(made["images"][0, :, row, column], seen, atol=2e-3)

    def test_a_small_view_shows_the_back_with_the_fingers_up(self):
        made = HandScenes(read_rig(), joints_of_freihand(), size=64, view=30.0)(np.arange(12))["joints_2d"]
        wrist, index, middle, little = (made[:, k] for k in (0, 5, 9, 17))
        assert (middle[:, 1] < wrist[:, 1]).all()
        assert (index[:, 0] < little[:, 0]).all()
        turned = (middle - wrist).unbind(1)
        angles = torch.rad2deg(torch.atan2(turned[0], -turned[1]))
        assert angles.std() > 3
        with pytest.raises(UserError, match=r"data\.view=0 is an angle"):
            data(view=0)

    def test_joints_bend_about_the_axes_of_their_frames(self, scenes):
        angles = torch.tensor([[0.3, 0.0], [0.0, 0.2], [0.5, -0.4]])
        for found, (flexion, spread) in zip(scenes._rotations({"angles": angles}), angles.tolist(), strict=True):
            expected = Rotation.from_euler("YX", [spread, -flexion]).as_matrix()
            np.testing.assert_allclose(found.numpy(), expected, atol=1e-6)

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
        other = data(seed=1)
        assert torch.equal(torch.cat([batch["joints"] for batch in other.val_dataloader()]), tested)
        assert not torch.allclose(joints(other, 0).sum(0), joints(fixed, 0).sum(0), atol=1e-4)

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

    def test_the_annotation_is_that_of_the_number_where_pictures_are_missing(self, tmp_path):
        root = write_miniature("freihand", tmp_path / "data")
        (root / "evaluation" / "rgb" / "00000001.jpg").unlink()
        module = FreiHand(str(root), image_size=64, coarse=40, eval_batch_size=4)
        module.setup()
        found = next(iter(module.val_dataloader()))["joints"]
        made = HandScenes(read_rig(), joints_of_freihand(), 64)(np.array([0, 2, 3]))["joints"]
        torch.testing.assert_close(found, made, atol=1e-4, rtol=1e-4)

    def test_bad_folders_are_a_sentence_each(self, tmp_path):
        root = write_miniature("freihand", tmp_path / "data")
        extra = root / "evaluation" / "rgb" / "00000004.jpg"
        Image.new("RGB", (64, 64)).save(extra)
        with pytest.raises(UserError, match=r"00000004.jpg has none"):
            FreiHand(str(root)).setup()
        extra.rename(extra.with_name("hand.jpg"))
        with pytest.raises(UserError, match=r"hand.jpg is not named by the number"):
            FreiHand(str(root)).setup()
        extra.with_name("hand.jpg").unlink()
        (root / "training_xyz.json").write_text(json.dumps([[[0, 0, 0]] * 21]))
        with pytest.raises(UserError, match="do not belong together"):
            FreiHand(str(root)).setup()
        (root / "MANO_RIGHT.pkl").unlink()
        with pytest.raises(UserError, match=r"MANO_RIGHT.pkl"):
            FreiHand(str(root)).setup()


class TestTask:
    @pytest.mark.parametrize(("method", "weight"), [("baseline", 1.0), ("batchformer", 0.25)])
    def test_two_steps_train_and_evaluation_is_in_millimetres(self, method, weight):
        task = HandMesh(**SMALL, method=method, projection_weight=weight)
        trainer = make_trainer(max_epochs=1, limit_train_batches=2)
        trainer.fit(task, datamodule=data())
        metrics = trainer.callback_metrics
        assert 1 < metrics["val/pa_mpvpe"] < 200
        total = sum(metrics[f"train/loss_{part}"] for part in ("joints", "vertices"))
        total += weight * metrics["train/loss_2d"]
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
        vertices = float(0.5 * full + 0.5 * coarse)
        assert float(losses["loss_vertices"]) == pytest.approx(vertices, rel=1e-4)
        assert float(task.total(losses)) == pytest.approx(expected + vertices + image, rel=1e-4)
        task.projection_weight = 0.25
        assert float(task.total(losses)) == pytest.approx(expected + vertices + 0.25 * image, rel=1e-4)
        with pytest.raises(UserError, match=r"model\.projection_weight=-1 must be 0 or more"):
            HandMesh(projection_weight=-1)

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
        with zipfile.ZipFile(out / "pred.zip") as archive:
            joints, meshes = json.loads(archive.read("pred.json"))
        assert (len(joints), len(joints[0]), len(meshes[0])) == (1, 21, len(vertices))
        (tmp_path / "broken.jpg").write_bytes(b"no picture")
        both = [str(tmp_path / name) for name in ("broken.jpg", "hand.jpg")]
        assert main(["predict", str(run), *both, "--out", str(out)]) == 1
        assert not (out / "pred.zip").exists()  # the second hand would be taken for the first
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


def test_the_servers_file_lists_joints_and_then_vertices_of_all_hands(tmp_path):
    joints, meshes = ([np.full((count, 3), number + 0.25) for number in range(2)] for count in (21, 778))
    for copy in "ab":
        with open(tmp_path / copy, "wb") as file:
            write_for_server(joints, meshes, file)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    with zipfile.ZipFile(tmp_path / "a") as archive:
        assert archive.namelist() == ["pred.json"]
        found = json.loads(archive.read("pred.json"))
    assert [np.shape(part) for part in found] == [(2, 21, 3), (2, 778, 3)]
    assert found[1][1][0] == [1.25, 1.25, 1.25]


def test_a_mesh_from_the_right_shows_what_is_on_the_right():
    """Two squares one behind the other along x, in other colours: the eye sees the one with the larger x."""
    square = torch.tensor([[0.0, -0.5, -0.5], [0.0, 0.5, -0.5], [0.0, 0.5, 0.5], [0.0, -0.5, 0.5]])
    vertices = torch.cat([square, square + torch.tensor([1.0, 0.0, 0.0])])
    faces = torch.tensor([[0, 1, 2], [0, 2, 3], [4, 5, 6], [4, 6, 7]])
    colours = torch.tensor([[1.0, 0.0, 0.0]] * 4 + [[0.0, 0.0, 1.0]] * 4)
    camera, image = torch.tensor([1.0, 0.0, 0.0]), torch.zeros(3, 16, 16)
    seen = draw_mesh(image, vertices, camera, faces, from_right=True, colours=colours)
    assert seen[2, 8, 8] > 0
    assert seen[0, 8, 8] == 0
    assert seen[:, 0, 0].tolist() == [0.0, 0.0, 0.0]
    # z grows to the right of this view: moved there, the near square is seen on the right
    vertices[4:, 2] += 0.4
    moved = draw_mesh(image, vertices, camera, faces, from_right=True, colours=colours)
    assert moved[2].nonzero()[:, 1].float().mean() > seen[2].nonzero()[:, 1].float().mean()


def test_pictures_turn_with_their_joints(tmp_path):
    """A bright dot at a joint is where the annotation of the turned, scaled picture has the joint."""
    camera = np.array([[100.0, 0, 32], [0, 100.0, 32], [0, 0, 1]], dtype=np.float32)
    joints = np.tile(np.float32([0.1, -0.05, 1.0]), (1, 21, 1))
    known = {"K": camera[None], "joints": joints, "vertices": np.zeros((1, 5, 3), dtype=np.float32)}
    picture = Image.new("RGB", (64, 64))
    picture.paste((255, 255, 255), (40, 25, 44, 29))  # around (42, 27)
    picture.save(tmp_path / "0.png")
    samples = HandSamples([str(tmp_path / "0.png")], known, 64, 0, (0.0,) * 3, (1.0,) * 3)
    turned = 0
    for draw in range(30):
        torch.manual_seed(draw)
        made = samples._augment(0, picture, 0)
        rows, columns = made["images"].sum(0).ge(0.5).nonzero(as_tuple=True)
        place = torch.stack([columns.float().mean(), rows.float().mean()]) + 0.5
        torch.testing.assert_close((made["joints_2d"][0] + 1) * 32, place, atol=1.0, rtol=0)
        turned += int(not torch.allclose(made["joints"], torch.from_numpy(known["joints"][0])))
    assert 0.2 < turned / 30 < 0.6  # 0.4 as released


class TestPictures:
    def test_meshes_and_attention_are_left_for_the_page(self, tmp_path):
        task, module = HandMesh(**SMALL), data(test_images=2)
        trainer = make_trainer(max_epochs=1, limit_train_batches=1, default_root_dir=tmp_path)
        trainer.fit(task, datamodule=module)
        assert task.analyses == ("hand_meshes",)
        (section,) = hand_meshes_of(task, module, trainer)["sections"]
        index = json.loads((tmp_path / section["pictures"] / "pictures.json").read_text())
        assert [entry["file"] for entry in index] == ["meshes.jpg", "attention.jpg"]
        assert Image.open(tmp_path / "meshes" / "meshes.jpg").height == 28 + 6 * (46 + 160 + 10) + 26 + 60
        control = float(trainer.callback_metrics["val/pa_mpvpe_mean_pose"])
        assert f"PA-MPVPE of {control:.1f} mm" in section["text"]
        numbers = {row[0]: int(row[1]) for row in section["table"]["rows"]}
        assert numbers == {"joints": 21, "vertices": 40, "cells of the picture": 49}

    def test_errors_are_blue_at_none_and_orange_at_the_last_colour(self):
        none, half, some, much = error_colours(torch.tensor([0.0, WORST / 2, WORST, 3 * WORST]))
        assert torch.equal(some, much)
        assert half.min() > 0.8  # pale between the two
        near, beyond = error_colours(torch.tensor([0.49 * WORST, 0.51 * WORST]))
        torch.testing.assert_close(near, half, atol=0.05, rtol=0)
        torch.testing.assert_close(beyond, half, atol=0.05, rtol=0)
        assert none[2] > none[0]
        assert much[0] > much[2]

    def test_below_the_meshes_is_a_bar_with_the_colours_of_errors(self):
        corners = torch.tensor([[[-0.5, -0.5, 0.0], [0.5, -0.5, 0.0], [0.0, 0.5, 0.0]]])
        camera, faces = torch.tensor([[1.0, 0.0, 0.0]]), torch.tensor([[0, 1, 2], [0, 2, 1]])
        found = {"vertices": corners, "camera": camera}
        drawn = draw_hands([Image.new("RGB", (8, 8))], found, corners, camera, torch.full((1, 3), WORST), faces)
        below = np.asarray(drawn)[-60:].astype(int)
        filled = (abs(below[:16] - PAPER).max(-1) > 20).all(0)
        assert np.flatnonzero(filled).tolist() == list(range(MARGIN, MARGIN + 400))
        assert abs(below[8, MARGIN] - LESS).max() <= 1
        assert abs(below[8, MARGIN + 399] - MORE).max() <= 1
        assert below[8, MARGIN + 200].min() > 200
        assert (below[16, MARGIN : MARGIN + 400] == PAPER).all()

    def test_the_fitted_camera_is_that_of_the_projection(self):
        torch.manual_seed(0)
        points, camera = torch.randn(3, 9, 3), torch.tensor([[2.0, 0.5, -1.0], [0.3, 0.0, 4.0], [5.0, -2.0, 1.0]])
        torch.testing.assert_close(fit_camera(points, project(points, camera)), camera, atol=1e-4, rtol=1e-4)


def test_the_mean_pose_is_found_whatever_way_its_copies_are_turned():
    torch.manual_seed(0)
    shape = torch.randn(1, 30, 3).double()
    turns = torch.matrix_exp(torch.randn(6, 3, 3).double().triu(1) * 2)
    turns = torch.linalg.qr(turns)[0] * torch.linalg.det(torch.linalg.qr(turns)[0])[:, None, None]
    meshes = 1.7 * shape @ turns + torch.randn(6, 1, 3).double()
    torch.testing.assert_close(align(mean_pose(meshes).expand_as(meshes), meshes), meshes)
