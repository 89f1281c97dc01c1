"""attach and detach beyond the behaviour suite: places, several heads, adapted heads."""

from __future__ import annotations

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import batchformer as bf
from batchformer.errors import UserError

from .small_models import PLACES, TOKENS, Net, TwoHeads, small


class Mapped(nn.Module):
    """A 1x1 convolution that scores every pixel, then the mean (as SqueezeNet does)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.classifier = nn.Sequential(nn.Dropout(0.0), nn.Conv2d(8, 4, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.stem(x)).mean((2, 3))


def test_heads_that_read_one_feature_share_one_module_computed_once() -> None:
    model = TwoHeads().train()
    attachment = bf.attach(model, before=["head_b", "head_a"])
    assert [point.paths for point in attachment.points] == [("head_a", "head_b")]
    seen: list[Tensor] = []
    for insertion in attachment.points[0].insertions:
        kept = insertion.previous or type(insertion.layer).forward.__get__(insertion.layer)
        insertion.previous = lambda x, kept=kept: (seen.append(x), kept(x))[1]
    a, b = model(torch.randn(5, 6))
    assert (len(a), len(b)) == (10, 10)
    assert seen[0] is seen[1]  # dropout 0.5: two computations could not agree
    assert attachment.points[0].insertions[0].feature.streams is None


def test_heads_that_read_different_features_get_a_module_each() -> None:
    model = timm.create_model("deit_tiny_distilled_patch16_224", num_classes=3, img_size=32)
    attachment = bf.attach(model)
    assert [point.paths for point in attachment.points] == [("head",), ("head_dist",)]
    assert attachment.points[0].module is not attachment.points[1].module


def test_heads_that_read_different_features_share_a_module_where_asked() -> None:
    model = timm.create_model("deit_tiny_distilled_patch16_224", num_classes=3, img_size=32)
    attachment = bf.attach(model, share=True, dropout=0.0)
    first, second = (point.module for point in attachment.points)
    assert first is second
    assert len(list(attachment.parameters())) == len(list(first.parameters()))
    x = model.train().forward_features(torch.randn(4, 3, 32, 32))
    model.set_distilled_training(True)
    by_class, by_token = model.forward_head(x)
    for outputs, head, token in ((by_class, model.head, 0), (by_token, model.head_dist, 1)):
        related = first.relate(x[:, token])
        torch.testing.assert_close(outputs[4:], F.linear(related, head.weight, head.bias))


def test_heads_of_different_widths_cannot_share() -> None:
    class Widths(TwoHeads):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            wide = self.trunk(x)
            return self.head_a(wide), self.narrow(wide[:, :4])

    model = Widths()
    model.narrow = nn.Linear(4, 2)
    with pytest.raises(UserError, match="share=True needs features of one width"):
        bf.attach(model, before=["head_a", "narrow"], share=True, heads=2)


def test_a_convolution_that_scores_pixels_is_related_at_every_pixel() -> None:
    model = Mapped().train()
    attachment = bf.attach(model, dropout=0.0, heads=2)
    assert attachment.paths == ("classifier.1",)
    x = torch.randn(4, 3, 6, 6)
    features = model.stem(x)
    related = attachment.points[0].module.relate(features.movedim(1, -1)).movedim(-1, 1)
    scores = F.conv2d(related, model.classifier[1].weight, model.classifier[1].bias).mean((2, 3))
    torch.testing.assert_close(model(x)[4:], scores)


def test_a_module_without_a_width_of_its_own_is_seen_by_a_dry_run_that_leaves_no_state() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 3)).train()
    model[3].eval()
    buffers = {k: v.clone() for k, v in model.named_buffers()}
    random = torch.get_rng_state()
    attachment = bf.attach(model, before="3", dim=8, heads=2)
    attachment.detach()
    torch.set_rng_state(random)
    attachment = bf.attach(model, before="2", heads=2)
    assert attachment.points[0].module.dim == 8
    attachment.detach()
    assert all(torch.equal(v, buffers[k]) for k, v in model.named_buffers())
    assert [module.training for module in model] == [True, True, True, False, True]


def test_every_keyword_of_the_module_passes_through() -> None:
    keywords = {
        "heads": 2,
        "hidden_dim": 5,
        "dropout": 0.1,
        "layers": 2,
        "norm": "pre",
        "group_size": 3,
        "streams": "split",
    }
    module = bf.attach(small(), **keywords).points[0].module
    layer = module.layers[1]
    assert (layer.self_attn.heads, layer.linear1.out_features, layer.dropout) == (2, 5, 0.1)
    assert (len(module.layers), layer.norm, layer.self_attn.group_size, module.streams) == (2, "pre", 3, "split")


def test_parameters_have_the_models_device_and_dtype() -> None:
    attachment = bf.attach(small().double(), heads=2)
    assert all(p.dtype == torch.float64 for p in attachment.parameters())


def test_the_module_alone_is_saved_and_loaded() -> None:
    first, second = bf.attach(small(), heads=2), bf.attach(small(), heads=2)
    second.load_state_dict(first.state_dict())
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


def test_an_own_instance_forward_of_the_user_survives() -> None:
    model = small()
    model[2].forward = lambda x: x.sum(dim=1)
    own = model[2].forward
    attachment = bf.attach(model, heads=2)
    assert model.train()(torch.randn(4, 6)).shape == (8,)
    attachment.detach()
    assert model[2].forward is own


def test_a_model_that_loses_the_second_stream_is_told() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x)[: len(x)]

    model = Keeps().train()
    bf.attach(model, heads=2)
    with pytest.raises(UserError, match=r"8 rows left the module in training and 4 left Keeps"):
        model(torch.randn(4, 6))


@pytest.mark.parametrize("by_name", [False, True])
def test_a_model_that_never_calls_the_layer_is_told(by_name: bool) -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.fc.weight)

    model, x = Functional().train(), torch.randn(4, 6)
    attachment = bf.attach(model, heads=2)
    with pytest.raises(UserError, match="without calling the layer"):
        model(x=x) if by_name else model(x)
    with attachment.disabled():
        assert len(model(x)) == 4


def test_two_places_on_one_way_are_told() -> None:
    model = small().train()
    bf.attach(model, before=["0", "2"], heads=2)
    with pytest.raises(UserError, match="opened twice in one forward"):
        model(torch.randn(4, 6))


def test_inputs_that_are_lists_of_images_work() -> None:
    class Lists(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 3)

        def forward(self, images: list[Tensor]) -> Tensor:
            return self.fc(input=torch.stack(images))  # by name: the insertion must find it

    model = Lists().train()
    bf.attach(model, heads=2)
    assert len(model([torch.randn(6) for _ in range(5)])) == 10
    assert len(model.eval()([torch.randn(6) for _ in range(5)])) == 5


def test_an_auxiliary_head_that_branches_off_earlier_stays_plain() -> None:
    import torchvision

    model = torchvision.models.googlenet(num_classes=3, aux_logits=True, init_weights=False).train()
    attachment = bf.attach(model)
    outputs = model(torch.randn(2, 3, 64, 64))
    assert [len(t) for t in outputs] == [4, 2, 2]
    plain = attachment.plain(outputs)
    assert type(plain) is type(outputs)
    assert [len(t) for t in plain] == [2, 2, 2]


def test_after_detach_plain_changes_nothing() -> None:
    attachment = bf.attach(small().train(), heads=2)
    model = attachment.detach()
    outputs = model(torch.randn(4, 6))
    assert attachment.plain(outputs) is outputs


@pytest.mark.parametrize("place", PLACES, ids=["before", "after"])
@pytest.mark.parametrize("streams", ["duplicate", "split"])
def test_outputs_of_one_stream_are_told_from_those_of_two_also_in_training_mode(place: dict, streams: str) -> None:
    model = Net()
    attachment = bf.attach(model, **place, streams=streams)
    evaluated = model.eval()(TOKENS)
    outputs = model.train()(TOKENS)
    plain = attachment.plain(outputs)
    assert len(plain) == (4 if streams == "duplicate" else 2)
    assert attachment.plain(plain) is plain
    assert attachment.related(plain) is None
    model(TOKENS[:3])  # an epoch's last batch, or that of another view: earlier outputs are still understood
    assert len(attachment.plain(outputs)) == len(plain)
    if streams == "duplicate":
        assert attachment.plain(evaluated) is evaluated
    with pytest.raises(UserError, match=r"have 24 rows.*right after the forward"):
        attachment.plain(outputs.repeat(24 // len(outputs), 1))  # of several processes, or of several batches


def test_a_forward_wrapped_by_somebody_after_attach_runs_plain_after_detach() -> None:
    model = small().train()
    attachment = bf.attach(model, heads=2)
    ours = model[2].forward
    model[2].forward = lambda x: ours(x) + 0.0
    assert len(model(torch.randn(4, 6))) == 8
    attachment.detach()
    assert len(model(torch.randn(4, 6))) == 4


def test_a_container_before_which_the_module_stands_still_runs() -> None:
    model, x = nn.Sequential(nn.Linear(6, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 3))), torch.randn(4, 6)
    expected = model.eval()(x)
    attachment = bf.attach(model, before="1", dim=8, heads=2)
    assert torch.equal(model(x), expected)
    assert len(model.train()(x)) == 8
    attachment.detach()
    assert [name for name, _ in model.named_modules()] == ["", "0", "1", "1.0", "1.1"]


def test_several_usual_names_are_not_guessed_between() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.classifier = nn.Linear(6, 8), nn.Linear(8, 3)

    with pytest.raises(UserError, match="'fc' and 'classifier'"):
        bf.attach(Both())


def test_a_head_of_several_layers_ends_in_the_classifier() -> None:
    model = timm.create_model("resnet18", num_classes=3)
    model.fc = nn.Sequential(nn.Linear(512, 16), nn.ReLU(), nn.Linear(16, 3))
    assert bf.attach(model).paths == ("fc.2",)


def test_a_layer_with_two_names_is_found_by_either() -> None:
    model = nn.Module()
    model.one = model.two = nn.Linear(4, 2)
    assert bf.attach(model, before="two", heads=2).paths == ("two",)


def test_the_module_has_the_precision_of_its_layer() -> None:
    model = nn.Sequential(nn.Linear(6, 8).bfloat16(), nn.ReLU(), nn.Linear(8, 3))
    assert next(bf.attach(model, heads=2).parameters()).dtype == torch.float32


def test_a_lazy_layer_is_asked_to_be_filled_first() -> None:
    model = nn.Sequential(nn.Flatten(), nn.LazyLinear(3))
    with pytest.raises(UserError, match="LazyLinear has no weights yet"):
        bf.attach(model, before="1", heads=2)


def test_places_are_found_by_any_of_their_names() -> None:
    model = Net().train()
    by_alias = bf.attach(model, after="layers.1", heads=2, example_inputs=TOKENS)
    assert len(model(TOKENS)) == 8
    by_alias.detach()
    assert len(model(TOKENS)) == 4


class Adapted(nn.Module):
    """A layer with a low-rank part beside it, as PEFT wraps it."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = layer
        self.lora_A, self.lora_B = nn.Linear(layer.in_features, 4), nn.Linear(4, layer.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))

    def get_base_layer(self):
        return self.base_layer


