"""MoCo-v2 and MoCo-v3 with and without BatchFormer in the projector."""

import math
import warnings
from itertools import pairwise

import lightning as L
import pytest
import torch
import torch.nn.functional as F

from batchformer.data import DigitsLT
from batchformer.errors import UserError
from batchformer.losses import contrastive_loss, pair_streams, queue_loss
from batchformer.tasks import MoCo

from .conftest import make_trainer

NET = {"backbone": "resnet20", "backbone_args": {"widths": [4, 8, 8]}}
OPTIMIZER = {"name": "sgd", "lr": 0.1, "lr_per": None}
VIT = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2}


def task(version="v3", contrast=None, **options) -> MoCo:
    chosen = {"version": version, "hidden_dim": 16, "out_dim": 8, "queue": 64, **(contrast or {})}
    keywords = {**NET, "batchformer": {"heads": 2}, "optimizer": OPTIMIZER, "judge": {"neighbours": 3}, **options}
    return MoCo(contrast=chosen, **keywords)


def data() -> DigitsLT:
    return DigitsLT(imbalance=1.0, batch_size=16)


def fit(model: MoCo, **options):
    trainer = make_trainer(**{"max_epochs": 1, "limit_val_batches": 0, "limit_train_batches": 2, **options})
    trainer.fit(model, datamodule=data())
    return trainer


class TestLosses:
    def test_every_query_finds_its_own_key_among_all(self):
        torch.manual_seed(0)
        queries, keys, own = torch.randn(3, 4, requires_grad=True), torch.randn(6, 4), torch.tensor([1, 3, 5])
        expected = 0.0
        for query, row in zip(queries, own.tolist(), strict=True):
            logits = torch.stack([torch.cosine_similarity(query, key, dim=0) / 0.3 for key in keys])
            expected = expected - 2 * 0.3 * logits.log_softmax(0)[row] / 3
        found = contrastive_loss(queries, keys, own, 0.3)
        torch.testing.assert_close(found, expected)
        (a,), (b,) = torch.autograd.grad(found, queries, retain_graph=True), torch.autograd.grad(expected, queries)
        torch.testing.assert_close(a, b)

    def test_the_queue_holds_what_the_key_is_held_against(self):
        torch.manual_seed(0)
        queries, keys, queue = torch.randn(3, 4), torch.randn(3, 4), F.normalize(torch.randn(5, 4), dim=1)
        expected = 0.0
        for query, key in zip(queries, keys, strict=True):
            others = [torch.cosine_similarity(query, one, dim=0) for one in (key, *queue)]
            expected = expected - (torch.stack(others) / 0.2).log_softmax(0)[0] / 3
        torch.testing.assert_close(queue_loss(queries, keys, queue, 0.2), expected)

    def test_pairs_of_streams(self):
        queries, keys = torch.arange(4.0)[:, None], torch.arange(10.0, 14.0)[:, None]
        pairs = [(q[:, 0].tolist(), k[:, 0].tolist()) for q, k in pair_streams(queries, keys, 2, "all")]
        assert pairs == [([0, 1], [10, 11]), ([0, 1], [12, 13]), ([2, 3], [10, 11]), ([2, 3], [12, 13])]
        assert len(pair_streams(queries, keys, 2, "plain")) == 1
        assert len(pair_streams(queries[:2], keys[:2], 2, "all")) == 1


def test_the_loss_of_v3_is_the_sum_of_eight_terms_or_their_mean_over_pairs():
    losses = {}
    for name, contrast in {"sum": {}, "mean": {"pair_loss": "mean"}, "plain": {"pairs": "plain"}}.items():
        model = task(contrast=contrast, batchformer={"heads": 2, "dropout": 0.0})
        model.construct(data())
        torch.manual_seed(0)
        views = [torch.randn(4, 3, 8, 8) for _ in range(2)]
        model.train()
        losses[name] = model.step({"views": views})["loss"].item()
        if name == "sum":
            model.construct(data())
            queries = [model.net(view).chunk(2) for view in views]
            keys = [model.keys_of(view).chunk(2) for view in views]
            own = torch.arange(4)
            terms = [contrastive_loss(q, k, own, 1.0) for a, b in ((0, 1), (1, 0)) for q in queries[a] for k in keys[b]]
            assert len(terms) == 8
            assert losses["sum"] == pytest.approx(sum(terms).item(), rel=1e-3)
    assert losses["mean"] == pytest.approx(losses["sum"] / 4, rel=1e-5)
    assert losses["plain"] != pytest.approx(losses["mean"], rel=1e-4)


