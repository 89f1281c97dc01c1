"""Linear probes: what is frozen, what is loaded, which labels are used; and the command."""

import json

import numpy as np
import pytest
import torch
import yaml

from batchformer.cli import main
from batchformer.cli.probe import recipe_of_probe
from batchformer.data import DigitsLT
from batchformer.errors import UserError
from batchformer.runs.folder import RunFolder
from batchformer.tasks import MAE, LinearProbe, LongTailed, MoCo
from batchformer.tasks.self_supervised.probe import labelled_part

from .conftest import COUNTS, TinyData, info, make_trainer
from .test_mae import DECODER, SMALL


def probe(**options) -> LinearProbe:
    return LinearProbe("resnet20", {"widths": [4, 8, 8]}, **options)


@pytest.mark.parametrize("optimizer", ["sgd", "lars"])
@pytest.mark.parametrize("batch_norm", [False, True])
def test_only_the_classifier_moves(optimizer, batch_norm):
    task = probe(optimizer={"name": optimizer}, batch_norm=batch_norm)
    task.construct(info(COUNTS))
    before = {name: value.clone() for name, value in task.net.state_dict().items()}
    make_trainer(max_epochs=1, limit_val_batches=0).fit(task, datamodule=TinyData())
    moved = {name for name, value in task.net.state_dict().items() if not torch.equal(value, before[name])}
    number = "1." if batch_norm else ""
    norm = {"fc.0.running_mean", "fc.0.running_var", "fc.0.num_batches_tracked"} if batch_norm else set()
    assert moved == {f"fc.{number}weight", f"fc.{number}bias"} | norm


def test_lars_adapts_the_weight_and_not_the_bias():
    task = probe(optimizer={"name": "lars", "lr": 1.0, "lr_per": None, "momentum": 0.0})
    task.construct(info(COUNTS))
    make_trainer(max_epochs=1, limit_train_batches=0).fit(task, datamodule=TinyData())
    optimizer = task.configure_optimizers()
    weight, bias = task.net.fc.weight, task.net.fc.bias
    weight.grad, bias.grad = torch.randn_like(weight), torch.randn_like(bias)
    expected_weight = weight - 0.001 * weight.norm() / weight.grad.norm() * weight.grad
    expected_bias = bias - bias.grad
    optimizer.step()
    torch.testing.assert_close(weight, expected_weight)
    torch.testing.assert_close(bias, expected_bias)


def test_labels_of_each_class_are_used_in_part_and_by_the_seed():
    labels = np.repeat([0, 1, 2], [100, 50, 3])
    chosen = labelled_part(labels, 0.1, seed=0)
    assert np.bincount(labels[chosen]).tolist() == [10, 5, 1]
    assert np.array_equal(chosen, labelled_part(labels, 0.1, seed=0))
    assert not np.array_equal(chosen, labelled_part(labels, 0.1, seed=1))
    data = DigitsLT(imbalance=1.0)
    data.setup()
    task = probe(labels=0.1)
    order = task.sampler(data)
    assert sorted(order(0)) == sorted(order(1)) == sorted(labelled_part(data.train_labels, 0.1, 0))
    assert not np.array_equal(order(0), order(1))
    with pytest.raises(UserError, match=r"model.labels=0"):
        probe(labels=0.0)


def test_weights_of_an_autoencoder_are_those_of_its_encoder(tmp_path):
    pretrained = MAE("vit_tiny_patch16_224", SMALL, decoder=DECODER, batchformer={"heads": 2})
    pretrained.construct(info(COUNTS))
    file = tmp_path / "mae.pth"
    torch.save({"state_dict": {f"net.{k}": v for k, v in pretrained.net.state_dict().items()}}, file)
    for batch_norm in (False, True):
        task = LinearProbe("vit_tiny_patch16_224", SMALL, batch_norm=batch_norm)
        task.init_from = {"network": str(file)}
        task.construct(info(COUNTS))
        for name, value in pretrained.net.encoder.state_dict().items():
            assert torch.equal(task.net.state_dict()[name], value), name


@pytest.mark.parametrize("method", ["baseline", "batchformer"])
def test_a_classifier_with_or_without_the_module_begins_with_a_pretrained_encoder(tmp_path, method):
    widths = {"widths": [4, 8, 8]}
    pretrained = MoCo("resnet20", widths, contrast={"version": "v2", "hidden_dim": 8, "out_dim": 4, "queue": 32})
    pretrained.construct(info(COUNTS))
    file = tmp_path / "moco.pth"
    torch.save({"state_dict": {f"net.{k}": v for k, v in pretrained.net.state_dict().items()}}, file)
    task = LongTailed("resnet20", widths, method=method)
    task.init_from = {"network": str(file)}
    with pytest.warns(UserWarning, match="starts untrained"):
        task.construct(info(COUNTS))
    for name, value in pretrained.net.encoder.state_dict().items():
        assert torch.equal(task.net.state_dict()[name], value), name


