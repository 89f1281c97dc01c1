"""Data of several domains: who sees which images, balanced batches, lists, adaptation, augmentation, and mistakes."""

import bz2
import operator
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.v2 import functional as F

import batchformer.data
from batchformer.cli import main
from batchformer.data import PACS, DeviceLoader, DigitDomains, DigitsDomains, DomainFolders, VisDA
from batchformer.data.augment import batched_augmentation, operations
from batchformer.data.augment.host import FILE_AUGMENTATIONS, array_transform, evaluation_transform, file_transform
from batchformer.data.loading.order import balanced_order, training_share
from batchformer.data.sets import SETS, write_miniature
from batchformer.errors import UserError

FOLDERS = ("folder-domains", "pacs", "vlcs", "office-home", "terra-incognita", "visda")
SMALL = {"image_size": 12, "workers": 0, "steps_per_epoch": 5}


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    folder = tmp_path_factory.mktemp("domains")
    return {name: write_miniature(name, folder / name) for name in (*FOLDERS, "mnist-usps-svhn")}


@pytest.fixture
def copied(roots, tmp_path):
    """A miniature to break."""

    def copy(name):
        return Path(shutil.copytree(roots[name], tmp_path / name))

    return copy


def pacs(root, **options):
    return PACS(str(root), **{"target": "photo", "batch_size": 6, **SMALL, **options})


def digits(**options):
    return DigitsDomains(**{"target": "30-degrees", "batch_size": 20, "steps_per_epoch": 6, **options})


def paths_of(data, name):
    return set(data._listings[name].paths)


def fingerprints(images):
    return {image.tobytes() for image in images.numpy()}


# who sees what


@pytest.mark.parametrize("name", FOLDERS)
def test_every_set_of_folders_is_read_and_each_domain_can_be_the_target(name, roots):
    cls = getattr(batchformer.data, SETS[name].partition(":")[2])
    targets = cls(str(roots[name])).targets
    assert len(targets) == {"visda": 2, "folder-domains": 3}.get(name, 4)
    for target in targets:
        data = cls(str(roots[name]), target=target, batch_size=6, **SMALL)
        info = data.info
        assert info.domains == [each for each in targets if each != target]
        assert (info.classes, info.target, info.targets) == (["dog", "elephant", "giraffe"], target, list(targets))
        assert info.evaluation_sets == ["target", "source"]
        batch = next(iter(data.train_dataloader()))
        each = 6 // len(info.domains)
        assert batch["domains"].tolist() == np.repeat(np.arange(len(info.domains)), each).tolist()
        assert {key: tuple(value.shape) for key, value in batch.items()} == {
            "images": (6, 3, 12, 12), "labels": (6,), "domains": (6,)
        }  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"lists": "splits"}, {"adapt": True}])
def test_leaving_one_domain_out_never_trains_on_it_nor_on_what_is_held_out(options, roots):
    data = pacs(roots["pacs"], index=True, **options)
    data.setup()
    trained = set()
    for batch in data.train_dataloader():
        part = batch["source"] if data.adapt else batch
        trained |= {data._listings["train"].paths[i] for i in part["index"].tolist()}
        if data.adapt:
            assert set(batch["target"]["labels"].tolist()) == {-1}
            assert set(batch["target"]["domains"].tolist()) == {3}
    held, target = paths_of(data, "source"), paths_of(data, "target")
    assert trained
    assert trained <= paths_of(data, "train")
    assert len(target) == 15
    assert all(path.startswith("photo") for path in target)
    assert not trained & target
    assert not trained & held
    assert not held & target
    everything = [os.path.join(*path.parts[-3:]) for path in roots["pacs"].rglob("*.jpg")]
    assert paths_of(data, "train") | held | target == set(everything)
    counts = data._listings["train"].labels
    assert data.class_counts == [int((counts == label).sum()) for label in range(3)]


