"""Checkpoints to graphs: reads a target and a drafter, writes a bundle. No torch, no onnxruntime."""