def test_the_command_writes_a_recipe_and_trains_it(tmp_path, capsys):
    run = tmp_path / "mae"
    small = ["--trainer.max_epochs", "1", "--model.backbone_args", str(SMALL).replace("'", '"'), "--no-analysis"]
    assert (
        main(["fit", "mae-digits", "--out", str(run), *small, "--trainer.limit_train_batches", "1", "--seed", "3"]) == 0
    )
    assert "   |   batchformer predict" not in capsys.readouterr().out  # it has no classifier
    assert main(["probe", str(run), "--protocol", "mae", "--labels", "0.2", *small[:2], "--data.batch_size", "32"]) == 0
    recipe = yaml.safe_load((tmp_path / "mae-probe.yaml").read_text())
    assert recipe["model"]["batch_norm"] is True
    assert recipe["model"]["labels"] == 0.2
    result = json.loads((tmp_path / "mae-probe" / "result.json").read_text())
    assert (result["variant"], result["reference"], result["seed"]) == ("batchformer", "baseline", 3)  # of the run
    capsys.readouterr()
    assert main(["probe", str(run), "--protocol", "moco-v3"]) == 2
    assert "already exists" in capsys.readouterr().err
    assert yaml.safe_load((tmp_path / "mae-probe.yaml").read_text()) == recipe  # still that of the run
    assert main(["probe", str(run), "--out", str(tmp_path / "other"), "--print-config"]) == 0
    assert not (tmp_path / "other.yaml").exists()
    capsys.readouterr()
    assert main(["probe", str(run), "--protocol", "moco-v4"]) == 2
    assert "expected one of moco-v2, moco-v3, mae, finetune" in capsys.readouterr().err
    assert main(["probe", str(tmp_path / "nothing")]) == 2


def test_a_probe_has_the_data_of_the_run_without_its_views(tmp_path):
    data = {"class_path": "batchformer.data.DigitsLT", "init_args": {"imbalance": 3.0, "root": None}}
    of_the_run = {**data["init_args"], "views": 2, "augment": "shift", "augment_repeats": 3}
    config = {
        "model": {"backbone": "resnet20", "method": "baseline", "seed": 4},
        "data": {**data, "init_args": of_the_run},
        "trainer": {"precision": "32-true", "max_epochs": 800},
        "run": {"recipe": "mine"},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    made = recipe_of_probe(RunFolder(tmp_path), "mae", None)
    assert made["data"] == {**data, "init_args": {"imbalance": 3.0, "augment": "shift"}}
    # fine-tuned with the augmentation of the data
    assert recipe_of_probe(RunFolder(tmp_path), "finetune", None)["data"] == {**data, "init_args": {"imbalance": 3.0}}
    assert (made["model"]["backbone"], made["model"]["seed"], made["run"]["variant"]) == ("resnet20", 4, "baseline")


def test_a_probe_imports_code_that_a_run_folder_names_only_when_trusted(tmp_path, monkeypatch, capsys):
    config = {
        "model": {"backbone": "resnet20", "method": "baseline"},
        "data": {"class_path": "evil_data.Data", "init_args": {}},
        "trainer": {"max_epochs": 1},
        "run": {"recipe": "mine", "code": str(tmp_path / "code")},
    }
    run = tmp_path / "run"
    (tmp_path / "code").mkdir()
    run.mkdir()
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    marker = tmp_path / "ran"
    code = f"from batchformer.data import DigitsLT\n\nopen({str(marker)!r}, 'w')\n\n\nclass Data(DigitsLT):\n    pass\n"
    (tmp_path / "code" / "evil_data.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path / "code"))
    assert main(["probe", str(run), "--print-config"]) == 2
    assert "evil_data.Data, which is code outside this package: add --trust" in capsys.readouterr().err
    assert not marker.exists()
    monkeypatch.undo()  # found by run.code of the run
    assert main(["probe", str(run), "--trust", "--print-config"]) == 0
    assert marker.exists()
    assert "class_path: evil_data.Data" in capsys.readouterr().out


def test_the_classifier_begins_with_small_weights_and_no_bias():
    task = LinearProbe("resnet20", {"widths": [4, 8, 64]})
    task.construct(info(COUNTS))
    assert task.classifier.weight.std().item() == pytest.approx(0.01, rel=0.2)
    assert task.classifier.bias.abs().max() == 0
