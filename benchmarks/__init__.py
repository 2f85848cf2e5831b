"""What Quartet costs and how much it can take: each module is a command that writes one JSON file of results."""
