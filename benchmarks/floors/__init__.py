"""The least that a thing can cost, with as little of Quartet in it as possible: what its figures are set against."""
