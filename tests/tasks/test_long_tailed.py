"""Training, testing and building, with and without the module."""

import pytest
import torch

from batchformer.data import DataInfo
from batchformer.errors import UserError
from batchformer.models import NormedLinear
from batchformer.tasks import BatchFormerOptions, LongTailed, LossOptions, OptimizerOptions, ScheduleOptions

from .conftest import COUNTS, TinyData, info, make_trainer


def weights(task: LongTailed) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in task.net.state_dict().items()}


def built(**arguments) -> LongTailed:
    task = LongTailed("resnet20", **arguments)
    task.construct(info(COUNTS))
    return task


def fit(task: LongTailed, data: TinyData | None = None, **arguments):
    trainer = make_trainer(**{"max_epochs": 1, "limit_val_batches": 0, **arguments})
    trainer.fit(task, datamodule=data or TinyData())
    return trainer


@pytest.mark.parametrize("method", ["baseline", "batchformer"])
@pytest.mark.parametrize("stream_loss", ["mean", "released"])
@pytest.mark.parametrize("loss", ["cross_entropy", "balanced_softmax", "logit_adjustment", "ldam"])
def test_two_steps_change_every_weight(method, stream_loss, loss):
    task = built(method=method, stream_loss=stream_loss, loss=LossOptions(loss))
    before = {name: p.detach().clone() for name, p in task.net.named_parameters()}
    trainer = fit(task)
    assert trainer.global_step == 2
    unchanged = [name for name, p in task.net.named_parameters() if torch.equal(p, before[name])]
    assert unchanged == []
    assert all(torch.isfinite(p).all() for p in task.net.parameters())
    assert any(name.startswith("batchformer.") for name in before) == (method == "batchformer")


def test_released_is_three_times_the_mean_of_two_streams_and_the_loss_itself_of_one():
    def train_loss(**arguments) -> float:
        task = LongTailed("resnet20", optimizer=OptimizerOptions(lr=0.0), **arguments)
        return fit(task).callback_metrics["train/loss"].item()

    assert train_loss(stream_loss="released") == pytest.approx(3 * train_loss(stream_loss="mean"), rel=1e-5)
    for one_stream in ({"method": "baseline"}, {"batchformer": BatchFormerOptions(streams="single")}):
        assert train_loss(stream_loss="released", **one_stream) == train_loss(stream_loss="mean", **one_stream)
    plain, weighted = (train_loss(method="baseline", loss_weight=weight) for weight in (1.0, 3.0))
    assert weighted == pytest.approx(3 * plain, rel=1e-5)  # the control for it


@pytest.mark.parametrize("streams", ["split", "single"])
def test_other_streams_train(streams):
    fit(built(batchformer=BatchFormerOptions(streams=streams)))


def test_training_accuracy_counts_plain_rows_only():
    still = OptimizerOptions(lr=0.0)
    with_module, without = (
        fit(LongTailed("resnet20", method=method, optimizer=still)).callback_metrics
        for method in ("batchformer", "baseline")
    )
    assert with_module["train/acc"] == without["train/acc"]
    assert with_module["train/loss"] != without["train/loss"]


class TestBuilding:
    def test_initial_weights_are_the_same_for_both_methods_and_a_function_of_the_seed(self):
        torch.manual_seed(1)
        plain = weights(built(method="baseline"))
        torch.manual_seed(2)
        attached, other = weights(built()), weights(built(seed=1))
        for name, value in plain.items():
            assert torch.equal(attached[name], value)
        assert not torch.equal(other["fc.weight"], plain["fc.weight"])
        module = [name for name in attached if name.startswith("batchformer.") and name.endswith("in_proj_weight")]
        assert module
        assert not torch.equal(other[module[0]], attached[module[0]])

    def test_building_leaves_the_generator_alone(self):
        torch.manual_seed(5)
        expected = torch.rand(3)
        torch.manual_seed(5)
        built()
        assert torch.equal(torch.rand(3), expected)

    def test_other_classes_are_refused_where_both_have_names(self):
        def known(*classes):
            return DataInfo(classes=list(classes), class_counts=[3] * len(classes))

        numbered, named = LongTailed(backbone="resnet20"), LongTailed(backbone="resnet20")
        numbered.construct(known("0", "1"))
        numbered.construct(known("cat", "dog"))  # data without names were of these, for all that is known
        named.construct(known("cat", "dog"))
        named.construct(known("0", "1"))
        for task, others, told in [
            (numbered, ("dog", "cat"), None),
            (numbered, ("cat", "dog", "fox"), "new: fox (2)"),
            (named, ("0", "1", "2"), "built for 2 classes and cannot take 3"),
        ]:
            task.construct(known("cat", "dog"))
            with pytest.raises(UserError) as caught:
                task.construct(known(*others))
            assert (told or "moved: dog (1 to 0), cat (0 to 1)") in str(caught.value)

    def test_ldam_has_a_cosine_classifier_before_which_the_module_sits(self):
        task = built(loss=LossOptions("ldam"))
        assert isinstance(task.net.fc, NormedLinear)
        assert task.attachment.points[0].paths == ("fc",)

    def test_options_of_the_module_reach_it(self):
        task = built(batchformer=BatchFormerOptions(heads=2, layers=3, dropout=0.1, streams="split"))
        module = task.attachment.points[0].module
        assert len(module.layers) == 3
        assert module.streams == "split"

    def test_a_timm_name_works(self):
        task = LongTailed("resnet10", loss=LossOptions("cross_entropy"))
        fit(task, TinyData(size=32), limit_train_batches=1)
        assert task.net.fc.in_features == 512

    def test_the_plain_network_takes_the_weights_of_the_detached_one(self):
        task = built()
        task.attachment.detach()
        task.plain_network().load_state_dict(task.net.state_dict(), strict=True)

    def test_channels_last_changes_layout_only(self):
        images = torch.randn(2, 3, 8, 8)
        task, other = built(), built(channels_last=True)
        assert other.net.conv1.weight.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(other.eval()(images), task.eval()(images))

    def test_a_wrong_number_of_counts_or_classes_is_refused(self):
        with pytest.raises(UserError, match="class counts"):
            LongTailed().construct(info(COUNTS, classes=3))
        with pytest.raises(UserError, match="4 classes"):
            built().construct(info([5, 5]))

    def test_unknown_classes_are_refused(self):
        with pytest.raises(UserError, match="does not know its data"):
            make_trainer(max_epochs=1).fit(LongTailed("resnet20"), train_dataloaders=TinyData().train_dataloader())

    def test_an_unknown_option_is_named(self):
        with pytest.raises(UserError, match="headz"):
            LongTailed(batchformer={"headz": 2})

    @pytest.mark.parametrize("options", [{"lr": -0.1}, {"weight_decay": -1.0}, {"module_lr_factor": -1.0}])
    def test_rates_that_would_climb_the_loss_are_named(self, options):
        with pytest.raises(UserError, match=rf"model\.optimizer\.{next(iter(options))}="):
            LongTailed(optimizer=options)

    def test_an_unknown_loss_is_named(self):
        with pytest.raises(UserError, match="focal"):
            built(loss=LossOptions("focal"))