def test_the_target_is_not_among_the_training_images_of_an_epoch_of_arrays():
    data = digits(augment="none")
    data.setup()
    seen = set().union(*(fingerprints(batch["images"]) for batch in data.train_dataloader()))
    target, source = (
        set().union(*(fingerprints(batch["images"]) for batch in data.evaluation_loader(name)))
        for name in ("target", "source")
    )
    assert len(seen) > 50
    assert not seen & target
    assert not seen & source


def test_evaluation_tells_the_domain_of_every_image(roots):
    data = pacs(roots["pacs"])
    target, source = data.val_dataloader()
    assert {number for batch in target for number in batch["domains"].tolist()} == {3}
    numbers = [number for batch in source for number in batch["domains"].tolist()]
    assert numbers == sorted(numbers)
    assert set(numbers) == {0, 1, 2}


def test_what_is_held_out_depends_on_the_seed_and_is_a_fifth_of_each_domain(roots):
    one, again, other = (pacs(roots["pacs"], seed=seed) for seed in (0, 0, 1))
    for data in (one, again, other):
        data.setup()
        assert data._counts == {"train": [12] * 3, "source": [3] * 3, "target": [15]}
    assert paths_of(one, "source") == paths_of(again, "source") != paths_of(other, "source")
    assert one.fingerprint == again.fingerprint != other.fingerprint
    half = pacs(roots["pacs"], holdout=0.5)
    half.setup()
    assert half._counts["source"] == [7] * 3


def test_sources_can_be_named(roots):
    data = pacs(roots["pacs"], sources=["sketch", "cartoon"])
    assert data.info.domains == ["sketch", "cartoon"]
    first = data._listings["train"].paths[0]
    assert first.startswith("sketch")
    assert not any(path.startswith("art") for path in paths_of(data, "train"))


def test_official_lists_say_what_is_trained_on_and_what_is_held_out(roots):
    data = pacs(roots["pacs"], lists="splits")
    data.setup()
    assert data._counts == {"train": [12] * 3, "source": [3] * 3, "target": [15]}
    listed = (roots["pacs"] / "splits" / "sketch_crossval_kfold.txt").read_text().split("\n")[0]
    path, label = listed.split()
    position = data._listings["source"].paths.index(path)
    assert data._listings["source"].labels[position] == int(label) - 1 == 0
    assert data.class_names[0] == Path(path).parent.name


def test_domains_may_lie_in_the_folder_domainbed_has_them_in(roots, tmp_path):
    (tmp_path / "PACS").symlink_to(roots["pacs"])
    for options in ({}, {"lists": "splits"}):
        data = pacs(tmp_path, **options)
        data.setup()
        assert next(iter(paths_of(data, "target"))).startswith("PACS/photo/")
        assert next(iter(data.train_dataloader()))["labels"].shape == (6,)


def test_visda_adapts_from_synthetic_to_real_images(roots):
    data = VisDA(str(roots["visda"]), adapt=True, batch_size=4, **SMALL)
    data.setup()
    assert (data.target, data.source_domains) == ("validation", ["train"])
    batches = list(data.train_dataloader())
    assert len(batches) == 5
    assert [{name: len(part["labels"]) for name, part in batch.items()} for batch in batches] == [
        {"source": 4, "target": 4}
    ] * 5


# the order


@pytest.mark.parametrize("draw", ["replacement", "shortest"])
def test_two_processes_share_the_batches_of_one(draw):
    whole = digits(batch_size=40, draw=draw, index=True)
    halves = [digits(batch_size=20, draw=draw, index=True) for _ in range(2)]
    for rank, data in enumerate(halves):
        data._rank_and_world = lambda rank=rank: (rank, 2)
    for expected, *parts in zip(whole.train_dataloader(), *(data.train_dataloader() for data in halves), strict=True):
        for rank, part in enumerate(parts):
            assert torch.equal(part["images"], expected["images"][rank::2])
            assert part["domains"].tolist() == np.repeat(np.arange(5), 4).tolist()


