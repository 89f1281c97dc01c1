"""RIDE's networks: what experts share, what they have of their own, and what routing computes."""

import pytest
import torch
from torch import nn

import batchformer as bf
from batchformer.errors import UserError
from batchformer.models import NormedLinear, RoutedExperts, create_backbone, expert_network
from batchformer.models.ride import experts_used, means_so_far

IMAGES = torch.randn(5, 3, 16, 16, generator=torch.Generator().manual_seed(0))
SMALL = {"widths": (4, 8, 16)}


def small(**options):
    torch.manual_seed(0)
    return expert_network("resnet20", 4, **{**SMALL, **options})


def shapes(module):
    return {name: tuple(value.shape) for name, value in module.state_dict().items()}


class TestParts:
    def test_cifar_experts_share_the_first_stage_and_are_three_quarters_as_wide(self):
        net = expert_network("resnet32", 100)
        assert list(dict(net.shared.named_children())) == ["conv1", "bn1", "act1", "layer1"]
        assert [stage[-1].conv2.out_channels for stage in (net.shared.layer1, net.experts[2].layer2)] == [16, 24]
        assert net.experts[0].layer3[-1].conv2.out_channels == net.dim == 48
        assert len(net.experts) == len(net.classifiers) == 3
        assert all(isinstance(layer, NormedLinear) and layer.scale == 30 for layer in net.classifiers)
        torch.testing.assert_close(net.classifiers[1].weight.norm(dim=1), torch.ones(100))
        assert not torch.equal(net.experts[0].layer2[0].conv1.weight, net.experts[1].layer2[0].conv1.weight)

    @pytest.mark.parametrize(
        ("name", "dim"), [("resnet10", 384), ("resnet50", 1536), ("resnet152", 1536), ("seresnet18", 384)]
    )
    def test_imagenet_experts_share_two_stages(self, name, dim):
        with torch.device("meta"):
            net = expert_network(name, 10, experts=2)
            whole = create_backbone(name, 10)
        assert list(dict(net.shared.named_children()))[-2:] == ["layer1", "layer2"]
        assert (net.dim, net.classifiers[0].in_features) == (dim, dim)
        early = {key: shape for key, shape in shapes(whole).items() if not key.startswith(("layer3", "layer4", "fc"))}
        assert shapes(net.shared) == early

    def test_with_full_width_the_experts_are_the_stages_of_the_backbone(self):
        net, whole = small(width=1.0, experts=2), create_backbone("resnet20", 4, **SMALL)
        for expert in net.experts:
            own = {key: shape for key, shape in shapes(whole).items() if key.startswith(("layer2", "layer3"))}
            assert shapes(expert) == own

    def test_an_expert_by_itself_is_the_backbone_with_its_stages(self):
        """Stem, stages and pooling are those of the plain network."""
        net = small(width=1.0, experts=2).eval()
        whole = create_backbone("resnet20", 4, **SMALL).eval()
        whole.load_state_dict({**net.shared.state_dict(), **net.experts[1].state_dict()}, strict=False)
        features = whole.forward_head(whole.forward_features(IMAGES), pre_logits=True)
        torch.testing.assert_close(net.experts[1](net.shared(IMAGES)), features)

    def test_dropout_and_two_stages_only(self):
        net = expert_network("test_resnet", 4, drop_rate=0.3)
        assert net.experts[0].dropout.p == 0.3
        assert list(dict(expert_network("resnet20", 4, widths=(16, 32)).experts[0].named_children())) == [
            "layer2", "global_pool"
        ]  # fmt: skip

    @pytest.mark.parametrize(
        ("name", "options", "told"),
        [
            ("vit_tiny_patch16_224", {"img_size": 32}, "the late stages of a ResNet, and vit_tiny_patch16_224 is Vis"),
            ("resnet20", {"widths": (4, 4, 4), "experts": 4}, "4 experts are more than the width allows.*has 3 chan"),
            ("resnet20", {"widths": (16,)}, "two stages or more"),
            ("resnet20", {"widths": (4, 4)}, "layer2 of an expert has 3 channels and layer1 4, which shortcuts"),
        ],
    )
    def test_what_cannot_be_split_is_told(self, name, options, told):
        with pytest.raises(UserError, match=told):
            expert_network(name, 4, **options)


