"""Attentive CutMix: which cells, whose labels, and an extractor that nothing happens to."""

import copy
import pickle

import pytest
import torch
import torchvision
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.utils import counters

from batchformer.errors import UserError
from batchformer.mix import AttentiveCutMix, Renormalize, feature_map


class Pool(nn.Module):
    """A feature map of as many cells as asked for: channel 0 the brightness, the last one the darkness."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d((rows, columns))
        self.seen: list[torch.Tensor] = []

    def forward(self, images):
        self.seen.append(images)
        bright = self.pool(images.mean(1, keepdim=True))
        return torch.cat([3 * bright, -bright], dim=1)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def lit(cells: list[list[tuple[int, int]]], grid: int = 4, cell: int = 3) -> torch.Tensor:
    """A dark image for each list of cells, those cells lit."""
    images = torch.zeros(len(cells), 3, grid, cell, grid, cell)
    for image, places in zip(images, cells, strict=True):
        for row, column in places:
            image[:, row, :, column] = 1
    return images.reshape(len(cells), 3, grid * cell, grid * cell)


def test_the_hottest_cells_of_the_partner_are_pasted():
    cells = [[(0, 1), (3, 3)], [(2, 2), (2, 3)], [(1, 0), (0, 0)]]
    mixed = AttentiveCutMix(Pool(4, 4), 3, k=2, size=None, generator=generator(1))(lit(cells), torch.arange(3))
    for row in range(3):
        expected = lit([cells[mixed.partner[row]]])[0, :1]
        assert mixed.mask[row].equal(expected)


def test_the_last_channel_can_be_the_heatmap_as_released():
    images = lit([[(r, c) for r in range(4) for c in range(4) if (r, c) not in dark] for dark in ([(0, 1)], [(2, 2)])])
    mixed = AttentiveCutMix(Pool(4, 4), 2, k=1, channels="last", size=None, partner="flip")(images, torch.arange(2))
    assert mixed.mask.equal(1 - images.flip(0)[:, :1])


@settings(max_examples=25, deadline=None)
@given(
    batch=st.integers(2, 5),
    rows=st.integers(1, 5),
    columns=st.integers(1, 5),
    height=st.integers(5, 16),
    width=st.integers(5, 16),
    per_sample=st.booleans(),
    prob=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 1000),
)
def test_pixels_and_labels_belong_together(batch, rows, columns, height, width, per_sample, prob, seed):
    assume(rows * columns > 1)
    images = torch.rand(batch, 3, height, width, generator=generator(seed))
    mix = AttentiveCutMix(
        Pool(rows, columns), 4, size=None, per_sample=per_sample, prob=prob, generator=generator(seed)
    )
    mixed = mix(images, torch.randint(4, (batch,), generator=generator(seed)))
    other = mixed.mask.bool().expand_as(images)
    assert mixed.images[other].equal(images[mixed.partner][other])
    assert mixed.images[~other].equal(images[~other])
    torch.testing.assert_close(mixed.share, mixed.mask.mean((1, 2, 3)))
    torch.testing.assert_close(mixed.targets().sum(1), torch.ones(batch))
    cells = rows * columns
    pasted = mixed.share > 0
    expected = pasted * max(1, round(cells * 6 / 49)) / cells
    torch.testing.assert_close(mixed.label_share(), expected)
    if height % rows == 0 and width % columns == 0:
        torch.testing.assert_close(mixed.share, expected)


def test_six_cells_of_forty_nine_is_the_default_and_other_grids_follow():
    mix = AttentiveCutMix(Pool(7, 7), 2)
    assert [mix.cells_to_paste(cells) for cells in (49, 196, 16, 1)] == [6, 24, 2, 1]
    assert AttentiveCutMix(Pool(7, 7), 2, k=6).cells_to_paste(16) == 6


def test_the_extractor_sees_resized_and_renormalised_images_and_the_mix_keeps_its_own():
    pool = Pool(7, 7)
    mean, std = (0.2, 0.3, 0.4), (0.5, 0.6, 0.7)
    pictures = torch.rand(2, 3, 30, 20)
    images = (pictures - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    mixed = AttentiveCutMix(pool, 2, size=14, prepare=Renormalize(mean, std, (0, 0, 0), (1, 1, 1)))(
        images, torch.arange(2)
    )
    assert mixed.images.shape == images.shape
    assert pool.seen[0].shape == (2, 3, 14, 14)
    expected = nn.functional.interpolate(pictures, (14, 14), mode="bilinear", antialias=True)
    torch.testing.assert_close(pool.seen[0], expected)


def test_renormalised_images_are_those_of_the_other_normalisation():
    pictures = torch.rand(2, 3, 5, 5)

    def normalised(mean: tuple[float, ...], std: tuple[float, ...]) -> torch.Tensor:
        return (pictures - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]

    ours, imagenet = ((0.2, 0.3, 0.4), (0.5, 0.6, 0.7)), ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    torch.testing.assert_close(Renormalize(*ours)(normalised(*ours)), normalised(*imagenet))
    one_for_all = (0.5, 0.25), ((0.5,) * 3, (0.25,) * 3)
    torch.testing.assert_close(Renormalize(*one_for_all[0])(normalised(*one_for_all[1])), normalised(*imagenet))
    torch.testing.assert_close(Renormalize(0.5, 0.25, 0, 1)(normalised(*one_for_all[1])), pictures)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_the_extractor_sees_images_of_its_own_precision_and_the_batch_keeps_its(dtype):
    images, ids = torch.rand(4, 3, 8, 8, dtype=dtype), torch.arange(4)
    mixed = AttentiveCutMix(nn.Conv2d(3, 4, 2, stride=2), 4, size=None)(images, ids)
    assert mixed.images.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_extractor_in_half_precision_sees_images_that_were_resized_in_full(dtype):
    extractor = nn.Conv2d(3, 4, 2, stride=2)
    images = torch.rand(4, 3, 8, 8)
    wanted = AttentiveCutMix(extractor, 4, size=12, prepare=lambda seen: seen - 0.5).heatmap(images)
    half = AttentiveCutMix(extractor.to(dtype), 4, size=12, prepare=lambda seen: seen - 0.5)
    torch.testing.assert_close(half.heatmap(images), wanted, atol=2e-2, rtol=2e-2)
    assert half.heatmap(images.to(dtype)).shape == wanted.shape


def test_nothing_happens_to_the_extractor():
    extractor = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4), nn.Dropout(0.5)).train()
    extractor[2].eval()
    before = copy.deepcopy(extractor.state_dict())
    mix = AttentiveCutMix(extractor, 2, size=None, k=3)
    images = torch.rand(4, 3, 16, 16, requires_grad=True)
    one, two = mix.heatmap(images), mix.heatmap(images)
    assert one.equal(two)  # neither dropout nor batch statistics
    assert not one.requires_grad
    assert all(value.equal(before[name]) for name, value in extractor.state_dict().items())
    assert [module.training for module in extractor] == [True, True, False]
    owner = nn.Module()
    owner.mix = mix
    assert not list(owner.parameters())
    assert not owner.state_dict()


def test_the_mixed_image_carries_the_gradient_of_the_images_but_the_labels_none():
    images = torch.rand(3, 3, 8, 8, requires_grad=True)
    mixed = AttentiveCutMix(Pool(4, 4), 3, size=None)(images, torch.arange(3))
    assert not mixed.targets().requires_grad
    mixed.images.sum().backward()
    torch.testing.assert_close(images.grad.sum(), torch.tensor(float(images.numel())))


def test_the_same_seed_gives_the_same_batch_and_a_pickled_mix_goes_on():
    images, ids = torch.rand(5, 3, 12, 12), torch.arange(5)
    mix = AttentiveCutMix(Pool(4, 4), 5, size=None, generator=generator(2))
    twin = AttentiveCutMix(Pool(4, 4), 5, size=None, generator=generator(2))
    assert mix(images, ids).images.equal(twin(images, ids).images)
    mix.generator = None
    again = pickle.loads(pickle.dumps(mix))
    assert again.heatmap(images).equal(mix.heatmap(images))


@pytest.mark.parametrize(("name", "channels", "grid"), [("resnet18", 512, 2), ("vit_tiny_patch16_224", 192, 4)])
def test_timm_models_are_cut_after_their_last_map(name, channels, grid):
    timm = pytest.importorskip("timm")
    options = {"img_size": 64} if "vit" in name else {}
    cut = feature_map(timm.create_model(name, **options).eval())
    assert cut(torch.rand(2, 3, 64, 64)).shape == (2, channels, grid, grid)


def test_a_transformers_cells_lie_where_its_patches_do():
    timm = pytest.importorskip("timm")
    model = timm.create_model("vit_tiny_patch16_224", img_size=(32, 48), depth=1).eval()
    images = torch.rand(1, 3, 32, 48)
    tokens = model.forward_features(images)[0, 1:]
    assert feature_map(model)(images)[0, :, 1, 2].equal(tokens[1 * 3 + 2])


NARROW = {"embed_dim": 48, "depth": 1, "num_heads": 2}


@pytest.mark.parametrize(
    ("name", "options", "prefix", "grid"),
    [
        ("cait_xxs24_224", {**NARROW, "img_size": (32, 48)}, 1, (2, 3)),
        ("xcit_nano_12_p16_224", NARROW, 1, (2, 3)),
        ("mixer_s32_224", {"img_size": (32, 96)}, 0, (1, 3)),
        ("vit_tiny_patch16_224", {**NARROW, "dynamic_img_size": True}, 1, (2, 3)),
    ],
)
def test_tokens_of_a_timm_model_become_a_map(name, options, prefix, grid):
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model = timm.create_model(name, **options).eval()
    cell = 32 if "s32" in name else 16
    images = torch.rand(2, 3, grid[0] * cell, grid[1] * cell)
    with torch.no_grad():
        tokens, cells = model.forward_features(images), feature_map(model)(images)
    assert cells.shape[2:] == grid
    assert cells[:, :, -1, 0].equal(tokens[:, prefix + (grid[0] - 1) * grid[1]])


def test_a_model_whose_features_are_no_map_is_named():
    timm = pytest.importorskip("timm")
    model = timm.create_model("pit_ti_224").eval()  # gives its class token alone
    with pytest.raises(UserError, match="feature map of a PoolingVisionTransformer"):
        feature_map(model)(torch.rand(1, 3, 224, 224))


@pytest.mark.parametrize(
    ("name", "options"),
    [("googlenet", {"transform_input": False}), ("googlenet", {"transform_input": True}), ("inception_v3", {})],
)
def test_auxiliary_heads_are_left_out_and_inputs_prepared(name, options):
    models = pytest.importorskip("torchvision.models")
    model = getattr(models, name)(weights=None, init_weights=False, num_classes=5, **options).eval()
    images = torch.rand(1, 3, 96, 96)
    with torch.no_grad():
        torch.testing.assert_close(model.fc(feature_map(model)(images).mean((2, 3))), model(images))


def test_torchvisions_swin_gives_its_channels_first():
    swin = pytest.importorskip("torchvision.models.swin_transformer")
    model = swin.SwinTransformer([4, 4], 12, [1, 1], [1, 2], [2, 2], num_classes=5).eval()
    images = torch.rand(2, 3, 32, 48)
    with torch.no_grad():
        cells = feature_map(model)(images)
        assert cells.shape == (2, 24, 4, 6)
        torch.testing.assert_close(model.head(cells.mean((2, 3))), model(images))


@pytest.mark.parametrize(
    ("name", "channels"),
    [("resnet18", 512), ("mobilenet_v2", 1280), ("mnasnet0_5", 1280), ("shufflenet_v2_x0_5", 1024)],
)
def test_torchvision_models_are_cut_after_their_last_map(name, channels):
    models = pytest.importorskip("torchvision.models")
    model = getattr(models, name)(weights=None).eval()
    cut = feature_map(model)
    images = torch.rand(2, 3, 64, 64)
    assert cut(images).shape == (2, channels, 2, 2)
    pooled = cut(images).mean((2, 3))
    head = model.fc if hasattr(model, "fc") else model.classifier
    torch.testing.assert_close(head(pooled), model(images))


def test_torchvisions_densenet_ends_behind_its_last_activation():
    model = torchvision.models.DenseNet(8, (1, 1), 16, num_classes=5).eval()
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(model.classifier(feature_map(model)(images).mean((2, 3))), model(images))


def test_torchvisions_maxvit_is_cut_before_its_classifier():
    model = torchvision.models.MaxVit((64, 64), 8, 2, [16, 16], [1, 1], 8, 0.0, num_classes=5).eval()
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        cells = feature_map(model)(images)
        assert cells.shape == (2, 16, 8, 8)
        torch.testing.assert_close(model.classifier(cells), model(images))


def test_the_cells_of_torchvisions_vit_are_its_patches():
    torch.manual_seed(0)
    model = torchvision.models.VisionTransformer(32, 8, 2, 2, 24, 48, num_classes=5).eval()
    tokens: list[torch.Tensor] = []
    model.encoder.register_forward_hook(lambda module, args, output: tokens.append(output))
    images = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        model(images)
        cells = feature_map(model)(images)
    assert cells.shape == (2, 24, 4, 4)
    torch.testing.assert_close(cells[:, :, 1, 2], tokens[0][:, 1 + 1 * 4 + 2])
    with pytest.raises(UserError, match=r"images of 32 x 32 pixels and got 32 x 48: .* size=32"):
        feature_map(model)(torch.rand(2, 3, 32, 48))


def test_layers_that_a_classifier_of_ones_own_may_run_otherwise_are_not_guessed():
    """torchvision's are known to run theirs in turn; here an activation would be missed."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(4, 2)

    with pytest.raises(UserError, match="where the feature map of a Own ends"):
        feature_map(Own())


