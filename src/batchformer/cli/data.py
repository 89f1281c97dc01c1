"""``batchformer data [RECIPE]`` and ``batchformer data miniature NAME DEST``."""

from __future__ import annotations

from batchformer.cli.arguments import Option, read_arguments
from batchformer.cli.shelf import find_recipe
from batchformer.cli.training import recipe_overrides
from batchformer.errors import UserError

HELP = """
batchformer data                              the data sets, their layouts, and which recipes use them
batchformer data RECIPE [--data-root DIR]     look at the data of a recipe: classes, images, many / medium / few
batchformer data miniature NAME DEST          write a tiny data set in the official layout, to try a recipe out
"""
LAYOUTS = """\
digits        embedded (scikit-learn), no files needed                        digits-lt, vit-digits
cifar100      DIR/cifar-100-python/{train,test,meta}                          cifar100-lt-*, deit-*-cifar100-*, vit-...
cifar10       DIR/cifar-10-batches-py/{data_batch_1..5,test_batch,...}        cifar10-lt-100
tiny-imagenet DIR/train/<wnid>/images/, DIR/val/images/, wnids.txt, ...       deit-s-tiny-imagenet*
imagenet      DIR/train/<wnid>/*.JPEG, DIR/val/<wnid>/*.JPEG                  deit-*-imagenet, resnet50-imagenet
imagenet-lt   DIR/{train,val}/..., ImageNet_LT_train.txt, ImageNet_LT_test.txt    imagenet-lt-*, deit-s-imagenet-lt-*
places-lt     DIR/{data_256,test_256}/..., Places_LT_train.txt, Places_LT_test.txt    places-lt
inaturalist18 DIR/train_val2018/..., iNaturalist18_train.txt, iNaturalist18_val.txt   inaturalist18
folder        DIR/train/<class>/*.jpg, DIR/val/<class>/*.jpg                  folder-lt
coco          DIR/{train,val}2017/*.jpg, annotations/instances_{train,val}2017.json   *-coco*, coco128-*
coco-panoptic the same, panoptic_{train,val}2017/*.png and their .json        *panoptic*
voc           DIR/{JPEGImages,Annotations,ImageSets/Main}/...                 any of them, with data VocDetection

DIR is --data-root (default: data, in the current folder). CIFAR can be fetched: --data.download true
Look at one:  batchformer data cifar100-lt-100 --data-root DIR
No data yet?  batchformer data miniature cifar100 DIR     a tiny generated set in the same layout"""


def run(args: list[str]) -> int:
    given = read_arguments(args, [Option("data-root")], recipe_keys=True)
    words = given.positional
    if not words:
        print(LAYOUTS)
    elif words[0] == "miniature":
        _miniature(words[1:])
    elif len(words) == 1:
        _describe(words[0], recipe_overrides(given))
    else:
        raise UserError(f"Unexpected argument {words[1]}: data takes one recipe.")
    return 0


def _miniature(words: list[str]) -> None:
    if len(words) != 2:
        raise UserError("miniature needs a name and a folder: batchformer data miniature cifar100 DIR")
    from batchformer.data.miniature import write

    print(f"{write(*words)}: a tiny {words[0]} in its official layout; use it with --data-root {words[1]}")


def _describe(recipe: str, overrides: list[tuple[str, str]]) -> None:
    name, file = find_recipe(recipe)
    from batchformer.cli.recipe_cli import RecipeCLI

    cli = RecipeCLI()
    cli.load(file, overrides)
    about = cli.build()[1].describe()
    head, tail = about["head"], about["tail"]
    print(
        f"{name}: {about['classes']} {'class' if about['classes'] == 1 else 'classes'}, "
        f"{about['train_images']:,} training and {about['test_images']:,} test images"
    )
    things = "boxes" if "train_boxes" in about else "images"
    if things == "boxes":
        print(f"  {about['train_boxes']:,} training and {about['test_boxes']:,} test boxes")
    print(f"  most {things}:   {head['name']} ({head['images']:,})")
    print(f"  fewest {things}: {tail['name']} ({tail['images']:,}), imbalance {about['imbalance']:.0f}")
    print(
        f"  many (> 100): {about['many']}   medium (20 to 100): {about['medium']}   few (< 20): {about['few']} classes"
    )
    print(f"  image size {about['image_size']}, fingerprint {about['fingerprint'][:16]}")
