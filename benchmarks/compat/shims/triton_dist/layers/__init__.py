"""Layers by machine."""
