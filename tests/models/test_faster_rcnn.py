"""Faster R-CNN with a C4 backbone: inputs and outputs, losses, and settings that differ from torchvision's."""

import pytest
import torch

from batchformer.data import VocDetection
from batchformer.data.sets import write_miniature
from batchformer.errors import UserError
from batchformer.models.faster_rcnn import FasterRCNN, _region_losses, _target
from batchformer.tasks.detection import faster_rcnn
from batchformer.tasks.detection.faster_rcnn import RegionDetection, average_statistics

from ..tasks.conftest import make_trainer


def small() -> FasterRCNN:
    torch.manual_seed(0)
    return made_fast(FasterRCNN("resnet10t", 3))


def made_fast(net: FasterRCNN) -> FasterRCNN:
    net.proposals._post_nms_top_n = {"training": 20, "testing": 10}
    net.regions.fg_bg_sampler.batch_size_per_image = 8
    return net


def batch():
    torch.manual_seed(1)
    mask = torch.ones(2, 96, 128, dtype=torch.int64)
    mask[1, 64:] = 0
    labels = [{"boxes": torch.tensor([[0.5, 0.5, 0.4, 0.6]]), "class_labels": torch.tensor([k])} for k in (0, 2)]
    return {"pixel_values": torch.randn(2, 3, 96, 128), "pixel_mask": mask, "labels": labels}


def test_every_layer_gets_a_gradient_and_detections_are_inside_their_image():
    net = small()
    found = net(**batch())
    assert set(found.losses) == {"loss_objectness", "loss_rpn_box_reg", "loss_classifier", "loss_box_reg"}
    torch.testing.assert_close(found.loss, sum(found.losses.values()))
    found.loss.backward()
    assert [name for name, p in net.named_parameters() if p.grad is None] == []
    with torch.no_grad():
        outputs = net.eval()(**batch())
    assert outputs.sizes == [(96, 128), (64, 128)]
    for one, (height, width) in zip(outputs.detections, outputs.sizes, strict=True):
        assert len(one["boxes"]) <= 100
        assert ((one["labels"] >= 0) & (one["labels"] < 3)).all()
        limits = torch.tensor([width, height, width, height])
        assert ((one["boxes"] >= 0) & (one["boxes"] <= limits)).all()


def test_box_losses_are_absolute_distances_over_all_regions():
    logits, classes = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    boxes, shifts = torch.randn(4, 12), torch.randn(4, 4)
    found = _region_losses(logits, boxes, classes, shifts)
    expected = ((boxes[1, 4:8] - shifts[1]).abs().sum() + (boxes[2, 8:12] - shifts[2]).abs().sum()) / 4
    torch.testing.assert_close(found["loss_box_reg"], expected)
    torch.testing.assert_close(found["loss_classifier"], torch.nn.functional.cross_entropy(logits, classes))


def test_targets_are_corners_in_pixels_and_classes_from_one():
    label = {"boxes": torch.tensor([[0.5, 0.25, 0.5, 0.5]]), "class_labels": torch.tensor([4])}
    made = _target(label, (100, 200))
    assert made["boxes"].tolist() == [[50.0, 0.0, 150.0, 50.0]]
    assert made["labels"].tolist() == [5]


def test_settings_are_detectron2s():
    net = small()
    assert net.cut.aligned
    assert net.proposals.pre_nms_top_n() == 12000
    net.eval()
    assert net.proposals.pre_nms_top_n() == 6000
    assert all(p.requires_grad for p in net.parameters())
    predictor = net.regions.box_predictor
    assert 0.008 < predictor.cls_score.weight.std() < 0.012
    assert 0.0008 < predictor.bbox_pred.weight.std() < 0.0012
    assert not predictor.cls_score.bias.any()
    with pytest.raises(UserError, match="needs a ResNet"):
        FasterRCNN("vit_tiny_patch16_224", 3)


