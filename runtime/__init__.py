"""Graphs to tokens: sessions, caches, sampling and the round loop. The only package that imports onnxruntime."""