@pytest.mark.parametrize("version", ["v2", "v3"])
@pytest.mark.parametrize("method", ["baseline", "batchformer"])
def test_three_steps_train_queries_and_keys_follow(version, method):
    model = task(version, method=method)
    model.construct(data())
    before = {name: p.detach().clone() for name, p in model.net.named_parameters()}
    keys = {name: p.clone() for name, p in model.keys.encoder.named_parameters()}
    metrics = fit(model, limit_train_batches=3).callback_metrics  # the first one has a learning rate of 0
    still = {name for name, p in model.net.named_parameters() if torch.equal(p, before[name])}
    assert still <= {"projector.0.bias"}  # in front of a BatchNorm
    assert all(not p.requires_grad for p in model.keys.parameters())
    assert any(not torch.equal(p, keys[name]) for name, p in model.keys.encoder.named_parameters())
    assert 0 < metrics["train/spread"] < 2
    if version == "v2":
        assert model.queue.position == 3 * 16 * (2 if method == "batchformer" else 1) % 64


def test_the_module_is_one_for_queries_and_keys_and_frozen_by_option_only():
    free, frozen = task(), task(contrast={"frozen_module": True})
    for model in (free, frozen):
        model.construct(data())
    assert not any("batchformer" in name for name, _ in free.keys.named_parameters())
    images = torch.randn(4, 3, 8, 8)
    assert len(free.train().keys_of(images)) == 8
    with torch.no_grad():
        before = free.keys_of(images)[4:]
        for parameter in free.attachment.parameters():
            parameter.add_(1.0)
        assert not torch.allclose(free.keys_of(images)[4:], before)
    kept = [p.detach().clone() for p in frozen.attachment.parameters()]
    fit(frozen)
    assert all(torch.equal(a, b) for a, b in zip(kept, frozen.attachment.parameters(), strict=True))
    fit(task(contrast={"frozen_module": True}, method="baseline"))  # of a comparison: it has none


def test_the_plain_pair_is_that_of_the_baseline_where_each_stream_is_normalised_by_itself():
    """With joint statistics, as released, plain queries and keys are others, and so is the gradient of the encoder."""
    torch.manual_seed(0)
    views, found, start = [torch.randn(6, 3, 8, 8) for _ in range(2)], {}, {}
    for name in ("baseline", "separate", "joint"):
        method = "baseline" if name == "baseline" else "batchformer"
        contrast = {"pairs": "plain", "batch_norm": "joint" if name == "baseline" else name}
        model = task(method=method, contrast=contrast)
        model.construct(data())
        start = start or model.net.state_dict()
        model.net.load_state_dict({**model.net.state_dict(), **start})
        model.keys.copy_from(model.net)
        loss = model.train().step({"views": views})["loss"]
        weights = [p for key, p in model.net.named_parameters() if key in start]
        found[name] = [loss, *torch.autograd.grad(loss, weights)]
    for expected, separate, joint in zip(found["baseline"], found["separate"], found["joint"], strict=True):
        torch.testing.assert_close(separate, expected, rtol=1e-4, atol=1e-6)
        assert not torch.allclose(joint, expected, rtol=1e-2, atol=1e-4)


def test_momentum_rises_along_a_cosine_in_v3_and_stays_in_v2():
    v3, v2 = task(contrast={"momentum": 0.9}), task("v2", contrast={"momentum": 0.9})
    assert v3.momentum_at(0, 10) == pytest.approx(0.9)
    assert v3.momentum_at(2.5, 10) == pytest.approx(1 - 0.1 * (1 + math.cos(math.pi / 4)) / 2)
    assert v3.momentum_at(10, 10) == 1.0
    assert v2.momentum_at(7, 10) == 0.9


def test_keys_follow_once_for_each_update_of_the_queries():
    """In the further parts of an accumulated step the queries have not changed."""
    seen = []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer, task, *_) -> None:
            seen.append([p.clone() for p in task.keys.encoder.parameters()])

    model = task(schedule={"warmup_epochs": 0.0})
    fit(model, limit_train_batches=4, accumulate_grad_batches=2, callbacks=[Watch()])
    same = [all(map(torch.equal, before, after)) for before, after in pairwise(seen)]
    assert same == [True, False, True]


