"""The paper's head on frozen Swin-T, COCO-Stuff 164k.

The paper's mIoU (arXiv:2603.04892, its table, as reported by readers): 28.34. Not run here.
The weights are those of Swin's authors, not the paper's.
Cost: 20,000 updates of 32 crops, 640,000 image passes; not timed.

    python -m seg.train seg/configs/coco_stuff164k/patch_head_swin_tiny.py --cfg-options data_root=/data/coco
"""

_base_ = ["../_base_/coco_stuff164k.py", "../_base_/patch_head_20k.py", "../_base_/runtime.py"]
train_dataloader = dict(batch_size=32, num_workers=8)
model = dict(
    backbone=dict(model_name="swin_tiny_patch4_window7_224.ms_in1k", pretrained=True),
    decode_head=dict(num_classes=171),
)
