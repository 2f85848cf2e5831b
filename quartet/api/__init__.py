"""What clients see: requests, answers, sessions and placements."""
