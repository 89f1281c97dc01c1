"""How runs were made: the settings that matter, what makes a comparison less than clean, the command."""

import pytest
from made_up import classification, comparison, pose, write

from batchformer.report import load_runs, write_report
from batchformer.report.provenance import caveats, command, facts

BASE = "vit-cifar100-32"


@pytest.mark.parametrize(
    ("method", "told"),
    [("cutmix", ""), ("transmix", ", attention of block 7"), ("attentive-cutmix", ", extractor mobilenet_v2")],
)
def test_settings_tell_the_mixing_and_what_that_one_reads(tmp_path, method, told):
    made = classification(BASE, "baseline", 0)
    made["config"]["model"]["mix"] = {"method": method, "cutmix": 1.0, "block": 7, "extractor": "mobilenet_v2"}
    settings = dict(facts(load_runs([write(tmp_path, [made])])))["Settings"]
    assert f"mixing by {method}, CutMix 1.0{told}, " in f"{settings}, "
    assert ("block" in settings) == (method == "transmix")
    assert ("extractor" in settings) == (method == "attentive-cutmix")


@pytest.mark.parametrize(
    ("method", "told"),
    [("mixup", "mixup 0.5"), ("cutmix", "CutMix 1.0"), ("saliencymix", "mixup 0.5, CutMix 1.0")],
)
def test_settings_tell_the_alphas_that_the_mixing_draws_with(tmp_path, method, told):
    made = classification(BASE, "baseline", 0)
    made["config"]["model"]["mix"] = {"method": method, "mixup": 0.5, "cutmix": 1.0}
    settings = dict(facts(load_runs([write(tmp_path, [made])])))["Settings"]
    assert f"mixing by {method}, {told}" in settings
    assert ("CutMix" in settings, " mixup 0.5" in settings) == ("CutMix" in told, "mixup" in told)


def test_settings_of_a_training_without_mixing_name_none(tmp_path):
    made = classification(BASE, "baseline", 0)
    made["config"]["model"]["mix"] = {"method": "mixup-cutmix", "mixup": 0.0, "cutmix": 0.0}
    settings = dict(facts(load_runs([write(tmp_path, [made])])))["Settings"]
    assert "mixing by" not in settings
    assert "CutMix" not in settings


@pytest.mark.parametrize(
    ("algorithm", "told", "kept"),
    [
        ("plain", "", {"loss ldam", "streams both", "learning rate 0.1"}),
        ("ride", "algorithm ride", {"loss ldam", "streams both", "learning rate 0.1"}),
        ("crt", "algorithm crt", {"streams both", "learning rate 0.1"}),
        ("lws", "algorithm lws", {"learning rate 0.1"}),
        ("tau_norm", "algorithm tau_norm", set()),
    ],
)
def test_settings_tell_the_method_and_what_that_one_reads(tmp_path, algorithm, told, kept):
    made = classification(BASE, "batchformer", 0)
    made["config"]["model"] |= {"algorithm": algorithm, "loss": {"name": "ldam"}, "optimizer": {"lr": 0.1},
                                "batchformer": {"streams": "both"}}  # fmt: skip
    settings = set(dict(facts(load_runs([write(tmp_path, [made])])))["Settings"].split(", "))
    assert {each for each in settings if "algorithm" in each} == ({told} if told else set())
    assert settings & {"loss ldam", "streams both", "learning rate 0.1"} == kept


def test_settings_of_the_module_do_not_make_a_baseline_another_training(tmp_path):
    results = [classification(BASE, m, s) for m in ("baseline", "batchformer") for s in (0, 1)]
    for each in results:
        each["config"]["model"]["batchformer"] = {"norm": "pre" if each["method"] == "batchformer" else "post"}
    assert caveats(load_runs([write(tmp_path / "a", results)])) == []
    results[-1]["config"]["model"]["lr"] = 0.5
    (told,) = caveats(load_runs([write(tmp_path / "b", results)]))
    assert told == "The runs differ in more than method and seed: model.lr."  # which the others do not have
    for each in results[:-1]:
        each["config"]["model"]["lr"] = 0.1
    (told,) = caveats(load_runs([write(tmp_path / "c", results)]))
    assert told.endswith(": model.lr; to compare them, train them as variants: --variant NAME:model.lr=VALUE.")


def test_variants_may_change_what_they_like_and_runs_of_one_may_not(tmp_path):
    results = pose()
    for each in results:
        each["config"] = {"model": {"algorithm": each["variant"]}, "data": {"target": each["target"]}}
    assert caveats(load_runs([write(tmp_path / "a", results)])) == []
    results[0]["config"]["model"]["lr"] = 0.5
    (told,) = caveats(load_runs([write(tmp_path / "b", results)]))
    assert told == f"Runs of {results[0]['variant']} differ in more than target and seed: model.lr."


def test_a_run_is_no_variant_of_another_recipe_because_of_its_name(tmp_path):
    results = [classification(f"{BASE}-baseline", "baseline", s, 54) for s in range(2)]
    results += [classification(f"{BASE}-published", seed=s) for s in range(2)]
    runs = load_runs([write(tmp_path, results)])
    assert command(runs[2:]) == "\n".join(
        f"batchformer fit {BASE}-published --method batchformer --seed {seed}" for seed in range(2)
    )
    page = write_report([tmp_path], tmp_path / "page.html").read_text()
    assert "Study" not in page
    assert f"<code>batchformer compare {BASE}-published</code>" in page


def test_the_facts_name_the_targets_and_every_seed_once(tmp_path):
    told = dict(facts(load_runs([write(tmp_path, pose())])))
    assert told["Targets"] == "glove, indoor, night, sun"
    assert told["Seeds"] == "scratch: 0, 1, 2; mixstyle: 0, 1, 2; mixstyle+batchformer: 0, 1, 2"
    uneven = [made for made in comparison(seeds=3) if (made["method"], made["seed"]) != ("batchformer", 1)]
    told = dict(facts(load_runs([write(tmp_path / "uneven", uneven)])))
    assert told["Seeds"] == "baseline: 0, 1, 2; batchformer: 0, 2"


def test_the_facts_name_every_device_once_and_leave_out_what_is_not_known(tmp_path):
    results = comparison(seeds=2)
    results[1]["device"] = "NVIDIA A100"
    told = dict(facts(load_runs([write(tmp_path / "two", results)])))
    assert sorted(told["Device"].split(", ")) == ["NVIDIA A100", "NVIDIA H200"]
    for each in results:
        del each["device"], each["wall_s"]
    told = dict(facts(load_runs([write(tmp_path / "none", results)])))
    assert not {"Device", "Wall time per run"} & set(told)


def test_loss_scales_that_differ_are_told(tmp_path):
    results = comparison(seeds=2)
    for each in results:
        each["config"]["model"]["stream_loss"] = "released"
    assert any("not scaled" in text for text in caveats(load_runs([write(tmp_path, results)])))
