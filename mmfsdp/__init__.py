"""Multimodal FSDP."""