class TestForward:
    def test_training_gives_every_expert_and_eval_their_mean(self):
        net = small()
        for layer in net.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.momentum = 0.0
                layer.train(False)
        both = net(IMAGES)
        assert both.shape == (5, 3, 4)
        torch.testing.assert_close(net.eval()(IMAGES), both.mean(1))

    def test_the_loss_of_an_expert_reaches_the_shared_stages_and_no_other_expert(self):
        for k in range(3):
            net = small()
            net(IMAGES)[:, k].logsumexp(1).sum().backward()
            reached = {name for name, p in net.named_parameters() if p.grad is not None and p.grad.any()}
            own = {
                name for name, _ in net.named_parameters() if name.startswith((f"experts.{k}.", f"classifiers.{k}."))
            }
            shared = {name for name, _ in net.named_parameters() if name.startswith("shared.")}
            assert reached == own | shared

    def test_the_gradient_of_the_shared_stages_is_the_sum_over_the_experts(self):
        net = small().double()
        logits = net(IMAGES.double())
        parts = [
            torch.autograd.grad(logits[:, k].logsumexp(1).sum(), net.shared.conv1.weight, retain_graph=True)[0]
            for k in range(3)
        ]
        (whole,) = torch.autograd.grad(logits.logsumexp(2).sum(), net.shared.conv1.weight)
        assert all(part.abs().max() > 0 for part in parts)
        torch.testing.assert_close(whole, sum(parts))

    def test_one_graph_of_the_compiler(self):
        net = small()
        bf.attach(net, share=True, heads=1)
        torch.manual_seed(1)
        compiled = torch.compile(net, fullgraph=True, backend="eager")(IMAGES)
        torch.manual_seed(1)
        assert compiled.shape == (10, 3, 4)
        torch.testing.assert_close(compiled, net(IMAGES))

    @pytest.mark.parametrize("name", ["resnet20", "test_resnet"])
    def test_the_cost_is_that_of_the_parts(self, name):
        net = expert_network(name, 4, experts=2).eval()
        one, two = net.giga_multiply_adds(IMAGES[:1])
        seen = []

        def count(layer, _, out):
            per_value = layer.weight[0].numel()
            seen.append(per_value * out[0].numel())

        for part in (net.shared, net.experts[0], net.classifiers[0]):
            for layer in part.modules():
                if isinstance(layer, nn.Conv2d | nn.Linear):
                    layer.register_forward_hook(count)
        net.classifiers[0](net.experts[0](net.shared(IMAGES[:1])))
        assert one == pytest.approx(sum(seen) / 1e9)
        assert one < two < 2 * one


class TestModule:
    @pytest.mark.parametrize(("streams", "rows"), [("duplicate", 10), ("single", 5)])
    def test_one_module_stands_before_every_classifier(self, streams, rows):
        net = small()
        attachment = bf.attach(net, share=True, heads=1, dropout=0.0, streams=streams)
        assert attachment.paths == ("classifiers.0", "classifiers.1", "classifiers.2")
        module = attachment.points[0].module
        assert all(point.module is module for point in attachment.points)
        assert len(attachment.modules) == 1
        features = [expert(net.shared(IMAGES)) for expert in net.experts]
        logits = net(IMAGES)
        assert logits.shape == (rows, 3, 4)
        for k, (feature, classifier) in enumerate(zip(features, net.classifiers, strict=True)):
            expected = type(classifier).forward(classifier, module.relate(feature))
            torch.testing.assert_close(logits[-5:, k], expected)
        assert torch.equal(attachment.plain(logits), logits[:5])

    def test_its_gradient_is_the_sum_over_the_experts_and_it_leaves_no_trace(self):
        net, twin = small(), small()
        attachment = bf.attach(net, share=True, heads=1, dropout=0.0)
        logits, weight = net(IMAGES), next(attachment.parameters())
        parts = [torch.autograd.grad(logits[:, k].logsumexp(1).sum(), weight, retain_graph=True)[0] for k in range(3)]
        assert all(part.abs().max() > 0 for part in parts)
        torch.testing.assert_close(torch.autograd.grad(logits.logsumexp(2).sum(), weight)[0], sum(parts))
        net.load_state_dict(twin.state_dict(), strict=False)
        assert torch.equal(net.eval()(IMAGES), twin.eval()(IMAGES))
        twin.load_state_dict(attachment.detach().state_dict(), strict=True)


