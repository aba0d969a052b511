"""The paper's head on frozen ViT-Ti/16, COCO-Stuff 164k.

The paper's mIoU (arXiv:2603.04892, its table, as reported by readers): 20.29. Not run here.
Cost: 20,000 updates of 32 crops, 640,000 image passes; not timed.

    accelerate launch -m timm_locat.train vit_tiny_in1k  # the backbone
    python -m seg.train seg/configs/coco_stuff164k/patch_head_vit_tiny.py --cfg-options data_root=/data/coco
"""

_base_ = ["../_base_/coco_stuff164k.py", "../_base_/patch_head_20k.py", "../_base_/runtime.py"]
train_dataloader = dict(batch_size=32, num_workers=8)
model = dict(
    backbone=dict(model_name="vit_tiny_patch16_224", checkpoint="runs/vit_tiny_in1k"),
    decode_head=dict(num_classes=171),
)
