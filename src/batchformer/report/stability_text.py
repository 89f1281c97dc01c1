"""The words of docs/stability.md; its numbers come from result files (`stability_page.py`)."""

BEFORE = """\
# Stability: why the related stream can die, and the form that stays alive

Written by `python -m batchformer.report.stability_page .` from `benchmarks/results/stability_start.json` (made by
`benchmarks/stability.py`) and the files in `results/`.

BatchFormerV2 puts a module after one block of a network or after all of them. With many modules the paper speaks of
frequent crashes and leaves the reason open; its code skips steps whose loss is not finite. There is a quieter
failure: the loss of the related rows stays at chance for long, or for good, while the plain rows learn. Nothing is
learnt through the modules then, and the run is a baseline at twice the price. Nobody sees it in the sum of both
losses. `bf.StreamGuard` watches for it and warns once; every classification run has it (and `train/loss_related` in the
logs), and so has `BatchFormerCallback`, for Lightning modules of one's own.
"""

START = """\
## What a module does to a token

A related token behind a module is the token that entered, plus what attention and the MLP add. What the shared blocks
and the classifier can learn from is the part that tells samples apart *and* is the same under another dropout mask.
**Signal** is the cosine between the related tokens (minus their mean over the batch) of two forwards that differ in
the dropout masks only. Measured at the initial weights, DeiT-Ti with patches of 4 on one batch of CIFAR-100, a module
after each of the twelve blocks. What differs, norm, rank (the effective one of the related tokens) and entropy (of the
attention; 1 looks at all samples alike) are those at the last module; the gradient is what the loss of the related
rows sends into the parameters of a block over what that of the plain rows sends, the blocks behind the first module:

{table}

![Signal by depth](stability-signal.svg)

Two things happen in the published form (post-LN, dropout 0.5), and both compound with depth:

1. **Dropout noise takes the place of the token.** Dropout with p = 0.5 on a branch makes noise as large as the
   branch. LayerNorm behind the sum brings token + noise back to one size, so each module *replaces* a fixed share of
   the token. The signal falls geometrically with the number of modules: what is left after twelve is the product of
   twelve shares. Norm, effective rank and the share that differs between samples all look healthy, because noise
   differs between samples as well. And with or without noise the rescaling weakens the gradient that the related rows
   send into the shared blocks behind the first module, to a fraction of what the plain rows send.
2. **Without the noise, the batch mean takes its place.** Attention starts out nearly uniform, so what it adds is
   nearly the same for all samples of the batch, and LayerNorm again pays for it with the token. That is why less
   dropout alone does not help for long: the share that differs between samples falls instead (the next picture).

![What differs between samples, by depth](stability-between.svg)

Pre-LN does not rescale the sum, but the branches have the size of a *normalised* token whatever the size of the token
they are added to. Early tokens, and the class token most of all, are small, so the noise still wins, and the norm of
the related tokens runs away from that of the plain ones, which the shared blocks also see. A small layer scale
repairs the large tokens and leaves little relation.
"""

DEPTH = """\
## How training begins

The same, seen from the losses: a tiny ViT on the embedded digits (`benchmarks/stability_depth.py`, on a CPU), mean
losses of the plain and of the related rows over windows of 50 steps, the learning rate warmed up over 100.
Chance is {chance}.

{table}

The deeper the stack of published modules, the longer its related rows stay at chance, because the first steps must
rebuild the signal before anything can be learnt from it. With 48 modules they do not leave it in these steps: the
plain rows learn, and nothing is learnt through the modules. That is the collapse, on data everybody has. Less dropout
does not prevent it at that depth, in line with the second reason above. The stable form trains both streams side by
side at every depth, with the same data and seeds.
"""

AFTER = """\
## What training makes of it

At the end of training, on a batch of training images: the losses of the last epoch, the signal behind the last
module, the least that any module changes the related tokens, in percent of their norm, and the share of the gradient
of a sample's loss that falls on other samples (both without dropout), once by norms and once by squared norms: it is
spread thin over many of them, which counts in the first sum and hardly in the second.

{table}

A run can climb out of a dead start: where the first steps manage to strengthen the signal, related and plain loss end
side by side, as in these runs of the published form. The 48 modules above did not, and neither did those of the
earlier, shorter measurement this project began with: there the published form, after the same twelve blocks, ended
with its related rows at chance. Which of the two happens depends on depth, learning rate, data and length; the form
below does not leave it to them.

Being stable is not being better. Once the published form is out of its slow start its strong perturbation of the
related rows is worth more accuracy here than the gentler stable one. Take the published form where `bf.StreamGuard`
stays silent, the stable one where it warns, and where depth, half precision or a short schedule leave no room for a
slow start.

The related loss may end *below* the plain one. In DeiT's mixing all images of a batch share one mixing ratio and one
box, and a row that sees the batch can tell them better than a row that sees one image.
"""

STABLE_FORM = """\
## The stable form

```python
import timm
import batchformer as bf

vit = timm.create_model("vit_tiny_patch16_224", num_classes=10)
attachment = bf.attach(vit, blocks="all", heads=3, variant="stable")
bf.detach(vit)
```

`variant="stable"` is `norm="relative"`: each branch is measured by the token it is added to, and the sum keeps the
token's size (`src/batchformer/nn/encoder.py`):

$$\\hat{x} = \\mathrm{keep}\\big(x + s\\,|x|\\,\\mathrm{LN}(\\mathrm{MSA}(x / |x|))\\big), \\qquad
x' = \\mathrm{keep}\\big(\\hat{x} + s\\,|x|\\,\\mathrm{LN}(\\mathrm{MLP}(\\hat{x} / |x|))\\big)$$

$|x|$ is the root mean square of the token, $\\mathrm{keep}$ scales the sum back to $|x|$, and $s$ is learnt from 0.1
on (`layer_scale=`). What follows from it, whatever the depth, the precision or the token:

- a module cannot drown a token: the noise of each of its two branches is at most $s$ of the token's size, so after
  $m$ modules of $s = 0.1$ the signal is still about $(1 + s^2)^{-2m}$ or more (the table above), where the published
  form loses a far larger share with every module;
- it cannot blow it up either: related tokens keep the norm of the plain ones, the shared blocks see one scale, and
  nothing overflows in half precision;
- it still relates: a branch that is switched on changes the token by $s$ of its size, not by what weight decay left
  of it;
- dropout stays at 0.5, the regulariser of the papers.

The parameters are those of the papers' layer and the two vectors $s$. The published form stays the default, and the
recipes that reproduce published rows use it. `bf.StreamGuard` says when a run needs this one.
"""
