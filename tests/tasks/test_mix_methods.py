"""Every method of batchformer.mix inside the task: the same bits every time, TransMix's targets by its attention."""

import urllib.error
from functools import partial

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from lightning import Callback
from safetensors.torch import save_file
from torch import nn
from torch._dynamo.utils import counters

import batchformer as bf
from batchformer.errors import UserError
from batchformer.tasks import Classification, DistillationOptions, InsertionOptions, MixOptions
from batchformer.tasks.classification import mixing as mixing_module
from batchformer.training.compiling import compile_in_place
from batchformer.training.reseed import seed_from

from ..training.test_checkpoints import SaveAt
from .conftest import COUNTS, TinyData, info, make_trainer
from .test_classification import STILL
from .test_distillation import TEACHER, teacher_file  # noqa: F401
from .tiny_vit import WholeClassification, built, fit, vit_task

METHODS = ["mixup", "cutmix", "transmix", "attentive-cutmix", "saliencymix", "puzzlemix"]
DATA = TinyData()


@pytest.fixture(scope="module")
def extractor_file(tmp_path_factory):
    torch.manual_seed(3)
    file = tmp_path_factory.mktemp("extractor") / "weights.safetensors"
    save_file(timm.create_model("test_resnet").state_dict(), file)
    return str(file)


@pytest.fixture
def mixing(extractor_file):
    def options(method, **given):
        return MixOptions(method, **{"extractor": "test_resnet", "extractor_checkpoint": extractor_file,
                                     "extractor_size": 64, **given})  # fmt: skip

    return options


def trained(task, resume=None, callbacks=(), epochs=2):
    trainer = make_trainer(max_epochs=epochs, limit_val_batches=0, callbacks=list(callbacks))
    trainer.fit(task, datamodule=TinyData(), ckpt_path=resume)
    return {name: value.clone() for name, value in task.state_dict().items()}


def by_hand(net, images, labels, seed_numbers, weight=0.5):
    """One step of TransMix without mixup, its attention from the whole matrix of the last block."""
    generator = torch.Generator().manual_seed(seed_from(*seed_numbers))
    torch.rand((), generator=generator, dtype=torch.float64)  # which method, where there is one
    mixed = bf.mix.CutMix(4, partner="flip", label_smoothing=0.1, generator=generator)(images, labels)
    seen = []
    attention = net.blocks[-1].attn
    handle = attention.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    outputs = net.train()(mixed.images)
    handle.remove()
    qkv = attention.qkv(seen[0]).unflatten(-1, (3, attention.num_heads, -1))
    q, k = qkv[:, :, 0].transpose(1, 2), qkv[:, :, 1].transpose(1, 2)
    whole = (q @ k.transpose(-2, -1) * attention.scale).softmax(-1).mean(1)
    prefix = net.num_prefix_tokens
    row = whole[: len(images), 0, prefix:]
    mask = F.interpolate(mixed.mask, (2, 2)).flatten(1)
    share = (1 - weight) * mixed.share + weight * (mask * row).sum(1) / row.sum(1)
    targets = (1 - share)[:, None] * mixed.labels + share[:, None] * mixed.labels.flip(0)
    return mixed, outputs, targets.detach()


@pytest.mark.parametrize("method", METHODS)
def test_a_method_trains_the_same_bits_whoever_drew_before(mixing, method):
    torch.manual_seed(1)
    first = trained(vit_task(mix=mixing(method)), epochs=1)
    torch.manual_seed(2)
    second = trained(vit_task(mix=mixing(method)), epochs=1)
    assert all(torch.equal(second[name], value) for name, value in first.items())
    if method in ("transmix", "puzzlemix"):  # the step of a captured graph: rounded elsewhere, otherwise the same
        whole = trained(vit_task(WholeClassification, mix=mixing(method)), epochs=1)
        assert all(torch.allclose(whole[name], value, atol=1e-4) for name, value in first.items())


@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
@pytest.mark.parametrize("method", METHODS)
def test_a_method_trains_all_in_another_precision(mixing, method, precision):
    trainer = fit(vit_task(mix=mixing(method)), precision=precision)
    assert trainer.callback_metrics["train/loss"].isfinite()


@pytest.mark.parametrize("channels_last", [False, True])
def test_the_network_is_shown_one_layout_whatever_mixed_the_batch(mixing, channels_last):
    """Another one is compiled anew, and breaks a CUDA graph that is being captured."""
    task, seen = vit_task(mix=mixing("puzzlemix"), channels_last=channels_last, method="baseline"), []
    task.construct(info(COUNTS))
    task.net.register_forward_pre_hook(lambda net, given: seen.append(given[0].stride()) if net.training else None)
    fit(task, max_epochs=4)
    assert (len(seen), len(set(seen))) == (8, 1)


