"""An engine that takes a real one's time and computes nothing: scheduler, block pool and events are the real ones."""
