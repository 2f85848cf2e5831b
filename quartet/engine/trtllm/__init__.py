"""TensorRT-LLM 1.2 as an engine. The code that loads a model imports the package itself, late."""