@pytest.mark.parametrize("name", ["mobilenet_v2", "resnet18"])
def test_a_compiled_extractor_is_one_graph(name):
    """torch compiles every part of a plain `nn.Sequential` alone."""
    extractor = feature_map(torchvision.models.get_model(name).eval().requires_grad_(False))
    torch._dynamo.reset()
    counters.clear()
    extractor.compile(dynamic=False, backend="eager")
    mix = AttentiveCutMix(extractor, 2, size=64)
    for _ in range(2):
        mix(torch.rand(2, 3, 16, 16), torch.tensor([0, 1]))
    assert counters["stats"]["unique_graphs"] == 1


def test_bad_input_is_refused_with_a_way_out():
    images, ids = torch.rand(2, 3, 8, 8), torch.arange(2)
    with pytest.raises(UserError, match="feature_map"):
        AttentiveCutMix(nn.Sequential(nn.Flatten()), 2, size=None)(images, ids)
    with pytest.raises(UserError, match="more than the 4 cells"):
        AttentiveCutMix(Pool(2, 2), 2, k=5, size=None)(images, ids)
    with pytest.raises(UserError, match="a single cell, and all of image B would be pasted"):
        AttentiveCutMix(nn.Conv2d(3, 4, 8), 2, size=None)(images, ids)
    with pytest.raises(UserError, match="finer than the images"):
        AttentiveCutMix(Pool(9, 2), 2)(images, ids)
    with pytest.raises(UserError, match="extractor"):
        AttentiveCutMix(lambda x: x, 2)
    with pytest.raises(UserError, match="k=0"):
        AttentiveCutMix(Pool(2, 2), 2, k=0)
    for size in (0, 64.5):
        with pytest.raises(UserError, match=f"size={size} must be a whole number of pixels"):
            AttentiveCutMix(Pool(2, 2), 2, size=size)
    with pytest.raises(UserError, match="channels='max'"):
        AttentiveCutMix(Pool(2, 2), 2, channels="max")
    with pytest.raises(UserError, match="drop_last"):
        AttentiveCutMix(Pool(2, 2), 2)(images[:1], ids[:1])
    with pytest.raises(UserError, match="Linear"):
        feature_map(nn.Linear(2, 2))
    with pytest.raises(UserError, match="each channel"):
        Renormalize((0.5,), (0.5,))
    with pytest.raises(UserError, match=r"mean='grey' must be a number"):
        Renormalize("grey", 0.5)
    with pytest.raises(UserError, match=r"to_std=0 must be .* above 0"):
        Renormalize(0.5, 0.5, 0, 0)
    with pytest.raises(UserError, match="numbers for 3 channels and the images have 1"):
        Renormalize((0.5, 0.5, 0.5), 0.5)(images[:, :1])
    with pytest.raises(UserError, match="prepare='imagenet' must be a function"):
        AttentiveCutMix(Pool(2, 2), 2, prepare="imagenet")
    with pytest.raises(UserError, match=r"prepare= must return images .* a tensor \(3, 8, 8\)"):
        AttentiveCutMix(Pool(2, 2), 2, prepare=lambda seen: seen[0])(images, ids)
    with pytest.raises(UserError, match=r"takes a model, an nn\.Module, and got a str"):
        feature_map("resnet18")


@pytest.mark.gpu
def test_on_the_gpu_the_extractor_follows_and_the_batch_is_that_of_the_cpu():
    images, ids = torch.rand(5, 3, 28, 28, dtype=torch.float64), torch.arange(5)
    extractor = nn.Conv2d(3, 8, 4, stride=4).double()
    here = AttentiveCutMix(copy.deepcopy(extractor), 5, size=None, generator=generator(1))(images, ids)
    there = AttentiveCutMix(extractor, 5, size=None, generator=generator(1))(images.cuda(), ids.cuda())
    assert there.images.cpu().equal(here.images)
    torch.testing.assert_close(there.targets().cpu(), here.targets())


def test_tokens_of_images_of_any_size_are_laid_out_by_the_size_of_the_image():
    timm = pytest.importorskip("timm")
    shape = {"img_size": 32, "patch_size": 8, "depth": 1, "embed_dim": 32, "num_heads": 2}
    vit = timm.create_model("vit_tiny_patch16_224", dynamic_img_size=True, **shape)
    assert feature_map(vit)(torch.randn(2, 3, 16, 64)).shape[2:] == (2, 8)  # as many patches as the 4 x 4 of its own