def test_drawn_with_replacement_every_domain_comes_as_often_and_a_sample_that_comes_again_is_its_next_repeat():
    counts, each, steps = [5, 50], 3, 40
    slots = balanced_order(2, counts=counts, each=each, steps=steps, seed=7, draw="replacement")
    index = slots % 55
    first, second = index.reshape(steps, 2, each).transpose(1, 0, 2).reshape(2, -1)
    assert first.max() < 5 <= second.min()
    assert len(set(slots.tolist())) == len(slots)
    for sample in range(55):
        repeats = slots[index == sample] // 55
        assert repeats.tolist() == list(range(len(repeats)))
    assert np.bincount(first, minlength=5).min() > 10
    other = balanced_order(3, counts=counts, each=each, steps=steps, seed=7, draw="replacement")
    assert not np.array_equal(slots, other)


def test_as_far_as_the_shortest_all_domains_go_through_permutations_and_begin_anew_together():
    counts, each, steps = [7, 20], 2, 4  # all begin anew after three steps
    orders = [balanced_order(e, counts=counts, each=each, steps=steps, seed=1, draw="shortest") for e in range(3)]
    batches = np.concatenate(orders).reshape(-1, 2, each) % 27
    for begin in range(0, 12, 3):
        turn = batches[begin : begin + 3]
        assert all(len(set(turn[:, domain].ravel().tolist())) == 6 for domain in range(2))
    assert len({tuple(batches[begin : begin + 3].ravel()) for begin in range(0, 12, 3)}) == 4
    repeated = orders[0] // 27
    assert repeated[:12].max() == 0  # of the first turn; the fourth step may have some again
    assert np.array_equal(training_share(orders[0], 0, 1, True), orders[0])


@pytest.mark.parametrize("draw", ["replacement", "shortest"])
@pytest.mark.parametrize("adapt", [False, True])
def test_resumed_in_the_middle_of_an_epoch_it_reads_on(draw, adapt):
    def read(batches):
        parts = [batch if adapt else {"all": batch} for batch in batches]
        return [{name: (part["images"].sum().item(), part["labels"].tolist()) for name, part in batch.items()}
                for batch in parts]  # fmt: skip

    first, second = digits(draw=draw, adapt=adapt), digits(draw=draw, adapt=adapt)
    loader = first.train_dataloader()
    whole = read(loader) + read(loader)
    begun = digits(draw=draw, adapt=adapt)
    batches = iter(reading := begun.train_dataloader())
    for _ in range(4):
        next(batches)
    second.setup()
    second.load_state_dict({"seed": 0, "fingerprint": begun.fingerprint, "train": reading.state_dict()})
    resumed = second.train_dataloader()
    assert read(resumed) + read(resumed) == whole[4:]


def test_a_repeated_sample_is_augmented_anew(roots):
    for on_device in (True, "auto"):
        data = pacs(roots["pacs"], on_device=on_device, batch_size=30, steps_per_epoch=6, index=True)
        seen, times = {}, 0
        for batch in data.train_dataloader():
            for image, index in zip(batch["images"], batch["index"].tolist(), strict=True):
                seen.setdefault(index, set()).add(image.numpy().tobytes())
                times += 1
        assert len(seen) < times / 2
        assert sum(len(looks) for looks in seen.values()) == times


# digits


def test_the_digits_are_divided_among_six_rotations_and_none_is_seen_twice():
    from sklearn.datasets import load_digits

    data = digits(target="75-degrees")
    data.setup()
    assert len(data.targets) == 6
    assert sum(sum(counts) for counts in data._counts.values()) == len(load_digits().target)
    for count, held in zip(data._counts["train"], data._counts["source"], strict=True):
        assert 294 <= count + held <= 305
    upright = digits(target="0-degrees", augment="none")
    upright.setup()
    originals = {image.tobytes() for image in np.rint(load_digits().images * 255 / 16).astype(np.uint8)}
    assert all(image[0].tobytes() in originals for image in upright._splits["target"].images)
    turned = data._splits["target"].images[:, 0]
    assert not any(image.tobytes() in originals for image in turned)


