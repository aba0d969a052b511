"""Batch norm and a linear layer on frozen ViT-B/16, ADE20K.

Reproduces no number that we know of. Not run here.
Cost: 40,000 updates of 16 crops, 640,000 image passes; not timed.

    accelerate launch -m timm_locat.train vit_base_in1k  # the backbone
    python -m seg.train seg/configs/ade20k/linear_bn_vit_base.py --cfg-options data_root=/data/ade20k
"""

_base_ = ["../_base_/ade20k.py", "../_base_/linear_bn_40k.py", "../_base_/runtime.py"]
train_dataloader = dict(batch_size=16, num_workers=8)
model = dict(
    backbone=dict(model_name="vit_base_patch16_224", checkpoint="runs/vit_base_in1k"),
    decode_head=dict(num_classes=150),
)
