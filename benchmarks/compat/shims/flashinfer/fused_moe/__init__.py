"""Tests' helpers."""