def test_the_module_stands_before_an_adapted_classifier_not_inside_the_adapter() -> None:
    model = timm.create_model("resnet18", num_classes=3).train()
    model.fc = Adapted(model.fc)
    attachment = bf.attach(model)
    assert [(point.paths, point.module.dim) for point in attachment.points] == [(("fc",), 512)]
    assert len(model(torch.randn(2, 3, 32, 32))) == 4


def test_a_layer_that_is_only_called_like_an_adapters_is_none() -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base_layer, self.out = nn.Linear(512, 16), nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.base_layer(x).relu())

    model = timm.create_model("resnet18", num_classes=3)
    model.fc = Head()
    assert bf.attach(model).paths == ("fc.out",)


class _CropsOf(nn.Module):
    """A head for the image, and one for three crops of it."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.aux = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.head(x), self.aux(x.repeat(3, 1))


def test_rows_of_each_place_are_known() -> None:
    attachment = bf.attach(_CropsOf().train(), before=["head", "aux"], heads=2)
    whole, crops = attachment.model(torch.randn(4, 6))
    assert len(attachment.plain(whole)) == 4
    assert len(attachment.plain(crops)) == 12


def test_a_distillation_head_that_was_taken_out_is_none() -> None:
    model = timm.create_model("deit_tiny_distilled_patch16_224", num_classes=3, depth=1)
    model.head_dist = None
    assert bf.find_classifiers(model) == ["head"]
