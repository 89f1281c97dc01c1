"""Every number of the health of the streams agrees with a slow, obvious computation on a tiny ViT."""

import json
import math

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

import batchformer as bf
from batchformer.analysis import gradient_on_others, stream_health
from batchformer.errors import UserError

BATCH, CLASSES, WIDTH = 6, 5, 32


def tiny_vit(**keywords):
    torch.manual_seed(0)
    return timm.create_model(
        "vit_tiny_patch16_224",
        img_size=32,
        patch_size=8,
        depth=4,
        embed_dim=WIDTH,
        num_heads=2,
        num_classes=CLASSES,
        **keywords,
    )


@pytest.fixture
def vit():
    return tiny_vit()


@pytest.fixture
def batch():
    torch.manual_seed(1)
    return torch.randn(BATCH, 3, 32, 32), torch.randint(0, CLASSES, (BATCH,))


def tokens_by_hand(vit, attachment, images):
    """(in, out) of the related and plain tokens at every block, dropout 0, by walking through the ViT."""
    modules = dict(zip(attachment.paths, [point.module for point in attachment.points], strict=True))
    plain = vit.norm_pre(vit._pos_embed(vit.patch_embed(images)))
    related, found = None, {}
    with attachment.disabled():
        for k, block in enumerate(vit.blocks):
            plain = block(plain)
            related = None if related is None else block(related)
            if module := modules.get(f"blocks.{k}"):
                entered = plain if related is None else related
                related = module.relate(entered)
                found[f"blocks.{k}"] = (plain, entered, related)
    return found, vit.forward_head(vit.norm(plain)), vit.forward_head(vit.norm(related))


def test_tokens_are_those_of_a_walk_through_the_model(vit, batch):
    attachment = bf.attach(vit, blocks=[1, 2], heads=2, dropout=0.0)
    vit.train()
    found, plain_logits, related_logits = tokens_by_hand(vit, attachment, batch[0])
    health = stream_health(vit, *batch, positions=None, samples=0)
    assert [point.path for point in health.points] == ["blocks.1", "blocks.2"]
    for point in health.points:
        plain, entered, left = found[point.path]
        for stats, tokens in ((point.plain, plain), (point.related_in, entered), (point.related_out, left)):
            assert stats.norm == pytest.approx(
                sum(t.norm().item() for t in tokens.flatten(0, 1)) / (BATCH * 17), rel=1e-4
            )
            ranks, shares = [], []
            for n in range(17):
                s = torch.linalg.svdvals(tokens[:, n].double())
                p = s / s.sum()
                ranks.append(math.exp(-(p * p.log()).sum().item()))
                mean = tokens[:, n].mean(0)
                shares.append(1 - (mean @ mean / (tokens[:, n] ** 2).sum(1).mean()).item())
            assert stats.effective_rank == pytest.approx(sum(ranks) / 17, rel=1e-4)
            assert stats.between_samples == pytest.approx(sum(shares) / 17, rel=1e-3)
        assert point.change == pytest.approx(((left - entered).norm() / entered.norm()).item(), rel=1e-4)
        assert point.change_quiet == pytest.approx(point.change, rel=1e-4)
        assert point.reproducible == pytest.approx(1, abs=1e-5)
        assert point.signal == pytest.approx(1, abs=1e-5)
    assert health.plain_loss == pytest.approx(F.cross_entropy(plain_logits, batch[1]).item(), rel=1e-4)
    assert health.related_loss == pytest.approx(F.cross_entropy(related_logits, batch[1]).item(), rel=1e-4)
    assert health.chance == pytest.approx(math.log(CLASSES))


def test_what_comes_from_others_is_the_difference_to_batches_of_one(vit, batch):
    attachment = bf.attach(vit, blocks=[1], heads=2, dropout=0.0)
    vit.train()
    _, entered, left = tokens_by_hand(vit, attachment, batch[0])[0]["blocks.1"]
    module = attachment.points[0].module
    alone = torch.cat([module.relate(entered[i : i + 1]) for i in range(BATCH)])
    (point,) = stream_health(vit, *batch, positions=None, samples=0).points
    assert point.from_others == pytest.approx(((left - alone).norm() / entered.norm()).item(), rel=1e-4)
    module.layers[0].self_attn.group_size = 1
    assert stream_health(vit, *batch, samples=0).points[0].from_others == 0


