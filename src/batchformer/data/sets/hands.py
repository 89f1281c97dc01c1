"""Pictures of hands with their meshes: rendered from a rigged hand while training, or FreiHAND's."""

import hashlib
import json
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import default_collate
from torchvision.transforms import v2

from batchformer.data.augment.options import IMAGENET_MEAN, IMAGENET_STD, check_at_least, check_images
from batchformer.data.images import open_image
from batchformer.data.loading.data_module import DataModule
from batchformer.data.loading.epoch_loader import Batch, EpochLoader, SampleLoader
from batchformer.data.loading.samples import AddressedSamples
from batchformer.data.rendering import HandScenes
from batchformer.data.sets.files import existing_root
from batchformer.errors import UserError
from batchformer.models.rig import joints_of_freihand, read_rig
from batchformer.models.topology import MeshTopology, hand_topology, mano_topology

LAYOUT = {
    "hands": "none: pictures are rendered from the embedded rigged hand",
    "freihand": "DIR/training/rgb/*.jpg, DIR/training_{K,xyz,verts}.json, DIR/evaluation/rgb/*.jpg, "
    "DIR/evaluation_{K,xyz,verts}.json, DIR/MANO_RIGHT.pkl",
}
_VAL, _VAL_SEED = 1 << 40, 0  # numbers of test scenes begin here
_ROTATED, _ROTATION, _SCALE, _GAIN = 0.4, 90.0, 0.25, 0.4  # Mesh Graphormer's augmentation


class HandData(DataModule):
    """Batches of `images`, `joints` (21, metres) and `vertices` in the camera's frame, and `joints_2d`, in units in
    which the image reaches from -1 to 1. After `setup`, `topology` is the mesh that the vertices are of."""

    topology: MeshTopology

    def __init__(self, root: str | None = None, *, image_size: int = 224, coarse: int = 195, **options: Any) -> None:
        super().__init__(root, **options)
        self.mean, self.std = IMAGENET_MEAN, IMAGENET_STD
        check_images(image_size, self.std)
        self.image_size, self.coarse = image_size, coarse

    def declare(self) -> dict[str, Any]:
        return {**super().declare(), "topology": self.topology_settings()}

    @abstractmethod
    def topology_settings(self) -> dict[str, Any]:
        """What `make_topology` takes: so that a checkpoint restores its mesh without the data."""

    def describe(self) -> dict[str, Any]:
        """The data set in numbers."""
        self.setup()
        named = {name: getattr(self, name) for name in self._counted}
        return {**named, "vertices": len(self.topology.vertices), "fingerprint": self.fingerprint}

    @property
    def predict_transform(self) -> Callable[[Image.Image], Tensor]:
        return partial(_to_square, size=self.image_size, mean=self.mean, std=self.std)


def make_topology(rig: str | None = None, mano: str | None = None, coarse: int = 195) -> MeshTopology:
    """The mesh of a rigged hand (None: the embedded one), or that of MANO's file."""
    return mano_topology(mano, coarse) if mano is not None else hand_topology(read_rig(rig), coarse)


class RenderedHands(HandData):
    """Pictures of a rigged hand, rendered on the device of the run: no download.

    What a picture shows depends on (seed, its number) only: every epoch has the same `train_images` scenes, in another
    order, or with `fresh` new ones. The test scenes are others, the same for all seeds. See `HandScenes` for what is
    random.

    Args:
        root: not used; every data set has this option.
        train_images, test_images: how many scenes.
        rig: a GLB file with WebXR's hand joints; null: the embedded hand.
        fresh: new scenes in every epoch.
        view: the hand is turned by at most so many degrees out of a view of its back; 180: any direction.
        options: image_size, coarse (vertices of the coarse mesh), and those of `DataModule`.
    """

    def __init__(
        self,
        root: str | None = None,
        train_images: int = 20000,
        test_images: int = 2000,
        rig: str | None = None,
        fresh: bool = False,
        view: float = 180.0,
        **options: Any,
    ) -> None:
        super().__init__(root, **options)
        check_at_least(1, train_images=train_images, test_images=test_images)
        if not 0 < view <= 180:
            raise UserError(f"data.view={view} is an angle in degrees: above 0, at most 180.")
        self.view = view
        self.train_images, self.test_images, self.rig, self.fresh = train_images, test_images, rig, fresh

    def topology_settings(self) -> dict[str, Any]:
        return {"rig": self.rig, "coarse": self.coarse}

    def _read(self) -> None:
        self.topology = make_topology(**self.topology_settings())
        numbers = (self.train_images, self.image_size, self.fresh, *([self.view] if self.view < 180 else []))
        content = repr(numbers).encode() + self.topology.vertices.tobytes()
        self.fingerprint = hashlib.sha256(content).hexdigest()

    def make_loader(self, name: str, training: bool) -> EpochLoader:
        seed = self.seed if name == "train" else _VAL_SEED
        scenes = HandScenes(read_rig(self.rig), joints_of_freihand(), self.image_size, seed, self._device(), self.view)
        count = self.train_images if name == "train" else self.test_images
        first = 0 if name == "train" else _VAL
        options = self._loader_options(name, training)
        return RenderLoader(scenes, count, first, training and self.fresh, self.mean, self.std, **options)


