"""What stands behind the imitated API: nothing in here exists in TensorRT-LLM, and only tests import it."""
