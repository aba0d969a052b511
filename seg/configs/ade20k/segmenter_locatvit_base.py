"""Segmenter on fine-tuned LocAtViT-B/16, ADE20K.

Reproduces no number that we know of. Not run here.
Cost: 160,000 updates of 16 crops, 2,560,000 image passes; not timed.

    python -m seg.train seg/configs/ade20k/segmenter_locatvit_base.py --cfg-options data_root=/data/ade20k
"""

_base_ = ["../_base_/ade20k.py", "../_base_/segmenter_160k.py", "../_base_/runtime.py"]
train_dataloader = dict(batch_size=16, num_workers=8)
model = dict(
    backbone=dict(model_name="locatvit_base.in1k", pretrained=True),
    decode_head=dict(num_classes=150, channels=768, embed_dims=768, num_heads=12),
)
