"""MAE with and without BatchFormerV2 in its decoder."""

import pytest
import timm
import torch

import batchformer as bf
from batchformer.data import DigitsLT, ImageNet
from batchformer.data.sets import write_miniature
from batchformer.errors import UserError
from batchformer.losses import masked_pixel_loss
from batchformer.metrics.features import knn_scores, linear_scores
from batchformer.models.mae import MaskedAutoencoder, positions
from batchformer.tasks import MAE
from batchformer.tasks.self_supervised.task import Pretraining

from .conftest import TinyData, make_trainer

SMALL = {"img_size": 8, "patch_size": 2, "embed_dim": 16, "depth": 2, "num_heads": 2}
DECODER = {"dim": 16, "depth": 2, "heads": 2}


def autoencoder(**options) -> MaskedAutoencoder:
    torch.manual_seed(0)
    encoder = timm.create_model("vit_tiny_patch16_224", num_classes=0, **SMALL)
    return MaskedAutoencoder(encoder, 16, 2, 2, **options)


def task(**options) -> MAE:
    return MAE("vit_tiny_patch16_224", SMALL, decoder=DECODER, batchformer={"heads": 2}, **options)


def fit(model: MAE, data=None, **options):
    trainer = make_trainer(**{"max_epochs": 1, "limit_val_batches": 0, **options})
    trainer.fit(model, datamodule=data or TinyData(size=8))
    return trainer


class TestModel:
    def test_patches_go_back_to_the_image_and_lie_row_by_row(self):
        net, images = autoencoder(), torch.randn(2, 3, 8, 8)
        patches = net.patchify(images)
        assert torch.equal(net.unpatchify(patches), images)
        for row in range(4):
            for column in range(4):
                cut = images[:, :, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
                assert torch.equal(patches[:, 4 * row + column], cut.permute(0, 2, 3, 1).flatten(1))

    def test_positions_differ_everywhere_and_are_fixed(self):
        net = autoencoder()
        for table in (net.encoder.pos_embed[0, 1:], net.decoder_positions[0, 1:]):
            assert not table.requires_grad
            assert len(torch.unique(table, dim=0)) == 16
        assert not net.encoder.pos_embed[:, 0].any()
        assert positions((2, 3), 8, 1).shape == (1, 7, 8)

    def test_a_masked_patch_is_not_seen_and_a_kept_one_is(self):
        net, images, noise = autoencoder().eval(), torch.randn(1, 3, 8, 8), torch.rand(1, 16)
        mask = net.mask(noise)[0].bool()
        assert mask.sum() == 12
        assert torch.equal(noise[0][~mask].max() <= noise[0][mask].min(), torch.tensor(True))
        before = net(images, noise)
        for hidden in (True, False):
            patch = int((mask == hidden).nonzero()[0])
            changed = net.patchify(images).clone()
            changed[0, patch] += 1.0
            same = torch.equal(net(net.unpatchify(changed), noise), before)
            assert same == hidden

    def test_kept_patches_stand_at_their_own_places(self):
        """The order in which patches were kept decides nothing: only noise's smallest ones do."""
        net, images = autoencoder().eval(), torch.randn(1, 3, 8, 8)
        noise = torch.rand(1, 16)
        kept = ~net.mask(noise)[0].bool()
        other = noise.clone()
        other[0, kept] = noise[0, kept].flip(0)  # the same patches in another order
        torch.testing.assert_close(net(images, other), net(images, noise), atol=1e-5, rtol=1e-5)

    @pytest.mark.parametrize("after", [["decoder_blocks.0", "decoder_blocks.1"], ["encoder.blocks.0"]])
    def test_the_module_doubles_rows_and_leaves_no_trace(self, after):
        net, images, noise = autoencoder(), torch.randn(3, 3, 8, 8), torch.rand(3, 16)
        keys, plain = list(net.state_dict()), net(images, noise)
        handle = bf.attach(net, after=after, heads=2, example_inputs={"images": images, "noise": noise})
        rows = net.train()(images, noise)
        torch.testing.assert_close(rows[:3], plain, atol=1e-5, rtol=1e-5)
        assert (rows[3:] - plain).abs().max() > 1e-3
        assert torch.equal(net.eval()(images, noise), plain)
        handle.detach()
        assert list(net.state_dict()) == keys

    def test_what_does_not_fit_is_refused(self):
        with pytest.raises(UserError, match="VisionTransformer"):
            MaskedAutoencoder(timm.create_model("resnet10t", num_classes=0))
        with pytest.raises(UserError, match="mask_ratio"):
            autoencoder(mask_ratio=1.0)
        with pytest.raises(UserError, match=r"mask_ratio=0\.0 must be above 0"):
            autoencoder(mask_ratio=0.0)
        encoder = autoencoder().encoder
        MaskedAutoencoder(encoder, 12, 1, 3)
        for dim, heads in ((12, 5), (6, 3)):
            with pytest.raises(UserError, match=f"decoder_dim={dim} must be divisible by decoder_heads={heads} and by"):
                MaskedAutoencoder(encoder, dim, 1, heads)
        assert autoencoder(mask_ratio=0.9).kept == 1  # of 16
        with pytest.raises(UserError, match="leaves none"):
            autoencoder(mask_ratio=0.99)
        with pytest.raises(UserError, match="images of 9 x 9 pixels are no whole patches of 2 x 2"):
            MaskedAutoencoder(timm.create_model("vit_tiny_patch16_224", **{**SMALL, "img_size": 9}))


class TestLoss:
    def test_it_is_the_formula_and_both_streams_have_the_same_targets(self):
        torch.manual_seed(0)
        patches, mask = torch.randn(2, 3, 4), torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]])
        predictions = torch.randn(4, 3, 4, requires_grad=True)
        expected = []
        for row in range(4):
            image, errors = row % 2, []
            for patch in range(3):
                pixels = patches[image, patch]
                wanted = (pixels - pixels.mean()) / (pixels.var(unbiased=True) + 1e-6).sqrt()
                if mask[image, patch]:
                    errors.append(((predictions[row, patch] - wanted) ** 2).mean())
            expected.append(sum(errors) / len(errors))
        found = masked_pixel_loss(predictions, patches, mask)
        torch.testing.assert_close(found, torch.stack(expected))
        (gradient,) = torch.autograd.grad(found.mean(), predictions)
        assert not gradient[:, :, :][mask.repeat(2, 1) == 0].any()

    def test_pixels_as_they_are_by_option(self):
        patches = torch.randn(1, 2, 4)
        assert masked_pixel_loss(patches, patches, torch.ones(1, 2), normalise=False).item() == 0
        assert masked_pixel_loss(patches, patches, torch.ones(1, 2)).item() > 0


