"""Unknown names are answered with known ones."""

from batchformer.errors import did_you_mean, nearest


def test_the_nearest_name_is_found_by_its_last_part_too():
    known = ["trainer.max_epochs", "model.batchformer.heads", "data.init_args.imbalance"]
    assert nearest("trainer.max_epoch", known) == ["trainer.max_epochs"]
    assert nearest("heads", known) == ["model.batchformer.heads"]
    assert nearest("epochs", [*known, "trainer.min_epochs"]) == ["trainer.max_epochs"]
    assert nearest("zzz", known) == []


def test_the_last_part_of_a_dotted_name_counts_most():
    known = ["model.batchformer.blocks", "model.batchformer.heads", "model.mix.block", "model.seed", "run.threads"]
    assert nearest("heads", known) == ["model.batchformer.heads"]
    assert nearest("model.head", known) == ["model.batchformer.heads"]
    assert nearest("model.batchformer.block", known) == ["model.batchformer.blocks"]


def test_the_hint_names_one_or_several_or_nothing():
    known = ["resnet20", "resnet32", "vit"]
    assert did_you_mean("ot", ["out", "resume"], prefix="--") == " Did you mean --out?"
    assert did_you_mean("resnet22", known) == " Did you mean resnet20?"
    assert did_you_mean("resnet22", known, count=3) == " Did you mean resnet20 or resnet32?"
    assert did_you_mean("zzz", known) == ""
