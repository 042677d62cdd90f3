"""Bindings to trainers: Lightning."""
