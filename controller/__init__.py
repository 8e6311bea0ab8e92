"""Numbers to decisions: how many drafted tokens to verify. numpy only; no clock, no files, no onnxruntime."""
