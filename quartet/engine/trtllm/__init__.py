"""TensorRT-LLM 1.2 as an engine; the package itself is imported late, by what loads a model."""
