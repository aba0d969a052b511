"""The paper's head on frozen Swin-T, PASCAL Context 59.

The paper's mIoU (arXiv:2603.04892, its table, as reported by readers): 36.78. Not run here.
The weights are those of Swin's authors, not the paper's.
Cost: 20,000 updates of 32 crops, 640,000 image passes; not timed.

    python -m seg.train seg/configs/pascal_context_59/patch_head_swin_tiny.py --cfg-options data_root=/data/voc10
"""

_base_ = ["../_base_/pascal_context_59.py", "../_base_/patch_head_20k.py", "../_base_/runtime.py"]
train_dataloader = dict(batch_size=32, num_workers=8)
model = dict(
    data_preprocessor=dict(size=(480, 480)),
    backbone=dict(model_name="swin_tiny_patch4_window7_224.ms_in1k", pretrained=True),
    decode_head=dict(num_classes=59),
)
