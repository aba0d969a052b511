"""Batch norm and a linear layer on frozen ViT-B/16, Cityscapes.

Reproduces no number that we know of. Not run here.
Cost: 40,000 updates of 16 crops, 640,000 image passes; not timed.

    accelerate launch -m timm_locat.train vit_base_in1k  # the backbone
    python -m seg.train seg/configs/cityscapes/linear_bn_vit_base.py --cfg-options data_root=/data/cityscapes
"""

_base_ = ["../_base_/cityscapes.py", "../_base_/linear_bn_40k.py", "../_base_/runtime.py"]
train_dataloader = dict(batch_size=16, num_workers=8)
model = dict(
    data_preprocessor=dict(size=(512, 1024)),
    backbone=dict(model_name="vit_base_patch16_224", checkpoint="runs/vit_base_in1k"),
    decode_head=dict(num_classes=19),
    test_cfg=dict(crop_size=(512, 1024), stride=(341, 682)),
)
