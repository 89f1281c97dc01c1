"""Unseen classes: every method with and without BatchFormer, several seeds.

    python -m benchmarks.zero_shot_study plantvillage-czsl --data-root DIR --weights backbone=resnet50.pth
        [--seeds 0 1 2] [--only cge cge+batchformer] [--missing] [--minutes 8] [-- more overrides]
    python -m benchmarks.zero_shot_study plantvillage-czsl-trained --data-root DIR --weights backbone=resnet50.pth
    python -m benchmarks.zero_shot_study digits-states
    python -m benchmarks.zero_shot_study cub-gzsl --data-root DIR
    python -m benchmarks.zero_shot_study cub-gzsl-sentences --data-root DIR

A study is a recipe and its variants; of pairs beside them random vectors in place of words (`*-random`: the control)
and label embedding. With fixed features (plantvillage-czsl) all runs of a process share them: 3 minutes of one core
once, then seconds a run without the module and 2 minutes with it. Result files, `--missing` and `--minutes`: as in
`benchmarks.domains_study`.
"""

from __future__ import annotations

from benchmarks.domains_study import DomainStudy, main

_RANDOM = "model.method=baseline,data.words=[random],model.pairs.name"
_EXTRA = {
    "label-embedding": "model.method=baseline,model.pairs.name=label_embedding",
    "compcos-random": f"{_RANDOM}=compcos",
    "cge-random": f"{_RANDOM}=cge",
}
STUDIES = {
    "plantvillage-czsl": DomainStudy("plantvillage-czsl", extra=_EXTRA),
    "plantvillage-czsl-trained": DomainStudy("plantvillage-czsl-trained", extra=_EXTRA),
    "digits-states": DomainStudy("digits-states"),
    "cub-gzsl": DomainStudy("cub-gzsl"),
    "cub-gzsl-sentences": DomainStudy("cub-gzsl-sentences"),
}

if __name__ == "__main__":
    raise SystemExit(main(STUDIES, "benchmarks.zero_shot_study", __doc__))
