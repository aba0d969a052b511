"""Batch norm and a linear layer on frozen ViT-B/16, PASCAL VOC 2012 (aug).

Reproduces no number that we know of. Not run here.
Cost: 40,000 updates of 16 crops, 640,000 image passes; not timed.

    accelerate launch -m timm_locat.train vit_base_in1k  # the backbone
    python -m seg.train seg/configs/voc12_aug/linear_bn_vit_base.py --cfg-options data_root=/data/voc2012
"""

_base_ = ["../_base_/voc12_aug.py", "../_base_/linear_bn_40k.py", "../_base_/runtime.py"]
train_dataloader = dict(batch_size=16, num_workers=8)
model = dict(
    backbone=dict(model_name="vit_base_patch16_224", checkpoint="runs/vit_base_in1k"),
    decode_head=dict(num_classes=21),
)
