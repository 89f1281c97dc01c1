"""Detection: what is trained with which learning rate, what the streams' losses are, what a checkpoint holds."""

import copy
import math
import warnings

import lightning as L
import pytest
import torch
from torch import nn

import batchformer as bf
from batchformer.data import CocoDetection
from batchformer.data.sets import write_miniature
from batchformer.errors import NonFiniteLoss, UserError
from batchformer.metrics import CocoAP
from batchformer.models import DETECTORS, create_detector
from batchformer.tasks import Detection, DetectorModuleOptions, DetectorOptimizerOptions, ScheduleOptions
from batchformer.tasks.detection.faster_rcnn import RegionDetection

from .conftest import info, make_trainer

SMALL = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 8,
         "decoder_attention_heads": 2, "decoder_ffn_dim": 8, "num_queries": 6, "dropout": 0.0,
         "image_size": 64}  # fmt: skip


def small(name):
    return {**SMALL, **({"two_stage_num_proposals": 6} if name == "deformable-detr-two-stage" else {})}


def task_of(detector="detr", backbone_weights=None, **options):
    task = Detection(detector, small(detector), backbone="test_resnet", **options)
    task.init_from = {} if backbone_weights is None else {"backbone": backbone_weights}
    return task


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return str(write_miniature("coco", tmp_path_factory.mktemp("mini") / "coco"))


@pytest.fixture
def data(root):
    return CocoDetection(
        root, image_size=48, augment="none", limit_train=8, limit_val=6, batch_size=4, eval_batch_size=3, workers=0
    )


@pytest.fixture(scope="module")
def batch(root):
    data = CocoDetection(root, image_size=48, augment="none", batch_size=3, workers=0)
    data.setup()
    return next(iter(data.train_dataloader()))


def train(task, data, epochs=1, resume=None, **trainer):
    made = make_trainer(max_epochs=epochs, gradient_clip_val=0.1, **trainer)
    made.fit(task, datamodule=data, ckpt_path=resume)
    return made


# ---- parity