def test_the_methods_differ(mixing):
    heads = [trained(vit_task(mix=mixing(m, mixup=m == "mixup")), epochs=1)["net.head.weight"] for m in METHODS]
    assert not any(torch.equal(a, b) for i, a in enumerate(heads) for b in heads[:i])


@pytest.mark.parametrize("method", ["transmix", "puzzlemix"])
def test_a_resumed_run_has_the_bits_of_an_unbroken_one(mixing, method, tmp_path):
    path = str(tmp_path / "middle.ckpt")
    unbroken = trained(vit_task(mix=mixing(method), ema=0.8), callbacks=[SaveAt(0, path)], epochs=3)
    resumed = trained(vit_task(mix=mixing(method), ema=0.8), resume=path, epochs=3)
    assert all(torch.equal(resumed[name], value) for name, value in unbroken.items())


class TestTransMix:
    @pytest.mark.parametrize("method", ["baseline", "batchformer"])
    def test_the_loss_has_the_targets_of_the_attention(self, mixing, method):
        """lr 0: the logged loss is that of the initial weights; with two streams the plain rows' attention counts."""
        still = {**STILL, "method": method, "batchformer": InsertionOptions(blocks=[1], dropout=0.0), "seed": 5}
        logged = fit(vit_task(mix=mixing("transmix", mixup=0.0), **still)).callback_metrics["train/loss"].item()
        area = fit(vit_task(mix=mixing("cutmix"), **still)).callback_metrics["train/loss"].item()
        net, losses = built(**still).net, []
        for step in range(2):
            rows = slice(8 * step, 8 * step + 8)
            _, outputs, targets = by_hand(net, DATA.images[rows], DATA.labels[rows], (5, 0, step, 0))
            losses.append(F.cross_entropy(outputs, bf.repeat_targets(targets, outputs)).item())
        assert logged == pytest.approx(sum(losses) / 2, rel=1e-5)
        assert abs(logged - area) > 1e-5

    def test_a_mixup_batch_keeps_the_targets_of_mixup(self, mixing):
        still = {**STILL, "method": "baseline"}
        losses = [
            fit(vit_task(mix=options, **still)).callback_metrics["train/loss"].item()
            for options in (mixing("transmix", switch_prob=0.0), mixing("mixup"))
        ]
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)

    def test_together_with_distillation(self, mixing, teacher_file):  # noqa: F811
        """alpha 0 leaves the class head's loss alone: labels by attention. The teacher sees the mixed image."""
        options = DistillationOptions(kind="hard", checkpoint=teacher_file, alpha=0.0, **TEACHER)
        still = {**STILL, "backbone": "deit_tiny_distilled_patch16_224", "distillation": options, "method": "baseline"}
        data = TinyData(batch_size=16)
        task, seen = vit_task(mix=mixing("transmix", mixup=0.0), **still), []
        task.construct(info(COUNTS))
        task._load_teacher()
        task._teacher[0].register_forward_pre_hook(lambda _, x: seen.append(x[0].clone()))
        logged = fit(task, data).callback_metrics["train/loss"].item()
        mixed, outputs, targets = by_hand(built(**still).net, DATA.images, DATA.labels, (0, 0, 0, 0))
        assert logged == pytest.approx(F.cross_entropy(outputs[0], targets).item(), rel=1e-5)
        assert torch.equal(seen[0], mixed.images)

    def test_another_block_or_rollout_gives_other_targets(self, mixing):
        """Also where the second stream begins in the middle of the network."""
        losses = []
        for block in (None, 0, "rollout"):
            task = vit_task(mix=mixing("transmix", mixup=0.0, block=block), seed=5, **STILL)
            task.construct(info(COUNTS))
            with torch.no_grad():
                for layer in [*(block.attn.qkv for block in task.net.blocks), task.net.head]:
                    layer.weight.normal_(generator=torch.Generator().manual_seed(1))  # not as good as uniform
            losses.append(fit(task).callback_metrics["train/loss"].item())
        assert len({round(loss, 5) for loss in losses}) == 3

    def test_nothing_is_left_in_the_network(self, mixing):
        class Hold(Callback):
            """The mixing outlives the training: what it put into the network is taken out all the same."""

            def on_train_end(self, trainer, task):
                self.mixing = task._mixing

        task, hold = vit_task(mix=mixing("transmix"), ema=0.9), Hold()
        fit(task, callbacks=[hold])
        assert hold.mixing is not None
        for net in (task.net, task.ema.module):
            assert not any("forward" in block.attn.__dict__ for block in net.blocks)
        assert task._mixing is None

    def test_validation_between_the_steps_changes_nothing(self, mixing):
        runs = [vit_task(mix=mixing("transmix")) for _ in range(2)]
        fit(runs[0], max_epochs=2)
        fit(runs[1], max_epochs=2, limit_val_batches=1.0, val_check_interval=1)
        assert all(torch.equal(runs[1].state_dict()[name], value) for name, value in runs[0].state_dict().items())