def test_dropout_shows_in_what_repeats_and_the_plain_stream_has_none(vit, batch):
    bf.attach(vit, blocks=[0, 3], heads=2, dropout=0.5)
    first, last = stream_health(vit, *batch, samples=0).points
    assert 0 < last.signal < first.signal < 0.99
    assert last.reproducible < first.reproducible < 0.99
    assert first.signal_plain == pytest.approx(1, abs=1e-5)
    assert first.reproducible_plain == pytest.approx(1, abs=1e-5)
    assert first.change_quiet < first.change


def test_quiet_means_without_dropout(vit, batch):
    attachment = bf.attach(vit, blocks=[0], heads=2, dropout=0.5)
    module = attachment.points[0].module
    with attachment.disabled():
        entered = vit.blocks[0](vit.norm_pre(vit._pos_embed(vit.patch_embed(batch[0]))))
    module.eval()
    wanted = ((module.relate(entered) - entered).norm() / entered.norm()).item()
    module.train()
    assert stream_health(vit, *batch, positions=None, samples=0).points[0].change_quiet == pytest.approx(
        wanted, rel=1e-4
    )
    one, other = (gradient_on_others(vit, *batch, mode="quiet", samples=2, seed=seed) for seed in (0, 1))
    assert one == other


@pytest.mark.parametrize("streams", ["duplicate", "split", "single"])
def test_gradients_of_each_stream_at_each_block(vit, batch, streams):
    attachment = bf.attach(vit, blocks=[1, 2], heads=2, dropout=0.0, streams=streams)
    images, labels = batch
    vit.train()
    outputs = vit(images)
    rows = bf.repeat_targets(labels, outputs)
    plain = {"duplicate": BATCH, "split": BATCH // 2, "single": 0}[streams]
    losses = F.cross_entropy(outputs, rows, reduction="none")
    health = stream_health(vit, images, labels, samples=0)
    assert [block.path for block in health.blocks] == [f"blocks.{k}" for k in range(4)]
    for k, block in enumerate(health.blocks):
        vectors = []
        for part in (losses[:plain], losses[plain:]):
            if len(part):
                vit.zero_grad()
                part.mean().backward(retain_graph=True)
                vectors.append(torch.cat([p.grad.flatten() for p in vit.blocks[k].parameters()]))
        assert block.gradient.related == pytest.approx(vectors[-1].norm().item(), rel=1e-4)
        if streams == "single":
            assert block.gradient.plain is None
            assert block.gradient.cosine is None
        else:
            assert block.gradient.plain == pytest.approx(vectors[0].norm().item(), rel=1e-4)
            assert block.gradient.cosine == pytest.approx(torch.cosine_similarity(*vectors, dim=0).item(), abs=1e-4)
        assert (block.related is None) == (k < 1)
    vit.zero_grad()
    losses[plain:].mean().backward()
    own = torch.cat([p.grad.flatten() for p in attachment.points[0].module.parameters()])
    assert health.points[0].gradient == pytest.approx(own.norm().item(), rel=1e-4)


@pytest.mark.parametrize("streams", ["duplicate", "split", "single"])
@pytest.mark.parametrize("wrt", ["tokens", "images"])
def test_the_gradient_on_others_is_that_of_one_backward_per_sample(vit, batch, streams, wrt):
    attachment = bf.attach(vit, blocks=[1, 2], heads=2, dropout=0.0, streams=streams)
    images, labels = batch
    vit.train()
    images = images.clone().requires_grad_()
    with attachment.disabled():
        tokens = vit.blocks[1](vit.blocks[0](vit.norm_pre(vit._pos_embed(vit.patch_embed(images)))))
    first, second = (point.module for point in attachment.points)
    mine = tokens[BATCH // 2 :] if streams == "split" else tokens
    with attachment.disabled():
        logits = vit.forward_head(vit.norm(vit.blocks[3](second.relate(vit.blocks[2](first.relate(mine))))))
    norm_shares, squared_shares = [], []
    for row in range(len(mine)):
        image = row + BATCH // 2 if streams == "split" else row
        loss = F.cross_entropy(logits[row : row + 1], labels[image : image + 1])
        (g,) = torch.autograd.grad(loss, tokens if wrt == "tokens" else images, retain_graph=True)
        norms = [g[j].norm().item() for j in range(BATCH)]
        others = norms[:image] + norms[image + 1 :]
        norm_shares.append(sum(others) / sum(norms))
        squared_shares.append(sum(n * n for n in others) / sum(n * n for n in norms))
    found = gradient_on_others(vit, images, labels, wrt=wrt, samples=BATCH)
    assert found.samples == len(mine)
    assert found.norm_share == pytest.approx(sum(norm_shares) / len(mine), rel=1e-3)
    assert found.squared_share == pytest.approx(sum(squared_shares) / len(mine), rel=1e-3)


def test_nothing_falls_on_others_when_each_sample_is_a_group_of_its_own(vit, batch):
    bf.attach(vit, blocks=[1], heads=2, group_size=1)
    for mode in ("train", "quiet"):
        assert gradient_on_others(vit, *batch, mode=mode).norm_share == pytest.approx(0, abs=1e-12)


def test_quiet_shows_no_relation_by_batch_norm(batch):
    """In training BatchNorm relates samples by itself; the quiet share is through the insertions alone."""
    torch.manual_seed(0)
    net = timm.create_model("resnet10t", num_classes=CLASSES)
    bf.attach(net, after="layer3", heads=2, group_size=1, dropout=0.0)
    assert gradient_on_others(net, *batch, mode="train", samples=2).norm_share > 0.01
    assert gradient_on_others(net, *batch, mode="quiet", samples=2).norm_share == pytest.approx(0, abs=1e-12)


def state_of(model):
    return {
        "buffers": {k: v.clone() for k, v in model.state_dict().items()},
        "grads": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "modes": [m.training for m in model.modules()],
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
        "random": torch.get_rng_state(),
        "groups": [m.group_size for m in model.modules() if hasattr(m, "group_size")],
    }


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return all(same(a[k], b[k]) for k in a)
    return all(map(same, a, b)) if isinstance(a, list) else a == b


@pytest.mark.parametrize("training", [True, False])
def test_leaves_the_model_and_the_random_state_as_they_were(batch, training):
    torch.manual_seed(0)
    net = timm.create_model("resnet10t", num_classes=CLASSES)
    bf.attach(net, after=["layer2", "layer3"], heads=2, group_size=4)
    net.train(training)
    net.bn1.eval()
    F.cross_entropy(net(batch[0])[:BATCH], batch[1]).backward()
    before = state_of(net)
    stream_health(net, *batch, samples=2)
    assert same(before, state_of(net))


def test_one_module_at_all_places_is_measured_at_each(vit, batch):
    bf.attach(vit, blocks="all", share=True, heads=2, layers=2)
    health = stream_health(vit, *batch, samples=1)
    assert [point.path for point in health.points] == [f"blocks.{k}" for k in range(4)]
    assert len({point.change for point in health.points}) == 4
    assert [len(point.attention) for point in health.points] == [2] * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_works_in_half_precision_near_the_full_one(vit, batch, dtype):
    bf.attach(vit, blocks="all", heads=2, dropout=0.0)
    full = stream_health(vit, *batch, samples=2)
    with torch.autocast("cpu", dtype):
        half = stream_health(vit, *batch, samples=2)
    for a, b in zip(full.points, half.points, strict=True):
        assert b.change == pytest.approx(a.change, rel=0.05)
        assert b.gradient == pytest.approx(a.gradient, rel=0.1)
    for mode in ("train", "quiet"):
        wanted = full.gradient_on_others[mode].norm_share
        assert half.gradient_on_others[mode].norm_share == pytest.approx(wanted, rel=0.1)


def test_works_where_the_insertion_runs_wide_and_with_soft_labels(batch):
    torch.manual_seed(0)
    net = timm.create_model("xcit_nano_12_p16_224", img_size=32, num_classes=CLASSES, depth=3, cls_attn_layers=1)
    bf.attach(net, blocks=[1], heads=2, dropout=0.0)
    images, labels = batch
    health = stream_health(net, images, F.one_hot(labels, CLASSES).float(), samples=1)
    ids = stream_health(net, images, labels, samples=0)
    assert health.plain_loss == pytest.approx(ids.plain_loss, rel=1e-5)
    assert health.blocks[0].related is None
    assert health.blocks[2].related is not None
    assert health.blocks[0].plain.effective_rank <= BATCH


def test_is_saved_as_json_without_anything_json_does_not_know(vit, batch, tmp_path):
    bf.attach(vit, blocks=[1], heads=2)
    health = stream_health(vit, *batch, samples=1)
    health.points[0].change = math.nan
    health.save(tmp_path / "stream_health.json")
    read = json.loads((tmp_path / "stream_health.json").read_text())
    assert read["points"][0]["change"] is None
    assert read["points"][0]["path"] == "blocks.1"
    assert read["gradient_on_others"]["quiet"]["samples"] == 1


def test_wrong_calls_say_what_to_do(vit, batch):
    images, labels = batch
    with pytest.raises(UserError, match="call attach first"):
        stream_health(vit, images, labels)
    bf.attach(vit, blocks=[1], heads=2)
    with pytest.raises(UserError, match="two images or more"):
        stream_health(vit, images[:1], labels[:1])
    with pytest.raises(UserError, match="two images or more"):
        gradient_on_others(vit, images[:1], labels[:1])
    with pytest.raises(UserError, match='"tokens" or "images"'):
        gradient_on_others(vit, images, labels, wrt="pixels")
    with pytest.raises(UserError, match='"train" or "quiet"'):
        gradient_on_others(vit, images, labels, mode="eval")
    with pytest.raises(UserError, match="samples=0"):
        gradient_on_others(vit, images, labels, samples=0)
    for keywords, words in [
        ({"positions": 0}, "positions=0"),
        ({"samples": -1}, "samples=-1"),
        ({"blocks": ["blocks.77"]}, r"no submodule 'blocks\.77'"),
    ]:
        with pytest.raises(UserError, match=words):
            stream_health(vit, images, labels, **keywords)
    for look in (stream_health, gradient_on_others):
        with pytest.raises(UserError, match="give row_losses="):
            look(vit, images, [{"class_labels": label[None]} for label in labels])
        with bf.attachment_of(vit).disabled(), pytest.raises(UserError, match="disabled here"):
            look(vit, images, labels)
    bf.detach(vit)
    bf.attach(vit, blocks=[1], heads=2, streams="split")
    with pytest.raises(UserError, match="four images or more"):  # one related row has no other
        stream_health(vit, images[:3], labels[:3])


def test_maps_before_a_module_at_the_classifier_have_their_channels_first():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    bf.attach(net, heads=2)
    images = torch.randn(5, 3, 6, 8)
    health = stream_health(net, images, torch.arange(5) % 3, positions=None, samples=0)
    with torch.no_grad():
        norm = net[0](images).norm(dim=1).mean().item()  # over the channels of each place
    assert health.blocks[0].path == "0"
    assert health.blocks[0].plain.norm == pytest.approx(norm, rel=1e-5)


@pytest.mark.gpu
def test_the_gpu_measures_what_the_cpu_measures_and_keeps_its_random_state(vit, batch):
    bf.attach(vit, blocks="all", heads=2, dropout=0.0)
    there = stream_health(vit, *batch, samples=2)
    vit.cuda()
    torch.cuda.manual_seed(7)
    before = torch.cuda.get_rng_state()
    here = stream_health(vit, *(tensor.cuda() for tensor in batch), samples=2)
    assert torch.equal(before, torch.cuda.get_rng_state())
    for a, b in zip(there.points, here.points, strict=True):
        assert b.change == pytest.approx(a.change, rel=1e-2)
        assert b.related_out.effective_rank == pytest.approx(a.related_out.effective_rank, rel=1e-2)
        assert b.gradient == pytest.approx(a.gradient, rel=2e-2)
    wanted = there.gradient_on_others["quiet"].norm_share
    assert here.gradient_on_others["quiet"].norm_share == pytest.approx(wanted, rel=2e-2)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cuda", dtype):
            half = stream_health(vit, *(tensor.cuda() for tensor in batch), samples=2)
        assert half.points[0].change == pytest.approx(there.points[0].change, rel=0.05)


@pytest.mark.parametrize("kind", ["distilled", "checkpointed", "stable"])
def test_works_in_models_with_two_heads_with_checkpointing_and_with_every_form_of_the_module(batch, kind):
    torch.manual_seed(0)
    shape = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": WIDTH, "num_heads": 2, "num_classes": CLASSES}
    name = "deit_tiny_distilled_patch16_224" if kind == "distilled" else "vit_tiny_patch16_224"
    net = timm.create_model(name, **shape)
    if kind == "distilled":
        net.set_distilled_training(True)
    if kind == "checkpointed":
        net.set_grad_checkpointing(True)
    bf.attach(net, blocks="all", heads=2, variant="stable" if kind == "stable" else "published")
    health = stream_health(net, *batch, samples=1)
    assert [point.path for point in health.points] == ["blocks.0", "blocks.1"]
    assert all(0 < point.change_quiet < 5 and 0 < point.signal < 1 and point.gradient > 0 for point in health.points)
    assert 0 < health.gradient_on_others["quiet"].norm_share < 1
    assert health.chance == pytest.approx(math.log(CLASSES))
