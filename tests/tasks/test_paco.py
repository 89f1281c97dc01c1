"""PaCo: its step against one written out, what learns and what follows, the balanced loss alone, and mistakes."""

import copy

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from batchformer.data import DigitsLT
from batchformer.errors import UserError
from batchformer.losses import PaCoLoss
from batchformer.tasks import LongTailed, ScheduleOptions
from batchformer.training.weights import read_weights

from .conftest import COUNTS, TinyData, info, make_trainer
from .whole_step import WholeStep

SMALL = {"backbone": "resnet20", "backbone_args": {"widths": [4, 8]}, "algorithm": "paco",
         "batchformer": {"dropout": 0.0}, "schedule": ScheduleOptions("constant")}  # fmt: skip
OPTIONS = {"queue": 16, "dim": 4, "momentum": 0.5, "temperature": 0.5, "alpha": 0.1}
BOTH = pytest.mark.parametrize("method", ["baseline", "batchformer"])


class TwoViews(L.LightningDataModule):
    """Sixteen images in two views."""

    num_classes, class_counts = 4, COUNTS

    def __init__(self, batch_size=8):
        super().__init__()
        self.size = batch_size

    def train_dataloader(self):
        draw = torch.Generator().manual_seed(3)
        views = torch.randn(2, 16, 3, 8, 8, generator=draw)
        rows = [{"views": list(pair), "labels": i % 4} for i, pair in enumerate(views.unbind(1))]
        return DataLoader(rows, batch_size=self.size)

    def val_dataloader(self):
        return TinyData().val_dataloader()


def batch():
    return next(iter(TwoViews().train_dataloader()))


def built(kind=LongTailed, **options):
    task = kind(**{**SMALL, **options, "paco": {**OPTIONS, **options.get("paco", {})}})
    task.construct(info(COUNTS))
    return task.train()


def fit(task, data=None, **options):
    trainer = make_trainer(**{"max_epochs": 1, "limit_val_batches": 0, **options})
    trainer.fit(task, datamodule=data or TwoViews())
    return trainer


def state(task):
    return {name: value.clone() for name, value in task.state_dict().items()}


