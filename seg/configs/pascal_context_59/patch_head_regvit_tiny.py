"""The paper's head on frozen ViT-Ti/16 with registers, PASCAL Context 59.

The paper's mIoU (arXiv:2603.04892, its table, as reported by readers): 33.45. Not run here.
Four registers are our choice; the paper's number of them is not known to us.
Cost: 20,000 updates of 32 crops, 640,000 image passes; not timed.

    accelerate launch -m timm_locat.train vit_tiny_in1k --model-kwargs '{"reg_tokens":4}' --out runs/vit_reg4
    python -m seg.train seg/configs/pascal_context_59/patch_head_regvit_tiny.py --cfg-options data_root=/data/voc10
"""

_base_ = ["../_base_/pascal_context_59.py", "../_base_/patch_head_20k.py", "../_base_/runtime.py"]
train_dataloader = dict(batch_size=32, num_workers=8)
model = dict(
    data_preprocessor=dict(size=(480, 480)),
    backbone=dict(model_name="vit_tiny_patch16_224", model_args=dict(reg_tokens=4), checkpoint="runs/vit_reg4"),
    decode_head=dict(num_classes=59),
)