@pytest.mark.parametrize("name", DETECTORS)
def test_a_module_that_adds_nothing_leaves_the_loss_of_the_plain_model(name, batch):
    torch.manual_seed(0)
    plain = create_detector(name, num_labels=5, backbone="test_resnet", **small(name)).train()
    model = copy.deepcopy(plain)
    attachment = bf.attach(model, encoder_layers=[0], norm="pre", dropout=0.0)
    for part, parameter in attachment.named_parameters():
        if "out_proj" in part or "linear2" in part:
            nn.init.zeros_(parameter)
    loss = model(**batch).loss
    torch.testing.assert_close(loss, plain(**batch).loss, rtol=1e-6, atol=0)
    for stream in attachment.stream_losses():
        torch.testing.assert_close(stream, loss.detach(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", ["Detr", "ConditionalDetr", "DeformableDetr"])
def test_a_stock_model_gives_the_loss_of_transformers(kind, batch):
    import transformers
    from transformers.loss.loss_utils import LOSS_MAPPING

    config = getattr(transformers, f"{kind}Config")(backbone="test_resnet", num_labels=5, auxiliary_loss=True, **SMALL)
    model = getattr(transformers, f"{kind}ForObjectDetection")(config).train()
    expected = model(**batch)
    own_loss = LOSS_MAPPING["ForObjectDetection" if kind == "Detr" else f"{kind}ForObjectDetection"]
    by_hand, *_ = own_loss(
        expected.logits, batch["labels"], "cpu", expected.pred_boxes, config, *_every_layer(expected)
    )
    torch.testing.assert_close(expected.loss, by_hand, rtol=1e-6, atol=0)
    attachment = bf.attach(model, encoder_layers=[0])
    with attachment.disabled():
        assert torch.equal(model(**batch).loss, expected.loss)
    attachment.detach()
    assert torch.equal(model(**batch).loss, expected.loss)


def _every_layer(outputs):
    """Logits and boxes of all decoder layers, from the auxiliary outputs and the last one."""
    layers = [*outputs.auxiliary_outputs, {"logits": outputs.logits, "pred_boxes": outputs.pred_boxes}]
    return [torch.stack([layer[name] for layer in layers]) for name in ("logits", "pred_boxes")]


# ---- training


def test_each_group_has_the_learning_rate_of_the_released_code(data):
    options = DetectorOptimizerOptions(lr=2e-4, backbone_lr=2e-5, module_lr_factor=0.5)
    task = task_of("deformable-detr", optimizer=options, schedule=ScheduleOptions("step", milestones=[1]))
    trainer = train(task, data, epochs=2)
    rate = {}
    for group in trainer.optimizers[0].param_groups:
        rate |= {id(parameter): group["lr"] for parameter in group["params"]}
        assert group["weight_decay"] == 1e-4
    net = task.net.model
    expected = {2e-4: task.net.class_embed[0], 2e-5: net.backbone.model.layer4}
    for lr, module in expected.items():
        assert rate[id(next(module.parameters()))] == pytest.approx(lr / 10)  # the drop after epoch 1
    assert rate[id(net.encoder.layers[0].self_attn.sampling_offsets.weight)] == pytest.approx(2e-6)
    assert rate[id(net.reference_points.bias)] == pytest.approx(2e-6)
    assert all(rate[id(p)] == pytest.approx(1e-5) for p in task.attachment.parameters())
    assert len(rate) == sum(p.requires_grad for p in task.net.parameters())


@pytest.mark.parametrize(
    ("streams", "logged"), [("duplicate", {"plain", "related"}), ("single", {"related"}), (None, {"plain"})]
)
def test_the_loss_of_each_stream_is_logged(streams, logged, data):
    method = "baseline" if streams is None else "batchformer"
    task = task_of(method=method, batchformer=DetectorModuleOptions(streams=streams or "duplicate"))
    seen = train(task, data).callback_metrics
    losses = {name: float(seen[f"train/loss_{name}"]) for name in logged}
    assert {name for name in ("plain", "related") if f"train/loss_{name}" in seen} == logged
    assert float(seen["train/loss"]) == pytest.approx(sum(losses.values()) / len(losses))


def test_both_methods_begin_with_the_same_detector(data):
    data.setup()
    tasks = [task_of(method=method, seed=3) for method in ("baseline", "batchformer")]
    for task in tasks:
        task.construct(data)
    plain, attached = tasks[0].net.state_dict(), tasks[1].attachment.plain_state_dict()
    assert plain.keys() == attached.keys()
    assert all(torch.equal(plain[key], attached[key]) for key in plain)


def test_a_random_backbone_is_warned_of(data, tmp_path):
    with pytest.warns(RuntimeWarning, match="begins with random weights"):
        train(task_of(), data, limit_train_batches=1, limit_val_batches=0)
    weights = tmp_path / "backbone.pth"
    torch.save(create_detector("detr", num_labels=5, backbone="test_resnet").model.backbone.model.state_dict(), weights)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        train(task_of(backbone_weights=str(weights)), data, limit_train_batches=1, limit_val_batches=0)


def test_boxes_that_are_no_numbers_stop_the_training(data):
    task = task_of("conditional-detr")
    data.setup()
    task.construct(data)
    nn.init.constant_(task.net.bbox_predictor.layers[-1].bias, math.nan)
    with pytest.raises(NonFiniteLoss, match=r"step 0 .*lower model.optimizer.lr"):
        train(task, data)


# ---- evaluation


class Seen(Detection):
    """Keeps what it was evaluated by, and finds all objects, some of them a little beside their place."""

    def make_metric(self, data):
        metric = super().make_metric(data)
        metric.logits = []
        return metric

    def update_metrics(self, metric, outputs, batch):
        metric.logits.append(outputs.logits)
        metric.update([beside(label["truth"]) for label in batch["labels"]], batch["labels"])


def beside(truth):
    boxes = truth["boxes"].copy()
    boxes[::2, [0, 2]] += 0.2 * (boxes[::2, 2:3] - boxes[::2, 0:1])
    return {"boxes": boxes, "labels": truth["labels"], "scores": [1.0] * len(boxes)}


def test_validation_gives_cocos_numbers_in_percent(data):
    task = Seen("detr", SMALL, "test_resnet")
    seen = train(task, data).callback_metrics
    metric = CocoAP(5)
    for batch in data.evaluation_loader("val"):
        metric.update([beside(label["truth"]) for label in batch["labels"]], batch["labels"])
    values = metric.compute()
    assert 0 < values["ap"] < values["ap50"]
    for name in ("ap", "ap50", "ar100"):
        assert float(seen[f"val/{name}"]) == pytest.approx(100 * float(values[name]), abs=1e-4)
    assert task.per_class == pytest.approx((100 * values["per_class"]).tolist(), nan_ok=True)


def test_the_plain_detector_is_evaluated_and_with_the_module_where_asked(data):
    task = Seen("detr", SMALL, "test_resnet", evaluate_with_batch=True)
    seen = train(task, data).callback_metrics
    plain = bf.detach(copy.deepcopy(task.net)).eval()
    for k, batch in enumerate(data.evaluation_loader("val")):
        inputs = batch["pixel_values"], batch["pixel_mask"]
        with torch.no_grad():
            assert torch.equal(task.metrics["val"].logits[k], plain(*inputs).logits)
            with task.attachment.infer_with_batch():
                related = task.net.eval()(*inputs).logits
        torch.testing.assert_close(task.batch_metrics["val"].logits[k], related)
        assert not torch.allclose(related, task.metrics["val"].logits[k])
    assert seen["val/ap_batch"] > 0
    assert not task_of(method="baseline", evaluate_with_batch=True).evaluate_with_batch


def test_predictions_are_boxes_in_the_pixels_of_the_original_image(data):
    task = task_of("smca-detr")
    data.setup()
    task.construct(data)
    batch = next(iter(data.evaluation_loader("val")))
    with torch.no_grad():
        found = task.eval().predict_step(batch, 0)
        outputs = task.net(batch["pixel_values"], batch["pixel_mask"])
    height, width = batch["labels"][1]["orig_size"].tolist()
    best = outputs.logits[1].sigmoid().max()
    assert found[1]["scores"][0] == best
    query, label = divmod(int(outputs.logits[1].flatten().argmax()), 5)
    assert found[1]["labels"][0] == label
    x, y, w, h = outputs.pred_boxes[1, query].tolist()
    expected = [(x - w / 2) * width, (y - h / 2) * height, (x + w / 2) * width, (y + h / 2) * height]
    assert found[1]["boxes"][0].tolist() == pytest.approx(expected, rel=1e-4)
    assert len(task.eval().predict_step(batch, 0, threshold=1.0)[1]["scores"]) == 0


# ---- checkpoints


class SaveAt(L.Callback):
    def __init__(self, epoch, path):
        self.epoch, self.path = epoch, path

    def on_train_epoch_end(self, trainer, task):
        if trainer.current_epoch == self.epoch:
            trainer.save_checkpoint(self.path)


def test_a_resumed_run_ends_with_the_weights_of_an_unbroken_one(data, tmp_path):
    path = str(tmp_path / "middle.ckpt")
    whole, resumed = task_of("deformable-detr-refine"), task_of("deformable-detr-refine")
    unbroken = train(whole, data, 2, callbacks=[SaveAt(0, path)], limit_val_batches=0)
    trainer = train(resumed, data, 2, resume=path, limit_val_batches=0)
    assert trainer.global_step == unbroken.global_step == 4
    for name, value in whole.net.state_dict().items():
        assert torch.equal(resumed.net.state_dict()[name], value), name


def test_a_checkpoint_restores_the_task_without_data_and_without_the_file_of_the_backbone(data, tmp_path):
    weights, path = tmp_path / "backbone.pth", str(tmp_path / "last.ckpt")
    torch.save(create_detector("detr", num_labels=5, backbone="test_resnet").model.backbone.model.state_dict(), weights)
    task = task_of(backbone_weights=str(weights))
    train(task, data, callbacks=[SaveAt(0, path)], limit_val_batches=0)
    begun, body = torch.load(weights, weights_only=True), task.net.model.backbone.model
    frozen = [name for name, parameter in body.named_parameters() if not parameter.requires_grad]
    assert any(name.startswith("layer1") for name in frozen)
    assert all(torch.equal(begun[name], body.get_parameter(name)) for name in frozen)
    weights.unlink()
    restored = Detection.load_from_checkpoint(path, weights_only=True, map_location="cpu")
    assert restored.category_ids == data.category_ids
    assert restored.module_options == task.module_options
    again = [name for name, parameter in restored.net.named_parameters() if not parameter.requires_grad]
    assert again == [name for name, parameter in task.net.named_parameters() if not parameter.requires_grad]
    images = torch.randn(2, 3, 48, 48)
    with torch.no_grad():
        assert torch.equal(
            restored.eval()({"pixel_values": images}).logits, task.eval()({"pixel_values": images}).logits
        )
    assert train(restored.train(), data, 2, resume=path, limit_val_batches=0).global_step == 4


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cuda_graph": True}, "cuda_graph=true is not for detectors"),
        ({"batchformer": {"encoder_layer": 0}}, "DetectorModuleOptions has no 'encoder_layer'"),
        ({"optimizer": {"lr": 0.0}}, "must be more than 0"),
        ({"optimizer": {"backbone_lr": -1e-5}}, "backbone_lr=-1e-05 must not be negative"),
        ({"optimizer": {"sampling_lr": -1.0}}, "sampling_lr=-1.0 must not be negative"),
        ({"optimizer": {"betas": (-0.1, 0.9)}}, r"model.optimizer.betas=\[-0.1, 0.9\] must be"),
        ({"method": "both"}, "must be"),
    ],
)
def test_mistakes_are_told(options, said):
    with pytest.raises(UserError, match=said):
        task_of(**options)


