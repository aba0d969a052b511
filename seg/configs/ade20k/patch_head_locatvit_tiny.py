"""The paper's head on frozen LocAtViT-Ti/16, ADE20K.

The paper's mIoU (arXiv:2603.04892, its table, as reported by readers): 23.47. Not run here.
Cost: 20,000 updates of 32 crops, 640,000 image passes; not timed.

    python -m seg.train seg/configs/ade20k/patch_head_locatvit_tiny.py --cfg-options data_root=/data/ade20k
"""

_base_ = ["../_base_/ade20k.py", "../_base_/patch_head_20k.py", "../_base_/runtime.py"]
train_dataloader = dict(batch_size=32, num_workers=8)
model = dict(
    backbone=dict(model_name="locatvit_tiny.in1k", pretrained=True),
    decode_head=dict(num_classes=150),
)