def digit_domains(root, **options):
    return DigitDomains(str(root), **{"target": "usps", "batch_size": 8, "steps_per_epoch": 3, **options})


def test_three_sets_of_digits_are_domains_of_one_size(roots):
    root = roots["mnist-usps-svhn"]
    data = digit_domains(root, adapt=True)
    assert data.info.domains == ["mnist", "svhn"]
    assert data._counts == {"train": [40, 40], "source": [20, 20], "target": [20], "unlabelled": [40]}
    batch = next(iter(data.train_dataloader()))
    assert batch["source"]["images"].shape == batch["target"]["images"].shape == (8, 3, 28, 28)
    # the same pictures, whose zeros SVHN numbers 10
    assert data._splits["train"].labels.tolist() == [*range(10)] * 8
    stored = np.load(root / "usps.npz")["test_images"]
    expected = F.resize(torch.from_numpy(stored), [28, 28]).numpy()
    assert np.array_equal(data._splits["target"].images[:, 1], expected)


def test_digits_that_are_not_there_are_no_domain_and_usps_is_read_as_torchvision_reads_it(roots, tmp_path):
    shutil.copytree(roots["mnist-usps-svhn"] / "MNIST", tmp_path / "MNIST")
    arrays = np.load(roots["mnist-usps-svhn"] / "usps.npz")
    with pytest.raises(UserError, match=r"one domain only \(mnist\)"):
        digit_domains(tmp_path).setup()
    for part, name in (("train", "usps.bz2"), ("test", "usps.t.bz2")):
        rows = zip(arrays[f"{part}_images"].reshape(-1, 256) / 127.5 - 1, arrays[f"{part}_labels"], strict=True)
        lines = [" ".join([str(y + 1), *(f"{k}:{v:.6f}" for k, v in enumerate(x, 1))]) for x, y in rows]
        (tmp_path / name).write_bytes(bz2.compress("\n".join(lines).encode()))
    data = digit_domains(tmp_path)
    data.setup()
    assert data.targets == ("mnist", "usps")
    whole = digit_domains(roots["mnist-usps-svhn"])
    whole.setup()
    ours, theirs = data._splits["target"], whole._splits["target"]
    assert ours.labels.tolist() == theirs.labels.tolist()
    assert np.abs(ours.images.astype(int) - theirs.images).max() <= 1
    (tmp_path / "usps.t.bz2").unlink()
    with pytest.raises(UserError, match=r"test images of usps cannot be read from .*: unpack them again"):
        digit_domains(tmp_path).setup()


# augmentation


