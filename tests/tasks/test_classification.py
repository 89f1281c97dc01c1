"""Training, measuring and testing with DeiT's recipe, with and without the module."""

import pytest
import torch
import torch.nn.functional as F

from batchformer.errors import NonFiniteLoss, UserError
from batchformer.tasks import AdamWOptions, CosineOptions, InsertionOptions

from .conftest import COUNTS, TinyData, info, make_trainer
from .tiny_vit import NO_MIX, WholeClassification, built, fit, vit_task

STILL = {"optimizer": AdamWOptions(lr=0.0, lr_per=None), "schedule": CosineOptions(warmup_epochs=0, min_lr=0.0)}
PLACES = {
    "baseline": {"method": "baseline"},
    "after a block": {"batchformer": InsertionOptions(blocks=[1])},
    "after all blocks, shared": {"batchformer": InsertionOptions(blocks="all", share=True)},
    "after named places": {"batchformer": InsertionOptions(after=["patch_embed", "blocks.2"], layer_scale=0.1)},
    "stable after all blocks": {"batchformer": InsertionOptions(blocks="all", variant="stable")},
    "before the classifier": {"batchformer": InsertionOptions()},
    "split": {"batchformer": InsertionOptions(blocks=[0], streams="split")},
    "single": {"batchformer": InsertionOptions(blocks=[0], streams="single", group_size=4)},
}  # fmt: skip


@pytest.mark.parametrize("places", PLACES)
def test_two_steps_change_every_weight_wherever_the_module_is(places):
    task = built(**PLACES[places])
    before = {name: p.detach().clone() for name, p in task.net.named_parameters()}
    trainer = fit(task)
    assert trainer.global_step == 2
    same = [name for name, p in task.net.named_parameters() if torch.equal(p, before[name])]
    assert same == []
    assert any(name.startswith("batchformer.") for name in before) == (places != "baseline")
    logged = {name for name in trainer.callback_metrics if "loss_" in name}
    streams = {"baseline": {"plain"}, "single": {"related"}}.get(places, {"plain", "related"})
    assert logged == {f"train/loss_{stream}" for stream in streams}


