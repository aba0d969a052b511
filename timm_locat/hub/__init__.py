"""The Hugging Face Hub's format: folders that timm and transformers load."""

from timm_locat.hub.export import export

__all__ = ["export"]
