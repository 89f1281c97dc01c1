"""Puzzle-Mix as a whole: what it makes of a batch, and that the model it looks through stays as it was."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import batchformer as bf
from batchformer.errors import UserError
from batchformer.mix import CutMix, PuzzleMix

from ..processes import run_in_processes


class Squares(nn.Module):
    """Class 0 by the sum of squares: the brighter a pixel, the more salient."""

    calls = 0

    def forward(self, images):
        self.calls += 1
        return torch.stack([images.square().sum((1, 2, 3)), images.new_zeros(len(images))], dim=1) / 100


def network(classes: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(128, classes),
    )


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def at_share(mix: PuzzleMix, images: torch.Tensor, share: float, labels: torch.Tensor):
    """Mixed with a given lambda instead of a drawn one."""
    drawn = mix.draw(images)
    fixed = {**vars(drawn), "share": torch.full_like(drawn.share, share)}
    return mix.apply(images, labels, type(drawn)(**fixed))


def test_each_image_keeps_its_salient_half():
    images = torch.full((2, 3, 16, 16), 0.01)
    images[0, :, :, :8] += 1
    images[1, :, :, 8:] += 1
    mix = PuzzleMix(Squares(), 2, blocks=4, partner="flip", transport=False)
    mixed = at_share(mix, images, 0.5, torch.eye(2)[[0, 0]])
    assert mixed.mask[0, 0, :, :8].eq(0).all()
    assert mixed.mask[0, 0, :, 8:].eq(1).all()
    assert mixed.images[0].equal(torch.full((3, 16, 16), 1.01))
    assert mixed.share.tolist() == [0.5, 0.5]


def test_transport_brings_what_is_salient_to_where_it_is_seen():
    # blocks of one brightness each, most of them dark: what is bright is salient
    blocks = torch.rand(6, 1, 4, 4, generator=generator()) ** 4
    images = blocks.expand(-1, 3, -1, -1).repeat_interleave(4, 2).repeat_interleave(4, 3)
    options = {"blocks": 4, "partner": "flip", "transport_eps": 0.01}
    still, moved = (
        at_share(PuzzleMix(Squares(), 2, transport=transport, **options), images, 0.5, torch.eye(2)[[0] * 6])
        for transport in (False, True)
    )
    assert moved.mask.equal(still.mask)
    assert moved.images.sum() > still.images.sum()


@settings(max_examples=20, deadline=None)
@given(
    batch=st.integers(2, 5),
    height=st.sampled_from([8, 12, 16]),
    width=st.sampled_from([8, 16, 20]),
    steps=st.sampled_from([2, 3]),
    transport=st.booleans(),
    per_sample=st.booleans(),
    prob=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 1000),
)
def test_pixels_and_labels_belong_together(batch, height, width, steps, transport, per_sample, prob, seed):
    images = torch.rand(batch, 3, height, width, generator=generator(seed))
    mix = PuzzleMix(
        network(),
        4,
        labels=steps,
        transport=transport,
        per_sample=per_sample,
        prob=prob,
        label_smoothing=0.1,
        generator=generator(seed),
    )
    ids = torch.randint(4, (batch,), generator=generator(seed))
    mixed = mix(images, ids)
    share = mixed.mask.mean((1, 2, 3)).expand(batch)
    torch.testing.assert_close(mixed.share, share)
    torch.testing.assert_close(mixed.targets(), torch.lerp(mixed.labels, mixed.labels[mixed.partner], share[:, None]))
    torch.testing.assert_close(mixed.targets().sum(1), torch.ones(batch))
    assert set((mixed.mask.unique() * (steps - 1)).tolist()) <= set(range(steps))
    if not transport:
        torch.testing.assert_close(mixed.images, torch.lerp(images, images[mixed.partner], mixed.mask))
    if transport and steps == 2:  # every pixel is one of one of the two images
        for row in range(batch):
            both = torch.cat([images[row].flatten(1), images[mixed.partner[row]].flatten(1)], dim=1).T
            seen = mixed.images[row].flatten(1).T
            assert torch.cdist(seen, both).amin(1).max() < 1e-3
    if prob == 0:
        assert mixed.images.equal(images)


def test_the_model_is_left_as_it_was():
    model = network().train()
    model[3].eval()
    flags = [module.training for module in model.modules()]
    before = copy.deepcopy(model.state_dict())
    model[0].weight.grad = torch.ones_like(model[0].weight)
    PuzzleMix(model, 4)(torch.rand(4, 3, 16, 16), torch.arange(4))
    assert [module.training for module in model.modules()] == flags
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
    assert model[0].weight.grad.eq(1).all()
    assert all(p.grad is None for name, p in model.named_parameters() if name != "0.weight")


def test_the_model_is_left_as_it_was_after_an_error_too():
    model = network().train()
    with pytest.raises(RuntimeError):
        PuzzleMix(model, 4)(torch.rand(2, 5, 16, 16), torch.arange(2))
    assert all(module.training for module in model.modules())


def test_saliency_is_that_of_each_image_alone_in_eval_mode():
    model = network()
    images, ids = torch.rand(3, 3, 16, 16), torch.tensor([2, 0, 3])
    labels = F.one_hot(ids, 4).float()
    found = PuzzleMix(model.train(), 4, label_smoothing=0.2).saliency(images, labels * 0.8 + 0.05)
    model.eval()
    for row in range(3):
        one = images[row : row + 1].clone().requires_grad_()
        F.cross_entropy(model(one), ids[row : row + 1]).backward()
        torch.testing.assert_close(found[row], one.grad[0].square().mean(0).sqrt())


def test_an_own_criterion_decides_what_is_salient():
    images, ids = torch.rand(4, 3, 16, 16), torch.arange(4)
    calls = []

    def criterion(outputs, targets):
        calls.append(targets)
        return (outputs.softmax(1) - targets).square().mean()

    PuzzleMix(network(), 4, criterion=criterion)(images, ids)
    assert len(calls) == 1
    assert calls[0].equal(torch.eye(4))


def test_nothing_is_computed_for_a_batch_that_is_left_alone():
    model = Squares()
    images = torch.rand(3, 3, 8, 8)
    mixed = PuzzleMix(model, 2, prob=0.0)(images, torch.zeros(3, dtype=torch.long))
    assert model.calls == 0
    assert mixed.images is images
    assert mixed.share.eq(0).all()


def test_images_that_are_left_alone_stay_whole():
    images, ids = torch.rand(8, 3, 16, 16), torch.arange(8) % 4
    options = {"per_sample": True, "prob": 0.5, "eta": 0.0}  # no prior that would see to it
    alone = PuzzleMix(network(), 4, generator=generator(0), **options).draw(images).share == 0
    mixed = PuzzleMix(network(), 4, generator=generator(0), **options)(images, ids)
    assert 0 < alone.sum() < 8
    assert mixed.images[alone].equal(images[alone])
    assert mixed.share[alone].eq(0).all()
    assert mixed.share[~alone].gt(0).any()


def test_no_gradient_flows_into_images_or_targets():
    images = torch.rand(3, 3, 8, 8)
    mixed = PuzzleMix(network(), 4)(images, torch.arange(3))
    assert not mixed.images.requires_grad
    assert not mixed.targets().requires_grad
    assert not images.requires_grad


def test_the_same_seed_gives_the_same_batch_and_other_seeds_other_blocks():
    images, ids, model = torch.rand(4, 3, 16, 16), torch.arange(4), network()
    one, two = (PuzzleMix(model, 4, generator=generator(5))(images, ids) for _ in range(2))
    assert one.images.equal(two.images)
    assert one.targets().equal(two.targets())
    drawn = PuzzleMix(model, 4, generator=generator())
    assert {drawn.draw(images).blocks for _ in range(40)} == {2, 4, 8, 16}
    assert {drawn.draw(images[:, :, :12]).blocks for _ in range(20)} == {2, 4}


def test_it_mixes_under_autocast_and_no_grad():
    images, ids = torch.rand(4, 3, 16, 16), torch.arange(4)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        mixed = PuzzleMix(network(), 4)(images, ids)
    assert mixed.images.dtype == torch.float32
    assert mixed.targets().sum(1).allclose(torch.ones(4))


def test_it_goes_with_an_attached_batchformer():
    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = network(16), nn.Linear(16, 4)

        def forward(self, images):
            return self.head(self.body(images))

    model = Classifier().train()
    bf.attach(model, before="head", heads=4)
    mixed = PuzzleMix(model, 4)(torch.rand(4, 3, 16, 16), torch.arange(4))
    outputs = model(mixed.images)
    assert len(outputs) == 8
    bf.TwoStreamLoss(F.cross_entropy)(outputs, mixed.targets()).backward()


def _two_steps_of_ddp(_: int, folder: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
    model = nn.parallel.DistributedDataParallel(network().train())
    calls = []
    model.register_forward_pre_hook(lambda *_: calls.append(None))
    mix = PuzzleMix(model, 4)
    for step in range(2):
        mixed = mix(torch.rand(4, 3, 16, 16), torch.arange(4))
        assert len(calls) == step  # the wrapper, which talks to other processes, is not asked
        F.cross_entropy(model(mixed.images), mixed.targets()).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    torch.distributed.destroy_process_group()


def test_a_step_of_ddp_follows_as_if_nothing_had_been(tmp_path):
    # in a process of its own: freeing DDP waits for gloo's threads, which may wait for Python
    run_in_processes(_two_steps_of_ddp, 1, tmp_path)


def test_a_pickled_mix_goes_on_the_same():
    images, ids = torch.rand(3, 3, 8, 8), torch.arange(3)
    mix = PuzzleMix(network(), 4, blocks=4)
    twin = pickle.loads(pickle.dumps(mix))
    results = []
    for one in (mix, twin):
        torch.manual_seed(3)
        results.append(one(images, ids).images)
    assert results[0].equal(results[1])


def test_one_mean_and_std_for_all_channels():
    images, made = torch.rand(4, 3, 16, 16), []
    for mean, std in ((0.5, 0.2), ([0.5] * 3, [0.2] * 3)):
        mix = PuzzleMix(network(), 4, generator=torch.Generator().manual_seed(0), mean=mean, std=std)
        made.append(mix(images, torch.arange(4)).images)
    assert made[0].equal(made[1])


def test_bad_input_is_refused_with_a_way_out():
    model, images, ids = network(), torch.rand(2, 3, 15, 16), torch.arange(2)
    with pytest.raises(UserError, match="divides 15 x 16"):
        PuzzleMix(model, 4)(images, ids)
    with pytest.raises(UserError, match="drop_last"):
        PuzzleMix(model, 4)(images[:1], ids[:1])
    with pytest.raises(UserError, match="model in training"):
        PuzzleMix(100, 4)
    with pytest.raises(UserError, match="blocks="):
        PuzzleMix(model, 4, blocks=(1, 2))
    with pytest.raises(UserError, match=r"blocks=4\.0 must be whole"):
        PuzzleMix(model, 4, blocks=4.0)
    with pytest.raises(UserError, match=r"pass what PuzzleMix\.draw gives"):
        PuzzleMix(model, 4).apply(images, torch.eye(4)[:2], CutMix(4).draw(images))
    with pytest.raises(UserError, match="eta=None"):
        PuzzleMix(model, 4, eta=None)
    with pytest.raises(UserError, match=r"labels=3\.0"):
        PuzzleMix(model, 4, labels=3.0)
    with pytest.raises(UserError, match="criterion='bce' must be a function"):
        PuzzleMix(model, 4, criterion="bce")
    for criterion in (nn.CrossEntropyLoss(reduction="none"), lambda logits, targets: logits.detach().mean()):
        with pytest.raises(UserError, match="criterion= returned has none"):
            PuzzleMix(model, 4, criterion=criterion)(torch.rand(2, 3, 16, 16), ids)
    with pytest.raises(UserError, match="labels=4"):
        PuzzleMix(model, 4, labels=4)
    with pytest.raises(UserError, match="beta=-1"):
        PuzzleMix(model, 4, beta=-1)
    with pytest.raises(UserError, match="transport_size=0"):
        PuzzleMix(model, 4, transport_size=0)
    with pytest.raises(UserError, match="belong together"):
        PuzzleMix(model, 4, std=(0.5, 0.5, 0.5))
    with pytest.raises(UserError, match=r"gives \(2, 4\) and num_classes needs logits of \(2, 7\): let num"):
        PuzzleMix(model, 7)(torch.rand(2, 3, 16, 16), ids)
    with pytest.raises(UserError, match="more than 1024"):
        PuzzleMix(model, 4, blocks=2, transport_size=1)(torch.rand(2, 3, 64, 64), ids)


def test_transport_can_be_finer_than_the_mask():
    mix = PuzzleMix(network(), 4, transport_size=4)
    assert [mix._transport_grid(32, 32, blocks) for blocks in (2, 4, 8, 16)] == [(8, 8), (8, 8), (8, 8), (16, 16)]
    assert mix._transport_grid(28, 28, 4) == (4, 4)
    assert PuzzleMix(network(), 4)._transport_grid(32, 32, 4) == (4, 4)


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", [2, 16])
def test_on_the_gpu_the_batch_is_that_of_the_cpu(blocks):
    images, ids = torch.rand(5, 3, 32, 32, dtype=torch.float64), torch.arange(5)
    model = network(5).double()
    here = PuzzleMix(model, 5, blocks=blocks, generator=generator(1))(images, ids)
    there = PuzzleMix(copy.deepcopy(model).cuda(), 5, blocks=blocks, generator=generator(1))(images.cuda(), ids.cuda())
    torch.testing.assert_close(there.mask.cpu(), here.mask)
    torch.testing.assert_close(there.images.cpu(), here.images)


@pytest.mark.gpu
def test_on_the_gpu_under_autocast_it_mixes():
    images, ids = torch.rand(6, 3, 32, 32).cuda(), torch.arange(6).cuda() % 4
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cuda", dtype):
            mixed = PuzzleMix(network().cuda().train(), 4)(images, ids)
        assert mixed.images.isfinite().all()
        assert 0 < mixed.share.mean() < 1
