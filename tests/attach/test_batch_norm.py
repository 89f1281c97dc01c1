"""BatchNorm behind an insertion: wherever that is, plain rows and running statistics are those of the plain model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import batchformer as bf
from batchformer.errors import UserError

from .small_models import AuxiliaryHead


class Behind(nn.Module):
    """A head with a BatchNorm in it, one registered before the head and called behind it, one called before it."""

    def __init__(self) -> None:
        super().__init__()
        self.early, self.last = nn.BatchNorm1d(8), nn.BatchNorm1d(3)
        self.stem = nn.Linear(6, 8)
        self.head = nn.Sequential(nn.Linear(8, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
        self.end = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.last(self.head(self.early(self.stem(x)))))


class Neck(nn.Module):
    """The BNNeck of re-identification: the classifier reads normalised features."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.neck, self.fc = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.neck(self.stem(x)))


class Signal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.default_cfg = {"input_size": (3, 16)}
        self.conv, self.norm, self.fc = nn.Conv1d(3, 8, 3, padding=1), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.norm(self.conv(x)).mean(2))


class Maps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem_map, self.body = nn.Conv2d(3, 8, 1), nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8))
        self.fc = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.body(self.stem_map(x)).mean((2, 3)))


def twins(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    return model.train(), copy.deepcopy(model).train()


def running(model: nn.Module) -> list[Tensor]:
    return [buffer for name, buffer in model.named_buffers() if "batchformer" not in name]


@pytest.mark.parametrize(
    ("make", "before"), [(Behind, "head"), (Behind, ["head"]), (Neck, "neck")], ids=["path", "list", "the norm itself"]
)
@pytest.mark.parametrize("batch_norm", ["separate", "joint"])
def test_before_a_head(make: type[nn.Module], before: str | list[str], batch_norm: str) -> None:
    model, twin = twins(make())
    if make is Behind:
        model.default_cfg = {"input_size": (6,)}
    x = torch.randn(7, 6)
    attachment = bf.attach(model, before, heads=2, dropout=0.0, batch_norm=batch_norm)
    outputs, expected = model(x), twin(x)
    separate = batch_norm == "separate"
    assert outputs.shape == (14, 3)
    assert torch.allclose(outputs[:7], expected, atol=1e-5) == separate
    same = [torch.allclose(one, other, atol=1e-6) for one, other in zip(running(model), running(twin), strict=True)]
    assert all(same) == separate
    plain = attachment.detach()
    assert all("forward" not in part.__dict__ for part in plain.modules())


def test_split_streams_are_kept_apart_too() -> None:
    model, twin = twins(Neck())
    x = torch.randn(7, 6)
    bf.attach(model, "neck", heads=2, dropout=0.0, streams="split")
    outputs = model(x)
    assert torch.allclose(outputs[:4], twin(x[:4]), atol=1e-5)
    torch.testing.assert_close(running(model), running(twin))


@pytest.mark.parametrize("place", [{"before": "head"}, {"after": ["stem_map"]}])
def test_converting_to_sync_batch_norm_after_attach_keeps_them_apart(place: dict) -> None:
    model = Behind() if "before" in place else Maps()
    model, twin = twins(model)
    x = torch.randn(7, 6) if "before" in place else torch.randn(4, 3, 8, 8)
    model.default_cfg = {"input_size": tuple(x.shape[1:])}
    attachment = bf.attach(model, heads=2, dropout=0.0, **place)
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    rows = len(x)
    torch.testing.assert_close(converted(x)[:rows], twin(x))
    torch.testing.assert_close(running(converted), running(twin))
    attachment.detach()
    assert all("forward" not in part.__dict__ for part in converted.modules())


@pytest.mark.traced
@pytest.mark.parametrize("replaced", ["all", "one", "by something else"])
def test_what_was_replaced_after_attach_is_followed_where_it_is_a_batch_norm(replaced: str) -> None:
    model, twin = twins(Behind())
    model.default_cfg = {"input_size": (6,)}
    bf.attach(model, "head", heads=2, dropout=0.0)
    x = torch.randn(7, 6)
    if replaced == "by something else":
        model.head[1] = twin.head[1] = nn.Identity()
        torch.testing.assert_close(model(x)[:7], twin(x))
        return
    if replaced == "one":
        model.end = nn.SyncBatchNorm.convert_sync_batchnorm(model.end)
        called = model
    else:
        called = torch.compile(nn.SyncBatchNorm.convert_sync_batchnorm(model), backend="eager")
    torch.testing.assert_close(called(x)[:7], twin(x))
    torch.testing.assert_close(running(model), running(twin))


class Beside(nn.Module):
    """What is registered after the head and called later, but not behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.other = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.stem(x)
        return self.head(x), self.other(x)


def test_a_branch_that_the_second_stream_does_not_reach_stays_as_it_is() -> None:
    model, twin = twins(Beside())
    x = torch.randn(7, 6)
    bf.attach(model, "head", heads=2, dropout=0.0, example_inputs=x)
    torch.testing.assert_close(model(x)[1], twin(x)[1])
    torch.testing.assert_close(running(model), running(twin))


class Auxiliary(Maps):
    """A second head on features of before the insertion, run last, as in DeepLab."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), self.second(x)


@pytest.mark.parametrize("streams", ["duplicate", "split"])
def test_behind_an_insertion_too_only_what_both_streams_reach_is_kept_apart(streams: str) -> None:
    model, twin = twins(Auxiliary())
    x = torch.randn(4, 3, 8, 8)
    bf.attach(model, after=["stem_map"], heads=2, dropout=0.0, streams=streams)
    plain, second = model(x)[0][: 4 if streams == "duplicate" else 2], model(x)[1]
    for _ in range(2):
        expected = twin(x)[1]
    torch.testing.assert_close(second, expected)
    torch.testing.assert_close(model.second.running_var, twin.second.running_var)
    fresh = Auxiliary().train()
    fresh.load_state_dict(twin.state_dict())
    torch.testing.assert_close(plain, fresh(x[: len(plain)])[0])


def test_a_model_that_cannot_be_run_dry_is_attached_to_all_the_same() -> None:
    model = Beside().train()
    bf.attach(model, "head", heads=2)
    assert model(torch.randn(7, 6))[0].shape == (14, 3)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_split_streams_of_too_few_rows_for_statistics_go_together(rows: int) -> None:
    model = Neck().train() if rows > 1 else Neck().eval()
    bf.attach(model, "neck", heads=2, streams="split")
    assert model(torch.randn(rows, 6)).shape == (rows, 3)


def test_what_goes_with_after_only_is_refused_before_a_head() -> None:
    with pytest.raises(UserError, match=r"mask_padding=True needs after="):
        bf.attach(Neck(), "neck", heads=2, mask_padding=True)
    with pytest.raises(UserError, match=r"batch_norm='none' must be"):
        bf.attach(Neck(), "neck", heads=2, batch_norm="none")


@pytest.mark.parametrize("place", ["conv", "norm"])
def test_a_signal_has_its_channels_first(place: str) -> None:
    model, twin = twins(Signal())
    attachment = bf.attach(model, after=[place], heads=2, dropout=0.0)
    assert attachment.points[0].module.dim == 8
    x = torch.randn(5, 3, 16)
    outputs = model(x)
    torch.testing.assert_close(outputs[:5], twin(x))
    # a position is a place in time: what another sample does there is seen, what it does elsewhere is not
    features = twin.conv(x) if place == "conv" else twin.norm(twin.conv(x))
    related = attachment.points[0].site.related(features)[5:]
    moved = features.clone()
    moved[0, :, 3] += 1.0
    changed = (attachment.points[0].site.related(moved)[5:] - related).abs().amax(1) > 1e-6
    assert changed[:, 3].all()
    assert not changed[:, [0, 1, 2, *range(4, 16)]].any()


def test_a_batch_norm_without_running_statistics_keeps_the_streams_apart() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8, track_running_stats=False), nn.Flatten(), nn.Linear(8 * 16, 5)
    ).train()
    model.default_cfg = {"input_size": (3, 4, 4)}
    plain, images = copy.deepcopy(model), torch.randn(3, 3, 4, 4)
    attachment = bf.attach(model, after=["0"], heads=2, dropout=0.0)
    torch.testing.assert_close(attachment.plain(model(images)), plain(images))


def test_a_batch_norm_of_training_alone_keeps_the_streams_apart() -> None:
    torch.manual_seed(0)
    model = AuxiliaryHead().train()
    plain, images = copy.deepcopy(model), torch.randn(4, 3, 8, 8)
    attachment = bf.attach(model, after=["block"], heads=2, dropout=0.0)
    for found, wanted in zip(attachment.plain(model(images)), plain(images), strict=True):
        torch.testing.assert_close(found, wanted)
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(getattr(model.auxiliary[0], name), getattr(plain.auxiliary[0], name))
    attachment.detach()
    joint = bf.attach(model, after=["block"], batch_norm="joint", heads=2, dropout=0.0)
    assert not torch.allclose(joint.plain(model(images))[1], plain(images)[1])
