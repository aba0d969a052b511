"""What every run here has: our parts of mmsegmentation, a seed, and draws that depend on nothing but the seed."""

_base_ = [__import__("timm_locat._mmseg_compat", fromlist=["base"]).base("default_runtime.py")]
custom_imports = dict(imports=["timm_locat.mmseg_backbone"], allow_failed_imports=False)
custom_hooks = [dict(type="SeedUpdate")]
randomness = dict(seed=0)
