"""Batch norm and a linear layer on frozen LocAtViT-Ti/16, PASCAL VOC 2012 (aug).

Reproduces no number that we know of. Not run here.
Cost: 40,000 updates of 16 crops, 640,000 image passes; not timed.

    python -m seg.train seg/configs/voc12_aug/linear_bn_locatvit_tiny.py --cfg-options data_root=/data/voc2012
"""

_base_ = ["../_base_/voc12_aug.py", "../_base_/linear_bn_40k.py", "../_base_/runtime.py"]
train_dataloader = dict(batch_size=16, num_workers=8)
model = dict(
    backbone=dict(model_name="locatvit_tiny.in1k", pretrained=True),
    decode_head=dict(num_classes=21),
)