@BOTH
@pytest.mark.parametrize("related_keys", [False, True])
def test_a_step_is_the_published_one(method, related_keys):
    """Queries, then the momentum update, then keys; the queue as it was before; each stream by itself."""
    task, now = built(method=method, paco={"related_keys": related_keys}), batch()
    algorithm = task.algorithm
    with torch.no_grad():
        for p in (*task.net.parameters(), *algorithm.projection.parameters()):
            p.add_(0.01)  # the momentum encoder is behind
    before = copy.deepcopy(algorithm)
    found = task.step(now)["loss"]

    plain = task.plain_network().train()
    plain.load_state_dict({k: v for k, v in task.net.state_dict().items() if not k.startswith("batchformer.")})
    features = plain.forward_head(plain.forward_features(now["views"][0]), pre_logits=True)
    streams = [features]
    module = None if task.attachment is None else task.attachment.points[0].module
    if module is not None:
        streams = list(module(features).chunk(2))

    key_net, key_projection = before.key_net.encoder, before.key_projection.encoder
    with torch.no_grad():
        for own, source in ((key_net, task.net), (key_projection, algorithm.projection)):
            for name, p in own.named_parameters():
                p.copy_(0.5 * p + 0.5 * source.get_parameter(name))
        keys = [key_net(now["views"][1])]
        if related_keys and module is not None:
            keys = list(module(keys[0]).chunk(2))
        keys = torch.cat([F.normalize(key_projection(rows), dim=1) for rows in keys])
    key_labels = now["labels"].repeat(len(keys) // 8)
    losses = []
    for rows in streams:
        queries = F.normalize(algorithm.projection(rows), dim=1)
        contrasts = torch.cat([queries, keys, before.queue.keys])
        labels = torch.cat([now["labels"], key_labels, before.queue.labels])
        loss = PaCoLoss(COUNTS, 0.1, 1.0, 1.0, 0.5)
        losses.append(loss(plain.fc(rows), now["labels"], queries, contrasts, labels, torch.arange(8)))
    assert found.item() == pytest.approx((sum(losses) / len(losses)).item(), rel=1e-5)
    torch.testing.assert_close(algorithm.queue.keys[: len(keys)], keys)
    assert torch.equal(algorithm.queue.labels[: len(keys)], key_labels)
    assert int(algorithm.queue.position) == len(keys) % 16
    if related_keys and module is not None:
        assert len(keys) == 16


def test_released_is_three_times_the_mean_of_two_streams():
    mean, released = (built(stream_loss=name).step(batch())["loss"].item() for name in ("mean", "released"))
    assert released == pytest.approx(3 * mean)


def test_both_methods_begin_with_the_same_weights_and_queue():
    plain, attached = state(built(method="baseline")), state(built())
    assert any(name.startswith("algorithm.queue.") for name in plain)
    for name, value in plain.items():
        assert torch.equal(attached[name], value), name


@BOTH
def test_what_is_trained_learns_and_the_momentum_encoder_follows(method):
    task = built(method=method)
    before = state(task)
    trainer = fit(task)
    after = state(task)
    assert trainer.global_step == 2
    trained = [name for name, p in task.named_parameters() if p.requires_grad]
    assert any(name.startswith("algorithm.projection.") for name in trained)
    assert [name for name in trained if torch.equal(after[name], before[name])] == []
    followers = [name for name, p in task.named_parameters() if not p.requires_grad]
    assert followers
    assert all(name.startswith(("algorithm.key_net.", "algorithm.key_projection.")) for name in followers)
    assert not torch.equal(after["algorithm.key_net.encoder.conv1.weight"], before["net.conv1.weight"])
    assert not [name for name in after if "key_net" in name and (".fc." in name or "batchformer" in name)]
    optimized = {id(p) for group in trainer.optimizers[0].param_groups for p in group["params"]}
    assert optimized == {id(p) for p in task.parameters() if p.requires_grad}
    rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
    assert rates == ([0.1, 0.1 * 0.1] if method == "batchformer" else [0.1])


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_the_whole_step_ends_with_the_bits_of_the_ordinary_one(precision):
    ends = []
    for kind in (LongTailed, WholeStep):
        task = built(kind, batchformer={"dropout": 0.5})
        fit(task, max_epochs=2, precision=precision)
        ends.append(state(task))
    assert all(torch.equal(ends[1][name], value) for name, value in ends[0].items())


def test_the_momentum_encoder_begins_with_the_weights_of_the_network(tmp_path):
    trained = built(seed=5)
    trainer = fit(trained)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert "algorithm.queue.keys" not in read_weights(tmp_path / "last.ckpt")  # the network alone
    task = LongTailed(**SMALL, paco={**OPTIONS, "momentum": 1.0}, optimizer={"lr": 0.0})
    task.init_from = {"network": str(tmp_path / "last.ckpt")}
    task.construct(info(COUNTS))
    assert torch.equal(task.net.conv1.weight, trained.net.conv1.weight)
    fit(task)
    assert torch.equal(task.algorithm.key_net.encoder.conv1.weight, trained.net.conv1.weight)


def test_a_resumed_run_goes_on_with_its_queue_and_momentum_encoder(tmp_path):
    unbroken, first, second = (built() for _ in range(3))
    fit(unbroken, max_epochs=3)
    fit(first, max_epochs=2).save_checkpoint(tmp_path / "last.ckpt")
    make_trainer(max_epochs=3, limit_val_batches=0).fit(
        second, datamodule=TwoViews(), ckpt_path=tmp_path / "last.ckpt", weights_only=True
    )
    for name, value in unbroken.state_dict().items():
        assert torch.equal(second.state_dict()[name], value), name


def test_evaluation_is_that_of_the_plain_network():
    task = built()
    trainer = fit(task, limit_val_batches=1.0)
    plain = task.plain_network().eval()
    task.attachment.detach()
    plain.load_state_dict(task.net.state_dict(), strict=True)
    data = TinyData()
    right = (plain(data.images).argmax(1) == data.labels).float().mean()
    assert trainer.callback_metrics["val/accuracy"].item() == pytest.approx(100 * right.item())


@BOTH
def test_the_balanced_loss_alone_is_the_plain_method(method):
    task = built(method=method, paco={"contrast": False})
    assert not list(task.algorithm.state_dict())
    now, plain = batch(), built(method=method, algorithm="plain")
    expected = plain.step({"images": now["views"][0], "labels": now["labels"]})
    assert task.step(now)["loss"] == expected["loss"]
    assert (task.views, built().views, plain.views) == (1, 2, 1)
    fit(task)


def test_the_convolutions_of_one_part_alone_are_trained():
    task = built(paco={"trained_convolutions": "layer2.2"})
    before = state(task)
    fit(task)
    after = state(task)
    convolutions = [name for name in before if name.startswith("net.") and "conv" in name]
    changed = {name for name in convolutions if not torch.equal(after[name], before[name])}
    assert changed == {"net.layer2.2.conv1.weight", "net.layer2.2.conv2.weight"}
    assert not torch.equal(after["net.bn1.weight"], before["net.bn1.weight"])
    with pytest.raises(UserError, match="trained_convolutions=layer9: the network has no such part; it has: conv1"):
        built(paco={"trained_convolutions": "layer9"})


def test_a_timm_backbone_works():
    task = LongTailed("test_resnet", algorithm="paco", paco=OPTIONS)
    task.construct(info(COUNTS))
    views = torch.randn(2, 8, 3, 32, 32)
    loss = task.train().step({"views": list(views), "labels": torch.arange(8) % 4})["loss"]
    loss.backward()
    assert torch.isfinite(loss)


def refused(match, **options):
    data = DigitsLT(**{"batch_size": 8, **options.pop("data", {})})
    with pytest.raises(UserError, match=match):
        built(**options).check_data(data)


def test_mistakes_are_one_sentence():
    refused(r"model\.paco\.queue 20 is no multiple of the 8 keys .* choose 16 or 24", paco={"queue": 20})
    refused(r"no multiple of the 16 keys", paco={"queue": 24, "related_keys": True})
    refused(r"set data\.drop_last to true", data={"drop_last": False})
    refused(
        r"data\.views=\['shift'\] gives 1 view of each image, and LongTailed trains on 2", data={"views": ["shift"]}
    )
    refused(r"data\.views=1 gives 1 view of each image.*: set data\.views to 2\.", data={"views": 1})
    refused(r"data\.views=3 gives 3 views of each image", data={"views": 3})
    refused(r"data\.views=2 gives 2 views .* trains on 1 with", algorithm="plain", data={"views": 2})
    refused(r"model\.loss\.name=ldam cannot be combined", loss={"name": "ldam"})
    refused(r"related_keys needs the module before the classifier", paco={"related_keys": True},
            batchformer={"before": "layer2.2.conv2"})  # fmt: skip
    refused(r"model\.paco\.momentum=2", paco={"momentum": 2})
    refused(r"model\.paco\.dim=0", paco={"dim": 0})
    refused(r"PaCo: alpha=-1", paco={"alpha": -1})
    built(method="baseline", paco={"queue": 24, "related_keys": True}).check_data(DigitsLT(batch_size=8))
    with pytest.raises(UserError, match=r"a batch has one: set data\.views to 2"):
        fit(built(), TinyData())
    with pytest.raises(UserError, match="a queue of 16 is no multiple of the 6 keys"):
        fit(built(), TwoViews(6))


def test_a_network_with_two_classifiers_is_refused():
    tiny = {"img_size": 16, "patch_size": 8, "embed_dim": 12, "depth": 1, "num_heads": 1}
    with pytest.raises(UserError, match=r"one linear classifier, and deit_tiny_distilled_patch16_224 has head and"):
        built(backbone="deit_tiny_distilled_patch16_224", backbone_args=tiny)


@pytest.mark.gpu
@BOTH
@pytest.mark.parametrize("compile", [False, True])
def test_captured_and_eager_steps_agree(method, compile, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    ends = []
    for cuda_graph in (False, True):
        task = built(method=method, cuda_graph=cuda_graph, compile=compile, optimizer={"lr": 0.02})
        fit(task, accelerator="cuda", devices=1, max_epochs=6)
        ends.append({name: value.cpu() for name, value in task.state_dict().items()})
    for name, value in ends[0].items():
        torch.testing.assert_close(ends[1][name], value, rtol=1e-3, atol=1e-3, msg=name)