MANY = torch.randn(40, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def routed(threshold=0.5, **options):
    """A router that sends half of the images on after each expert: those whose feature lies above the median."""
    net = small(top=30, threshold=threshold, **options).eval()
    with torch.no_grad():
        net.router.score.weight.zero_()
        net.router.score.bias.fill_(-1e-6)
        hidden = net.shared(MANY)
        for k, layer in enumerate(net.router.features):
            features = nn.functional.normalize(net.experts[k](hidden), dim=1)
            layer.weight.zero_()
            layer.bias.fill_(-1.0)
            layer.weight[k, k] = 1e3
            layer.bias[k] = -1e3 * features[:, k].quantile(0.5)
            net.router.score.weight[0, 4 + k] = 1.0
    return net


class TestRouting:
    def test_where_nobody_leaves_it_is_full_evaluation(self):
        net, full = routed(threshold=0.0), small().eval()
        full.load_state_dict(net.state_dict(), strict=False)
        logits, used = net.routed(IMAGES)
        assert used.tolist() == [3] * 5
        torch.testing.assert_close(logits, full(IMAGES))
        assert torch.equal(net(IMAGES), logits)

    def test_at_one_everybody_leaves_after_the_first(self):
        net = routed(threshold=1.0)
        logits, used = net.routed(IMAGES)
        assert used.tolist() == [1] * 5
        torch.testing.assert_close(logits, net.with_all_experts(IMAGES)[0][:, 0])

    def test_each_image_gets_the_mean_of_the_experts_it_passed_as_if_it_came_alone(self):
        net = routed()
        logits, used = net.routed(MANY)
        every, scores = net.with_all_experts(MANY)
        assert set(used.tolist()) == {1, 2, 3}
        assert torch.equal(experts_used(scores, 0.5), used)
        means = means_so_far(every)
        for row, count in enumerate(used.tolist()):
            torch.testing.assert_close(logits[row], every[row, :count].mean(0))
            torch.testing.assert_close(means[row, count - 1], every[row, :count].mean(0))
            torch.testing.assert_close(net(MANY[row : row + 1])[0], logits[row])

    def test_experts_are_computed_for_the_images_that_go_on(self):
        net = routed()
        seen = []
        for expert in net.experts:
            expert.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
        used = net.routed(MANY)[1]
        assert seen == [40, int((used > 1).sum()), int((used > 2).sum())]
        assert 0 < seen[2] < seen[1] < 40
        seen.clear()
        net.threshold = 1.0
        net(MANY)
        assert seen == [40]

    def test_only_the_router_learns_and_batch_norm_stays(self):
        net = small(top=30).train()
        assert isinstance(net, RoutedExperts)
        before = {name: value.clone() for name, value in net.state_dict().items()}
        logits, scores = net(IMAGES)
        assert (logits.shape, scores.shape) == ((5, 3, 4), (5, 2))
        scores.sum().backward()
        learning = {name for name, p in net.named_parameters() if p.grad is not None}
        assert learning == {name for name in before if name.startswith("router.")}
        assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
        assert net.router.score.in_features == 16 + 4  # no more logits than classes

    def test_the_score_is_that_of_feature_and_sorted_logits(self):
        net = routed()
        features, mean = torch.rand(3, net.dim), torch.randn(3, 4)
        scores = net.router(1, features, mean)
        for row in range(3):
            unit = features[row] / features[row].norm()
            hidden = (net.router.features[1].weight @ unit + net.router.features[1].bias).clamp(min=0)
            given = torch.cat([mean[row].sort(descending=True).values, hidden])
            torch.testing.assert_close(scores[row], net.router.score.weight[0] @ given + net.router.score.bias[0])
