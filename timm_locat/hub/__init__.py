"""The Hugging Face Hub: folders that timm and transformers load, cards, push and pull."""

from timm_locat.hub.card import model_card
from timm_locat.hub.export import export
from timm_locat.hub.package import package, write_card
from timm_locat.hub.remote import Pushed, pull, push
from timm_locat.hub.verify import verify

__all__ = ["Pushed", "export", "model_card", "package", "pull", "push", "verify", "write_card"]