class TestTask:
    @pytest.mark.parametrize("method", ["baseline", "batchformer"])
    def test_two_steps_change_all_that_is_trained(self, method):
        model = task(method=method)
        model.construct(TinyData(size=8))
        before = {name: p.detach().clone() for name, p in model.net.named_parameters()}
        metrics = fit(model, limit_train_batches=2).callback_metrics
        still = [name for name, p in model.net.named_parameters() if torch.equal(p, before[name])]
        assert still == ["encoder.pos_embed"]
        assert ("train/loss_related" in metrics) == (method == "batchformer")

    def test_no_label_reaches_training(self):
        trained = []
        for shift in (0, 1):
            data, model = TinyData(size=8), task()
            data.labels = (data.labels + shift) % 4
            fit(model, data)
            trained.append(dict(model.net.named_parameters()))
        assert all(torch.equal(trained[0][name], trained[1][name]) for name in trained[0])
        assert "labels" not in model.prepare({"images": torch.zeros(1), "labels": torch.zeros(1)}, 0)

    def test_validation_judges_features_of_unmasked_images(self):
        model = task(judge={"neighbours": 3, "linear": True, "images": 100})
        metrics = fit(model, DigitsLT(batch_size=64), limit_val_batches=1.0, limit_train_batches=1).callback_metrics
        assert 10 < metrics["val/knn"] <= 100
        assert 10 < metrics["val/linear"] <= 100
        assert metrics["val/loss"] > 0
        assert len(model.per_class) == 10

    def test_images_that_are_searched_are_of_all_classes(self, tmp_path):
        """Files are sorted by class: the first ones would be of few."""
        data = ImageNet(str(write_miniature("imagenet", tmp_path / "data")), image_size=8, batch_size=8, workers=0)
        loader = data.spaced_train_loader(40)
        labels = [label for batch in loader for label in batch["labels"].tolist()]
        assert len(labels) == 40 < data.train_images
        assert set(labels) == set(range(data.num_classes))
        assert sum(len(batch["labels"]) for batch in data.spaced_train_loader(None)) == data.train_images

    def test_the_exported_network_is_the_stock_backbone(self):
        model = task()
        model.construct(TinyData(size=8))
        encoder = model.trained_network()
        fresh = model.plain_network()
        fresh.load_state_dict(encoder.state_dict(), strict=True)
        assert model.export_notes()[1].startswith("timm.create_model('vit_tiny_patch16_224', num_classes=0")

    def test_spread_is_one_of_random_directions_and_zero_of_equal_ones(self):
        torch.manual_seed(0)
        model = task()
        assert Pretraining.spread_of(model, torch.randn(4096, 32)).item() == pytest.approx(1.0, abs=0.02)
        assert Pretraining.spread_of(model, torch.ones(8, 4)).item() == pytest.approx(0.0, abs=1e-6)


class TestFeatures:
    def test_votes_are_those_of_the_slow_rule(self):
        torch.manual_seed(0)
        queries, known, labels = torch.randn(5, 4), torch.randn(20, 4), torch.randint(3, (20,))
        found = knn_scores(queries, known, labels, 3, neighbours=6, temperature=0.2)
        for query, votes in zip(queries, found, strict=True):
            cosines = [float(torch.cosine_similarity(query, one, dim=0)) for one in known]
            nearest = sorted(range(20), key=lambda i: -cosines[i])[:6]
            expected = torch.zeros(3)
            for i in nearest:
                expected[labels[i]] += torch.tensor(cosines[i] / 0.2).exp()
            torch.testing.assert_close(votes / votes.sum(), expected / expected.sum(), atol=1e-5, rtol=1e-4)

    def test_the_linear_classifier_is_at_the_minimum_of_its_loss(self):
        torch.manual_seed(0)
        known = torch.randn(60, 3)
        labels = (known @ torch.randn(3, 4)).argmax(1)
        logits = linear_scores(known, known, labels, 4, decay=1e-2, iterations=200)
        # at the minimum the gradient of the mean cross entropy by the bias is 0: mean probability = frequency
        torch.testing.assert_close(
            logits.softmax(1).mean(0), torch.bincount(labels, minlength=4) / 60, atol=1e-3, rtol=0
        )
        assert (logits.argmax(1) == labels).float().mean() > 0.9
