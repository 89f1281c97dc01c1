"""Recipes that extend others, and the task they name."""

import pytest
import yaml

from batchformer.cli.recipe_cli import RecipeCLI
from batchformer.errors import UserError
from batchformer.recipes import find_recipe, merge, read_recipe, recipe_names, recipe_text
from batchformer.tasks import Classification, LongTailed


def test_sections_are_merged_key_by_key():
    before = {"model": {"mix": {"mixup": 0.8, "cutmix": 1.0}, "blocks": [1, 2]}, "trainer": {"max_epochs": 3}}
    after = {"model": {"mix": {"cutmix": 0.0}, "blocks": [5]}}
    assert merge(before, after) == {
        "model": {"mix": {"mixup": 0.8, "cutmix": 0.0}, "blocks": [5]},
        "trainer": {"max_epochs": 3},
    }
    assert before["model"]["mix"]["cutmix"] == 1.0


def test_another_class_takes_no_arguments_over():
    before = {"data": {"class_path": "one", "init_args": {"imbalance": 100, "batch_size": 8}}}
    same = merge(before, {"data": {"class_path": "one", "init_args": {"batch_size": 4}}})
    assert same["data"]["init_args"] == {"imbalance": 100, "batch_size": 4}
    other = merge(before, {"data": {"class_path": "other", "init_args": {"batch_size": 4}}})
    assert other["data"]["init_args"] == {"batch_size": 4}


def test_a_row_of_a_table_is_its_parent_with_its_own_fields():
    parent, row = (read_recipe(find_recipe(name)[1]) for name in ("deit-ti-cifar100-100", "deit-b-cifar100-300"))
    assert row["trainer"].pop("max_epochs") == 300
    assert row["model"].pop("backbone") == "deit_base_patch16_224"
    del parent["trainer"]["max_epochs"], parent["model"]["backbone"]
    assert row == parent


@pytest.mark.parametrize(
    ("name", "blocks", "share"),
    [
        ("1-12", "all", True),
        ("4-12", [*range(3, 12)], True),
        ("8-12", [*range(7, 12)], True),
        ("not-shared", "all", False),
    ],
)
def test_positions_of_the_papers_table_8(name, blocks, share):
    """The paper counts from 1."""
    options = read_recipe(find_recipe(f"deit-s-imagenet-lt-{name}")[1])["model"]["batchformer"]
    assert (options["blocks"], options["share"]) == (blocks, share)


def test_a_file_extends_one_beside_it_and_a_saved_recipe_still_extends_the_shipped_one(tmp_path):
    (tmp_path / "saved.yaml").write_text(recipe_text("deit-s-cifar100-100"))
    (tmp_path / "mine.yaml").write_text("extends: saved.yaml\ntrainer: {max_epochs: 7}\n")
    config = RecipeCLI().load(tmp_path / "mine.yaml", [("model.batchformer.blocks", "[8]")])
    assert config["trainer"]["max_epochs"] == 7
    assert config["model"]["backbone"] == "deit_small_patch16_224"
    assert config["model"]["batchformer"]["blocks"] == [8]
    assert config["data"]["init_args"]["image_size"] == 224
    assert config["task"] == "classification"


def test_the_resolved_recipe_is_a_recipe_of_the_same_task(tmp_path):
    cli = RecipeCLI()
    for name, kind in (("vit-digits", Classification), ("digits-lt", LongTailed)):
        config = cli.load(find_recipe(name)[1])
        (tmp_path / "resolved.yaml").write_text(yaml.safe_dump(config))
        assert cli.load(tmp_path / "resolved.yaml") == config
        assert type(cli.build()[0]) is kind


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("extends: vit-digit", "Did you mean vit-digits"),
        ("extends: mine.yaml", "in turn"),
        ("extends: [a]", "expected the name of a recipe"),
        ("extends: digits-lt\ntask: clasification", "Did you mean classification"),
        ("extends: vit-digits\nmodel: {mixx: {mixup: 1}}", "Did you mean model.mix"),
        ("extends: vit-digits\nmodel: {batchformer: {block: 3}}", "Did you mean model.batchformer.blocks"),
    ],
)
def test_mistakes_are_named(tmp_path, text, expected):
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(UserError, match=expected.replace(".", r"\.").replace("[", r"\[")):
        RecipeCLI().load(tmp_path / "mine.yaml")


def test_every_row_of_tables_6_and_7_has_a_name():
    names = set(recipe_names())
    assert {f"deit-{size}-cifar100-{epochs}" for size in ("ti", "s", "b") for epochs in (100, 300)} <= names
    assert {f"deit-{size}-imagenet" for size in ("ti", "s", "b")} <= names
    assert {"resnet50-imagenet", "vit-cifar100-32", "vit-digits"} <= names