def noise(n=10, size=24, seed=0):
    images = torch.randint(0, 256, (n, 3, size, size), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    images[0], images[1, 0], images[2] = 90, 0, torch.linspace(0, 255, size).to(torch.uint8)
    return images


def test_hue_and_grey_are_torchvisions():
    images = noise()
    turns = torch.linspace(-0.5, 0.5, len(images))
    turns[3] = 0.0
    expected = torch.stack([F.adjust_hue(image, float(turn)) for image, turn in zip(images, turns, strict=True)])
    off = (operations.hue(images, turns).int() - expected.int()).abs()
    assert off.max() <= 1
    assert (off > 0).float().mean() < 0.01
    assert (expected != images).any()
    assert torch.equal(operations.hue(images, turns)[3], images[3])
    assert torch.equal(operations.grey(images), F.rgb_to_grayscale(images, 3))


def test_the_device_draws_nothing_new_for_other_augmentations():
    assert batched_augmentation("crop-flip").purposes == ("augment",)
    assert batched_augmentation("resized-crop", 24, 20).purposes == ("augment", "crop")
    images = noise()
    plain = batched_augmentation("resized-crop", 24, 20).evaluation()
    bilinear = batched_augmentation("domains", 24, 20).evaluation()
    index = torch.arange(len(images))
    off = bilinear.apply(images, index, {}).int() - F.resize(images, [20, 20], antialias=True).int()
    assert off.abs().max() <= 1
    assert plain.size == 23
    assert plain.centre == 20


def test_files_are_augmented_on_the_host_and_evaluated_as_a_whole():
    assert "domains" in FILE_AUGMENTATIONS
    mean, std = (0.0,) * 3, (1.0,) * 3
    steps = [type(step).__name__ for step in file_transform("domains", 20, mean, std).transforms]
    assert steps[:4] == ["RandomResizedCrop", "RandomHorizontalFlip", "ColorJitter", "RandomGrayscale"]
    crop, _, jitter, grey = file_transform("domains", 20, mean, std).transforms[:4]
    assert crop.scale == (0.7, 1.0)
    assert jitter.hue == (-0.3, 0.3)
    assert jitter.contrast == (0.7, 1.3)
    assert grey.p == 0.1
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (30, 60, 3)).astype(np.uint8))
    seen = evaluation_transform("domains", 20, mean, std)(image)
    whole = F.pil_to_tensor(image.resize((20, 20), Image.Resampling.BILINEAR)) / 255
    assert torch.allclose(seen, whole)
    assert array_transform("domains", 24, 20, mean, std)(noise()[5]).shape == (3, 20, 20)


def test_the_centre_of_the_squared_image_is_flipped_and_no_more():
    mean, std = (0.0,) * 3, (1.0,) * 3
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (30, 60, 3)).astype(np.uint8))
    centre = F.pil_to_tensor(image.resize((32, 32), Image.Resampling.BILINEAR))[:, 2:30, 2:30] / 255
    assert torch.allclose(evaluation_transform("centre", 28, mean, std)(image), centre)
    train = file_transform("centre", 28, mean, std)
    found = [train(image) for _ in range(20)]
    ways = [[torch.allclose(one, wanted) for one in found] for wanted in (centre, centre.flip(2))]
    assert all(map(operator.or_, *ways))
    assert all(map(any, ways))


def test_held_on_the_device_the_images_are_those_of_the_files(roots):
    held, read = pacs(roots["pacs"], on_device=True, adapt=True), pacs(roots["pacs"], adapt=True)
    for name in ("target", "source"):
        one, two = held.evaluation_loader(name), read.evaluation_loader(name)
        assert isinstance(one, DeviceLoader)
        assert not isinstance(two, DeviceLoader)
        for ours, theirs in zip(one, two, strict=True):
            assert torch.allclose(ours["images"], theirs["images"], atol=1e-5)
            assert torch.equal(ours["labels"], theirs["labels"])
    held.train_dataloader()
    assert set(held._held) == {"target", "source", "train"}  # what is adapted to is not held a second time
    stored = held._held["target"].data_ptr()
    assert held.make_loader("unlabelled", True)._stores[0].data_ptr() == stored
    with pytest.raises(UserError, match=r"needs data\.augment domains, got imagenet"):
        pacs(roots["pacs"], on_device=True, augment="imagenet")


# mistakes


def refused(data, message):
    with pytest.raises(UserError, match=message) as caught:
        data.train_dataloader()
    assert "\n" not in str(caught.value)


