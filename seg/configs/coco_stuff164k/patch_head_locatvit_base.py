"""The paper's head on frozen LocAtViT-B/16, COCO-Stuff 164k.

The paper's mIoU (arXiv:2603.04892, its table, as reported by readers): 33.62. Not run here.
Cost: 20,000 updates of 32 crops, 640,000 image passes; not timed.

    python -m seg.train seg/configs/coco_stuff164k/patch_head_locatvit_base.py --cfg-options data_root=/data/coco
"""

_base_ = ["../_base_/coco_stuff164k.py", "../_base_/patch_head_20k.py", "../_base_/runtime.py"]
train_dataloader = dict(batch_size=32, num_workers=8)
model = dict(
    backbone=dict(model_name="locatvit_base.in1k", pretrained=True),
    decode_head=dict(num_classes=171),
)
