"""What batches hold besides images and labels: further fields, the index, several views, features without images."""

import numpy as np
import pytest
import torch

from batchformer.data import DeviceLoader, DigitsLT, FeatureData, HostLoader, ListFiles
from batchformer.data.augment import batched_augmentation
from batchformer.data.augment.host import array_evaluation, array_transform
from batchformer.data.loading.epoch_loader import images_and_labels, samples_in
from batchformer.data.loading.samples import ArraySamples, FileSamples, LabelledSamples
from batchformer.data.sets import write_miniature
from batchformer.data.sets.arrays import Split
from batchformer.errors import UserError

N, SIZE = 30, 16
MEAN = STD = (0.5, 0.5, 0.5)
IMAGES = torch.randint(0, 256, (N, 3, SIZE, SIZE), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
LABELS = torch.arange(N) % 7
FIELDS = {"domains": torch.arange(N) % 3, "pairs": torch.arange(2 * N).view(N, 2)}


def device_loader(augment="randaugment", fields=None, views=1, index=False, **options):
    return DeviceLoader(
        IMAGES, LABELS, batch_size=8, mean=MEAN, std=STD, augmentation=batched_augmentation(augment, SIZE, 12, 0.5),
        fields=fields, views=views, index=index, **options,
    )  # fmt: skip


def host_loader(augment="randaugment", fields=None, views=1, index=False, training=True, **options):
    make = array_transform if training else array_evaluation
    transform = make(augment, SIZE, 12, MEAN, STD)
    views = views if training else 1
    samples = ArraySamples(IMAGES, LABELS, transform, 0 if training else None, fields=fields, views=views, index=index)
    return HostLoader(samples, batch_size=8, training=training, **options)


def helped_loader(**options):
    return host_loader(workers=1, **options)


BOTH = pytest.mark.parametrize("make", [device_loader, host_loader, helped_loader])


@BOTH
def test_a_batch_is_images_and_labels(make):
    batch = next(iter(make()))
    assert list(batch) == ["images", "labels"]
    assert batch["images"].shape == (8, 3, 12, 12)
    assert batch["labels"].dtype == torch.int64
    assert samples_in(batch) == 8
    assert images_and_labels((1, 2)) == (1, 2), "pairs of foreign loaders"


@BOTH
@pytest.mark.parametrize("training", [True, False])
def test_fields_and_index_belong_to_their_samples(make, training):
    seen = []
    for batch in make(fields=FIELDS, index=True, training=training):
        index = batch["index"]
        assert index.dtype == torch.int64
        assert torch.equal(batch["labels"], LABELS[index])
        for name, values in FIELDS.items():
            assert torch.equal(batch[name], values[index])
        seen += index.tolist()
    assert len(set(seen)) == len(seen) == (24 if training else N)
    plain = next(iter(make(training=training)))
    assert torch.equal(plain["images"], next(iter(make(fields=FIELDS, index=True, training=training)))["images"])


def test_a_field_of_another_length_or_with_a_taken_name_is_refused():
    for fields, said in (({"domains": torch.arange(3)}, "3 rows for 30"), ({"images": LABELS}, "'images'")):
        for make in (device_loader, host_loader):
            with pytest.raises(ValueError, match=said):
                make(fields=fields)


@BOTH
@pytest.mark.parametrize("repeats", [1, 3])
def test_the_first_view_is_what_a_single_view_is_and_the_others_differ(make, repeats):
    single, several = make(repeats=repeats), make(repeats=repeats, views=3)
    for one, three in zip(single, several, strict=True):
        assert "images" not in three
        assert [view.shape for view in three["views"]] == [one["images"].shape] * 3
        assert torch.equal(three["views"][0], one["images"])
        assert torch.equal(three["labels"], one["labels"])
        for a, b in ((0, 1), (0, 2), (1, 2)):
            same = [torch.equal(*pair) for pair in zip(three["views"][a], three["views"][b], strict=True)]
            assert sum(same) <= 2
        assert samples_in(three) == 8


@BOTH
def test_views_do_not_depend_on_where_a_run_was_resumed(make):
    loader, fresh = make(views=2), make(views=2)
    loader.set_epoch(3)
    iterator = iter(loader)
    next(iterator)
    fresh.load_state_dict(loader.state_dict())
    for rest, resumed in zip(iterator, fresh, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(rest["views"], resumed["views"], strict=True))


@BOTH
def test_evaluation_has_one_view(make):
    assert "images" in next(iter(make(views=2, training=False)))


@BOTH
def test_channels_last_reaches_the_views(make):
    batch = next(iter(make(views=2, channels_last=True)))
    assert all(view.is_contiguous(memory_format=torch.channels_last) for view in batch["views"])


@pytest.mark.parametrize("on_device", ["auto", False])
def test_a_data_module_hands_out_views_and_index_on_request(on_device):
    data = DigitsLT(batch_size=16, views=2, index=True, on_device=on_device)
    batch = next(iter(data.train_dataloader()))
    assert list(batch) == ["views", "labels", "index"]
    labels = torch.from_numpy(data._splits["train"].labels)
    assert torch.equal(batch["labels"], labels[batch["index"]])
    assert list(next(iter(data.val_dataloader()))) == ["images", "labels", "index"]
    with pytest.raises(UserError, match=r"data\.views must be at least 1, got 0"):
        DigitsLT(views=0)


class WithDomains(ListFiles):
    """Image files with a domain each."""

    def _read_listings(self, root):
        listings, names = super()._read_listings(root)
        for listing in listings.values():
            listing.fields["domains"] = np.arange(len(listing.labels)) % 4
        return listings, names


def test_files_have_fields_and_views(tmp_path):
    root = str(write_miniature("imagenet-lt", tmp_path / "data"))
    data = WithDomains(
        root, "ImageNet_LT_train.txt", "ImageNet_LT_test.txt",
        image_size=16, batch_size=8, workers=0, views=2, index=True,
    )  # fmt: skip
    batch = next(iter(data.train_dataloader()))
    assert [view.shape for view in batch["views"]] == [(8, 3, 16, 16)] * 2
    assert torch.equal(batch["domains"], batch["index"] % 4)
    assert batch["labels"].tolist() == data._listings["train"].labels[batch["index"].numpy()].tolist()


def test_a_file_of_several_views_is_read_once(tmp_path, monkeypatch):
    root = write_miniature("folder", tmp_path / "data")
    path = "train/class_0/0000.jpg"
    opened = []

    def open_counted(*args):
        opened.append(args)
        return torch.zeros(3, 4, 4, dtype=torch.uint8)

    monkeypatch.setattr("batchformer.data.loading.samples.open_image", open_counted)
    samples = FileSamples([path], torch.tensor([0]), lambda image: image.float(), 0, f"{root}/", views=3)
    assert len(samples[0, 0]["views"]) == 3
    assert len(opened) == 1


class Embeddings(FeatureData):
    """Features of 5 numbers; as a task of zero-shot recognition has them, with classes that are never trained on."""

    allow_empty_classes = True

    def read_splits(self):
        draw = np.random.default_rng(0)
        train, val = (
            Split(draw.normal(size=(n, 5)).astype(np.float32), np.arange(n) % classes, {"pairs": np.arange(n)})
            for n, classes in ((20, 3), (12, 4))
        )
        return {"train": train, "val": val}, ["a", "b", "c", "never seen"]


@pytest.mark.parametrize("on_device", ["auto", False])
def test_features_take_the_place_of_images(on_device):
    data = Embeddings(batch_size=5, on_device=on_device, index=True)
    (epoch, again) = (list(data.train_dataloader()) for _ in range(2))
    assert len(epoch) == 4
    for batch, same in zip(epoch, again, strict=True):
        assert list(batch) == ["labels", "features", "pairs", "index"]
        expected = torch.from_numpy(data._splits["train"].images)[batch["index"]]
        assert torch.equal(batch["features"], expected)
        assert torch.equal(batch["features"], same["features"])
        assert samples_in(batch) == 5
    assert data.info.feature_dim == 5
    assert "image_size" not in data.info
    assert data.class_counts == [7, 7, 6, 0]
    assert data.describe()["tail"]["images"] == 6
    with pytest.raises(UserError, match="features and no images"):
        _ = data.predict_transform


def test_a_class_without_a_training_image_is_refused_unless_the_reader_allows_it():
    class Strict(Embeddings):
        allow_empty_classes = False

    with pytest.raises(UserError, match=r"class 3 \(never seen\) has no training image"):
        Strict().setup()


def test_samples_without_an_image_are_labels_and_fields():
    batch = next(iter(HostLoader(LabelledSamples(LABELS, fields=FIELDS), batch_size=4)))
    assert list(batch) == ["labels", "domains", "pairs"]