def test_the_classes_on_the_page_are_those_of_the_decisive_measure():
    """347 test images of ten classes: the mean of per_class, weighted by their number, is that measure."""
    for judge, key in (({"neighbours": 3}, "knn"), ({"neighbours": 0}, "linear")):
        model = task(judge=judge)
        trainer = fit(model, limit_val_batches=1.0, limit_train_batches=1)
        labels = torch.from_numpy(trainer.datamodule.set_labels["val"])
        mean = torch.tensor(model.per_class)[labels].mean()
        assert float(mean) == pytest.approx(float(trainer.callback_metrics[f"val/{key}"]), abs=1e-3)


def test_patch_projection_of_a_vit_is_frozen_and_its_projector_has_three_layers():
    model = task(backbone="vit_tiny_patch16_224", backbone_args=VIT)
    model.construct(data())
    assert not any(p.requires_grad for p in model.net.encoder.patch_embed.parameters())
    assert sum(isinstance(layer, torch.nn.Linear) for layer in model.net.projector) == 3
    assert isinstance(model.net.predictor[-1], torch.nn.BatchNorm1d)
    kept = model.net.encoder.patch_embed.proj.weight.clone()
    fit(model)
    assert torch.equal(model.net.encoder.patch_embed.proj.weight, kept)


def test_the_head_of_v2_has_another_layer_where_the_module_is_and_by_option():
    def layers(**options):
        model = task("v2", **options)
        model.construct(data())
        return sum(isinstance(layer, torch.nn.Linear) for layer in model.net.projector)

    assert layers() == 3
    assert layers(method="baseline") == 2
    assert layers(method="baseline", contrast={"extra_layer": True}) == 3


def test_lars_trains_and_adapts_matrices_only():
    model = task(optimizer={"name": "lars", "lr": 0.1, "lr_per": None, "weight_decay": 1e-6})
    fit(model)
    decays = {group["weight_decay"] for group in model.trainer.optimizers[0].param_groups}
    assert decays == {0.0, 1e-6}


def test_what_cannot_work_is_refused():
    model = task("v2", contrast={"queue": 40})
    model.construct(data())
    with pytest.raises(UserError, match=r"model.contrast.queue 40 is no multiple of the 32 keys"):
        model.check_data(data())
    with pytest.raises(UserError, match=r"data.batch_size=1 leaves MoCo nothing"):
        model.check_data(DigitsLT(imbalance=1.0, batch_size=1))
    for version, views in (("v2", ["simclr"]), ("v3", 1), ("v3", 3)):
        model = task(version)
        model.construct(data())
        with pytest.raises(UserError, match=r"trains on 2 with these settings: set data\.views to 2\."):
            model.check_data(DigitsLT(imbalance=1.0, batch_size=16, views=views))
    vit = task(backbone="vit_tiny_patch16_224", backbone_args={**VIT, "img_size": 16})
    vit.construct(data())
    with pytest.raises(UserError, match=r"images of 16 x 16 pixels, and data.image_size is 8"):
        vit.check_data(data())
    with pytest.raises(UserError, match=r"model.contrast.version"):
        task("v4")
    with pytest.raises(UserError, match=r"model.batchformer.before=encoder"):
        task(batchformer={"before": "encoder"})
    with pytest.raises(UserError, match="temperature"):
        task(contrast={"temperature": 0.0})


def test_the_exported_network_is_the_backbone():
    model = task()
    model.construct(data())
    model.plain_network().load_state_dict(model.trained_network().state_dict(), strict=True)


def test_collapse_warns_once_and_not_in_the_first_steps(monkeypatch):
    model = task(contrast={"momentum": 0.0}, optimizer={**OPTIMIZER, "lr": 0.0})
    monkeypatch.setattr(MoCo, "spread_of", lambda self, rows: torch.tensor(0.01))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*collapsed")
        fit(model)
    monkeypatch.setattr("batchformer.tasks.self_supervised.task._FIRST_STEPS", 2)
    with pytest.warns(UserWarning, match="has collapsed") as told:
        fit(model, max_epochs=3)
    assert sum("collapsed" in str(one.message) for one in told) == 1


def test_the_curve_of_the_linear_classifier_is_on_the_page_and_in_checkpoints(tmp_path):
    model = task(judge={"neighbours": 3, "images": 60})
    trainer = fit(model, max_epochs=2, limit_val_batches=1, limit_train_batches=1)
    (section,) = model.sections()
    (line,) = section["series"]["lines"].values()
    assert (section["title"], section["series"]["x"]) == ("Accuracy of a linear classifier while training", [1, 2])
    assert line[-1] == pytest.approx(float(trainer.callback_metrics["val/linear"]))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert MoCo.load_from_checkpoint(tmp_path / "last.ckpt", weights_only=False).sections() == [section]