class TestBuilding:
    def test_the_network_starts_the_same_for_both_methods(self):
        plain, attached, other = (built(**a).net.state_dict() for a in ({"method": "baseline"}, {}, {"seed": 1}))
        for name, value in plain.items():
            assert torch.equal(attached[name], value)
        assert not torch.equal(other["pos_embed"], plain["pos_embed"])

    @pytest.mark.parametrize(
        ("options", "heads"),
        [
            (InsertionOptions(blocks=[1]), 2),
            (InsertionOptions(after=["blocks.0"]), 2),
            (InsertionOptions(blocks=[1], heads=8), 8),
            (InsertionOptions(after=["patch_embed"]), 4),
            (InsertionOptions(), 4),
        ],
        ids=str,
    )
    def test_heads_are_those_of_the_backbone_at_the_place(self, options, heads):
        module = built(batchformer=options).attachment.points[0].module
        assert module.layers[0].self_attn.heads == heads

    def test_backbones_with_several_numbers_of_heads_need_one_said(self):
        args = {"img_size": 32, "embed_dim": 8, "depths": (1, 1), "num_heads": (2, 4), "window_size": 4}
        after = ["layers.0", "layers.1"]
        with pytest.raises(UserError, match=r"2, 4 heads.*model\.batchformer\.heads"):
            built(backbone="swin_tiny_patch4_window7_224", backbone_args=args, batchformer={"after": after})

    def test_options_of_the_module_reach_it(self):
        options = InsertionOptions(blocks=[0, 2], dropout=0.1, norm="pre", layer_scale=0.2, layers=2, streams="split")
        points = built(batchformer=options).attachment.points
        assert [point.paths for point in points] == [("blocks.0",), ("blocks.2",)]
        layer = points[1].module.layers[1]
        assert (layer.dropout, layer.norm, points[1].module.streams) == (0.1, "pre", "split")
        assert layer.scale1.eq(0.2).all()

    def test_the_stable_variant_is_a_word(self):
        points = built(batchformer=InsertionOptions(blocks="all", variant="stable")).attachment.points
        assert {point.module.layers[0].norm for point in points} == {"relative"}

    def test_the_plain_network_takes_the_weights_of_the_detached_one(self):
        task = built()
        task.attachment.detach()
        task.plain_network().load_state_dict(task.net.state_dict(), strict=True)

    def test_a_small_vit_for_32_pixels_comes_from_the_arguments(self):
        net = built(backbone_args={"img_size": 32, "patch_size": 4}, method="baseline").net
        assert net.pos_embed.shape == (1, 65, 192)
        assert (len(net.blocks), net.blocks[0].attn.num_heads) == (12, 3)

    def test_wrong_options_are_named(self):
        with pytest.raises(UserError, match="head_count"):
            vit_task(batchformer={"head_count": 3})
        with pytest.raises(UserError, match="ema"):
            vit_task(ema=1.0)
        with pytest.raises(UserError, match="module_weight_decay=-1"):
            vit_task(optimizer={"module_weight_decay": -1.0})

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"label_smoothing": 1.0}, "model.label_smoothing=1.0 must be 0 or more and less than 1"),
            ({"label_smoothing": -0.1}, "model.label_smoothing=-0.1 must"),
            ({"schedule": {"min_lr": -1e-5}}, "model.schedule.min_lr=-1e-05 must be 0 or more"),
            ({"schedule": {"warmup_lr": -1.0}}, "model.schedule.warmup_lr=-1.0 must be 0 or more"),
            ({"optimizer": {"layer_decay": 0.0}}, "model.optimizer.layer_decay=0.0 must be more than 0"),
            ({"optimizer": {"layer_decay": 1.1}}, "model.optimizer.layer_decay=1.1 must be more than 0 and at most 1"),
            ({"optimizer": {"betas": (0.9, 1.0)}}, r"model.optimizer.betas=\[0.9, 1.0\] must be two numbers"),
        ],
    )
    def test_numbers_that_train_to_nonsense_are_named(self, options, said):
        with pytest.raises(UserError, match=said):
            vit_task(**options)


class TestMeasuring:
    def test_the_losses_of_the_streams_are_those_of_their_rows(self):
        """lr 0 and no dropout: every step has the initial weights, and the rows can be computed by hand."""
        task = vit_task(mix=NO_MIX, batchformer=InsertionOptions(blocks=[1], dropout=0.0), **STILL)
        logged = fit(task).callback_metrics
        data, twin = TinyData(), built(batchformer=InsertionOptions(blocks=[1], dropout=0.0))
        plain, related = [], []
        for rows in range(0, 16, 8):
            labels = data.labels[rows : rows + 8]
            logits = twin.net.train()(data.images[rows : rows + 8])
            losses = F.cross_entropy(logits, torch.cat([labels, labels]), reduction="none", label_smoothing=0.1)
            plain.append(losses[:8])
            related.append(losses[8:])
        assert logged["train/loss_plain"].item() == pytest.approx(torch.cat(plain).mean().item(), rel=1e-5)
        assert logged["train/loss_related"].item() == pytest.approx(torch.cat(related).mean().item(), rel=1e-5)
        assert logged["train/loss_plain"] != logged["train/loss_related"]
        both = (logged["train/loss_plain"] + logged["train/loss_related"]) / 2
        assert logged["train/loss"].item() == pytest.approx(both.item(), rel=1e-5)

    def test_plain_rows_are_those_of_the_baseline(self):
        """With mixing and all: what the module adds does not touch the plain stream."""
        with_module, without = (fit(vit_task(method=m, **STILL)).callback_metrics for m in ("batchformer", "baseline"))
        assert with_module["train/loss_plain"].item() == pytest.approx(without["train/loss"].item(), rel=1e-5)
        assert with_module["train/acc"] == without["train/acc"]

    def test_accuracies_are_those_of_the_plain_network(self):
        data = TinyData()
        task = vit_task()
        trainer = fit(task, data, limit_val_batches=1.0)
        task.eval()
        task.attachment.detach()
        logits = task.net(data.images)
        right = (logits.argmax(1) == data.labels).double()
        metrics = trainer.callback_metrics
        assert metrics["val/top1"].item() == pytest.approx(100 * right.mean().item())
        assert metrics["val/top5"].item() == 100  # of four classes
        assert metrics["val/loss"].item() == pytest.approx(F.cross_entropy(logits, data.labels).item(), rel=1e-5)
        per_class = [100 * right[data.labels == c].mean().item() for c in range(4)]
        assert task.per_class == pytest.approx(per_class)
        assert metrics["val/few"].item() == pytest.approx(per_class[3])
        assert {"val/many", "val/medium", "val/few"} <= set(metrics)

    def test_equal_classes_have_no_splits(self):
        data = TinyData()
        data.class_counts = [500] * 4
        seen = fit(vit_task(), data, limit_val_batches=1.0).callback_metrics
        assert {key for key in seen if key.startswith("val/")} == {"val/top1", "val/top5", "val/loss"}


