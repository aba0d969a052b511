"""UPerNet on fine-tuned LocAtViT-B/16, COCO-Stuff 164k.

Reproduces no number that we know of. Not run here.
Cost: 160,000 updates of 16 crops, 2,560,000 image passes; not timed.

    python -m seg.train seg/configs/coco_stuff164k/upernet_locatvit_base.py --cfg-options data_root=/data/coco
"""

_base_ = ["../_base_/coco_stuff164k.py", "../_base_/upernet_160k.py", "../_base_/runtime.py"]
train_dataloader = dict(batch_size=16, num_workers=8)
model = dict(
    backbone=dict(model_name="locatvit_base.in1k", pretrained=True),
    decode_head=dict(num_classes=171),
    auxiliary_head=dict(num_classes=171),
)
