"""``batchformer export RUN``: write the plain network of a run in a format of other programs, and prove it equal."""

from pathlib import Path

from batchformer.cli.arguments import Option, read_arguments
from batchformer.cli.training import root_override
from batchformer.errors import UserError, did_you_mean

FORMATS = {"safetensors": "model.safetensors", "onnx": "model.onnx", "pt2": "model.pt2", "folder": "exported"}
HELP = """
batchformer export RUN [--format safetensors|onnx|pt2|folder] [--half] [--out PLACE] [options]

Write the plain network of a run, without BatchFormer, and verify on test images that its outputs equal those of the
trained network; if they differ, nothing is written.

  --format safetensors   the weights for the stock model: model.safetensors in the run folder (default)
  --format onnx          model.onnx, with dynamic batch size where the network allows it
                         (pip install "batchformer[onnx]")
  --format pt2           model.pt2, a torch.export program: torch.export.load needs no model code
  --format folder        a folder with config.json, model.safetensors and a model card, for timm
                         (timm.create_model("local-dir:DIR", pretrained=True)) or transformers (from_pretrained)
  --half                 write float16
  --ema                  write the averaged weights of a run that kept an average (model.ema, model.swad)
  --calibrated           divide the classifier's weights by the temperature that was fitted after training, so that the
                         softmax of the outputs is calibrated
  --out PLACE            file or folder to write (default: in the run folder)
  --data-root DIR        where the data is, for the test images; without them random images are used
  --license NAME         licence of the weights, for the model card of a folder
  --trust                import classes from outside this package that the run folder names; only if you trust its
                         source
"""
_TAKES_NOTHING = ("half", "ema", "calibrated", "trust")


def run(args: list[str]) -> int:
    options = [Option(name) for name in ("out", "format", "data-root", "license")]
    given = read_arguments(args, [*options, *(Option(name, "nothing") for name in _TAKES_NOTHING)])
    if len(given.positional) != 1:
        raise UserError("export needs one run folder: batchformer export runs/digits-lt/batchformer-seed0")
    kind = given.value("format") or "safetensors"
    if kind not in FORMATS:
        raise UserError(f"--format {kind}: expected one of {', '.join(FORMATS)}.{did_you_mean(kind, FORMATS)}")
    if given.flag("license") and kind != "folder":
        raise UserError("--license is for the model card, which --format folder writes: give that, or leave it out.")

    from batchformer.cli.finished_run import load_run

    found = load_run(given.positional[0], root_override(given), trust=given.flag("trust"))
    out = Path(given.value("out") or found.folder.path / FORMATS[kind])
    if note := found.note():
        print(note)

    from batchformer.cli.export_network import export

    proof = export(
        found,
        out,
        kind,
        half=given.flag("half"),
        averaged=given.flag("ema"),
        temperature=found.temperature() if given.flag("calibrated") else None,
        license=given.value("license"),
    )
    print(f"{out}: {proof.tensors} tensors, {proof.parameters:,} parameters, none of them of BatchFormer.")
    print(f"Verified: {proof.sentence}")
    print("\nTo load it:")
    for line in proof.code:
        print(f"  {line}")
    return 0
