"""Rigs, topologies and Mesh Graphormer."""

import json
import pickle
import struct

import numpy as np
import pytest
import torch

import batchformer as bf
from batchformer.errors import UserError
from batchformer.models.graphormer import GraphConvolution, MeshGraphormer, project
from batchformer.models.rig import Skeleton, _parents, _parents_first, hand_chains, joints_of_freihand, read_rig
from batchformer.models.topology import hand_topology, mano_topology, topology_of
from batchformer.tasks.hands.predict import glb_bytes


@pytest.fixture(scope="module")
def rig():
    return read_rig()


@pytest.fixture(scope="module")
def topology(rig):
    return hand_topology(rig, coarse=60)


class TestRig:
    def test_the_rest_pose_is_that_of_the_file(self, rig):
        skeleton = Skeleton(rig, dtype=torch.float64)
        identity = torch.eye(3, dtype=torch.float64).expand(2, len(rig.names), 3, 3)
        vertices, joints = skeleton.pose(identity)
        np.testing.assert_allclose(vertices[0].numpy(), rig.vertices, atol=1e-12)
        np.testing.assert_allclose(joints[1].numpy(), rig.frames[:, :3, 3], atol=1e-12)

    def test_seams_are_welded_and_the_surface_is_closed(self, rig):
        edges = np.sort(np.concatenate([rig.faces[:, [0, 1]], rig.faces[:, [1, 2]], rig.faces[:, [2, 0]]]), axis=1)
        _, count = np.unique(edges, axis=0, return_counts=True)
        assert set(count) == {2}
        assert len(np.unique(rig.vertices, axis=0)) == len(rig.vertices)

    def test_a_joint_moves_what_hangs_on_it_and_nothing_else(self, rig):
        skeleton = Skeleton(rig, dtype=torch.float64)
        turns = torch.eye(3, dtype=torch.float64).repeat(1, len(rig.names), 1, 1)
        _, before = skeleton.pose(turns)
        bent = turns.clone()
        bent[0, rig.joint("index-finger-phalanx-proximal")] = torch.tensor(
            [[1.0, 0, 0], [0, 0, 1], [0, -1, 0]], dtype=torch.float64
        )
        _, after = skeleton.pose(bent)
        moved = {rig.names[k] for k in ((after - before).norm(dim=-1)[0] > 1e-9).nonzero()[:, 0].tolist()}
        assert moved == {f"index-finger-{part}" for part in ("phalanx-intermediate", "phalanx-distal", "tip")}

    def test_lengths_and_size_scale_bones(self, rig):
        skeleton = Skeleton(rig, dtype=torch.float64)
        turns = torch.eye(3, dtype=torch.float64).expand(1, len(rig.names), 3, 3)
        tip, above = rig.joint("thumb-tip"), rig.joint("thumb-phalanx-distal")
        lengths = torch.ones(1, len(rig.names), dtype=torch.float64)
        lengths[0, tip] = 2.0

        def bone(**options):
            _, joints = skeleton.pose(turns, **options)
            return float((joints[0, tip] - joints[0, above]).norm())

        assert bone(lengths=lengths) == pytest.approx(2 * bone())
        assert bone(size=torch.full((1,), 1.5, dtype=torch.float64)) == pytest.approx(1.5 * bone())

    def test_bad_files_are_a_sentence_each(self, tmp_path):
        def refused(content: bytes, match: str) -> None:
            (tmp_path / "bad.glb").write_bytes(content)
            with pytest.raises(UserError, match=match):
                read_rig(tmp_path / "bad.glb")

        refused(b"PK", "is not a GLB file")
        plain = glb_bytes(np.eye(3), np.array([[0, 1, 2]]))
        refused(plain, "has no skin")
        text = b'{"buffers": [{"uri": "other.bin", "byteLength": 4}]}'
        text += b" " * (-len(text) % 4)
        refused(struct.pack("<4sIII4s", b"glTF", 2, 20 + len(text), len(text), b"JSON") + text, "in other files")
        with pytest.raises(UserError, match="cannot be read"):
            read_rig(tmp_path / "nothing.glb")
        with pytest.raises(UserError, match="has no joint elbow"):
            read_rig().joint("elbow")

    def test_a_mesh_that_is_written_as_glb_can_be_read_there(self, rig):
        content = glb_bytes(rig.vertices, rig.faces)
        length = struct.unpack_from("<I", content, 12)[0]
        scene, binary = json.loads(content[20 : 20 + length]), content[28 + length :]
        assert struct.unpack_from("<I", content, 8) == (len(content),)
        assert scene["buffers"] == [{"byteLength": len(binary)}]
        drawn = scene["meshes"][scene["nodes"][scene["scenes"][scene["scene"]]["nodes"][0]]["mesh"]]["primitives"][0]

        def read(number: int, kind: type) -> np.ndarray:
            accessor = scene["accessors"][number]
            view = scene["bufferViews"][accessor["bufferView"]]
            values = np.frombuffer(binary, kind, view["byteLength"] // 4, view["byteOffset"]).reshape(-1, 3)
            assert accessor["count"] == (len(values) if accessor["type"] == "VEC3" else values.size)
            assert accessor["componentType"] == {np.float32: 5126, np.uint32: 5125}[kind]
            return values

        points = read(drawn["attributes"]["POSITION"], np.float32)
        np.testing.assert_allclose(points, rig.vertices * [1, -1, -1], atol=1e-7)
        np.testing.assert_array_equal(read(drawn["indices"], np.uint32), rig.faces)
        extent = scene["accessors"][drawn["attributes"]["POSITION"]]
        assert (extent["min"], extent["max"]) == (points.min(0).tolist(), points.max(0).tolist())

    def test_names_are_those_of_webxr_and_freihand(self, rig):
        assert sorted(hand_chains()) == sorted(rig.names)
        assert len(joints_of_freihand()) == 21
        assert joints_of_freihand()[0] == "wrist"


class TestTopology:
    def test_a_downsampled_mesh_comes_back(self, rig, topology):
        whole = hand_topology(rig, coarse=195)
        back = whole.upsampling @ whole.vertices[whole.chosen]
        np.testing.assert_allclose(back[whole.chosen], whole.vertices[whole.chosen], atol=1e-12)
        np.testing.assert_allclose(whole.upsampling.sum(1), 1.0)
        error = np.linalg.norm(back - whole.vertices, axis=1).mean()
        coarser = np.linalg.norm(topology.upsampling @ topology.vertices[topology.chosen] - topology.vertices, axis=1)
        assert error < 0.002 < coarser.mean() < 0.01

    def test_the_graph_is_symmetric_connected_and_normalised(self, topology):
        adjacency = topology.adjacency
        np.testing.assert_allclose(adjacency, adjacency.T)
        joined = adjacency > 0
        degrees = joined.sum(1)
        np.testing.assert_allclose(adjacency[joined], (1 / np.sqrt(np.outer(degrees, degrees)))[joined])
        assert (np.linalg.matrix_power(joined.astype(float), 60) > 0).all()

    def test_joints_follow_the_mesh_in_new_poses(self, rig, topology):
        generator = torch.Generator().manual_seed(9)
        axes = torch.randn(4, len(rig.names), 3, 3, generator=generator, dtype=torch.float64) * 0.2
        turns = torch.matrix_exp(axes - axes.transpose(-1, -2))
        vertices, joints = Skeleton(rig, dtype=torch.float64).pose(turns)
        found = torch.as_tensor(topology.regressor) @ vertices
        expected = joints[:, [rig.joint(name) for name in topology.joint_names]]
        assert (found - expected).norm(dim=-1).mean() < 1e-4
        np.testing.assert_allclose(topology.regressor.sum(1), 1.0)

    def test_files_of_mano_are_read_and_code_in_them_is_not_run(self, rig, topology, tmp_path):
        content = {"v_template": rig.vertices, "f": rig.faces, "J_regressor": topology.regressor[:16]}
        file = tmp_path / "MANO_RIGHT.pkl"
        file.write_bytes(pickle.dumps(content, protocol=2))
        found = mano_topology(file, coarse=30)
        assert found.regressor.shape == (21, len(rig.vertices))
        assert np.array_equal(found.regressor[5], topology.regressor[1])  # the index finger's root is MANO's first
        tips = {name: int(row.argmax()) for name, row in zip(found.joint_names, found.regressor, strict=True)}
        # of FreiHAND's joints (its mano_utils.py), which are the truth; smplx and manopth have others
        assert [tips[name] for name in tips if name.endswith("tip")] == [744, 320, 443, 555, 672]
        marker = tmp_path / "ran"
        file.write_bytes(b"cos\nsystem\n(S'touch " + str(marker).encode() + b"'\ntR.")
        with pytest.raises(UserError, match=r"MANO_RIGHT\.pkl names os\.system"):
            mano_topology(file)
        assert not marker.exists()

    def test_what_cannot_be_made_coarser_is_refused(self, rig):
        faces = np.array([[0, 1, 2], [3, 4, 5]])
        with pytest.raises(UserError, match="not in one piece"):
            topology_of(np.random.default_rng(0).normal(size=(6, 3)), faces, np.eye(6), ["a"] * 6, 4)
        with pytest.raises(UserError, match="not 5000"):
            hand_topology(rig, coarse=5000)
        corners, faces = np.random.default_rng(0).normal(size=(5, 3)), np.array([[0, 1, 2], [1, 2, 3], [2, 3, 4]])
        for coarse in (3, 6):
            with pytest.raises(UserError, match=f"of 5 vertices can have 4 to 5 coarse ones, not {coarse}"):
                topology_of(corners, faces, np.eye(5), ["a"] * 5, coarse)
        for coarse in (4, 5):
            topology_of(corners, faces, np.eye(5), ["a"] * 5, coarse)

    def test_joints_have_one_root_and_no_cycle(self):
        assert _parents_first([1, -1, 0], "a.glb") == [1, 0, 2]
        with pytest.raises(UserError, match=r"a.glb: the hierarchy of its joints has a cycle"):
            _parents_first([-1, 2, 1], "a.glb")
        nodes = [{"children": [1]}, {}, {}]
        assert _parents({"nodes": nodes}, [0, 1], ["a", "b"], "a.glb") == [-1, 0]
        with pytest.raises(UserError, match=r"a.glb has no hierarchy of joints, and no index-finger-metacarpal"):
            _parents({"nodes": nodes}, [0, 1, 2], ["a", "b", "c"], "a.glb")


class TestGraphormer:
    def net(self, topology):
        torch.manual_seed(0)
        return MeshGraphormer("resnet10t", topology, dims=(16, 8, 8), layers=2, heads=2, dropout=0.0)

    def test_graph_convolution_is_the_sum_over_neighbours(self):
        torch.manual_seed(0)
        adjacency = torch.rand(5, 5)
        layer, x = GraphConvolution(3, adjacency), torch.randn(2, 5, 3)
        expected = torch.zeros(2, 5, 3)
        for i in range(5):
            for j in range(5):
                expected[:, i] += adjacency[i, j] * (x[:, j] @ layer.weight)
        torch.testing.assert_close(layer(x), expected + layer.bias)

    def test_outputs_and_a_batch_of_one(self, topology):
        net = self.net(topology).eval()
        images = torch.randn(3, 3, 64, 64)
        found = net(images)
        assert found["vertices"].shape == (3, len(topology.vertices), 3)
        assert found["coarse"].shape == (3, 60, 3)
        torch.testing.assert_close(found["mesh_joints"], net.regressor @ found["vertices"])
        alone = net(images[:1])
        for name, value in found.items():
            torch.testing.assert_close(alone[name], value[:1], atol=1e-5, rtol=1e-4)

    def test_coordinates_are_not_rounded_to_bfloat16(self, topology):
        """At 10 cm its steps are half a millimetre, more than methods differ by."""
        net, images = self.net(topology).eval(), torch.randn(2, 3, 64, 64)
        with torch.autocast("cpu", torch.bfloat16):
            found = net(images)
        for name, value in found.items():
            assert value.dtype is torch.float32
            assert not torch.equal(value.bfloat16().float(), value), name

    @pytest.mark.parametrize("after", [["encoders.0.layers.0"], ["encoders.1.layers.1", "encoders.2.layers.0"]])
    def test_the_module_opens_two_streams_and_leaves_no_trace(self, topology, after):
        net, images = self.net(topology), torch.randn(3, 3, 64, 64)
        keys, plain = list(net.state_dict()), net.eval()(images)
        handle = bf.attach(net, after=after, heads=2)
        attached = net(images)
        assert all(torch.equal(attached[name], value) for name, value in plain.items())
        net.train()
        net.backbone.eval()
        rows = net(images)
        for name, value in rows.items():
            assert len(value) == 6
            torch.testing.assert_close(value[:3], plain[name], atol=1e-4, rtol=1e-3)
            assert (value[3:] - plain[name]).abs().max() > 1e-5
        rows["vertices"].sum().backward()
        handle.detach()
        assert list(net.state_dict()) == keys

    def test_masked_queries_hide_their_place_and_the_feature(self, topology):
        net, images = self.net(topology).eval(), torch.randn(1, 3, 64, 64)
        none = torch.zeros(1, 81, dtype=torch.bool)
        assert torch.equal(net(images, none)["vertices"], net(images)["vertices"])
        assert not torch.allclose(net(images, ~none)["vertices"], net(images)["vertices"])

    def test_projection_is_scale_times_shifted_points(self):
        points, camera = torch.tensor([[[1.0, 2.0, 3.0]]]), torch.tensor([[2.0, 0.5, -1.0]])
        assert project(points, camera).tolist() == [[[3.0, 2.0]]]

    def test_what_does_not_fit_is_refused(self, topology):
        with pytest.raises(UserError, match="divisible by heads=3"):
            MeshGraphormer("resnet10t", topology, dims=(16, 8, 8), heads=3)
        vit = {"img_size": 32, "embed_dim": 16, "depth": 1, "num_heads": 2}
        net = MeshGraphormer("vit_tiny_patch16_224", topology, dims=(16, 8, 8), heads=2, **vit)
        with pytest.raises(UserError, match="gives maps"):
            net(torch.randn(1, 3, 32, 32))

    def test_the_first_meshes_are_small_and_every_encoder_begins_as_bert(self, topology):
        """With coordinates of half a metre most of a short training would be spent on their size."""
        net = self.net(topology)
        first = net.eval()(torch.randn(4, 3, 64, 64))
        assert first["coarse"].std() < 0.15
        torch.testing.assert_close(first["camera"], torch.tensor([[5.0, 0, 0]] * 4), atol=0.5, rtol=0)  # in the middle
        last = net.encoders[2].layers[0]
        assert last.attention.in_proj_weight.std().item() == pytest.approx(0.02, rel=0.2)
        assert not last.expand.bias.any()
        assert last.norm1.weight.eq(1).all()
        assert last.graph.widen.weight.abs().max() <= 1 / (8 * 4)