@pytest.mark.parametrize("size", [(96, 128), (101, 321)])
def test_anchors_are_detectron2s_whatever_the_size_of_the_batch(size):
    """Cell (y, x) has anchors around (16 x, 16 y), areas 32^2 to 512^2, heights 0.5, 1 and 2 times the width."""
    from torchvision.models.detection.image_list import ImageList

    images, net = torch.randn(1, 3, *size), small()
    features = net._stage3(images)
    found = net.proposals.anchor_generator(ImageList(images, [size]), [features])[0]
    rows, columns = features.shape[2:]
    assert (rows, columns) == tuple(-(-side // 16) for side in size)
    found = found.double().reshape(rows, columns, 15, 4)
    centre, sides = (found[..., :2] + found[..., 2:]) / 2, found[..., 2:] - found[..., :2]
    expected = torch.stack(torch.meshgrid(torch.arange(columns), torch.arange(rows), indexing="xy"), -1) * 16.0
    torch.testing.assert_close(centre, expected[:, :, None].expand_as(centre).double(), atol=1e-4, rtol=0)
    shapes = {(round(float((w * h) ** 0.5), 3), round(float(h / w), 3)) for w, h in sides[-1, -1]}
    assert shapes == {(s, r) for s in (32.0, 64.0, 128.0, 256.0, 512.0) for r in (0.5, 1.0, 2.0)}


def test_boxes_are_of_full_precision_in_half_precision():
    """bfloat16 has 8 bits: a side at pixel 700 would be rounded to a multiple of 4."""
    from torchvision.models.detection.image_list import ImageList

    net, images, found = small().eval(), torch.randn(1, 3, 64, 1024), []
    torch.nn.init.normal_(net.proposals.head.bbox_pred.weight, std=1e-6)  # proposals are anchors, cut at the border
    net.proposals.register_forward_hook(lambda module, given, result: found.extend(result[0]))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        net(images)
    anchors = net.proposals.anchor_generator(ImageList(images, [(64, 1024)]), [torch.zeros(1, 1, 4, 64)])[0]
    assert found[0].dtype == torch.float32
    off = (found[0][:, None, 0] - anchors[None, :, 0].clamp(0, 1024)).abs().min(1).values
    assert off.max() < 0.01


def test_statistics_of_batch_norm_are_plain_means_over_the_batches():
    """And nothing else of the network changes: not its mode, and not the averages that training goes on with."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.ReLU(), torch.nn.BatchNorm1d(4))
    net(torch.randn(6, 3))
    net.eval()
    net[0].train()
    batches, weights = list(torch.randn(5, 8, 3)), [p.clone() for p in net.parameters()]
    average_statistics(net, net, batches)
    hidden = [net[0](batch).detach() for batch in batches]
    torch.testing.assert_close(net[1].running_mean, torch.stack([x.mean(0) for x in hidden]).mean(0))
    torch.testing.assert_close(net[1].running_var, torch.stack([x.var(0) for x in hidden]).mean(0))
    seen = [((x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-5).sqrt()).relu() for x in hidden]
    torch.testing.assert_close(net[3].running_mean, torch.stack([x.mean(0) for x in seen]).mean(0))
    assert [module.training for module in net] == [True, False, False, False]
    assert (net[1].momentum, int(net[1].num_batches_tracked)) == (0.1, 1)
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), weights, strict=True))


def test_the_last_evaluation_has_statistics_of_training_batches(tmp_path, monkeypatch):
    root = str(write_miniature("voc", tmp_path / "data"))
    options = {"image_size": 64, "max_size": 96, "scales": [64], "batch_size": 2, "eval_batch_size": 2, "workers": 0}
    data = VocDetection(root, train="trainval", val="test", **options)
    task = RegionDetection("resnet10t", precise_norm=1, schedule={"name": "step", "milestones": []})
    data.setup()
    task.construct(data)
    made_fast(task.net)
    counted = []
    monkeypatch.setattr(faster_rcnn, "average_statistics", lambda net, forward, given: counted.append(len(list(given))))
    make_trainer(max_epochs=2, limit_train_batches=1, limit_val_batches=1).fit(task, datamodule=data)
    assert counted == [1]  # after the second epoch alone
    task.expect_checkpoint()
    assert task.precise_norm == 0
