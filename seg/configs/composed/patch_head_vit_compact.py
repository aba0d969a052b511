"""The paper's head on a frozen plain ViT compact, trained on the embedded Fashion-MNIST, over composed scenes of
64 x 64. Reproduces nothing: no paper has these scenes. 1,000 updates of 8 scenes.

    python -m seg.demo
"""

_base_ = ["../_base_/composed.py", "../_base_/patch_head_20k.py", "../_base_/runtime.py"]
max_iters = 1000
model = dict(
    data_preprocessor=dict(size=(64, 64)),
    backbone=dict(model_name="vit_compact_patch4_32.fashion_mnist", pretrained=True),
    decode_head=dict(num_classes=11),
)
param_scheduler = [{**_base_.param_scheduler[0], "total_steps": max_iters}]
train_cfg = dict(max_iters=max_iters, val_interval=max_iters)
default_hooks = dict(logger=dict(interval=20), checkpoint=dict(interval=250))
