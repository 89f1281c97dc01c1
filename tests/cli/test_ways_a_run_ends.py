"""However a run ends, checkpoint and result.json are of the same weights: those after the last step."""

import json
import shutil

import pytest
import torch
import yaml

from batchformer.recipes import recipe_text

from ..selection import others_slow

SMALL = ["--trainer.enable_progress_bar", "false", "--data.batch_size", "64", "--no-analysis"]
STOP_AT_ONCE = {
    "class_path": "lightning.pytorch.callbacks.EarlyStopping",
    "init_args": {"monitor": "train/loss", "stopping_threshold": 1e9, "check_on_train_epoch_end": True},
}
# 490 training images in batches of 64 are 7 steps an epoch; the recipe validates every fourth epoch.
ENDS = {
    "steps, inside an epoch": ({"max_steps": 10}, 10, 2),
    "steps alone, at the end of an epoch": ({"max_steps": 7, "max_epochs": -1}, 7, 1),
    "early stopping": ({"callbacks": [STOP_AT_ONCE]}, 7, 1),
    "time": ({"max_time": "00:00:00:01", "max_epochs": 100_000}, None, None),
    "epochs, last validated before the last step": (
        {"max_epochs": 1, "check_val_every_n_epoch": 1, "val_check_interval": 5}, 7, 1,
    ),
}  # fmt: skip


@pytest.fixture(params=others_slow(ENDS, ["steps, inside an epoch", "early stopping", "time"]))
def ended(request, say, tmp_path):
    settings, steps, epochs = ENDS[request.param]
    recipe = yaml.safe_load(recipe_text("digits-lt"))
    recipe["trainer"].update(settings)
    recipe["run"]["checkpoint_every_epochs"] = 10
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(recipe))
    command = ["fit", tmp_path / "mine.yaml", *SMALL, "--out", tmp_path / "run"]
    code, _, err = say(*command)
    assert code == 0, err
    return command, tmp_path / "run", steps, epochs


def test_checkpoint_result_test_and_export_agree(ended, say):
    _, run, steps, epochs = ended
    result = json.loads((run / "result.json").read_text())
    saved = torch.load(run / "checkpoints/last.ckpt", weights_only=True)
    assert saved["global_step"] == result["steps"]
    if steps is not None:
        assert (result["steps"], result["epochs"]) == (steps, epochs)
        assert len(result["history"]) == 1
    assert result["history"][-1]["epoch"] == result["epochs"] - 1
    assert result["history"][-1]["train_loss"] > 0
    assert result["history"][-1]["accuracy"] == result["metrics"]["accuracy"]
    code, out, err = say("test", run)
    assert code == 0, out + err
    assert "result.json has exactly these numbers" in out
    assert say("export", run)[0] == 0


def test_killed_before_the_result_file_it_resumes_to_the_same_result_without_training_on(ended, say):
    command, run, _, _ = ended
    before = json.loads((run / "result.json").read_text())
    weights = torch.load(run / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
    (run / "result.json").unlink()
    code, _, err = say(*command, "--resume")
    assert code == 0, err
    after = json.loads((run / "result.json").read_text())
    for key in ("metrics", "per_class", "history", "epochs", "steps"):
        assert after[key] == before[key], key
    again = torch.load(run / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(weights[key], again[key]) for key in weights)


@pytest.mark.parametrize("command", ["test", "export"])
def test_a_checkpoint_of_another_step_than_the_result_is_refused(command, say, tiny_run, tmp_path):
    copy = shutil.copytree(tiny_run, tmp_path / "copy")
    result = json.loads((copy / "result.json").read_text())
    (copy / "result.json").write_text(json.dumps({**result, "steps": result["steps"] + 3}))
    code, out, err = say(command, copy)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "is of step 4" in err
    assert "of step 7" in err
    assert not (copy / "model.safetensors").exists()
