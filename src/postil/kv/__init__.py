"""Cells: where keys and values live, and which sequences see them."""
