"""``batchformer grad-cam RUNS...``: Grad-CAM maps of finished runs, side by side."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from batchformer.cli.arguments import Option, read_arguments
from batchformer.cli.training import root_override
from batchformer.errors import UserError
from batchformer.files import refuse_to_replace, refuse_unwritable

HELP = """
batchformer grad-cam RUNS... [--out grad-cam.png] [--images 8] [--seed 0] [--layer NAME] [--data-root DIR]

Draw Grad-CAM maps (the paper's Fig. 5) of test images of rare classes. The images are drawn by a seed, not picked by
hand; below them, each run has a row with the map of the true class and the predicted class. The runs must have the same
classes, for example two of one recipe with and without BatchFormer.

  --images N   number of images, at most 8
  --seed N     seed for drawing rare classes and their images
  --layer NAME a submodule whose output is a feature map (default: layer3 of a ResNet, as in the released code)
  --trust      import classes from outside this package that a run folder names; only if you trust its source
"""


def run(args: list[str]) -> int:
    given = read_arguments(
        args, [*map(Option, ("out", "images", "seed", "layer", "data-root")), Option("trust", "nothing")]
    )
    if not given.positional:
        raise UserError("grad-cam needs run folders: batchformer grad-cam runs/a runs/b")
    out = Path(given.value("out") or "grad-cam.png")
    if out.suffix != ".png":
        raise UserError(f"--out {out}: a picture is written, so the name must end in .png.")
    refuse_unwritable(out)
    refuse_to_replace(out, lambda content: b"batchformer grad-cam" in content)
    seed, count = given.integer("seed", 0), given.integer("images", 8, at_least=1)

    from batchformer.analysis.pictures import MOST_SHOWN
    from batchformer.analysis.rare_images import caption_of, draw_explained, explain, rare_images
    from batchformer.cli.finished_run import best_device, load_run
    from batchformer.data.drawing import save_marked
    from batchformer.runs.result import variant_of

    explained: dict[str, Any] = {}
    first: Any = None
    for path in given.positional:
        found = load_run(path, root_override(given), given.flag("trust"))
        task, data = found.task.to(best_device()), found.data
        data.setup()
        classes = [str(name) for name in task.data_info.get("classes", ())]
        if not hasattr(task, "test_logits") or not hasattr(data, "set_labels"):
            raise UserError(f"{path} is not a classifier of images, so there is nothing to explain.")
        labels = data.set_labels[data.evaluation_sets[0]]
        if first is None:
            first, counts = (classes, labels), task.class_counts
            chosen = rare_images(task.class_counts, labels, min(count, MOST_SHOWN), seed)
        elif classes != first[0] or labels.tolist() != first[1].tolist():
            raise UserError(
                f"{path} has other classes or test images than {given.positional[0]}: they cannot be compared."
            )
        name = f"{variant_of(found.config)}, seed {task.seed}"
        name = f"{name} ({path})" if name in explained else name
        explained[name] = explain(task, data, chosen, given.value("layer"))
    save_marked(draw_explained(explained), out, "grad-cam")
    for name, each in explained.items():
        right = sum(p == true for p, true in zip(each.predicted, each.classes, strict=True))
        print(f"{name}: {right} of {len(each.classes)} right, at {each.layer}")
    layers = " and ".join(dict.fromkeys(each.layer for each in explained.values()))
    print(f"\n{caption_of(replace(next(iter(explained.values())), layer=layers), counts, classes, seed)}\n{out}")
    return 0