@pytest.mark.parametrize(("precision", "other"), [("bf16-true", "bf16-mixed"), ("16-true", "16-mixed")])
def test_half_precision_for_all_would_round_the_boxes(precision, other, data):
    with pytest.raises(UserError, match=f"trainer.precision {precision} rounds the boxes .* use {other}"):
        train(task_of(), data, precision=precision)


def test_fields_that_have_a_place_of_their_own_are_sent_there():
    for name, said in {"backbone": "it is model.backbone", "num_labels": "those of the data"}.items():
        with pytest.raises(UserError, match=f"cannot hold '{name}': .*{said}"):
            Detection("detr", {name: 3})
    with pytest.raises(UserError, match="encoder_layers names no layer"):
        task_of(batchformer={"encoder_layers": []}).construct(info([1, 1]))


def test_the_schedule_of_faster_rcnn_counts_steps_of_the_run():
    schedule = ScheduleOptions("step", warmup_epochs=4, warmup_start=0.2, milestones=[10, 20])
    task = RegionDetection("test_resnet", schedule=schedule)
    task.trainer = make_trainer(max_steps=30)
    done = task.trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total
    rates = {}
    for done.completed in (0, 2, 4, 9, 10, 19, 20, 29):
        rates[task.trainer.global_step] = task.learning_rate() / task.sgd.lr
    expected = {0: 0.2, 2: 0.6, 4: 1, 9: 1, 10: 0.1, 19: 0.1, 20: 0.01, 29: 0.01}
    assert rates == pytest.approx(expected)
