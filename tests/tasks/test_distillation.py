"""DeiT's distillation: two heads, one teacher, two streams."""

import pytest
import timm
import torch
from lightning import Callback
from safetensors.torch import save_file

from batchformer.errors import UserError
from batchformer.losses import DistillationLoss
from batchformer.tasks import DistillationOptions, InsertionOptions

from .conftest import COUNTS, TinyData, info
from .tiny_vit import NO_MIX, VIT, fit, vit_task

TEACHER = {"teacher": "vit_tiny_patch16_224", "teacher_args": {**VIT, "depth": 1}}


@pytest.fixture
def teacher_file(tmp_path):
    torch.manual_seed(11)
    teacher = timm.create_model("vit_tiny_patch16_224", num_classes=4, **TEACHER["teacher_args"])
    save_file(teacher.state_dict(), tmp_path / "teacher.safetensors")
    return str(tmp_path / "teacher.safetensors")


def distilling(checkpoint: str, kind: str = "hard", **arguments):
    options = DistillationOptions(kind=kind, checkpoint=checkpoint, alpha=arguments.pop("alpha", 0.5), **TEACHER)
    return vit_task(backbone="deit_tiny_distilled_patch16_224", distillation=options, **arguments)


@pytest.mark.parametrize("kind", ["hard", "soft"])
@pytest.mark.parametrize("places", [InsertionOptions(blocks=[1]), InsertionOptions()], ids=["inside", "before heads"])
def test_both_heads_learn_and_the_teacher_does_not(teacher_file, kind, places):
    task = distilling(teacher_file, kind, batchformer=places)
    task.construct(info(COUNTS))
    before = {name: p.detach().clone() for name, p in task.net.named_parameters()}
    fit(task)
    for name in ("head.weight", "head_dist.weight", "dist_token"):
        assert not torch.equal(task.net.get_parameter(name), before[name]), name
    stored = timm.models.load_state_dict(teacher_file)
    assert all(torch.equal(value, stored[name]) for name, value in task._teacher[0].state_dict().items())
    assert not any("teacher" in name for name in task.state_dict())


@pytest.mark.parametrize(("alpha", "still"), [(0.0, "head_dist.weight"), (1.0, "head.weight")])
def test_each_head_has_its_own_teacher(teacher_file, alpha, still):
    """The class head learns from the labels alone, that of the token from the teacher alone."""
    task = distilling(teacher_file, alpha=alpha)
    task.construct(info(COUNTS))
    batch = TinyData().images, torch.arange(16) % 4
    task._teacher.append(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 4)))
    outputs = task.net.train()(batch[0])
    task.stream_criterion(outputs, (batch[1], task._teacher[0](batch[0]).detach())).backward()
    other = {"head_dist.weight": "head.weight", "head.weight": "head_dist.weight"}[still]
    assert task.net.get_parameter(still).grad.abs().max() == 0
    assert task.net.get_parameter(other).grad.abs().max() > 0


@pytest.mark.parametrize("of_a_file", [False, True], ids=["pretrained", "file"])
def test_a_pretrained_teacher_sees_images_normalised_as_it_was_trained(teacher_file, of_a_file):
    """timm's numbers for this one are halves; a teacher of one's own was trained on the data as it comes."""
    own = {
        **TEACHER["teacher_args"],
        "pretrained_cfg_overlay": {"file": teacher_file, "num_classes": 4, "custom_load": False},
    }
    options = DistillationOptions("hard", TEACHER["teacher"], own, teacher_file if of_a_file else None)
    task = vit_task(backbone="deit_tiny_distilled_patch16_224", distillation=options, mix=NO_MIX)
    data, seen = TinyData(), {"teacher": [], "student": []}
    data.mean, data.std = (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)
    task.construct(info(COUNTS))
    task.net.register_forward_pre_hook(lambda net, x: seen["student"].append(x[0].clone()))

    class Watch(Callback):
        def on_fit_start(self, trainer, task):
            network = getattr(task._teacher[0], "network", task._teacher[0])
            network.register_forward_pre_hook(lambda _, x: seen["teacher"].append(x[0].clone()))

    fit(task, data, callbacks=[Watch()])
    pictures = seen["student"][0] * torch.tensor(data.std)[:, None, None] + torch.tensor(data.mean)[:, None, None]
    torch.testing.assert_close(seen["teacher"][0], seen["student"][0] if of_a_file else (pictures - 0.5) / 0.5)


