"""``quartet plan``: how many Prefill and Decode workers a trace needs, by replaying it on fleets of all sizes."""