class RenderLoader(SampleLoader):
    """Renders each batch when it is asked for."""

    def __init__(
        self, scenes: HandScenes, count: int, first: int, fresh: bool, mean: Any, std: Any, **options: Any
    ) -> None:
        super().__init__(count, **options)
        self.scenes, self.first, self.fresh = scenes, first, fresh
        self._mean, self._std = (torch.tensor(v, device=scenes.device).view(1, 3, 1, 1) for v in (mean, std))

    def __len__(self) -> int:
        return self._batches_of_a_pass

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        order = self._order(epoch)
        for batch in range(start, len(self)):
            yield self.batch_of(order[batch * self.batch_size : (batch + 1) * self.batch_size], epoch)

    def batch_of(self, slots: np.ndarray, epoch: int = 0) -> Batch:
        index = slots.astype(np.int64) % self._order.count
        made = self.scenes(index + self.first + (epoch * self._order.count if self.fresh else 0))
        images = (made["images"] - self._mean) / self._std
        if self.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        places = made["joints_2d"] / (self.scenes.size / 2) - 1
        return {"images": images, "joints": made["joints"], "vertices": made["vertices"], "joints_2d": places}


class FreiHand(HandData):
    """FreiHAND in its official folders: 32,560 scenes on four backgrounds each to train on, 3,960 to test on.

    The evaluation annotations, published later, are needed to score here. `mano` is MANO_RIGHT.pkl, which its users
    license themselves; the vertices are those of its mesh. In training pictures are rotated, scaled and changed in
    colour as in Mesh Graphormer.

    Args:
        root: the folder.
        mano: the file of MANO, in the root or anywhere.
        limit_train, limit_val: take the first so many pictures.
        options: image_size, coarse, and those of `DataModule`.
    """

    def __init__(
        self,
        root: str | None = None,
        mano: str = "MANO_RIGHT.pkl",
        limit_train: int | None = None,
        limit_val: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(root, **options)
        self.mano, self.limits = mano, {"training": limit_train, "evaluation": limit_val}

    def topology_settings(self) -> dict[str, Any]:
        beside = Path(self.root or "") / self.mano
        return {"mano": str(beside if beside.is_file() else Path(self.mano)), "coarse": self.coarse}

    def _read(self) -> None:
        root = Path(existing_root(self.root))
        self.topology = make_topology(**self.topology_settings())
        self._parts = {part: self._read_part(root, part) for part in ("training", "evaluation")}
        self.train_images, self.test_images = (len(self._parts[part][0]) for part in ("training", "evaluation"))
        self.fingerprint = hashlib.sha256(self._parts["training"][1]["vertices"].tobytes()).hexdigest()

    def _read_part(self, root: Path, part: str) -> tuple[list[str], dict[str, np.ndarray]]:
        named = {"K": "K", "joints": "xyz", "vertices": "verts"}
        known = {name: _numbers(root / f"{part}_{file}.json") for name, file in named.items()}
        folder = root / part / "rgb"
        paths = [str(path) for path in sorted(folder.glob("*.jpg"))][: self.limits[part]]
        if not paths:
            raise UserError(f"there are no pictures in {folder}: set data.root to the folder of FreiHAND.")
        count = len(known["joints"])
        if {len(values) for values in known.values()} != {count} or len(known["vertices"][0]) != len(
            self.topology.vertices
        ):
            raise UserError(f"{root}/{part}_*.json do not belong together, or are not of a mesh as MANO's.")
        for path in map(Path, paths):
            if not path.stem.isdecimal():
                raise UserError(f"{path} is not named by the number of its annotation, as 00000012.jpg is.")
            if part == "evaluation" and int(path.stem) >= count:
                raise UserError(f"{folder} has pictures and {part}_xyz.json {count} annotations: {path.name} has none.")
        return paths, known

    def make_loader(self, name: str, training: bool) -> EpochLoader:
        part = "training" if name == "train" else "evaluation"
        paths, known = self._parts[part]
        samples = HandSamples(paths, known, self.image_size, self.seed if training else None, self.mean, self.std)
        return self._host_loader(samples, name, training)


def _numbers(path: Path) -> np.ndarray:
    try:
        return np.asarray(json.loads(path.read_text()), dtype=np.float32)
    except (OSError, ValueError) as problem:
        raise UserError(f"{path} cannot be read ({problem}): set data.root to the folder of FreiHAND.") from None


class HandSamples(AddressedSamples):
    """FreiHAND's pictures by their numbers; those of other backgrounds follow, with the same annotations in order."""

    def __init__(
        self, paths: list[str], known: dict[str, np.ndarray], size: int, seed: int | None, mean: Any, std: Any
    ) -> None:
        super().__init__(seed)
        self.paths, self.known, self.size = np.array(paths), known, size
        self.rows = [int(Path(path).stem) % len(known["K"]) for path in paths]  # by number: a copy may lack some
        self.normalize = v2.Normalize(list(mean), list(std))

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def collate(self) -> Callable[[list[Any]], Batch]:
        return default_collate

    def _read(self, index: int) -> Image.Image:
        return open_image(str(self.paths[index]))

    def _augment(self, index: int, stored: Image.Image, view: int) -> dict[str, Tensor]:
        row = self.rows[index]
        camera, joints, vertices = (torch.from_numpy(self.known[name][row]) for name in ("K", "joints", "vertices"))
        projected = joints @ camera.T
        places = projected[:, :2] / projected[:, 2:] * (2 / stored.width) - 1
        turn, scale, gain = 0.0, 1.0, torch.ones(3)
        if self.seed is not None:
            if torch.rand(()) < _ROTATED:
                turn = float((torch.randn(()) * _ROTATION).clamp(-180, 180))
            scale = float((1 + torch.randn(()) * _SCALE).clamp(1 - _SCALE, 1 + _SCALE))
            gain = 1 + (torch.rand(3) * 2 - 1) * _GAIN
        image = v2.functional.affine(stored, turn, [0, 0], scale, [0.0, 0.0], v2.InterpolationMode.BILINEAR)
        image = v2.functional.resize(image, [self.size, self.size])
        pixels = (v2.functional.pil_to_tensor(image).float() / 255 * gain.view(3, 1, 1)).clamp(0, 1)
        cos, sin = math.cos(math.radians(turn)), math.sin(math.radians(turn))
        plane = torch.tensor([[cos, -sin], [sin, cos]])
        space = torch.eye(3)
        space[:2, :2] = plane
        return {
            "images": self.normalize(pixels),
            "joints": joints @ space.T,
            "vertices": vertices @ space.T,
            "joints_2d": scale * places @ plane.T,
        }


def _to_square(image: Image.Image, size: int, mean: Any, std: Any) -> Tensor:
    """The middle square of a picture, resized."""
    side = min(image.size)
    crop = [v2.RGB(), v2.CenterCrop(side), v2.Resize((size, size)), v2.PILToTensor()]
    return v2.Compose([*crop, v2.ToDtype(torch.float32, scale=True), v2.Normalize(list(mean), list(std))])(image)


def miniature(root: Path, name: str) -> None:
    """FreiHAND's folders with four pictures on two backgrounds, and a mesh file in MANO's format."""
    import pickle

    if name == "hands":
        return
    rig = read_rig()
    mesh = hand_topology(rig)
    content = {"v_template": mesh.vertices, "f": rig.faces.astype(np.uint32), "J_regressor": mesh.regressor[:16]}
    (root / "MANO_RIGHT.pkl").write_bytes(pickle.dumps(content, protocol=2))
    made = HandScenes(rig, joints_of_freihand(), 64)(np.arange(4))
    camera = np.array([[float(made["focal"][0]), 0, 32], [0, float(made["focal"][0]), 32], [0, 0, 1]])
    for part, backgrounds in (("training", 2), ("evaluation", 1)):
        for key, value in (("xyz", made["joints"]), ("verts", made["vertices"])):
            (root / f"{part}_{key}.json").write_text(json.dumps(value.tolist()))
        (root / f"{part}_K.json").write_text(json.dumps([camera.tolist()] * 4))
        for number in range(4 * backgrounds):
            pixels = (made["images"][number % 4] * 255).byte().permute(1, 2, 0).numpy()
            place = root / part / "rgb" / f"{number:08d}.jpg"
            place.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(place)