def test_the_teacher_sees_each_mixed_image_once(teacher_file):
    task, seen = distilling(teacher_file), {"teacher": [], "student": []}
    task.construct(info(COUNTS))
    task._load_teacher()
    task._teacher[0].register_forward_pre_hook(lambda _, x: seen["teacher"].append(x[0].clone()))
    task.net.patch_embed.register_forward_pre_hook(lambda _, x: seen["student"].append(x[0].clone()))
    fit(task)
    assert [len(x) for x in seen["teacher"]] == [8, 8]
    data = TinyData()
    for step in range(2):
        assert torch.equal(seen["teacher"][step], seen["student"][step][:8])
        assert not torch.equal(seen["teacher"][step], data.images[8 * step : 8 * step + 8])


def test_the_losses_are_those_of_the_paper():
    torch.manual_seed(0)
    by_class, by_token, teacher = torch.randn(3, 5, 4).unbind()
    labels = torch.tensor([0, 1, 2, 3, 0])
    criterion = torch.nn.CrossEntropyLoss()
    log_p, q = by_token.log_softmax(1), (teacher / 3).softmax(1)
    hard = -torch.stack([log_p[i, teacher[i].argmax()] for i in range(5)]).mean()
    soft = 9 * sum((q[i] * (q[i].log() - (by_token[i] / 3).log_softmax(0))).sum() for i in range(5)) / 5
    for kind, expected in (("hard", hard), ("soft", soft)):
        loss = DistillationLoss(criterion, kind, alpha=0.3, tau=3.0)((by_class, by_token), (labels, teacher))
        torch.testing.assert_close(loss, 0.7 * criterion(by_class, labels) + 0.3 * expected)


@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_by_default_labels_and_teacher_weigh_the_same_and_the_temperature_is_one(kind):
    torch.manual_seed(0)
    by_class, by_token, teacher = torch.randn(3, 5, 4).unbind()
    labels, criterion = torch.tensor([0, 1, 2, 3, 0]), torch.nn.CrossEntropyLoss(label_smoothing=0.1)
    told = teacher.argmax(1) if kind == "hard" else teacher.softmax(1)
    unsure = 0.0 if kind == "hard" else torch.distributions.Categorical(told).entropy().mean()
    expected = (criterion(by_class, labels) + torch.nn.functional.cross_entropy(by_token, told) - unsure) / 2
    torch.testing.assert_close(DistillationLoss(criterion, kind)((by_class, by_token), (labels, teacher)), expected)
    task = vit_task(backbone="deit_tiny_distilled_patch16_224", distillation={"kind": kind}, mix=NO_MIX)
    loss = task.build_criterion(info(COUNTS))
    torch.testing.assert_close(loss((by_class, by_token), (labels, teacher)), expected)


def test_at_test_time_the_heads_are_averaged(teacher_file):
    task = distilling(teacher_file, mix=NO_MIX)
    task.construct(info(COUNTS))
    assert task.eval()(TinyData().images).shape == (16, 4)


@pytest.mark.parametrize("chosen", [{"teacher": "resnet18"}, {"teacher_args": VIT}, {"checkpoint": "teacher.pth"}])
def test_a_teacher_that_is_chosen_while_nothing_is_distilled_is_told(chosen):
    with pytest.warns(UserWarning, match=f"{next(iter(chosen))} .* has no effect .*: add --model.distillation.kind"):
        vit_task(distillation=chosen)
    vit_task(distillation={"kind": "none", "teacher": "regnety_160"})


def test_what_cannot_teach_is_refused(teacher_file, tmp_path):
    with pytest.raises(UserError, match="head for it, which deit_tiny_patch16_224 has not"):
        vit_task(distillation={"kind": "hard"}).construct(info(COUNTS))
    with pytest.raises(UserError, match="no file"):
        fit(distilling(str(tmp_path / "none.pth")))
    options = {"kind": "hard", "checkpoint": teacher_file, "teacher": "vit_tiny_patch16_224", "teacher_args": VIT}
    with pytest.raises(UserError, match="does not hold the weights of a vit_tiny_patch16_224"):
        fit(vit_task(backbone="deit_tiny_distilled_patch16_224", distillation=options))
    with pytest.raises(UserError, match="alpha"):
        distilling(teacher_file, alpha=2.0).construct(info(COUNTS))
