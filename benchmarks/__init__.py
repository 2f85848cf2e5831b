"""What Quartet costs and stands, measured: each module is a command that writes one JSON file of results."""
