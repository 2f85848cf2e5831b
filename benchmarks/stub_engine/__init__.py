"""Workers that compute nothing: real processes, scheduler, block pool and transfers around a step of a fixed time."""
