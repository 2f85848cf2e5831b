"""What ``trtllm-llmapi-launch`` runs of TensorRT-LLM beside its command, and no more: it starts at once."""