def test_mistakes_in_the_options_are_told_in_a_sentence(roots):
    root = roots["pacs"]
    refused(pacs(root, target=None), r"data\.target is not set: .* one of art_painting, cartoon, photo, sketch\.")
    refused(pacs(root, target="foto"), r"there is no 'foto'; choose one of art_painting, .*\. Did you mean photo\?")
    refused(pacs(root, sources=["sketsh"]), r"data\.sources: there is no 'sketsh'; .* Did you mean sketch\?")
    refused(pacs(root, sources=["photo", "sketch"]), "other than the target 'photo'")
    refused(pacs(root, sources=["sketch", "sketch"]), "each once")
    refused(pacs(root, sources=[]), "other than the target")
    refused(pacs(root, batch_size=32), r"batch_size 32 is no multiple of the 3 source domains.*choose 30 or 33\.")
    refused(pacs(root, batch_size=2), r"choose 3\.")
    refused(pacs(root, batch_size=39, draw="shortest"), "art_painting has 12 training images, fewer than the 13")
    refused(pacs(root, lists="nowhere"), r"data\.lists: there is no folder .*nowhere")
    refused(pacs("/nowhere"), "is not a folder")
    with pytest.raises(UserError, match="above 0 and below 1, got 1"):
        pacs(root, holdout=1)
    with pytest.raises(UserError, match=r"data\.draw is one of replacement, shortest, got 'longest'"):
        pacs(root, draw="longest")
    with pytest.raises(UserError, match="steps_per_epoch must be at least 1"):
        pacs(root, steps_per_epoch=0)
    with pytest.raises(UserError, match="augment_repeats is not for data of several domains"):
        pacs(root, augment_repeats=2)


def test_a_domain_without_a_class_is_named_with_it_unless_that_is_allowed(copied):
    root = copied("folder-domains")
    shutil.rmtree(root / "noon" / "elephant")
    options = {"target": "noon", "batch_size": 4, **SMALL}
    refused(DomainFolders(str(root), **options), "the domain noon has no image of the class elephant in .*noon")
    options["target"] = "evening"
    refused(DomainFolders(str(root), **options), "the domain noon has no image of the class elephant")
    data = DomainFolders(str(root), allow_missing_classes=True, **options)
    data.setup()
    assert data.class_names == ["dog", "elephant", "giraffe"]
    first = data._listings["train"].fields["domains"] == 0
    assert set(data._listings["train"].labels[first].tolist()) == {0, 1, 2}
    assert set(data._listings["train"].labels[~first].tolist()) == {0, 2}


def test_one_domain_only_an_empty_one_and_a_missing_one_are_refused(copied):
    root = copied("folder-domains")
    options = {"target": "noon", "batch_size": 4, **SMALL}
    (root / "night").mkdir()
    refused(DomainFolders(str(root), **(options | {"batch_size": 6})), "the domain night has no images in .*night: put")
    DomainFolders(str(root), **options, sources=["evening", "morning"]).setup()
    for name in ("night", "evening", "morning"):
        shutil.rmtree(root / name)
    refused(DomainFolders(str(root), **options), r"one domain only \(noon\): there must be one to train on and another")
    for name in ("dog", "elephant", "giraffe"):
        shutil.rmtree(root / "noon" / name)
    shutil.rmtree(root / "noon")
    refused(DomainFolders(str(root), **options), "has no domain: ")
    named = copied("pacs")
    shutil.rmtree(named / "cartoon")
    refused(pacs(named), r"there is no folder .*cartoon: data\.root holds a folder for each domain \(art_painting, ")


def test_a_domain_of_one_image_leaves_nothing_to_train_on(copied):
    root = copied("folder-domains")
    for path in (root / "noon").rglob("*.jpg"):
        if path.parts[-2:] != ("dog", "000.jpg"):
            path.unlink()
    options = {"target": "evening", "batch_size": 4, **SMALL, "allow_missing_classes": True}
    refused(DomainFolders(str(root), **options), "the domain noon has one image only")


def test_a_list_that_names_a_missing_file_or_a_wrong_label_is_refused(copied):
    root = copied("pacs")
    file = root / "splits" / "sketch_train_kfold.txt"
    text = file.read_text()
    file.write_text(text + "sketch/dog/lost.jpg 1\n")
    refused(pacs(root, lists="splits"), r"image .*sketch/dog/lost\.jpg is named in .*sketch_train_kfold\.txt and does")
    file.write_text(text.replace("sketch/dog/001.jpg 1", "sketch/dog/001.jpg 3"))
    refused(
        pacs(root, lists="splits"),
        r"sketch_train_kfold\.txt gives sketch/dog/001\.jpg the label 3, but dog is number 1 of the classes dog, ",
    )
    file.unlink()
    refused(pacs(root, lists="splits"), r"there is no file .*sketch_train_kfold\.txt: put it there")
    real = copied("visda")
    file = real / "validation" / "image_list.txt"
    file.write_text(file.read_text().replace("giraffe/000.jpg 2", "giraffe/000.jpg 0"))
    options = {"batch_size": 4, **SMALL}
    refused(VisDA(str(real), **options), "giraffe is number 2 of the classes")