class TestMistakes:
    def test_a_model_without_attention(self, mixing):
        with pytest.raises(UserError, match="use CutMix"):
            fit(Classification("resnet20", mix=mixing("transmix"), batchformer=InsertionOptions()))

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"method": "cutmax"}, 'model.mix.method=.* must be "mixup-cutmix"'),
            ({"method": "transmix", "mode": "pair"}, '"batch" or "elem"'),
            ({"switch_prob": 1.5}, "switch_prob"),
            ({"prob": -0.1}, "model.mix.prob=-0.1"),
            ({"mixup": -1.0}, "model.mix.mixup=-1.0 must be 0"),
            ({"cutmix": float("inf")}, "model.mix.cutmix=inf must be 0, .* and finite"),
            ({"method": "transmix", "cutmix": -1.0}, "model.mix.cutmix=-1.0"),
            ({"method": "transmix", "cutmix": 0.0}, "transmix mixes nothing .* add --model.mix.cutmix 1"),
            ({"method": "cutmix", "mixup": 0.8, "cutmix": 0.0}, "add --model.mix.cutmix 1"),
            ({"method": "mixup", "mixup": 0.0}, "add --model.mix.mixup 1"),
        ],
    )
    def test_options(self, options, words):
        with pytest.raises(UserError, match=words):
            vit_task(mix=MixOptions(**options))

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"extractor": "test_resnets"}, "Did you mean test_resnet"),
            ({"extractor_checkpoint": "nowhere.pth"}, "no file nowhere.pth"),
            ({"extractor": "test_vit"}, "does not hold the weights of a test_vit"),
        ],
    )
    def test_extractors(self, mixing, options, words):
        with pytest.raises(UserError, match=words):
            fit(vit_task(mix=mixing("attentive-cutmix", **options)))


@pytest.mark.parametrize("name", ["test_resnet", "squeezenet1_1"])  # of timm, and of torchvision
def test_an_extractor_without_network_asks_for_a_file(name, monkeypatch, tmp_path):
    from batchformer.tasks.classification.mixing import load_extractor

    def no_network(*_, **__):
        raise urllib.error.URLError("no network")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("torch.hub.urlopen", no_network)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    said = rf"extractor {name} could not be fetched \(.*\): give a file .* --model\.mix\.extractor_checkpoint FILE\.$"
    with pytest.raises(UserError, match=said):
        load_extractor(name)


def test_a_torchvision_extractor_by_name_and_file(tmp_path):
    from batchformer.tasks.classification.mixing import load_extractor

    torch.manual_seed(0)
    model = torchvision.models.mobilenet_v2(weights=None)
    torch.save(model.state_dict(), tmp_path / "mobile.pth")
    images = torch.randn(2, 3, 64, 64)
    wanted = model.eval().features(images)
    torch.testing.assert_close(load_extractor("mobilenet_v2", str(tmp_path / "mobile.pth"))(images), wanted)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("test_resnet", (0.5,) * 6), ("mobilenet_v2", (0.485, 0.456, 0.406, 0.229, 0.224, 0.225))],  # of timm, torchvision
)
def test_an_extractor_sees_images_normalised_as_it_was_trained(mixing, tmp_path, name, wanted):
    options = mixing("attentive-cutmix")
    if name == "mobilenet_v2":
        torch.save(torchvision.models.mobilenet_v2().state_dict(), tmp_path / "mobile.pth")
        options = mixing("attentive-cutmix", extractor=name, extractor_checkpoint=str(tmp_path / "mobile.pth"))
    mean, std = (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)
    mix = mixing_module.build_mixing(options, nn.Identity(), 4, mean=mean, std=std).mix.mixes[-1]
    pictures, seen = torch.rand(2, 3, 64, 64), []
    mix.extractor.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    mix.heatmap((pictures - column(mean)) / column(std))
    torch.testing.assert_close(seen[0], (pictures - column(wanted[:3])) / column(wanted[3:]))


def column(numbers):
    return torch.tensor(numbers)[:, None, None]


def test_a_compiled_extractor_looks_at_the_same_cells_and_is_compiled_once(mixing, monkeypatch):
    monkeypatch.setattr(mixing_module, "compile_in_place", partial(compile_in_place, backend="eager"))
    net, options = timm.create_model("test_vit", num_classes=4), mixing("attentive-cutmix", mixup=0.0)
    images, labels = torch.randn(4, 3, 64, 64), torch.arange(4)
    torch._dynamo.reset()
    plain, fast = (mixing_module.build_mixing(options, net, 4) for _ in range(2))
    fast.compile()
    before = counters["stats"]["unique_graphs"]
    for step in range(2):
        wanted, got = plain(images, labels, 0, step), fast(images, labels, 0, step)
        assert torch.equal(wanted[0], got[0])
        assert torch.equal(wanted[1], got[1])
    assert counters["stats"]["unique_graphs"] == before + 1
