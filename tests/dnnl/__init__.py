"""The tests that need ONNX Runtime's oneDNN provider, and the Debian 13 root that has it."""