# what is told


@pytest.mark.parametrize("kind", ["pacs", "visda"])
def test_an_image_of_a_list_outside_the_root_is_refused_and_its_line_named(kind, roots, tmp_path):
    root = Path(shutil.copytree(roots[kind], tmp_path / "inside" / kind))
    shutil.copy(next(root.rglob("*.jpg")), tmp_path / "secret.jpg")
    file = root / ("splits/sketch_train_kfold.txt" if kind == "pacs" else "train/image_list.txt")
    file.write_text(f"{tmp_path / 'secret.jpg'} 1\n{file.read_text()}")
    data = pacs(root, lists="splits") if kind == "pacs" else VisDA(str(root), adapt=True, batch_size=4, **SMALL)
    with pytest.raises(UserError, match=rf"{file.name}, line 1, names .*secret.jpg, which is outside"):
        data.setup()


def test_the_data_tell_of_their_domains(roots):
    data = pacs(roots["pacs"])
    assert data.describe()["details"] == [
        "trained on art_painting (12), cartoon (12), sketch (12); 9 images of these are held out",
        "tested on photo (15)",
    ]
    assert data.info.domains == ["art_painting", "cartoon", "sketch"]
    assert PACS.domains == PACS().targets
    assert DomainFolders().targets == ()


def test_the_command_shows_them(tmp_path, capsys):
    recipe = tmp_path / "turned.yaml"
    recipe.write_text("extends: digits-lt\ndata: {class_path: DigitsDomains, init_args: {target: 0-degrees}}\n")
    assert main(["data", str(recipe), "--data.draw", "shortest"]) == 0
    assert "\n  tested on 0-degrees (304)\n" in capsys.readouterr().out


def test_the_command_shows_a_folder_before_a_target_is_chosen(roots, capsys):
    assert main(["data", "folders-domains", "--data-root", str(roots["folder-domains"])]) == 0
    told = capsys.readouterr().out
    assert "trained on morning (12), noon (12); 6 images of these are held out\n  tested on evening (15)" in told
    assert "data.target is not set, evening is an example; compare --targets all takes each" in told
    refused(DomainFolders(str(roots["folder-domains"]), **SMALL), "data.target is not set: name the domain")


def test_results_are_counted_over_the_target_alone(roots):
    data = pacs(roots["pacs"])
    data.setup()
    assert data.test_images == len(paths_of(data, "target"))


def test_which_of_the_digit_sets_are_used_can_be_chosen(roots):
    data = DigitDomains(str(roots["mnist-usps-svhn"]), target="usps", domains=["mnist", "usps"], batch_size=4)
    data.setup()
    assert data.targets == ("mnist", "usps")
    assert data.source_domains == ["mnist"]


def test_a_class_of_the_target_alone_is_allowed_by_option(copied):
    root = copied("pacs")
    shutil.copytree(root / "photo" / "dog", root / "photo" / "zebra")
    data = pacs(root, allow_missing_classes=True)
    data.setup()
    assert data.class_counts[data.class_names.index("zebra")] == 0


def test_files_passed_over_are_told(copied):
    root = copied("folder-domains")
    (root / "noon" / "dog" / "notes.txt").write_text("no image")
    data = DomainFolders(str(root), **{**SMALL, "target": "evening", "batch_size": 6})
    data.setup()
    assert any("1 .txt" in remark for remark in data.remarks())