class TestDeterminism:
    def test_dropout_is_a_function_of_seed_and_step(self):
        ends = []
        for noise in (1, 2):
            task = built()
            torch.manual_seed(noise)
            fit(task)
            ends.append(weights(task))
        assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])

    def test_another_seed_draws_other_dropout_from_the_same_weights(self):
        ends = []
        for seed in (0, 1):
            task = built()
            task.seed = seed
            fit(task)
            ends.append(weights(task))
        assert not torch.equal(ends[0]["fc.weight"], ends[1]["fc.weight"])

    def test_the_parts_of_an_accumulated_step_draw_different_dropout(self):
        seen = []

        class Watching(LongTailed):
            def training_step(self, batch, batch_idx):
                seen.append(torch.initial_seed())
                return super().training_step(batch, batch_idx)

        fit(Watching("resnet20"), accumulate_grad_batches=2)
        assert len(set(seen)) == 2


class TestEvaluation:
    def test_accuracies_are_those_of_the_plain_network(self, data):
        task = LongTailed("resnet20")
        trainer = fit(task, data, limit_val_batches=1.0)
        task.eval()
        task.attachment.detach()
        right = (task.net(data.images).argmax(1) == data.labels).double()
        per_class = [100 * right[data.labels == c].mean().item() for c in range(4)]
        assert task.per_class == pytest.approx(per_class)
        metrics = trainer.callback_metrics
        assert metrics["val/accuracy"].item() == pytest.approx(100 * right.mean().item())
        assert metrics["val/many"].item() == pytest.approx(per_class[0])
        assert metrics["val/medium"].item() == pytest.approx((per_class[1] + per_class[2]) / 2)
        assert metrics["val/few"].item() == pytest.approx(per_class[3])
        assert {"val/loss", "train/loss", "train/acc", "lr"} <= metrics.keys()

    def test_validation_adds_nothing_to_the_logits(self, data):
        task = built(method="baseline")
        values = make_trainer().validate(task, datamodule=data, verbose=False)[0]
        expected = torch.nn.functional.cross_entropy(task.eval()(data.images), data.labels)
        assert values["val/loss"] == pytest.approx(expected.item(), rel=1e-5)

    @pytest.mark.parametrize("loss", ["balanced_softmax", "ldam"])
    def test_predictions_are_probabilities(self, data, loss):
        task = built(loss=LossOptions(loss))
        rows = torch.cat(make_trainer().predict(task, datamodule=data))
        assert rows.shape == (16, 4)
        torch.testing.assert_close(rows.sum(1), torch.ones(16))
        scale = 30.0 if loss == "ldam" else 1.0
        torch.testing.assert_close(rows, (scale * task.eval()(data.images)).softmax(1))


def test_deferred_reweighting_starts_at_its_epoch():
    task = LongTailed("resnet20", loss=LossOptions("ldam", reweight_epoch=1), schedule=ScheduleOptions("constant"))
    fit(task, max_epochs=1)
    assert task.criterion.weights.eq(1).all()
    fit(task, max_epochs=2)
    assert task.criterion.weights.argmax() == 3


def test_bf16_trains_on_the_cpu():
    fit(built(), precision="bf16-mixed")
