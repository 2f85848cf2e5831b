"""The tiny vision-language model: its data generator, training, evaluation and, once trained, its checkpoint."""
