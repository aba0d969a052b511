"""The paper's head on frozen LocAtViT-S/16, PASCAL Context 59.

Reproduces no number that we know of. Not run here.
Cost: 20,000 updates of 32 crops, 640,000 image passes; not timed.

    accelerate launch -m timm_locat.train locatvit_small_in1k  # the backbone
    python -m seg.train seg/configs/pascal_context_59/patch_head_locatvit_small.py --cfg-options data_root=/data/voc10
"""

_base_ = ["../_base_/pascal_context_59.py", "../_base_/patch_head_20k.py", "../_base_/runtime.py"]
train_dataloader = dict(batch_size=32, num_workers=8)
model = dict(
    data_preprocessor=dict(size=(480, 480)),
    backbone=dict(model_name="locatvit_small", checkpoint="runs/locatvit_small_in1k"),
    decode_head=dict(num_classes=59),
)
