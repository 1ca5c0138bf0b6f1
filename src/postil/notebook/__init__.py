"""The library's surface: a model opens documents as notebooks, and notebooks answer questions."""
