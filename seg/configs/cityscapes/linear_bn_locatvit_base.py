"""Batch norm and a linear layer on frozen LocAtViT-B/16, Cityscapes.

Reproduces no number that we know of. Not run here.
Cost: 40,000 updates of 16 crops, 640,000 image passes; not timed.

    python -m seg.train seg/configs/cityscapes/linear_bn_locatvit_base.py --cfg-options data_root=/data/cityscapes
"""

_base_ = ["../_base_/cityscapes.py", "../_base_/linear_bn_40k.py", "../_base_/runtime.py"]
train_dataloader = dict(batch_size=16, num_workers=8)
model = dict(
    data_preprocessor=dict(size=(512, 1024)),
    backbone=dict(model_name="locatvit_base.in1k", pretrained=True),
    decode_head=dict(num_classes=19),
    test_cfg=dict(crop_size=(512, 1024), stride=(341, 682)),
)