class TestGuard:
    def test_the_task_feeds_the_guard_and_warns_once(self):
        class Nervous(WholeClassification):
            def on_train_start(self) -> None:
                super().on_train_start()
                self._guard.every = self._guard.looks = 1
                self._guard.at_chance, self._guard.has_learnt = 0.0, 9.0

        with pytest.warns(UserWarning, match="related stream stays at chance") as seen:
            fit(vit_task(Nervous), max_epochs=2)
        assert len([w for w in seen if "related stream" in str(w.message)]) == 1

    @pytest.mark.parametrize("places", ["baseline", "single"])
    def test_one_stream_has_none(self, places):
        task = vit_task(**PLACES[places])
        fit(task)
        assert task._guard is None

    def test_chance_is_that_of_the_smoothed_labels(self):
        task = vit_task(mix=NO_MIX, label_smoothing=0.3)
        fit(task)
        labels = torch.arange(4).repeat_interleave(torch.tensor(COUNTS))
        prior = 0.7 * torch.tensor(COUNTS) / sum(COUNTS) + 0.3 / 4
        constant = prior.log().expand(len(labels), 4)
        best = F.cross_entropy(constant, labels, label_smoothing=0.3)
        assert task._guard.chance == pytest.approx(best.item(), rel=1e-5)


@pytest.mark.parametrize("kind", [None, WholeClassification])
def test_a_loss_that_is_not_finite_stops_the_run(kind):
    task = vit_task(**({} if kind is None else {"kind": kind}))
    with pytest.raises(NonFiniteLoss, match=r"step 1 .*model\.optimizer\.lr"):
        make_trainer(max_epochs=1).fit(task, datamodule=TinyData(batch_size=4, spoil_image=5))


def test_bf16_trains_on_the_cpu():
    trainer = fit(vit_task(ema=0.9), precision="bf16-mixed", limit_val_batches=1.0)
    assert torch.isfinite(trainer.callback_metrics["train/loss_related"])


def test_gradients_are_clipped_by_the_trainer():
    """With plain SGD and one step, the whole change of the weights is the learning rate times the clipped norm."""
    task = vit_task(optimizer=AdamWOptions(name="sgd", lr=1.0, lr_per=None, weight_decay=0.0))
    task.construct(info(COUNTS))
    before = [p.detach().clone() for p in task.net.parameters()]
    fit(task, gradient_clip_val=0.01, max_steps=1, max_epochs=-1)
    moved = torch.cat([(p - b).flatten() for p, b in zip(task.net.parameters(), before, strict=True)]).norm()
    assert moved.item() == pytest.approx(0.01 * 1.9, rel=1e-3)  # Nesterov's first step is 1 + 0.9 of the gradient


def test_a_convolutional_network_trains_with_separate_statistics():
    task = vit_task(backbone="resnet20", backbone_args={"widths": (8, 16)}, batchformer={"after": ["layer1"]})
    trainer = fit(task)
    assert torch.isfinite(trainer.callback_metrics["train/loss_related"])
